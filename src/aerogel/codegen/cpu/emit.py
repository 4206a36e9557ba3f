"""A thin layer over llvmlite's builder: loops, typed loads and stores, splats. Every emitter speaks it.

All pointers are opaque bytes; offsets are in bytes. Element types are "f32", "f16" and "bf16"; bf16 is
widened and narrowed with integer instructions, so that every ISA gives the same bits and none calls a
library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

Value = Any  # an llvmlite value; llvmlite has no types of its own

I1, I8, I16, I32, I64 = (ir.IntType(b) for b in (1, 8, 16, 32, 64))
F32, F16, VOID, PTR = ir.FloatType(), ir.HalfType(), ir.VoidType(), ir.PointerType()
STORED = {"f32": F32, "f16": F16, "bf16": I16}
ROUND, ROUND_BITS = 1.5 * 2.0**23, 0x4B400000
"""Added to a number below 2^22 it leaves the number, rounded to nearest even, in the last bits; its bits."""


@dataclass
class Emit:
    """One function under construction."""

    function: Value
    b: Value

    @staticmethod
    def start(module: Value, name: str, arguments: Sequence[Value]) -> Emit:
        """Open a function `void name(arguments)`."""
        function = ir.Function(module, ir.FunctionType(VOID, arguments), name)
        return Emit(function, ir.IRBuilder(function.append_basic_block("entry")))

    def slots(self, block: Value, names: Sequence[str], pointers: Sequence[str]) -> dict[str, Value]:
        """The 64-bit slots of an argument block by name; those among `pointers` as pointers."""
        places = {name: self.b.gep(block, [I64(i)], source_etype=I64) for i, name in enumerate(names)}
        return {name: self.load(place, PTR if name in pointers else I64, 8) for name, place in places.items()}

    def at(self, pointer: Value, offset: Value) -> Value:
        """pointer + offset bytes."""
        return self.b.gep(pointer, [offset], source_etype=I8)

    def load(self, pointer: Value, typ: Value, align: int) -> Value:
        return self.b.load(pointer, typ=typ, align=align)

    def integer(self, pointer: Value, index: Value) -> Value:
        """The 32-bit integer `pointer[index]`, widened to 64."""
        at = self.b.gep(pointer, [index], source_etype=I32)
        return self.b.sext(self.load(at, I32, 4), I64)

    def scalar(self, pointer: Value, index: Value, stored: str, computed: str) -> Value:
        """The element `pointer[index]` in the type it is computed in."""
        at = self.b.gep(pointer, [index], source_etype=STORED[stored])
        return self.widen(self.load(at, STORED[stored], 2 if stored != "f32" else 4), stored, computed, 0)

    def vector(self, pointer: Value, stored: str, computed: str, lanes: int) -> Value:
        """`lanes` elements at `pointer` (any alignment) in the type they are computed in."""
        raw = self.load(pointer, ir.VectorType(STORED[stored], lanes), 2 if stored != "f32" else 4)
        return self.widen(raw, stored, computed, lanes)

    def widen(self, raw: Value, stored: str, computed: str, lanes: int) -> Value:
        """From the stored type to the computed one; `lanes` 0 means a scalar."""
        if stored == computed:
            return raw
        if stored == "bf16":
            bits = self.b.zext(raw, _shape(I32, lanes))
            return self.b.bitcast(self.b.shl(bits, _fill(I32, lanes, 16)), _shape(F32, lanes))
        return self.b.fpext(raw, _shape(F32, lanes))

    def narrow(self, value: Value, stored: str, lanes: int) -> Value:
        """From f32 to the stored type, to nearest even; a NaN stays a NaN."""
        if stored == "f32":
            return value
        if stored == "f16":
            return self.b.fptrunc(value, _shape(F16, lanes))
        bits = self.b.bitcast(value, _shape(I32, lanes))
        odd = self.b.and_(self.b.lshr(bits, _fill(I32, lanes, 16)), _fill(I32, lanes, 1))
        rounded = self.b.add(self.b.add(bits, _fill(I32, lanes, 0x7FFF)), odd)
        quiet = self.b.or_(bits, _fill(I32, lanes, 0x400000))
        kept = self.b.select(self.b.fcmp_unordered("uno", value, value), quiet, rounded)
        return self.b.trunc(self.b.lshr(kept, _fill(I32, lanes, 16)), _shape(I16, lanes))

    def store(self, value: Value, pointer: Value, stored: str) -> None:
        """Store a vector of the stored type, any alignment."""
        self.b.store(value, pointer, align=2 if stored != "f32" else 4)

    def splat(self, value: Value, lanes: int) -> Value:
        """A vector with `value` in every lane."""
        typ = ir.VectorType(value.type, lanes)
        undefined = ir.Constant(typ, ir.Undefined)
        zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return self.b.shuffle_vector(self.b.insert_element(undefined, value, I32(0)), undefined, zeros)

    def lanes_of(self, table: Value, vector: Value, lanes: int) -> Value:
        """The lanes of one vector that a table of bits names."""
        bits = max(8, lanes)
        typ = {8: I8, 16: I16, 32: I32}[bits]
        word = self.load(self.b.gep(table, [vector], source_etype=typ), typ, bits // 8)
        if lanes < 8:
            word = self.b.trunc(word, ir.IntType(lanes))
        return self.b.bitcast(word, ir.VectorType(I1, lanes))

    def loop(
        self,
        first: Value,
        last: Value,
        body: Callable[[Value, list[Value]], Sequence[Value] | None],
        carried: Sequence[Value] = (),
        step: int = 1,
    ) -> tuple[Value, list[Value]]:
        """for i in range(first, last, step), whole steps only; returns where i ended and the carried
        values."""
        b, fn = self.b, self.function
        before = b.block
        head, inside, after = (fn.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        i.add_incoming(first, before)
        phis = [b.phi(c.type) for c in carried]
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, before)
        following = b.add(i, I64(step))
        b.cbranch(b.icmp_signed("<=", following, last), inside, after)
        b.position_at_end(inside)
        results = body(i, list(phis)) or ()
        i.add_incoming(following, b.block)
        for phi, value in zip(phis, results, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        return i, list(phis)

    def share(self, units: Value, thread: Value, threads: Value, body: Callable[[Value], None]) -> None:
        """This thread's share of 0 .. units: whole units, in order; which thread takes one does not change a
        bit of it."""
        b = self.b
        first = b.sdiv(b.mul(units, thread), threads)
        last = b.sdiv(b.mul(units, b.add(thread, I64(1))), threads)
        self.loop(first, last, lambda u, _: body(u))

    def choose(
        self, condition: Value, yes: Callable[[], Sequence[Value]], no: Callable[[], Sequence[Value]]
    ) -> list[Value]:
        """if condition: yes() else: no(); both return the same number of values, which are merged."""
        b, fn = self.b, self.function
        then, other, after = (fn.append_basic_block() for _ in range(3))
        b.cbranch(condition, then, other)
        b.position_at_end(then)
        left = list(yes())
        then_end = b.block
        b.branch(after)
        b.position_at_end(other)
        right = list(no())
        other_end = b.block
        b.branch(after)
        b.position_at_end(after)
        merged = []
        for v, w in zip(left, right, strict=True):
            phi = b.phi(v.type)
            phi.add_incoming(v, then_end)
            phi.add_incoming(w, other_end)
            merged.append(phi)
        return merged

    def when(self, condition: Value, body: Callable[[], None]) -> None:
        """if condition: body()."""

        def run() -> Sequence[Value]:
            body()
            return ()

        self.choose(condition, run, lambda: ())


def _shape(typ: Value, lanes: int) -> Value:
    return ir.VectorType(typ, lanes) if lanes else typ


def _fill(typ: Value, lanes: int, number: float) -> Value:
    return ir.Constant(ir.VectorType(typ, lanes), [number] * lanes) if lanes else typ(number)


def constant(lanes: int, number: float) -> Value:
    """A vector of one f32 number."""
    return _fill(F32, lanes, number)
