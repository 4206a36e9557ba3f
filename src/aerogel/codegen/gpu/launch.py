"""`Code` and `Launch`: a kernel's source with its sizes as macros, and one launch of it. Whoever launches
brings the buffers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from aerogel.ir import NUMBERED, Array, Conv, Dtypes

MOST_BLOCKS = 65535
"""Of a grid, down and in depth."""

Number = np.int32 | np.int64 | np.float32


HALVES = (Dtypes.of("f16"), Dtypes("f16", "f16", "f16", "f16"))
"""Of f16 with sums in f32, and with sums within a stage in f16 (element.h)."""


def element(dtypes: Dtypes) -> dict[str, int | str]:
    """The macros that element.h asks for."""
    return {"HALF": int(dtypes in HALVES), "SUMS16": int(dtypes == HALVES[1])}


def twice(value: Array) -> Array:
    """A weight as a word: f32, or f16 two times."""
    if value.dtype == np.float32:
        return np.ascontiguousarray(value)
    bits = np.ascontiguousarray(value).view(np.uint16).astype(np.uint32)
    return bits | bits << 16


@dataclass(frozen=True)
class Code:
    """What is compiled: files beside this one and text of its own, macros in front. `block` is threads across
    and down."""

    entry: str
    block: tuple[int, int]
    macros: tuple[tuple[str, int | str], ...]
    steps: tuple[str, ...]
    files: tuple[str, ...]
    own: str = ""

    def text(self) -> str:
        """The whole source, for any of the compilers."""
        return dialect() + self.body()

    def body(self) -> str:
        """The source without the dialect: several of these may follow it."""
        macros = "".join(f"#undef {name}\n#define {name} {value}\n" for name, value in self.macros)
        return "".join([macros, _finish(self.steps), *map(_file, self.files), self.own])

    def __str__(self) -> str:
        """For people: entry, macros, steps of the epilogue."""
        return (
            f"{self.entry} {' '.join(f'{n.lower()}={v}' for n, v in sorted(self.macros))} "
            f"{'+'.join(self.steps)}"
        ).rstrip()


@dataclass(frozen=True)
class TritonCode:
    """A kernel of codegen/gpu/gathered.py: element types of its pointers, constants, and a program's warps of
    32 threads."""

    entry: str
    types: tuple[str, ...]
    constants: tuple[tuple[str, int | bool | str], ...]
    warps: int

    def __str__(self) -> str:
        """For people: entry, type of x, constants that say something."""
        said = (f"{n.lower()}={int(v) if isinstance(v, bool) else v}" for n, v in self.constants if v != "")
        return f"{self.entry} {self.types[0]} {' '.join(said)} warps={self.warps}"


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch. `arguments` in the kernel's order: the name of a buffer, an array that is uploaded once, or
    a number.

    The caller brings the buffers: x, y, bias, residual (y in their place where a layer has none), scratch,
    and counts, which kernels that skip zeros of x write, one for each block.
    """

    code: Code
    grid: tuple[int, int, int]
    arguments: tuple[str | Array | Number, ...]
    scratch_bytes: int = 0


@dataclass(frozen=True, eq=False)
class TritonLaunch:
    """The same of a kernel in Triton."""

    code: TritonCode
    grid: tuple[int, int, int]
    arguments: tuple[str | Array | Number, ...]
    scratch_bytes: int = 0


@dataclass(frozen=True, eq=False)
class TorchLaunch:
    """A product of torch's with two of four weights: what is kept of them, and where it stood."""

    conv: Conv
    value: Array
    metadata: Array
    arguments: tuple[str, ...] = ("x", "y", "bias", "residual")
    scratch_bytes: int = 0


AnyLaunch = Launch | TritonLaunch | TorchLaunch


def dialect() -> str:
    return _file("dialect.h")


@cache
def _file(name: str) -> str:
    return (files("aerogel.codegen.gpu") / name).read_text()


def _finish(steps: tuple[str, ...]) -> str:
    """FINISH(v, filter, at): the epilogue in its own order."""
    lines = {"bias": "v += READ(bias + (filter));", "add": "v += LOAD(residual + (at));"}
    own = [lines.get(s) or f"v = {s}(v{', parameter' if s in NUMBERED else ''});" for s in steps]
    return f"#undef FINISH\n#define FINISH(v, filter, at) {{ {' '.join(own)} }}\n"
