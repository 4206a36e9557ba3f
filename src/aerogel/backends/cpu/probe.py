"""What this core can do at most, measured with small loops of our own: FMAs a second, bytes a second from
each cache and memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np

from aerogel.codegen.cpu import llvm
from aerogel.codegen.cpu.rates import CHAINS, emit
from aerogel.ir import VECTOR_BYTES, Target


def _probe(isa: str, loads: bool) -> Callable[[int, int, int], None]:
    code = llvm.function(f"probe-{isa}-{CHAINS}-{loads}", "probe", lambda: emit(isa, loads), isa)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(code.address)
    call.code = code  # type: ignore[attr-defined]  # which keeps it linked
    return call


def limits(target: Target) -> dict[str, float]:
    """`fma` in floating-point operations a second; `l1`, `l2`, `l3` in bytes a second. The best of many
    tries: a limit."""
    sizes = {"l1": target.l1_bytes // 2, "l2": target.l2_bytes // 2, "l3": 8 * target.l2_bytes}
    step = CHAINS * target.vector_bytes
    found = {
        "fma": _best(_probe(target.isa, False), 1 << 20, 8)
        / target.vector_bytes
        * (target.vector_bytes // 4)
        * 2
    }
    for name, size in sizes.items():
        found[name] = _best(_probe(target.isa, True), size // step * step, max(1, (1 << 24) // size))
    return found


def multiply(isa: str) -> None:
    """About ten milliseconds of FMAs, without the GIL."""
    x = np.ones(CHAINS * VECTOR_BYTES[isa] // 4 + 32, np.float32)
    x[:] = 1e-9
    _probe(isa, False)(x[-x.ctypes.data % 64 // 4 :].ctypes.data, 1 << 20, 640)


def _best(probe: Callable[[int, int, int], None], size: int, rounds: int) -> float:
    """Bytes a second that the loop walks over."""
    raw, best = np.ones(size // 4 + 32, np.float32), 0.0
    x = raw[-raw.ctypes.data % 64 // 4 :]  # a load across two lines would count twice
    for _ in range(60):
        x[:] = 1e-9
        probe(x.ctypes.data, size, 1)
        began = time.perf_counter_ns()
        probe(x.ctypes.data, size, rounds)
        best = max(best, size * rounds / (time.perf_counter_ns() - began) * 1e9)
    return best
