"""Segments on the pool: steps wait for each other, threads share the work and no unit is done twice."""

from __future__ import annotations

import numpy as np

from aerogel.backends.cpu.threads import Segment
from aerogel.codegen.cpu import llvm
from aerogel.codegen.cpu.abi import Kernel
from aerogel.codegen.cpu.emit import I64, PTR, Emit
from aerogel.ir import Layout, host
from tests.suite.guard import Guarded

COUNT = 4096


def _counter() -> str:
    """void count(int64 *a, thread, threads): adds 1 to each element of its share of the array at a[0]; a[1]
    is the stage.

    An element that is not at the stage's number when its turn comes shows that a barrier is missing: it gets
    a million.
    """
    from llvmlite import ir

    module = ir.Module(name="count")
    e = Emit.start(module, "count", [PTR, I64, I64])
    a, thread, threads = e.function.args
    b = e.b
    data, stage = e.load(a, PTR, 8), e.load(e.at(a, I64(8)), I64, 8)
    first = b.sdiv(b.mul(I64(COUNT), thread), threads)
    last = b.sdiv(b.mul(I64(COUNT), b.add(thread, I64(1))), threads)

    def one(i: object, _: list[object]) -> None:
        mirrored = b.sub(I64(COUNT - 1), i)  # the element another thread wrote in the stage before
        place = e.at(data, b.mul(b.select(b.trunc(stage, ir.IntType(1)), mirrored, i), I64(8)))
        value = e.load(place, I64, 8)
        good = b.icmp_signed("==", value, stage)
        b.store(b.add(value, b.select(good, I64(1), I64(1_000_000))), place)

    e.loop(first, last, one)
    b.ret_void()
    return str(module)


def test_every_unit_is_done_once_and_in_order() -> None:
    entry = llvm.function("count-test", "count", _counter, host().isa)
    data = Guarded().place(COUNT, np.dtype(np.int64), back=True)
    plain = Layout("contiguous", 1)
    stages = [np.array([data.ctypes.data, stage], np.int64) for stage in range(64)]
    kernel = Kernel("count", plain, plain, entry, stages[0])
    for threads in (1, 2, 3, 8):
        segment = Segment([(kernel, stage) for stage in stages], threads)
        for _ in range(50):
            data[:] = 0
            segment()
            assert (data == len(stages)).all(), f"{threads} threads"
