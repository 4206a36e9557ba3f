"""What machine code and the Python that calls it must agree on: the slots of an argument block, `Kernel`, and
the digest of it all.

    void entry(int64 *block, int64 thread, int64 threads)

    block    x  y  residual  bias  scratch  |  the kernel's own pointers and sizes, as its emitter names them
             bound when buffers are known   |  written when the kernel is built

`digest()` is part of the name of every cached object: it covers the emitters and every constant of another
room that they read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import llvmlite
import llvmlite.binding
import numpy as np
from numpy.typing import NDArray

from aerogel.ir import Array, Layout, conv, dtypes, target

POINTERS = ("x", "y", "residual", "bias", "scratch")
"""The first slots of every native kernel's arguments; the rest is the kernel's own."""


def block(names: Sequence[str], values: Mapping[str, int]) -> NDArray[np.int64]:
    """An argument block with the slots `names` of one emitter: its own ones from `values`, POINTERS still
    unbound."""
    return np.array([0] * len(POINTERS) + [values[name] for name in names[len(POINTERS) :]], np.int64)


def constants() -> dict[str, Any]:
    """What shapes the emitted code and is no text of an emitter."""
    return {
        "pointers": POINTERS,
        "vector_bytes": target.VECTOR_BYTES,
        "item_bytes": dtypes.ITEM_BYTES,
        "activations": conv.ACTIVATIONS,
        "numbered": conv.NUMBERED,
        "llvm": (llvmlite.__version__, llvmlite.binding.llvm_version_info),
    }


@cache
def _emitters() -> bytes:
    return b"".join(
        file.name.encode() + file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))
    )


def digest() -> str:
    """A digest of the code generator: any change to it makes every cached object a stranger."""
    return hashlib.sha256(repr(sorted(constants().items())).encode() + _emitters()).hexdigest()


@dataclass(frozen=True, eq=False)
class Code:
    """Machine code in memory: the address of its entry, and what keeps it there. When nobody holds it the
    memory is given back, so whatever may call the address holds this."""

    address: int
    library: object


@dataclass(frozen=True, eq=False)
class LibraryCall:
    """A convolution by torch's libraries: a function of tensors (x, bias, residual) that gives y."""

    reads: Layout
    writes: Layout
    call: Callable[[Any, Any, Any], Any]


@dataclass(frozen=True, eq=False)
class Kernel:
    """Code for one concrete problem and the Layouts it reads and writes; a residual has the layout it writes,
    and may be y itself. Safe to run on any number of threads at once."""

    name: str
    reads: Layout
    writes: Layout
    entry: Code
    arguments: NDArray[np.int64]
    scratch_bytes: int = 0
    owned: tuple[Array, ...] = ()
    counts: NDArray[np.int64] | None = None
    """Of a kernel that skips what is zero in x: for each thread what it found active, and of how many; it
    only adds to them."""
    inner: tuple[Kernel, ...] = ()
    """Kernels whose code this one's calls."""

    @staticmethod
    def of(
        name: str,
        layouts: tuple[Layout, Layout],
        entry: Code,
        slots: Sequence[str],
        sizes: Mapping[str, int],
        owned: Mapping[str, Array] = MappingProxyType({}),
    ) -> Kernel:
        """A kernel whose emitter has these slots, filled by name: with sizes, or with the addresses of arrays
        that the kernel owns."""
        values = {slot: array.ctypes.data for slot, array in owned.items()} | dict(sizes)
        scratch, counts = sizes.get("scratch_thread", 0), owned.get("counts")
        return Kernel(name, *layouts, entry, block(slots, values), scratch, tuple(owned.values()), counts)

    def bind(
        self, *, x: int, y: int, residual: int = 0, bias: int = 0, scratch: int = 0
    ) -> NDArray[np.int64]:
        """The argument block for buffers at these addresses: a copy, so that two workspaces never share
        one."""
        bound = self.arguments.copy()
        x_front = self.reads.front * self.reads.item_bytes
        y_front = self.writes.front * self.writes.item_bytes
        bound[: len(POINTERS)] = (
            x + x_front,
            y + y_front,
            residual + y_front if residual else 0,
            bias,
            scratch,
        )
        return bound


def native(made: list[Kernel] | LibraryCall) -> list[Kernel]:
    """What a method of ours built."""
    assert not isinstance(made, LibraryCall)
    return made
