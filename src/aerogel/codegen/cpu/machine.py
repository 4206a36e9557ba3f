"""Machine code without a compiler: straight lines of FMAs, for AVX-512.

    body(x, sums, values, n)                 C's calling convention, n times:
        zmm0 .. = 0                          one register a filter
        zmm31   = x[offset]                  a window of x, then every FMA that reads it
        zmm7   += zmm31 * *values++
        ...
        sums    = zmm0 .., or sums + zmm0 ..
        x += 64; sums += 64

LLVM needs minutes for as many instructions as a layer has nonzeros; here they are a few patterns of
bytes that numpy fills in. Memory is written first and made executable afterwards, never both.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import lru_cache

import numpy as np

from aerogel.errors import AerogelError
from aerogel.ir import Array

REGISTERS = 32
WINDOWS = 4
"""Registers for windows of x, in turn: a load need not wait for the FMAs before it."""
MOST_SUMS = REGISTERS - WINDOWS
REACH = 256
"""Values that an FMA reaches from one base: eight bits, counted in floats."""
AHEAD = 128
"""Bytes from a window to what is fetched for a later vector: nobody else sees so many streams coming."""

_SAVE = bytes.fromhex("4989d0")  # mov r8, rdx
_BASE = bytes.fromhex("498d90") + (REACH * 2).to_bytes(4, "little")  # lea rdx, [r8 + 512]
_NEXT = bytes.fromhex("48 81 c2") + (REACH * 4).to_bytes(4, "little")  # add rdx, 1024
_FETCH = bytes.fromhex("0f188f")  # prefetcht0 [rdi + ...]
_STEP = bytes.fromhex("4883c740 4883c640 48ffc9")  # add rdi, 64; add rsi, 64; dec rcx
_AGAIN = bytes.fromhex("0f85")  # jnz
_RETURN = bytes.fromhex("c5f877 c3")  # vzeroupper; ret
_X, _SUMS = 7, 6  # rdi, rsi


def _moves(register: Array, base: int, offset: Array, opcode: int) -> Array:
    """vmovups zmm, [base + offset] (0x10) or back (0x11), one a row: ten bytes."""
    code = np.empty((len(register), 10), np.uint8)
    code[:, 0], code[:, 2], code[:, 3], code[:, 4] = 0x62, 0x7C, 0x48, opcode
    code[:, 1] = 0x61 | (~register >> 3 & 1) << 7 | (~register >> 4 & 1) << 4
    code[:, 5] = 0x80 | (register & 7) << 3 | base
    code[:, 6:] = offset.astype("<i4").view(np.uint8).reshape(-1, 4)
    return code


def _additions(register: Array, offset: Array) -> Array:
    """vaddps zmm, zmm, [rsi + offset], one a row: ten bytes."""
    code = _moves(register, _SUMS, offset, 0x58)
    code[:, 2] = 0x04 | (~register & 15) << 3
    code[:, 3] = 0x40 | (~register >> 4 & 1) << 3
    return code


def _products(register: Array, window: Array, value: Array) -> Array:
    """vfmadd231ps zmm, window, [rdx + 4 * (value - 128)] spread to all lanes, one a row: seven bytes."""
    code = np.empty((len(register), 7), np.uint8)
    code[:, 0], code[:, 4] = 0x62, 0xB8
    code[:, 1] = 0x62 | (~register >> 3 & 1) << 7 | (~register >> 4 & 1) << 4
    code[:, 2] = 0x05 | (~window & 15) << 3
    code[:, 3] = 0x50 | (~window >> 4 & 1) << 3
    code[:, 5] = 0x42 | (register & 7) << 3
    code[:, 6] = value - REACH // 2 & 0xFF
    return code


def _clears(registers: int) -> bytes:
    """vxorps zmm, zmm, zmm."""
    low = [
        (0x01 | (~i >> 3 & 1) * 0xA0 | (~i >> 4 & 1) * 0x50, 0x04 | (~i & 15) << 3, 0x40 | (~i >> 4 & 1) << 3)
        for i in range(registers)
    ]
    return b"".join(bytes([0x62, *p, 0x57, 0xC0 | (i & 7) * 9]) for i, p in enumerate(low))


def bodies(
    register: Array, offset: Array, asked: Array, start: Array, sums: Array, resumed: Array, stride: int
) -> list[bytes]:
    """Code of several bodies; the nonzeros of each begin at `start`.

    A nonzero has the `register` of its filter and the `offset` of its window from x, in bytes; those of one
    window follow each other. Where `asked`, the line of x that comes AHEAD later is fetched. A body has so
    many `sums`, `stride` bytes apart; where `resumed` they are added to what stands there.
    """
    count, lengths = len(register), np.diff(start)
    opening = np.zeros(count, bool)
    opening[start[:-1][lengths > 0]] = True
    first = opening | (np.diff(offset, prepend=0) != 0)
    number = np.arange(count) - np.repeat(start[:-1], lengths)
    window = REGISTERS - WINDOWS + np.cumsum(first) % WINDOWS
    turned = (number % REACH == 0) & (number > 0)  # the first base is set before
    code = np.empty((count, 31), np.uint8)
    code[:, :10] = _moves(window, _X, offset, 0x10)
    code[:, 10:17] = np.frombuffer(_NEXT, np.uint8)
    code[:, 17:20] = np.frombuffer(_FETCH, np.uint8)
    code[:, 20:24] = (offset + AHEAD).astype("<i4").view(np.uint8).reshape(-1, 4)
    code[:, 24:] = _products(register, window, number % REACH)
    taken = np.ones((count, 31), bool)
    taken[:, :10], taken[:, 10:17], taken[:, 17:24] = first[:, None], turned[:, None], asked[:, None]
    content = code[taken].tobytes()
    ends = np.concatenate([[0], np.cumsum(10 * first + 7 * turned + 7 * asked + 7)])
    return [
        _around(content[ends[low] : ends[high]], many, stride, more)
        for low, high, many, more in zip(
            start[:-1].tolist(), start[1:].tolist(), sums.tolist(), resumed.tolist(), strict=True
        )
    ]


def _around(content: bytes, sums: int, stride: int, resumed: bool) -> bytes:
    """A body: the loop around its windows and products."""
    head, tail = _ends(sums, stride, resumed)
    back = -(len(head) + len(content) + len(tail) + len(_AGAIN) + 4)
    return b"".join([_SAVE, head, content, tail, _AGAIN, back.to_bytes(4, "little", signed=True), _RETURN])


@lru_cache(256)
def _ends(sums: int, stride: int, resumed: bool) -> tuple[bytes, bytes]:
    """What begins and what ends a turn of the loop."""
    assert 0 < sums <= MOST_SUMS
    every = np.arange(sums)
    more = _additions(every, every * stride).tobytes() if resumed else b""
    return _BASE + _clears(sums), more + _moves(every, _SUMS, every * stride, 0x11).tobytes() + _STEP


def executable(code: bytes) -> Array:
    """Memory that holds this code and can be run but no longer written; it is freed with the array."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    held = mmap.mmap(-1, max(1, len(code)), flags=kind, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    held.write(code)
    array = np.frombuffer(held, np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if protect(array.ctypes.data, len(array), mmap.PROT_READ | mmap.PROT_EXEC):
        raise AerogelError(f"memory cannot be made executable here: {os.strerror(ctypes.get_errno())}")
    return array
