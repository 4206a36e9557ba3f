"""The thread pool torch already owns, used from generated code.

torch ships its own OpenMP runtime and another package may bring a second one. Two pools fight for the cores,
so the entries are looked up through libtorch_cpu's own dependencies: dlsym on its handle searches it and what
it was linked with, nothing else.

A child made by fork has the parent's pool on paper and none of its threads: entering it would hang, so the
child uses one, for torch's own layers too.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from aerogel.backends.cpu.cores import by_default, usable
from aerogel.codegen.cpu import llvm, segment
from aerogel.codegen.cpu.abi import Code, Kernel
from aerogel.ir import Array, here_levels

_SYMBOLS = {
    "parallel": "GOMP_parallel",
    "barrier": "GOMP_barrier",
    "thread_num": "omp_get_thread_num",
    "num_threads": "omp_get_num_threads",
}
_forked = [False]
_settled = threading.local()
os.register_at_fork(after_in_child=lambda: _forked.__setitem__(0, True))


@cache
def entries() -> dict[str, int]:
    """Addresses of the pool's C entries, or an empty dict where torch has no GNU OpenMP."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = {
            slot: ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            for slot, name in _SYMBOLS.items()
        }
    except (OSError, AttributeError):
        return {}
    return {slot: address for slot, address in found.items() if address}


def threads() -> int:
    """Threads a call made now would use."""
    settle()
    if _forked[0] or len(entries()) != len(_SYMBOLS):
        return 1
    return torch.get_num_threads()


def settle() -> None:
    """Before a call: torch goes down to one thread in a forked child, and to the cores this process can have
    where the user has set nothing. The number is kept for each thread, so each is told once."""
    if getattr(_settled, "forked", None) == _forked[0]:
        return
    _settled.forked = _forked[0]
    now, wanted = torch.get_num_threads(), 1 if _forked[0] else usable()
    if _forked[0] or (now > wanted and by_default(now)):
        torch.set_num_threads(wanted)


def walker_code() -> Code:
    """The loop over a segment's kernels: the same code on every CPU of a kind, since it only calls."""
    return llvm.function("segment", segment.ENTRY, segment.emit, here_levels()[-1])


@cache
def _walker() -> tuple[Callable[[int], None], Code]:
    code = walker_code()
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address), code


class Segment:
    """Consecutive native kernels with their arguments bound: one foreign call, one release of the GIL."""

    def __init__(self, steps: Sequence[tuple[Kernel, NDArray[np.int64]]], count: int | None = None) -> None:
        """`count` threads; by default torch's number when the segment is made."""
        self._kept = tuple(steps)
        pairs = [[kernel.entry.address, arguments.ctypes.data] for kernel, arguments in steps]
        self._steps = np.array(pairs, np.int64).reshape(-1, 2)
        self._threads = wanted = threads() if count is None else count
        workers = entries() if wanted > 1 else {}
        known: dict[str, int] = {
            "steps": self._steps.ctypes.data,
            "count": len(steps),
            "threads": wanted,
            **workers,
        }
        self._context = np.array([known.get(name, 0) for name in segment.CONTEXT], np.int64)
        self._address = self._context.ctypes.data

    def singles(self) -> list[Segment]:
        """A segment for each step."""
        return [Segment([step], self._threads) for step in self._kept]

    def __call__(self) -> None:
        if _forked[0]:
            self._context[segment.CONTEXT.index("threads")] = 1
        _walker()[0](self._address)


def run(
    kernels: Sequence[Kernel],
    x: Array,
    y: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    count: int = 1,
) -> None:
    """Run native kernels once on whole buffers, scratch made for the call. For tests and single layers."""
    scratch = np.empty(max((k.scratch_bytes for k in kernels), default=0) * count, np.uint8)
    addresses = {n: 0 if a is None else a.ctypes.data for n, a in (("bias", bias), ("residual", residual))}
    bound = [
        (k, k.bind(x=x.ctypes.data, y=y.ctypes.data, scratch=scratch.ctypes.data, **addresses))
        for k in kernels
    ]
    Segment(bound, count)()
