"""What a copy makes of the elements that it moves: `CopyCode` says which, `Turn` does it."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from aerogel.codegen.cpu.emit import F32, I8, I16, I32, I64, ROUND, ROUND_BITS, STORED, Emit, Value
from aerogel.ir import ITEM_BYTES, QUAD, VECTOR_BYTES


@dataclass(frozen=True)
class CopyCode:
    """`step` is the distance of neighbouring source columns in elements: 1 and 2 are compiled in, 0 means it
    is data.

    `repeat` is how many target rows and columns come of one source row and column: 1, or more to enlarge an
    image.
    """

    isa: str
    reads: str
    writes: str
    step: int
    repeat: int = 1
    joins: bool = False
    """Whether four channels of the source make a quad of the target."""
    parts: bool = False
    """Whether a channel is taken out of a quad of the source."""

    @property
    def same(self) -> bool:
        """Whether elements are moved as they are."""
        return self.reads == self.writes and not self.joins and not self.parts

    @property
    def item_bytes(self) -> tuple[int, int]:
        """Of an element of the source, and of the target; quads are elements."""
        whole = self.same and self.reads == "u8"
        x, y = ITEM_BYTES[self.reads], ITEM_BYTES[self.writes]
        return 4 if whole or self.parts else x, 4 if whole or self.joins else y

    def __str__(self) -> str:
        kinds = f"{self.reads}.{self.writes}" + "j" * self.joins + "p" * self.parts
        kinds = f"{self.item_bytes[1]}{'b' * (self.writes == 'u8')}" if self.same else kinds
        return f"copy-{self.isa}-{kinds}-{self.step}x{self.repeat}"

    @property
    def wide(self) -> int:
        """Columns that are moved at once, the last ones under a mask; 0 where the compiler is left to find
        its own way."""
        words = self.item_bytes == (4, 4) and (self.same or self.reads == "f32")
        masked = self.isa in ("avx512", "avx2")
        steps = self.step if self.repeat == 1 else self.step == 1 and self.same and self.repeat in (2, 4, 8)
        return VECTOR_BYTES[self.isa] // 4 if words and masked and steps else 0


def kind(code: CopyCode, dtype: str, size: int) -> Value:
    """The type in which an element is loaded or stored."""
    return STORED[dtype] if dtype in STORED and not code.same else {1: I8, 2: I16, 4: I32}[size]


class Turn:
    """From elements of the source to an element of the target, or from vectors to a vector."""

    def __init__(self, code: CopyCode, e: Emit, a: dict[str, Value], lanes: int = 0) -> None:
        """`lanes` 0 means one element at a time."""
        self.code, self.e, self.b, self.a, self.lanes = code, e, e.b, a, lanes
        self.scale = self.every(self.b.bitcast(self.b.trunc(a["scale"], I32), F32))
        self.zero = self.every(self.b.trunc(a["zero"], I32))

    def every(self, value: Value) -> Value:
        return self.e.splat(value, self.lanes) if self.lanes else value

    def _integer(self, number: int) -> Value:
        return self.every(I32(number))

    def _as(self, typ: Value) -> Value:
        return ir.VectorType(typ, self.lanes) if self.lanes else typ

    def sources(self, first: Value, channel: Value) -> tuple[list[Value], Value]:
        """Where the elements of a target's channel are, and by how many bits they stand to the left."""
        b, e, a = self.b, self.e, self.a
        if self.code.parts:
            quad, own = b.sdiv(channel, I64(QUAD)), b.srem(channel, I64(QUAD))
            return [e.at(first, b.mul(quad, a["x_channel"]))], b.trunc(b.mul(own, I64(8)), I32)
        if not self.code.joins:
            return [e.at(first, b.mul(channel, a["x_channel"]))], I32(0)
        numbers = [b.add(b.mul(channel, I64(QUAD)), I64(i)) for i in range(QUAD)]
        there = [b.select(b.icmp_signed("<", n, a["x_last"]), n, a["x_last"]) for n in numbers]
        return [e.at(first, b.mul(n, a["x_channel"])) for n in there], I32(0)

    def __call__(self, values: list[Value], shift: Value) -> Value:
        b, e, code = self.b, self.e, self.code
        if code.same:
            return values[0]
        if code.parts:
            return self._number(b.and_(b.lshr(values[0], self.every(shift)), self._integer(255)))
        if not code.joins:
            wide = e.widen(values[0], code.reads, "f32", self.lanes)
            return e.narrow(wide, code.writes, self.lanes)
        total = self._byte(values[0])
        for i, value in enumerate(values[1:], 1):
            total = b.or_(total, b.shl(self._byte(value), self._integer(8 * i)))
        return total

    def _number(self, byte: Value) -> Value:
        """What a byte means; itself where bytes are wanted."""
        b = self.b
        if self.code.writes == "u8":
            return b.trunc(byte, self._as(I8))
        number = b.fmul(b.sitofp(b.sub(byte, self.zero), self._as(F32)), self.scale)
        return self.e.narrow(number, self.code.writes, self.lanes)

    def _byte(self, value: Value) -> Value:
        """The byte that means a number: to nearest even, as ir/quantized.py says."""
        b, e = self.b, self.e
        if self.code.reads == "u8":
            return b.zext(value, self._as(I32))
        v, floats = b.fdiv(e.widen(value, self.code.reads, "f32", self.lanes), self.scale), self._as(F32)
        low = b.sitofp(b.neg(self.zero), floats)
        high = b.sitofp(b.sub(self._integer(255), self.zero), floats)
        v = b.select(b.fcmp_ordered(">", v, low), v, low)  # NaN is the lowest
        v = b.select(b.fcmp_ordered("<", v, high), v, high)
        whole = b.bitcast(b.fadd(v, self.every(F32(ROUND))), self._as(I32))
        return b.add(b.sub(whole, self._integer(ROUND_BITS)), self.zero)
