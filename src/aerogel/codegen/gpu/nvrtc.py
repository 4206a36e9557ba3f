"""CUDA C++ -> machine code for one architecture by NVRTC, through cuda-core. Needs no GPU; kept on disk by
digest."""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from aerogel.codegen.gpu.launch import Code
from aerogel.disk import compiled
from aerogel.errors import AerogelError
from aerogel.optional import import_optional


@dataclass(frozen=True)
class Facts:
    """What a compiler says of a kernel: registers of a thread, bytes spilled, bytes of shared memory of a
    block."""

    registers: int
    spilled: int
    shared: int


def cubin(code: Code, arch: str) -> bytes:
    """Machine code for `arch` ("sm_80"), from the cache or the compiler."""
    key = hashlib.sha256(f"{compiler_version()} {arch} {code.text()}".encode()).hexdigest()
    return compiled(f"{arch}-{key}.cubin", lambda: compile_for(code, arch)[0])


@cache
def compiler_version() -> str:
    """Return which NVRTC compiles here. The loaded library says so itself: CUDA 12's and 13's may both be
    installed. Where it came as a package, the package's version also tells its patches apart."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    try:
        return f"{major}.{minor} {version('nvidia-cuda-nvrtc' + ('-cu12' if major == 12 else ''))}"
    except PackageNotFoundError:  # a toolkit of the system
        return f"{major}.{minor}"


def compile_for(code: Code, arch: str) -> tuple[bytes, Facts]:
    """Machine code and what ptxas says of it."""
    import_optional("cuda.core", "cuda", "The CUDA backend")
    from cuda.core import Program, ProgramOptions

    words = io.StringIO()
    program = Program(code.text(), "c++", ProgramOptions(arch=arch, ptxas_options=["-v"]))
    made = bytes(program.compile("cubin", logs=words).code)
    said = words.getvalue()
    spilled = re.findall(r"(\d+) bytes spill", said)
    registers, shared = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes smem", said)
    if registers is None or not spilled:
        raise AerogelError(f"{code}: the compiler for {arch} says nothing of registers: {said[:300]}")
    return made, Facts(int(registers[1]), sum(map(int, spilled)), int(shared[1]) if shared else 0)
