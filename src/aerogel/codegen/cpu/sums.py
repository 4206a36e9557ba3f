"""Sums in registers: what every kernel of ours does with a sparse filter, wherever its windows lie.

A row is the nonzeros of one filter in one block of channels. Its sums take one broadcast and one FMA with a
memory operand for each nonzero and vector, are added to the bias or to what the block before left, and end in
scratch or, after the epilogue, in y.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from aerogel.codegen.cpu.emit import F16, F32, I16, I32, I64, PTR, VOID, Emit, Value, constant
from aerogel.codegen.cpu.epilogue import activation
from aerogel.ir import INT8, ITEM_BYTES, NUMBERED, Conv, Dtypes, Target

UNROLL = 4
HALF_ROW = 64
"""Products of an average row that are summed in fp16 before they go to f32, at most. A row of n adds g(n) sum
|w x| to the error, g(n) = n 2^-11 / (1 - n 2^-11); on real layers, where roundings cancel, rows of 64 lose
about what storing bf16 does."""


def unsupported(d: Dtypes, target: Target) -> str | None:
    """None, or why this target cannot sum these element types."""
    if d == INT8:
        return "computes with floats, not with bytes"
    if d.accumulator == "bf16":
        return "sums in bf16 lose too much; use f32 as the accumulator"
    if d.accumulator == "f16" and not {"avx512fp16", "fp16"} & set(target.extras):
        return f"fp16 sums need fp16 arithmetic, which {target.isa} here has not; use f32 as the accumulator"
    if d.accumulator == "f16" and (d.input, d.weight) != ("f16", "f16"):
        return f"fp16 sums need fp16 input and weights, not {d.input} and {d.weight}"
    if "f16" in (d.input, d.weight, d.output) and target.isa == "generic":
        return "fp16 needs the F16C instructions, which plain x86-64 has not"
    return None


def half(d: Dtypes, target: Target) -> str:
    """The extra that sums of these types need on this target."""
    able = {"avx512fp16", "fp16"} & set(target.extras)
    return next(iter(able)) if d.accumulator == "f16" and able else ""


def summed_channels(own: int, smallest: int, conv: Conv, nonzeros: int) -> list[int]:
    """Channels that may be summed before the sums go to f32: powers of two up to all of them, short rows for
    sums in fp16."""
    sizes = sorted({min(own, smallest << i) for i in range(9)} | {own})
    if conv.dtypes.accumulator == "f32":
        return sizes
    return [n for n in sizes if nonzeros * n <= HALF_ROW * conv.k * own] or sizes[:1]


def spread(value: NDArray[Any], summed: str) -> NDArray[Any]:
    """Nonzeros as `Sums` reads them."""
    return np.repeat(value, 2) if summed == "f16" else value


def by_rank(rank: NDArray[Any]) -> NDArray[Any]:
    """The order that sorts, first come first: by 16 bits at a time, for which numpy counts instead of
    comparing."""
    order = np.argsort((rank & 0xFFFF).astype(np.uint16), kind="stable")
    if rank.size and rank.max() >> 16:
        order = order[np.argsort((rank >> 16).astype(np.uint16)[order], kind="stable")]
    return order


def lane_bits(lanes: int, chosen: NDArray[np.bool_]) -> NDArray[Any]:
    """A boolean (vectors, lanes) table with one bit a lane, in the smallest integer that holds a vector's."""
    word = np.dtype({4: np.uint8, 8: np.uint8, 16: np.uint16, 32: np.uint32}[lanes])
    return np.asarray((chosen * (1 << np.arange(lanes, dtype=np.uint64))).sum(axis=1).astype(word))


class Code(Protocol):
    """What the sums need to know of a kernel's code."""

    @property
    def dtypes(self) -> Dtypes: ...
    @property
    def epilogue(self) -> tuple[str, ...]: ...
    @property
    def vectors(self) -> int: ...
    @property
    def lanes(self) -> int: ...


class Sums:
    """`a` holds the argument slots by name; among them bias, residual, value, offset, live and parameter."""

    short = False
    """Whether offsets are two bytes and count vectors, not four that count bytes."""

    def __init__(self, code: Code, e: Emit, a: dict[str, Value], module: Value) -> None:
        self.e, self.b, self.a, self._code = e, e.b, a, code
        d, self.lanes = code.dtypes, code.lanes
        self.summed = d.accumulator
        vector = ir.VectorType(F16 if self.summed == "f16" else F32, self.lanes)
        suffix = f"v{self.lanes}f{16 if self.summed == 'f16' else 32}"
        self.fma = ir.Function(module, ir.FunctionType(vector, [vector] * 3), f"llvm.fmuladd.{suffix}")
        hint = ir.FunctionType(VOID, [PTR, I32, I32, I32])
        self.prefetch = ir.Function(module, hint, "llvm.prefetch.p0")
        self.nothing = ir.Constant(vector, [0.0] * self.lanes)
        self.x_step = self.lanes * ITEM_BYTES[d.input]
        self.y_step = self.lanes * ITEM_BYTES[d.output]

    def start(self, k: Value, opening: Value, kept: Value) -> list[Value]:
        """The f32 sums of filter k so far: its bias, or what the block of channels before left at `kept`."""
        e, code = self.e, self._code

        def fresh() -> list[Value]:
            if "bias" not in code.epilogue:
                return [constant(self.lanes, 0.0)] * code.vectors
            return [e.splat(e.scalar(self.a["bias"], k, "f32", "f32"), self.lanes)] * code.vectors

        def resumed() -> list[Value]:
            places = (e.at(kept, I64(i * self.lanes * 4)) for i in range(code.vectors))
            return [e.vector(p, "f32", "f32", self.lanes) for p in places]

        return e.choose(opening, fresh, resumed)

    def row(
        self, k: Value, opening: Value, kept: Value, nonzeros: Callable[[list[Value]], list[Value]]
    ) -> list[Value]:
        """The f32 sums of filter k so far with a row's `nonzeros` added, which are summed in the type of the
        accumulator.

        A row starts from zero: rows of a few dozen nonzeros, then their sums, round less than one chain of
        hundreds.
        """
        so_far = self.start(k, opening, kept)
        added = nonzeros([self.nothing] * self._code.vectors)
        return [
            self.b.fadd(s, self.e.widen(v, self.summed, "f32", self.lanes))
            for s, v in zip(so_far, added, strict=True)
        ]

    def keep(self, sums: Sequence[Value], kept: Value) -> None:
        """Leave the sums for the next block of channels."""
        for i, v in enumerate(sums):
            self.e.store(v, self.e.at(kept, I64(i * self.lanes * 4)), "f32")

    def run(self, x: Value, first: Value, last: Value, acc: list[Value], steps: Sequence[int]) -> list[Value]:
        """The inner loop. `steps` are bytes from a nonzero's window to the vector that goes into each sum.

        One or two vectors are summed in several chains: a chain waits for its last FMA, and a shorter one
        rounds less.
        """
        b, e, d = self.b, self.e, self._code.dtypes

        def one(at: Value, sums: list[Value]) -> list[Value]:
            weight = self._weight(at)
            window = e.at(x, self._offset(at))
            loads = [e.vector(e.at(window, I64(step)), d.input, self.summed, self.lanes) for step in steps]
            return [b.call(self.fma, [weight, v, s]) for v, s in zip(loads, sums, strict=True)]

        def several(at: Value, sums: list[Value]) -> list[Value]:
            for i in range(UNROLL):
                own = slice(i % chains * len(acc), (i % chains + 1) * len(acc))
                sums[own] = one(b.add(at, I64(i)), sums[own])
            return sums

        chains = max(1, UNROLL // len(acc))
        rest, many = e.loop(first, last, several, acc + [self.nothing] * (len(acc) * (chains - 1)), UNROLL)
        total = e.loop(rest, last, one, many[: len(acc)])[1]
        for chain in range(1, chains):
            total = [b.fadd(s, v) for s, v in zip(total, many[chain * len(acc) :], strict=False)]
        return total

    def _weight(self, at: Value) -> Value:
        """A nonzero in every lane. In fp16 it stands in memory twice: x86 spreads 32 bits while it loads
        them, but not 16."""
        if self.summed == "f16":
            both = self.e.load(self.b.gep(self.a["value"], [at], source_etype=I32), I32, 4)
            return self.b.bitcast(self.e.splat(both, self.lanes // 2), ir.VectorType(F16, self.lanes))
        return self.e.splat(
            self.e.scalar(self.a["value"], at, self._code.dtypes.weight, self.summed), self.lanes
        )

    def _offset(self, at: Value) -> Value:
        if not self.short:
            return self.e.integer(self.a["offset"], at)
        raw = self.e.load(self.b.gep(self.a["offset"], [at], source_etype=I16), I16, 2)
        return self.b.mul(self.b.zext(raw, I64), I64(self.x_step))

    def finished(self, v: Value, place: Value, live: Value) -> Value:
        """A sum as it is stored: epilogue, element type, rubbish lanes to zero. `place` is in bytes from the
        residual's start."""
        b, e, a, lanes, stored = self.b, self.e, self.a, self.lanes, self._code.dtypes.output
        for step in self._code.epilogue:
            if step == "add":
                v = b.fadd(v, e.vector(e.at(a["residual"], place), stored, "f32", lanes))
            elif step != "bias":
                parameter = e.splat(e.load(a["parameter"], F32, 4), lanes) if step in NUMBERED else None
                v = activation(e, step, v, lanes, parameter)
        v = e.narrow(v, stored, lanes)
        return b.select(live, v, ir.Constant(v.type, None))
