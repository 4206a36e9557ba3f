"""Buffers between two pages that may not be touched: one byte too far is a SIGSEGV, not a wrong number.

A buffer cannot be flush with both guards at once, so every case runs twice: against the front guard, then the
back.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from aerogel.ir import Array

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Guarded:
    """One reusable region; `place` lays an array against its front or back guard, filled with 0xFF bytes
    (NaN)."""

    def __init__(self, capacity: int = 1 << 20) -> None:
        self.capacity = -(-capacity // _PAGE) * _PAGE
        length = self.capacity + 2 * _PAGE
        base = _libc.mmap(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert base not in (None, ctypes.c_void_p(-1).value)
        self.start = base + _PAGE
        assert _libc.mprotect(self.start, self.capacity, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        self.memory = np.ctypeslib.as_array((ctypes.c_uint8 * self.capacity).from_address(self.start))

    def place(self, count: int, dtype: np.dtype[np.generic], back: bool) -> Array:
        size = count * dtype.itemsize
        assert size <= self.capacity, f"a case needs {size} bytes"
        first = self.capacity - size if back else 0
        part = self.memory[first : first + size]
        part[:] = 0xFF
        return np.asarray(part.view(dtype))

    def copy(self, array: Array, back: bool) -> Array:
        """`array`'s content, guarded."""
        placed = self.place(array.size, array.dtype, back)
        placed[:] = array.ravel()
        return placed
