"""From LLVM IR to callable machine code, with a cache on disk.

IR -> object bytes (about 50 ms, cached by digest) -> linked by LLVM's JITLink, which writes a page first and
makes it executable afterwards, never both. It takes all memory of an object in one piece; its predecessor
RuntimeDyld took a piece for each section, and aborted the process where they came to lie more than 2 GB
apart. Objects need no symbol from outside: entries of the thread pool come in as data.

Code is freed when nothing holds its handle (abi.Code) any more; the STRONG ones used last are held
here.

The cache (disk.compiled) belongs to the user alone (0700). An entry is the digest of the object, then the
object: a torn, poisoned or foreign entry is a miss, and a folder that cannot be written costs only time.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

import llvmlite.binding as llvm

from aerogel.codegen.cpu import abi
from aerogel.codegen.cpu.abi import Code
from aerogel.disk import compiled
from aerogel.errors import PlanMismatch
from aerogel.ir import Target, here_levels
from aerogel.locks import Lock

_CPU = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "generic": "x86-64", "neon": "generic"}
_TRIPLE = {"neon": "aarch64-unknown-linux-gnu"}
_FEATURES = {
    "": "",
    "amx_bf16": "+amx-tile,+amx-bf16",
    "avx512fp16": "+avx512fp16",
    "avx512vnni": "+avx512vnni,+avx512vl",
    "avxvnni": "+avxvnni",
    "dotprod": "+dotprod",
    "i8mm": "+i8mm",
    "fp16": "+fullfp16",
}
"""What LLVM calls the extras of a Target that code may need."""
_DEFINE = re.compile(r"^(define [^\n]*\))", re.MULTILINE)
_lock = Lock(over_fork=True)
_loaded: weakref.WeakValueDictionary[str, Code] = weakref.WeakValueDictionary()
_recent: OrderedDict[str, Code] = OrderedDict()
_jit: list[Any] = []
_numbers = count()  # the linker takes a library's name once

STRONG = 256
"""Pieces of code kept linked though nothing uses them."""


def object_code(text: str, isa: str, extra: str = "") -> bytes:
    """Compile IR to an ELF object for an ISA and one of its extras. No cache, no host."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = _TRIPLE.get(isa, "x86_64-unknown-linux-gnu")
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=_CPU[isa], features=_FEATURES[extra], opt=2, reloc="pic", codemodel="default"
    )
    # no loop turns into a call of memset
    module = llvm.parse_assembly(_DEFINE.sub(r'\1 "no-builtins"', text))
    module.triple = triple
    module.verify()
    # emitters unroll what pays: more costs a quarter of LLVM's time, and kernels are no faster for it
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    options.loop_unrolling = False
    options.loop_vectorization = options.slp_vectorization = True
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return bytes(machine.emit_object(module))


def function(name: str, entry: str, emit: Callable[[], str], isa: str, extra: str = "") -> Code:
    """The code called `name` with its `entry`: from memory, the disk cache, or `emit` and LLVM.

    `extra` is the feature of a Target that it needs beyond its ISA. `name` says everything the code depends
    on. Code this CPU cannot run is refused here, before it is ever called.
    """
    key = hashlib.sha256(f"{abi.digest()} {name} {isa} {extra}".encode()).hexdigest()
    if (warm := _warm.get()) is not None:
        warm.add(key, emit, isa, extra)
        return Code(0, None)
    with _lock:
        code = _loaded.get(key)
        if code is None:
            if not Target(isa, (extra,) if extra else ()).runs_here():
                raise PlanMismatch(
                    f"this code is for {isa}{f' with {extra}' if extra else ''}; "
                    f"this machine runs {', '.join(here_levels())}. Compile the model here."
                )
            code = _loaded[key] = _link(_cached(key, emit, isa, extra), entry)
        _recent[key] = code
        _recent.move_to_end(key)
        while len(_recent) > STRONG:
            _recent.popitem(last=False)
        return code


def _link(content: bytes, entry: str) -> Code:
    if not _jit:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        _jit.append(llvm.create_lljit_compiler(use_jit_link=True))
    builder = llvm.JITLibraryBuilder().add_object_img(content).export_symbol(entry)
    library = builder.link(_jit[0], f"code{next(_numbers)}")
    library.linker = _jit[0]  # which must outlive it
    return Code(int(library[entry]), library)


def _cached(key: str, emit: Callable[[], str], isa: str, extra: str) -> bytes:
    return compiled(f"{isa}-{key}.o", lambda: object_code(emit(), isa, extra))


class Warm:
    """Code that was asked for while nothing is linked: the names of its objects, and of those compiled."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.compiled: set[str] = set()

    def add(self, key: str, emit: Callable[[], str], isa: str, extra: str) -> None:
        name = f"{isa}-{key}.o"
        if name in self.names:
            return
        self.names.add(name)

        def noted() -> str:
            self.compiled.add(name)
            return emit()

        _cached(key, noted, isa, extra)


_warm: ContextVar[Warm | None] = ContextVar("aerogel warm", default=None)


@contextmanager
def warming(seen: Warm) -> Iterator[None]:
    """Within it code goes into the cache and no further, whatever CPU it is for; what is built must not be
    called."""
    token = _warm.set(seen)
    try:
        yield
    finally:
        _warm.reset(token)
