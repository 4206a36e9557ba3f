"""The only oracle: convolution and epilogue in float64, and the error a correct kernel may show.

|y - y64| <= g(K+1) S + K 2^-149, with K the kept weights that meet input, u = 2^-24, g(n) = n u / (1 - n u)
and S = |bias| + |residual| + sum |w x|. It holds for any order of summation, fused or not; g(K+2) with a
residual. Activations that stretch (SiLU at most 1.1 times, Hardswish 1.5) stretch it too and add 4 ulp: of
their answer, GELU of its argument and the sigmoids of one, as torch's own forms of them do. A stored type
other than f32 adds its own half ulp. Sums in fp16 go to f32 after every block of channels, so
each block adds g(k) s + k 2^-24 of its own, with fp16's u = 2^-11, the k kept weights and the s = sum |w x|
of that block: halve the block and this part about halves.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aerogel.errors import ShapeError
from aerogel.ir import ELEMENTS, Array, Conv, Requantize

F64 = NDArray[np.float64]

STRETCH = {
    None: 1.0,
    "relu": 1.0,
    "relu6": 1.0,
    "leaky_relu": 1.0,
    "threshold": 1.0,
    "silu": 1.1,
    "hardswish": 1.5,
    "gelu": 1.13,
    "sigmoid": 0.25,
    "hardsigmoid": 0.17,
}
_ULPS = {"leaky_relu": 1, "silu": 4, "hardswish": 4, "gelu": 4, "sigmoid": 4, "hardsigmoid": 4}


def convolve(x: F64, weight: F64, conv: Conv) -> F64:
    """Plain convolution in float64, one tap at a time. Taps with no weight are skipped: 0 * Inf is not part
    of the promise."""
    if x.shape != conv.x_shape or weight.shape != conv.weight_shape:
        raise ShapeError(
            f"{conv} takes x {conv.x_shape} and weight {conv.weight_shape}, not {x.shape} and {weight.shape}"
        )
    n, k, p, q = conv.y_shape
    (top, left, bottom, right), (u, v), (dh, dw), g = conv.pad, conv.stride, conv.dilation, conv.groups
    padded = np.zeros((n, conv.c, conv.size[0] + top + bottom, conv.size[1] + left + right))
    padded[:, :, top : top + conv.size[0], left : left + conv.size[1]] = x
    y = np.zeros((n, g, k // g, p * q))
    for i in range(conv.r):
        for j in range(conv.s):
            tap = weight[:, :, i, j].reshape(g, k // g, conv.c // g)
            if tap.any():
                window = padded[
                    :, :, i * dh : i * dh + (p - 1) * u + 1 : u, j * dw : j * dw + (q - 1) * v + 1 : v
                ]
                y += tap @ window.reshape(n, g, conv.c // g, p * q)
    return y.reshape(n, k, p, q)


def activate(v: F64, conv: Conv) -> F64:
    """The activation of `conv` in float64, with torch's answers at NaN and the infinities."""
    with np.errstate(all="ignore"):
        match conv.activation:
            case "relu":
                return np.where(v < 0, 0.0, v)
            case "relu6":
                return np.where(v < 0, 0.0, np.where(v > 6, 6.0, v))
            case "leaky_relu":
                return np.where(v > 0, v, v * float(np.float32(conv.parameter)))
            case "threshold":
                return np.where(v <= float(np.float32(conv.parameter)), 0.0, v)
            case "silu":
                return np.asarray(v / (1 + np.exp(-v)))
            case "hardswish":
                return np.asarray(v * np.clip(v + 3, 0, 6) / 6)
            case "gelu":
                return np.asarray(v * _normal(v))
            case "sigmoid":
                return np.asarray(1 / (1 + np.exp(-v)))
            case "hardsigmoid":
                return np.asarray(np.clip(v + 3, 0, 6) / 6)
            case _:
                return v


def _normal(v: F64) -> F64:
    """The share of a normal distribution that is below v; math.erfc is exact far out, too."""
    share = np.vectorize(lambda one: 0.5 * math.erfc(-one / math.sqrt(2)), otypes=[float])
    return np.asarray(share(v))


def _scale(v: F64, conv: Conv) -> F64:
    """What the activation's own rounding is relative to."""
    if conv.activation == "gelu":
        return np.abs(v)
    return np.ones(1) if conv.activation in ("sigmoid", "hardsigmoid") else np.abs(activate(v, conv))


def reference(x: F64, weight: F64, conv: Conv, bias: F64 | None = None, residual: F64 | None = None) -> F64:
    """The whole layer: convolution, then the epilogue in its own order."""
    y = convolve(x, weight, conv)
    for step in conv.epilogue:
        if step == "bias":
            assert bias is not None
            y = y + bias[:, None, None]
        elif step == "add":
            assert residual is not None
            y = y + residual
        else:
            y = activate(y, conv)
    return y


def bound(
    x: F64,
    weight: F64,
    conv: Conv,
    bias: F64 | None = None,
    residual: F64 | None = None,
    channels: int | None = None,
) -> F64:
    """How far each output may be from `reference`. Inputs are the stored ones, already rounded.

    `channels` of each group (None: all) are summed before their sums go to f32.
    """
    total, met = _products(x, weight, conv)
    summed, stored = conv.dtypes.accumulator, conv.dtypes.output
    inside = np.zeros(1)
    if summed != "f32":
        own = weight.shape[1]
        for first in range(0, own, channels or own):
            part = np.zeros_like(weight)
            part[:, first : first + (channels or own)] = weight[:, first : first + (channels or own)]
            size, count = _products(x, part, conv)
            inside = inside + gamma(count, summed) * size + count * ELEMENTS[summed].tiny
    if bias is not None:
        total = total + np.abs(bias)[:, None, None]
    if residual is not None:
        total = total + np.abs(residual)
    roundings = met + (1 if residual is None else 2)
    error = gamma(roundings, "f32") * (total + inside) + met * ELEMENTS["f32"].tiny + inside
    error = error * STRETCH[conv.activation]
    y = np.abs(reference(x, weight, conv, bias, residual)) + error
    if (ulps := _ULPS.get(conv.activation or "")) is not None:
        before = reference(x, weight, _before(conv), bias, residual)
        largest = _scale(before, conv) + error
        error = error + ulps * np.maximum(2 * ELEMENTS["f32"].unit * largest, ELEMENTS["f32"].tiny)
    if stored != "f32":
        error = error + ELEMENTS[stored].unit * y + ELEMENTS[stored].tiny
    return error


def _products(x: F64, weight: F64, conv: Conv) -> tuple[F64, F64]:
    """sum |w x| of each output, and how many kept weights it meets."""
    plain = replace(conv, epilogue=())
    one_image = replace(plain, n=min(1, conv.batch))
    met = convolve(np.ones(one_image.x_shape), (weight != 0).astype(np.float64), one_image)
    return convolve(np.abs(x), np.abs(weight), plain), met


def _before(conv: Conv) -> Conv:
    """The layer up to its activation: only there the activation's own rounding counts."""
    cut = next(i for i, e in enumerate(conv.epilogue) if e.startswith(conv.activation or "?"))
    return replace(conv, epilogue=conv.epilogue[:cut])


def gamma(roundings: F64, dtype: str) -> F64:
    """Higham's g(n): the relative error that n roundings can pile up."""
    n = roundings * ELEMENTS[dtype].unit
    return np.asarray(n / (1 - np.minimum(n, 0.5)))


def in_bytes(x: Array, weight: Array, conv: Conv, how: Requantize, residual: Array | None = None) -> Array:
    """The whole layer in int8, to the last bit: x and the residual are bytes (n, c, h, w), weights signed
    ones. Sums are whole numbers far below 2^53."""
    centred = x.astype(np.float64) - how.x_zero
    sums = convolve(centred, weight.astype(np.float64), replace(conv, epilogue=())).astype(np.int64)
    per_filter = weight.reshape(conv.k, -1).sum(1, dtype=np.int64)
    return how.bytes_of(sums + how.x_zero * per_filter[:, None, None], conv, residual)
