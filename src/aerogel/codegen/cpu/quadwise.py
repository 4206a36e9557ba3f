"""`quadwise`: maps of bytes, pixel by pixel: the sum of two of them, or what a table says of every byte.

    for each unit of this thread        a plane of four channels, of an image
      for each vector of the plane      border and gaps too: maps of one size stand alike
        y = f(x, residual)              lanes that hold no pixel become the byte that means zero

ir/bytemaps.py says what f is to the last bit. The residual may be y itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from aerogel.codegen.cpu import abi
from aerogel.codegen.cpu.emit import F32, I8, I32, I64, PTR, ROUND, Emit, Value, constant
from aerogel.codegen.cpu.table import Table
from aerogel.ir import EVERY_BYTE, QUAD, VECTOR_BYTES

POINTERS = (*abi.POINTERS, "live")
SIZES = (
    "planes",  # of all images
    "plane_vectors",  # of a plane
    "front_vectors",  # border before the first plane
    "zero",  # the byte that means zero in y
    "x_zero",
    "beside_zero",  # in x and in the residual
    "x_scale",
    "beside_scale",  # bits of the f32 that numbers of each are multiplied with
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "quadwise"


@dataclass(frozen=True)
class QuadwiseCode:
    """`kind` is "add" or "table"; the table stands in the place of a bias."""

    isa: str
    kind: str

    def __str__(self) -> str:
        return f"quadwise-{self.isa}-{self.kind}"


def emit(code: QuadwiseCode) -> str:
    """LLVM IR of `void quadwise(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name=str(code))
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    b, a = e.b, e.slots(block, ARGUMENTS, POINTERS)
    step = VECTOR_BYTES[code.isa]
    lanes = step // QUAD
    quads = ir.VectorType(I32, lanes)
    zeros = e.splat(b.mul(b.trunc(a["zero"], I32), I32(EVERY_BYTE)), lanes)
    table = Table(e, module, code.isa, a["bias"]) if code.kind == "table" else None
    add = _Add(e, a, step) if code.kind == "add" else None

    def unit(u: Value) -> None:
        first = b.mul(b.mul(u, a["plane_vectors"]), I64(step))

        def vector(v: Value, _: list[Value]) -> None:
            at = b.add(first, b.mul(v, I64(step)))
            if table is not None:
                made = table(e.load(e.at(a["x"], at), quads, 4))
            else:
                assert add is not None
                made = add(at)
            b.store(b.select(e.lanes_of(a["live"], v, lanes), made, zeros), e.at(a["y"], at), align=4)

        e.loop(I64(0), a["plane_vectors"], vector)

    def front() -> None:
        def one(v: Value, _: list[Value]) -> None:
            b.store(zeros, e.at(a["y"], b.mul(v, I64(step))), align=4)

        e.loop(b.neg(a["front_vectors"]), I64(0), one)

    e.share(a["planes"], thread, threads, unit)
    e.when(b.icmp_signed("==", thread, I64(0)), front)
    b.ret_void()
    return str(module)


class _Add:
    """Sixteen bytes at a time, each as a number of its own."""

    BYTES = 16

    def __init__(self, e: Emit, a: dict[str, Value], step: int) -> None:
        self.e, self.b, self.a, self.step = e, e.b, a, step
        self.scales = [self._every(a[name]) for name in ("x_scale", "beside_scale")]
        self.zeros = [self._whole(a[name]) for name in ("x_zero", "beside_zero")]
        zero = e.b.trunc(a["zero"], I32)
        limits = (e.b.neg(zero), e.b.sub(I32(255), zero))
        self.low, self.high = (e.splat(e.b.sitofp(limit, F32), self.BYTES) for limit in limits)
        self.zero = e.splat(zero, self.BYTES)

    def _every(self, bits: Value) -> Value:
        return self.e.splat(self.b.bitcast(self.b.trunc(bits, I32), F32), self.BYTES)

    def _whole(self, number: Value) -> Value:
        return self.e.splat(self.b.trunc(number, I32), self.BYTES)

    def __call__(self, at: Value) -> Value:
        """A vector of quads."""
        b, parts = self.b, [self._part(self.b.add(at, I64(i))) for i in range(0, self.step, self.BYTES)]
        while len(parts) > 1:
            size = 2 * parts[0].type.count
            order = ir.Constant(ir.VectorType(I32, size), list(range(size)))
            parts = [b.shuffle_vector(*pair, order) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return b.bitcast(parts[0], ir.VectorType(I32, self.step // QUAD))

    def _part(self, at: Value) -> Value:
        b, count = self.b, self.BYTES
        numbers = [
            self._number(self.a[name], at, zero, scale)
            for name, zero, scale in zip(("x", "residual"), self.zeros, self.scales, strict=True)
        ]
        v = b.fadd(*numbers)
        v = b.select(b.fcmp_ordered("<", v, self.low), self.low, v)
        v = b.select(b.fcmp_ordered(">", v, self.high), self.high, v)
        whole = b.bitcast(b.fadd(v, constant(count, ROUND)), ir.VectorType(I32, count))
        return b.trunc(b.add(whole, self.zero), ir.VectorType(I8, count))

    def _number(self, base: Value, at: Value, zero: Value, scale: Value) -> Value:
        b, count = self.b, self.BYTES
        raw = self.e.load(self.e.at(base, at), ir.VectorType(I8, count), 4)
        whole = b.sub(b.zext(raw, ir.VectorType(I32, count)), zero)
        return b.fmul(b.sitofp(whole, ir.VectorType(F32, count)), scale)
