"""Numbers of four filters as the four bytes of a lane: to nearest even, zero point added, limits kept.

    packs     x86: 32 bits to 16 of two filters at once, then to bytes of all four, with saturation, which is
              most of the limits; a shuffle within each 16 bytes then lays a pixel's four side by side
    shifts    every machine: limits and rounding in floats, then a shift and an or for each filter

Numbers are in units of the output, its zero point not yet added.
"""

from __future__ import annotations

from llvmlite import ir

from aerogel.codegen.cpu.emit import F32, I8, I16, I32, ROUND, ROUND_BITS, Emit, Value, constant
from aerogel.ir import QUAD, VECTOR_BYTES

_NEAREST = 8
"""Round to nearest even, whatever the control register says."""


class Bytes:
    """`pair` takes numbers of two filters, `joined` two pairs."""

    def __init__(self, e: Emit, module: Value, isa: str, zero: Value, low: Value, high: Value) -> None:
        self.e, self.b, self.isa = e, e.b, isa
        size = VECTOR_BYTES[isa]
        self.lanes = size // QUAD
        self.numbers, self.sums = ir.VectorType(F32, self.lanes), ir.VectorType(I32, self.lanes)
        self.halves, self.bytes = ir.VectorType(I16, size // 2), ir.VectorType(I8, size)
        self.zero, self.low, self.high = zero, low, high
        self.packs = isa != "neon"
        if self.packs:
            self._declare(module)

    def _declare(self, module: Value) -> None:
        narrow, byte = {
            "avx512": ("avx512.packssdw.512", "avx512.packuswb.512"),
            "avx2": ("avx2.packssdw", "avx2.packuswb"),
            "generic": ("sse2.packssdw.128", "sse2.packuswb.128"),
        }[self.isa]
        whole = {
            "avx512": "avx512.mask.cvtps2dq.512",
            "avx2": "avx.cvt.ps2dq.256",
            "generic": "sse2.cvtps2dq",
        }[self.isa]
        extra = [self.sums, I16, I32] if self.isa == "avx512" else []

        def declared(name: str, result: Value, arguments: list[Value]) -> Value:
            return ir.Function(module, ir.FunctionType(result, arguments), f"llvm.x86.{name}")

        self._whole = declared(whole, self.sums, [self.numbers, *extra])
        self._narrow = declared(narrow, self.halves, [self.sums, self.sums])
        self._byte = declared(byte, self.bytes, [self.halves, self.halves])

    def pair(self, first: Value, second: Value) -> Value:
        """Of two filters. With `packs` their zero point is in."""
        b, e = self.b, self.e
        if not self.packs:
            return b.or_(self._last(first), b.shl(self._last(second), self._bits(8)))
        both = b.call(self._narrow, [self._rounded(first), self._rounded(second)])
        return b.add(both, e.splat(b.trunc(self.zero, I16), self.halves.count))

    def joined(self, first: Value, second: Value) -> Value:
        """Four channels of each pixel."""
        b, e = self.b, self.e
        if not self.packs:
            four = b.or_(first, b.shl(second, self._bits(16)))
            zeros = e.splat(b.mul(self.zero, I32(0x01010101)), self.lanes)
            return b.bitcast(b.add(b.bitcast(four, self.bytes), b.bitcast(zeros, self.bytes)), self.sums)
        four = b.call(self._byte, [first, second])
        low = e.splat(b.trunc(self.low, I8), self.bytes.count)
        four = b.select(b.icmp_unsigned(">", low, four), low, four)
        within = [16 * (i // 16) + QUAD * (i % QUAD) + i % 16 // QUAD for i in range(self.bytes.count)]
        beside = ir.Constant(ir.VectorType(I32, self.bytes.count), within)
        return b.bitcast(b.shuffle_vector(four, four, beside), self.sums)

    def _rounded(self, v: Value) -> Value:
        """As integers. What is far below becomes the least of them, and so the lowest byte."""
        v = self._at_most(v)
        extra = [ir.Constant(self.sums, None), I16(-1), I32(_NEAREST)] if self.isa == "avx512" else []
        return self.b.call(self._whole, [v, *extra])

    def _last(self, v: Value) -> Value:
        """As integers in the last byte, without the zero point."""
        b = self.b
        low = self.e.splat(b.sitofp(b.sub(self.low, self.zero), F32), self.lanes)
        v = self._at_most(b.select(b.fcmp_ordered("<", v, low), low, v))
        bits = b.bitcast(b.fadd(v, constant(self.lanes, ROUND)), self.sums)
        return b.and_(b.sub(bits, self._bits(ROUND_BITS)), self._bits(255))

    def _at_most(self, v: Value) -> Value:
        b = self.b
        high = self.e.splat(b.sitofp(b.sub(self.high, self.zero), F32), self.lanes)
        return b.select(b.fcmp_ordered(">", v, high), high, v)

    def _bits(self, number: int) -> Value:
        return ir.Constant(self.sums, [number] * self.lanes)
