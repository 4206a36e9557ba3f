"""`Target`: the machine a kernel is made for. Its string is the fingerprint in tuning keys and plans.

    cpu-avx512+amx_bf16+avx512fp16+f16c-l1:49152-l2:2097152-l3:314572800-t2

Code is generated for the ISA level and the extras named here, never for "whatever the host is": two machines
with the same string run the same instructions and give the same bits.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm

from aerogel.errors import InvalidArgument, ShapeError

VECTOR_BYTES = {"avx512": 64, "avx2": 32, "generic": 16, "neon": 16}
ISAS = ("avx512", "avx2", "generic")
"""The levels an x86-64 machine can run, best first. `neon` is AArch64."""

EXTRAS = (
    "amx_bf16",
    "amx_int8",
    "avx512bf16",
    "avx512fp16",
    "avx512vnni",
    "avxvnni",
    "dotprod",
    "f16c",
    "fp16",
    "i8mm",
)
"""Features that change what a kernel may do; `fp16` is ARM's half arithmetic, those of DOTS four products of
bytes in one instruction."""
DOTS = ("avx512vnni", "avxvnni", "dotprod", "i8mm")

_NEEDS = {
    "avx512": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "bmi2"),
    "avx2": ("avx2", "fma", "f16c", "bmi2"),
}
_ALLOWED = {
    "avx512": ("amx_bf16", "amx_int8", "avx512bf16", "avx512fp16", "avx512vnni", "f16c"),
    "avx2": ("avxvnni", "f16c"),
    "generic": (),
    "neon": ("dotprod", "fp16", "i8mm"),
}
MOST_THREADS = 4096
"""More than any machine has: a file that asks for more was damaged or made to harm."""
_GPU = re.compile(r"(cuda|opencl)-(\w+)-p(\d+)-s(\d+)(\+tf32)?")
_TEXT = re.compile(r"cpu-(\w+?)((?:\+\w+)*)-l1:(\d+)-l2:(\d+)-l3:(\d+)-t(\d+)")


@dataclass(frozen=True)
class Target:
    """A CPU: ISA level, extras in alphabetical order, cache sizes of one core (l3: shared) in bytes,
    threads."""

    isa: str
    extras: tuple[str, ...] = ()
    l1_bytes: int = 32768
    l2_bytes: int = 1048576
    l3_bytes: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        if self.isa not in VECTOR_BYTES:
            raise InvalidArgument(
                f"instruction set '{self.isa}' is unknown; known are {', '.join(VECTOR_BYTES)}"
            )
        if set(self.extras) - set(EXTRAS) or self.extras != tuple(sorted(self.extras)):
            raise InvalidArgument(f"extras {self.extras}: known are {', '.join(EXTRAS)}, in this order")
        if not 1 <= self.threads <= MOST_THREADS:
            raise ShapeError(f"a target has 1 to {MOST_THREADS} threads, not {self.threads}")

    @property
    def vector_bytes(self) -> int:
        return VECTOR_BYTES[self.isa]

    def lower(self, isa: str) -> Target:
        """This machine held to a lesser ISA level, as tests and older CPUs need it."""
        return replace(self, isa=isa, extras=tuple(e for e in self.extras if e in _ALLOWED[isa]))

    def runs_here(self) -> bool:
        """Whether code for this target can run on this machine: asked before any cached code is called."""
        here = host()
        levels = here_levels()
        return self.isa in levels and set(self.extras) <= set(here.extras)

    def __str__(self) -> str:
        extras = "".join(f"+{e}" for e in self.extras)
        return (
            f"cpu-{self.isa}{extras}-l1:{self.l1_bytes}-l2:{self.l2_bytes}-l3:{self.l3_bytes}-t{self.threads}"
        )

    @staticmethod
    def parse(text: str) -> Target:
        """The inverse of `str`."""
        m = _TEXT.fullmatch(text)
        if m is None:
            raise InvalidArgument(
                f"'{text[:200]}' is not a target; one looks like cpu-avx2+f16c-l1:49152-l2:2097152-l3:0-t4"
            )
        return Target(m[1], tuple(m[2].split("+")[1:]), int(m[3]), int(m[4]), int(m[5]), int(m[6]))


@dataclass(frozen=True)
class Gpu:
    """A GPU: how it is spoken to ("cuda" or "opencl"), its architecture ("sm_90", or a device's name in
    letters and digits), its multiprocessors, the shared memory of a block in bytes, and whether torch may
    round f32 to tf32 there, which kernels on tensor cores then do too. `cuda-sm_90-p132-s232448+tf32`."""

    kind: str
    arch: str
    processors: int
    shared_bytes: int
    tf32: bool = False

    def __post_init__(self) -> None:
        if (
            self.kind not in ("cuda", "opencl")
            or not re.fullmatch(r"\w+", self.arch)
            or min(self.processors, self.shared_bytes) < 1
        ):
            raise InvalidArgument(f"'{self}' is not a GPU; one looks like cuda-sm_90-p132-s232448")

    def __str__(self) -> str:
        return (
            f"{self.kind}-{self.arch}-p{self.processors}-s{self.shared_bytes}{'+tf32' if self.tf32 else ''}"
        )

    @staticmethod
    def parse(text: str) -> Gpu:
        """The inverse of `str`."""
        m = _GPU.fullmatch(text)
        if m is None:
            raise InvalidArgument(f"'{text[:200]}' is not a GPU; one looks like cuda-sm_90-p132-s232448")
        return Gpu(m[1], m[2], int(m[3]), int(m[4]), m[5] is not None)


@dataclass(frozen=True)
class Other:
    """A machine of which only its name is known here."""

    name: str

    def __str__(self) -> str:
        return self.name


Machine = Target | Gpu | Other


def multiplies_bytes(target: object) -> bool:
    """Whether one instruction adds four products of bytes there."""
    return isinstance(target, Target) and not set(target.extras).isdisjoint(DOTS)


def short(target: object) -> str:
    """What people call it."""
    return target.isa if isinstance(target, Target) else str(target)


def machine(text: str) -> Machine:
    """What the text of a target, which a record or a plan holds, names."""
    if text.startswith("cpu-"):
        return Target.parse(text)
    if _GPU.fullmatch(text):
        return Gpu.parse(text)
    if not re.fullmatch(r"[\w.+-]{1,200}", text):
        raise InvalidArgument(f"'{text[:200]}' names no machine")
    return Other(text)


@cache
def features() -> frozenset[str]:
    """The CPU's features as LLVM sees them: what CPUID reports and the operating system allows."""
    return frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)


@cache
def here_levels() -> tuple[str, ...]:
    """ISA levels this machine runs, best first."""
    if not llvm.get_process_triple().startswith("x86_64"):
        return ("neon",)
    return tuple(isa for isa in ISAS if set(_NEEDS.get(isa, ())) <= features())


@cache
def host() -> Target:
    """This machine, one thread. Caches come from the kernel; where it does not say, modest sizes are
    assumed."""
    isa = here_levels()[0]
    names = {"amx-bf16": "amx_bf16", "amx-int8": "amx_int8", "fullfp16": "fp16"}
    found = {names.get(f, f) for f in features()}
    if found & {"amx_bf16", "amx_int8"} and not ("amx-tile" in features() and _tiles_allowed()):
        found -= {"amx_bf16", "amx_int8"}
    extras = tuple(sorted(found & set(_ALLOWED[isa])))
    sizes = _caches()
    return Target(isa, extras, sizes.get(1, 32768), sizes.get(2, 1048576), sizes.get(3, 0))


def _tiles_allowed() -> bool:
    """Ask the operating system for AMX's registers, which a process must do before it touches them:
    arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA), granted for good and for all threads."""
    try:
        return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)
    except (OSError, AttributeError):
        return False


def _caches() -> dict[int, int]:
    sizes: dict[int, int] = {}
    for entry in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if (entry / "type").read_text().strip() == "Instruction":
                continue
            size = (entry / "size").read_text().strip()
            sizes[int((entry / "level").read_text())] = (
                int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}[size[-1]]
            )
        except (OSError, ValueError, KeyError):
            continue
    return sizes
