"""`Quantized`: what the bytes of a map mean. `Requantize`: how the sums of an int8 convolution become bytes.

A map in int8 holds unsigned bytes q; the number meant is (q - zero) * scale. Weights are signed bytes with a
scale for each filter and no zero point. A product of the two is at most 255 * 128, and sums are 32-bit
integers, so they are exact in any order. What becomes of a sum is said to the last bit, in f32, each step
rounded to nearest even and none of them fused:

    v = f32(sum + bias[k]) * scale[k]            in units of the output; scale[k] is f32(sx * sw[k] / sy)
    v = v + f32(r - beside_zero) * beside        "add", of a residual r in int8; beside is f32(sr / sy)
    v = activation(v)                            see `activated`
    q = rne(clamp(v, low - zero, high - zero)) + zero

`bias` holds what the input's zero point adds to every sum (so a border holds that zero point, not 0). The
reference computes exactly this, kernels of ours and torch's form of a graph too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aerogel.errors import InvalidFile
from aerogel.ir.conv import Conv
from aerogel.ir.dtypes import Array
from aerogel.ir.layout import QUAD
from aerogel.ir.numbers import round_up

F32s = NDArray[np.float32]

EXACT = ("relu", "relu6", "leaky_relu", "hardswish")
"""Activations that f32 without fused steps gives to the last bit on every machine."""
HEADER = ("x_zero", "zero", "low", "high", "beside_zero", "beside", "unit", "six")
"""Words before the bias: integers, then from `beside` on floats by their bits."""


@dataclass(frozen=True)
class Quantized:
    """The number that a byte q means is (q - zero) * scale."""

    scale: float
    zero: int

    @staticmethod
    def of(low: float, high: float) -> Quantized:
        """For numbers of this range, zero among them: zero is meant by a byte exactly, as borders need."""
        low, high = min(float(low), 0.0), max(float(high), 0.0)
        scale = float(np.float32((high - low) / 255)) if high - low > 1e-30 else 1.0
        return Quantized(scale, int(np.clip(np.rint(-low / scale), 0, 255)))

    def bytes_of(self, x: Array) -> Array:
        """Numbers as bytes: rne(x / scale) + zero, in f32."""
        v = np.asarray(x, np.float32) / np.float32(self.scale)
        return np.asarray(np.rint(np.clip(v, -self.zero, 255 - self.zero)) + self.zero).astype(np.uint8)

    def numbers_of(self, q: Array) -> F32s:
        return (q.astype(np.float32) - np.float32(self.zero)) * np.float32(self.scale)


@dataclass(frozen=True, eq=False)
class Requantize:
    """See the module. `unit` is the output's scale, which activations that are no multiples need."""

    bias: NDArray[np.int32]
    scale: F32s
    x_zero: int = 0
    zero: int = 0
    low: int = 0
    high: int = 255
    beside: float = 0.0
    beside_zero: int = 0
    unit: float = 1.0

    @staticmethod
    def of(
        weight: Array,
        weight_scale: Array,
        bias: Array | None,
        x: Quantized,
        y: Quantized,
        beside: Quantized | None = None,
    ) -> Requantize:
        """From the scales and zero points of x, the weights (s8), y and the residual, and the bias in
        numbers."""
        summed = weight.reshape(len(weight), -1).sum(1, dtype=np.int64)
        product = x.scale * weight_scale.astype(np.float64)
        own = np.zeros(len(weight)) if bias is None else np.rint(bias.astype(np.float64) / product)
        return Requantize(
            np.clip(own - x.zero * summed, -(2**30), 2**30).astype(np.int32),
            (product / y.scale).astype(np.float32),
            x.zero,
            y.zero,
            beside=0.0 if beside is None else float(np.float32(beside.scale / y.scale)),
            beside_zero=0 if beside is None else beside.zero,
            unit=y.scale,
        )

    def bytes_of(self, sums: Array, conv: Conv, residual: Array | None = None) -> Array:
        """The output of these sums (n, k, p, q), in which no bias is yet."""
        v = (sums + self.bias[:, None, None]).astype(np.int32).astype(np.float32) * self.scale[:, None, None]
        for step in conv.steps:
            if step == "add":
                assert residual is not None
                other = residual.astype(np.float32) - np.float32(self.beside_zero)
                v = v + other * np.float32(self.beside)
            elif step != "bias":
                v = activated(v, step, np.float32(conv.parameter), np.float32(self.unit))
        v = np.clip(v, np.float32(self.low - self.zero), np.float32(self.high - self.zero))
        return np.asarray(np.rint(v) + self.zero).astype(np.uint8)

    @property
    def words(self) -> NDArray[np.int32]:
        """As kernels read it: the header, then bias and scale of each filter, whole quads of them."""
        unit = np.float32(self.unit)
        numbers = np.array([self.beside, unit, np.float32(6) / unit], np.float32).view(np.int32)
        header = np.array([self.x_zero, self.zero, self.low, self.high, self.beside_zero], np.int32)
        spare = (0, round_up(len(self.bias), QUAD) - len(self.bias))
        scale = np.pad(self.scale.astype(np.float32), spare).view(np.int32)
        return np.concatenate([header, numbers, np.pad(self.bias, spare), scale])

    @staticmethod
    def parse(words: Array, filters: int) -> Requantize:
        """The inverse of `words`."""
        padded = round_up(filters, QUAD)
        if words.dtype != np.int32 or words.shape != (len(HEADER) + 2 * padded,):
            raise InvalidFile(f"this is no requantisation of {filters} filters")
        x_zero, zero, low, high, beside_zero = (int(word) for word in words[:5])
        beside, unit = (float(number) for number in words[5:7].view(np.float32))
        bias, scale = words[len(HEADER) :].reshape(2, padded)[:, :filters]
        found = Requantize(
            bias.copy(), scale.copy().view(np.float32), x_zero, zero, low, high, beside, beside_zero, unit
        )
        if not all(0 <= v <= 255 for v in (x_zero, zero, low, high, beside_zero)) or low > high:
            raise InvalidFile("a zero point or a limit of a requantisation is no byte")
        if not (np.isfinite([beside, unit]).all() and np.isfinite(found.scale).all() and unit > 0):
            raise InvalidFile("a scale of a requantisation is no number")
        return found


def activated(v: F32s, step: str, slope: np.float32, unit: np.float32) -> F32s:
    """An activation on numbers in units of `unit`, each step rounded to f32."""
    if step == "relu":
        return np.maximum(v, np.float32(0))
    if step == "relu6":
        return np.minimum(np.maximum(v, np.float32(0)), np.float32(6) / unit)
    if step == "leaky_relu":
        return np.where(v > 0, v, v * slope)
    gate = np.minimum(np.maximum(v * unit + np.float32(3), np.float32(0)), np.float32(6))
    return np.asarray(v * (gate * np.float32(1 / 6)))
