"""From the 32-bit sums of an int8 convolution to bytes, where every lane has a scale of its own.
ir/quantized.py says what each step is, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llvmlite import ir

from aerogel.codegen.cpu.emit import F32, I32, I64, ROUND, Emit, Value, constant
from aerogel.ir import EVERY_BYTE
from aerogel.ir.quantized import HEADER


class Head:
    """What every such epilogue begins with: sums in units of the output. `words` is where the requantisation
    stands, `parameter` the activation's number; `low` is the lowest byte, after a ReLU too."""

    def __init__(
        self, e: Emit, words: Value, parameter: Value, epilogue: tuple[str, ...], lanes: int
    ) -> None:
        self.e, self.b, self.words, self.parameter, self.lanes = e, e.b, words, parameter, lanes
        # a ReLU at the end is no more than a lowest byte
        closing = epilogue[-1:] == ("relu",)
        self.steps = epilogue[:-1] if closing else epilogue
        self.zero, low, self.high, self.beside_zero = (
            self._word(name, I32) for name in ("zero", "low", "high", "beside_zero")
        )
        self.low = self._from_zero(low) if closing else low

    def _word(self, name: str, typ: Value) -> Value:
        return self.e.load(self.e.at(self.words, I64(4 * HEADER.index(name))), typ, 4)

    def _from_zero(self, low: Value) -> Value:
        """The lowest byte after a ReLU."""
        b = self.b
        within = b.select(b.icmp_signed(">", self.zero, low), self.zero, low)
        return b.select(b.icmp_signed("<", within, self.high), within, self.high)

    def zeros(self) -> Value:
        """The byte that means zero, everywhere."""
        return self.e.splat(self.b.mul(self.zero, I32(EVERY_BYTE)), self.lanes)

    def scaled(self, sums: Value, scale: Value, beside: Callable[[], Value]) -> Value:
        """Sums after every step but the last, which makes bytes. `beside` gives a residual less its zero."""
        b, e, lanes = self.b, self.e, self.lanes
        v = b.fmul(b.sitofp(sums, ir.VectorType(F32, lanes)), scale)
        for step in self.steps:
            if step == "add":
                v = b.fadd(v, b.fmul(beside(), e.splat(self._word("beside", F32), lanes)))
            elif step != "bias":
                v = self._activated(step, v)
        return v

    def _activated(self, step: str, v: Value) -> Value:
        b, e, lanes = self.b, self.e, self.lanes
        nothing = constant(lanes, 0.0)
        if step == "leaky_relu":
            slope = e.splat(e.load(self.parameter, F32, 4), lanes)
            return b.select(b.fcmp_ordered(">", v, nothing), v, b.fmul(v, slope))
        if step == "hardswish":
            unit = e.splat(self._word("unit", F32), lanes)
            gate = self._within(b.fadd(b.fmul(v, unit), constant(lanes, 3.0)), constant(lanes, 6.0))
            return b.fmul(v, b.fmul(gate, constant(lanes, 1 / 6)))
        if step == "relu6":
            return self._within(v, e.splat(self._word("six", F32), lanes))
        return b.select(b.fcmp_ordered("<", v, nothing), nothing, v)

    def _within(self, v: Value, high: Value) -> Value:
        b, nothing = self.b, constant(self.lanes, 0.0)
        v = b.select(b.fcmp_ordered("<", v, nothing), nothing, v)
        return b.select(b.fcmp_ordered(">", v, high), high, v)


class Finish(Head):
    """A byte in the last bits of each lane."""

    def __init__(
        self, e: Emit, words: Value, parameter: Value, epilogue: tuple[str, ...], lanes: int
    ) -> None:
        super().__init__(e, words, parameter, epilogue, lanes)
        self.limits = [
            e.splat(e.b.sitofp(e.b.sub(limit, self.zero), F32), lanes) for limit in (self.low, self.high)
        ]

    def __call__(self, sums: Value, scale: Value, beside: Value | None) -> Value:
        """`beside` is a residual's byte, as 32 bits."""
        b, lanes = self.b, self.lanes
        v = self.scaled(sums, scale, partial(self._beside, beside))
        low, high = self.limits
        v = b.select(b.fcmp_ordered("<", v, low), low, v)
        v = b.select(b.fcmp_ordered(">", v, high), high, v)
        whole = b.bitcast(b.fadd(v, constant(lanes, ROUND)), sums.type)
        return b.add(whole, self.e.splat(self.zero, lanes))

    def _beside(self, byte: Value) -> Value:
        b, e, lanes = self.b, self.e, self.lanes
        return b.sitofp(b.sub(byte, e.splat(self.beside_zero, lanes)), ir.VectorType(F32, lanes))
