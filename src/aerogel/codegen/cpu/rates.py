"""`rates`: a loop that only multiplies, or only reads: what a core can do at most."""

from __future__ import annotations

from llvmlite import ir

from aerogel.codegen.cpu.emit import F32, I64, PTR, Emit, Value
from aerogel.ir import VECTOR_BYTES

CHAINS = 16
"""Sums that do not wait for each other."""


def emit(isa: str, loads: bool) -> str:
    """`void probe(float *x, int64 bytes, int64 rounds)`: each round reads all of x once, or multiplies as
    often without reading."""
    module, lanes = ir.Module(name="probe"), VECTOR_BYTES[isa] // 4
    kind = ir.VectorType(F32, lanes)
    fma = ir.Function(module, ir.FunctionType(kind, [kind] * 3), f"llvm.fmuladd.v{lanes}f32")
    e = Emit.start(module, "probe", [PTR, I64, I64])
    x, size, rounds = e.function.args
    b = e.b
    one = e.load(x, kind, 4)

    def sweep(_: Value, sums: list[Value]) -> list[Value]:
        def step(at: Value, acc: list[Value]) -> list[Value]:
            places = [e.at(x, b.add(at, I64(i * lanes * 4))) for i in range(CHAINS)]
            values = [e.load(p, kind, 4) for p in places] if loads else [one] * CHAINS
            return [b.call(fma, [v, one, a]) for v, a in zip(values, acc, strict=True)]

        return e.loop(I64(0), size, step, sums, CHAINS * lanes * 4)[1]

    _, sums = e.loop(I64(0), rounds, sweep, [ir.Constant(kind, [0.0] * lanes)] * CHAINS)
    for i, value in enumerate(sums):
        e.store(value, e.at(x, I64(i * lanes * 4)), "f32")
    b.ret_void()
    return str(module)
