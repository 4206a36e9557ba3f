"""From LLVM IR to callable machine code, with a cache on disk.

IR -> object bytes (about 50 ms, cached by digest) -> linked by LLVM's ORC linker, which writes a page first and makes it
executable afterwards, never both. Objects need no symbol from outside: entries of the thread pool come in as data.

The cache (disk.compiled) belongs to the user alone (0700). An entry is the digest of the object, then the object: a torn, poisoned
or foreign entry is a miss, and a folder that cannot be written costs only time.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from aerogel.disk import compiled
from aerogel.errors import PlanMismatch
from aerogel.target import Target, here_levels, host

_CPU = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "generic": "x86-64", "neon": "generic"}
_TRIPLE = {"neon": "aarch64-unknown-linux-gnu"}
_HALF = {"avx512": "+avx512fp16", "neon": "+fullfp16"}
_AMX = "+amx-tile,+amx-bf16"
_DEFINE = re.compile(r"^(define [^\n]*\))", re.MULTILINE)
_lock = threading.Lock()
_loaded: dict[str, tuple[int, object]] = {}
_jit: list[object] = []


def object_code(text: str, isa: str, *, half: bool = False, amx: bool = False) -> bytes:
    """Compile IR to an ELF object for an ISA; `half` allows its fp16 arithmetic, `amx` the matrix engine. No cache, no host."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    features = _HALF[isa] if half else _AMX if amx else ""
    triple = _TRIPLE.get(isa, "x86_64-unknown-linux-gnu")
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=_CPU[isa], features=features, opt=2, reloc="pic", codemodel="default"
    )
    module = llvm.parse_assembly(_DEFINE.sub(r'\1 "no-builtins"', text))  # no loop turns into a call of memset
    module.triple = triple
    module.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    return bytes(machine.emit_object(module))


@cache
def code_digest() -> str:
    """A digest of the code generator itself: any change to it makes every cached object a stranger."""
    state = hashlib.sha256(f"{llvmlite.__version__} {llvm.llvm_version_info}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        state.update(source.name.encode() + source.read_bytes())
    return state.hexdigest()


def function(name: str, entry: str, emit: Callable[[], str], isa: str, *, half: bool = False, amx: bool = False) -> int:
    """The address of `entry` in the code called `name`: from memory, the disk cache, or `emit` and LLVM.

    `name` says everything the code depends on. Code this CPU cannot run is refused here, before it is ever called.
    """
    key = hashlib.sha256(f"{code_digest()} {name} {isa} {half} {amx}".encode()).hexdigest()
    with _lock:
        if key in _loaded:
            return _loaded[key][0]
        extras = ("amx_bf16",) if amx else ("avx512fp16",) if half and isa == "avx512" else ("fp16",) if half else ()
        if not Target(isa, extras).runs_here():
            raise PlanMismatch(
                f"this code is for {isa}{' with AMX' if amx else ' with fp16 arithmetic' if half else ''}; "
                f"this machine runs {', '.join(here_levels())}. Compile the model here."
            )
        _loaded[key] = _link(_cached(key, emit, isa, half, amx), entry, key)
        return _loaded[key][0]


def _link(code: bytes, entry: str, key: str) -> tuple[int, object]:
    if not _jit:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        _jit.append(llvm.create_lljit_compiler())
    library = llvm.JITLibraryBuilder().add_object_img(code).export_symbol(entry).link(_jit[0], key)
    return int(library[entry]), library


def _cached(key: str, emit: Callable[[], str], isa: str, half: bool, amx: bool) -> bytes:
    return compiled(f"{host().isa}-{key}.o", lambda: object_code(emit(), isa, half=half, amx=amx))
