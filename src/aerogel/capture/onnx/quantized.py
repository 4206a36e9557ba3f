"""ONNX's quantised operators, computed in float: weights dequantised with their zeros kept, rounding of maps
left out.

A map that is quantised and dequantised keeps the range that the integers have (a clamp, which often stands
for a ReLU), and not their rounding: the answer is nearer to the network before quantisation than integers
give it. Integer products (ConvInteger) are whole numbers in f32, exact up to 2^24.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from aerogel.capture.onnx.file import Attributes
from aerogel.capture.onnx.layers import Conv, MatMul
from aerogel.capture.onnx.values import Reader, Value, operator
from aerogel.errors import UnsupportedModel
from aerogel.ir import Ref, Special


def _float(r: Reader, x: Value) -> Ref:
    return r.emit("aten.to.dtype", r.tensor(x), Special("dtype", "float32"))


def _along(r: Reader, a: Attributes, value: Value, rank: int) -> Value:
    """Scales of one axis, shaped to meet the others."""
    array = np.asarray(r.known(value, "a scale"))
    if array.ndim != 1 or rank < 2 or array.size == 1:
        return array.reshape(()) if array.size == 1 else array
    shape = [1] * rank
    shape[a.get("axis", 1) % rank] = -1
    return array.reshape(shape)


@operator
def QuantizeLinear(r: Reader, a: Attributes, x: Value, scale: Value, zero: Value = None) -> Any:
    """The range of the integers, in the map's own unit; the integers themselves where someone wants them."""
    x = r.tensor(x)
    dtype = torch.uint8 if zero is None else r.dtype(zero)
    factor = _along(r, a, scale, r.rank(x)).astype(np.float64)
    middle = 0 if zero is None else _along(r, a, zero, r.rank(x)).astype(np.float64)
    if (
        a.get("block_size")
        or a.get("output_dtype")
        or dtype not in (torch.uint8, torch.int8)
        or r.dtype(x) != torch.float32
    ):
        raise UnsupportedModel(f"QuantizeLinear '{a['layer']}' is by blocks or to another type than bytes")
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if not _read_back(r, a, scale, zero):
        y = r.emit(
            "aten.round.default", r.emit("aten.div.Tensor", x, r.tensor(np.asarray(factor, np.float32)))
        )
        y = r.emit("aten.add.Tensor", y, r.tensor(np.asarray(middle, np.float32)))
        y = r.emit("aten.clamp.default", y, least, most)
        return r.emit(
            "aten.to.dtype", y, Special("dtype", str(dtype).removeprefix("torch.")), layer=a["layer"]
        )
    low, high = (least - middle) * factor, (most - middle) * factor
    if np.asarray(low).ndim:
        kept = r.emit("aten.maximum.default", x, r.tensor(np.asarray(low, np.float32)))
        kept = r.emit("aten.minimum.default", kept, r.tensor(np.asarray(high, np.float32)), layer=a["layer"])
    else:
        kept = r.emit("aten.clamp.default", x, float(low), float(high), layer=a["layer"])
    r.ranged.add(kept.name)
    return kept


def _read_back(r: Reader, a: Attributes, scale: Value, zero: Value) -> bool:
    """Whether all that read the integers turn them into numbers again, by the scale and zero they were made
    with."""
    if r.file.readers(a["first"]) != {"DequantizeLinear"}:
        return False
    for node in r.file.nodes:
        if a["first"] not in node.input:
            continue
        own = r.file.attributes(node)
        if (
            list(node.input).count(a["first"]) > 1
            or own.get("axis", 1) != a.get("axis", 1)
            or own.get("block_size")
        ):
            return False
        theirs = [r.values.get(name) for name in (*node.input[1:], "")[:2]]
        if any(isinstance(v, Ref) for v in theirs) or not np.array_equal(
            np.asarray(theirs[0]), np.asarray(scale)
        ):
            return False
        middles = [np.zeros(1) if v is None else np.asarray(v) for v in (theirs[1], zero)]
        if not np.array_equal(middles[0].ravel(), middles[1].ravel()):
            return False
    return True


@operator
def DequantizeLinear(r: Reader, a: Attributes, x: Value, scale: Value, zero: Value = None) -> Any:
    x = r.tensor(x)
    if x.name in r.ranged:
        return x
    if a.get("block_size") or r.dtype(scale) != torch.float32 or r.dtype(x).is_floating_point:
        raise UnsupportedModel(
            f"DequantizeLinear '{a['layer']}' is by blocks or to another type than float32"
        )
    wide, rank = _float(r, x), r.rank(x)
    if zero is not None:
        wide = r.emit("aten.sub.Tensor", wide, r.tensor(_along(r, a, zero, rank).astype(np.float32)))
    return r.emit("aten.mul.Tensor", wide, r.tensor(_along(r, a, scale, rank)), layer=a["layer"])


@operator
def DynamicQuantizeLinear(r: Reader, a: Attributes, x: Value) -> Any:
    """Scale and zero point of the map as it is: these and the integers decide what follows, so they are
    rounded as they are."""
    x = r.tensor(x)
    axes = tuple(range(r.rank(x)))
    high = r.emit("aten.clamp_min.default", r.emit("aten.amax.default", x, axes), 0)
    low = r.emit("aten.clamp_max.default", r.emit("aten.amin.default", x, axes), 0)
    scale = r.emit("aten.div.Scalar", r.emit("aten.sub.Tensor", high, low), 255.0)
    middle = r.emit("aten.round.default", r.emit("aten.neg.default", r.emit("aten.div.Tensor", low, scale)))
    zero = r.emit("aten.clamp.default", middle, 0, 255)
    y = r.emit("aten.add.Tensor", r.emit("aten.round.default", r.emit("aten.div.Tensor", x, scale)), zero)
    whole = Special("dtype", "uint8")
    y = r.emit("aten.to.dtype", r.emit("aten.clamp.default", y, 0, 255), whole, layer=a["layer"])
    return [y, scale, r.emit("aten.to.dtype", zero, whole)]


def _centred(r: Reader, x: Value, zero: Value) -> Value:
    """Integers without their zero point, in f32: what was zero is zero."""
    if not isinstance(x, Ref) and (zero is None or not isinstance(zero, Ref)):
        return np.asarray(x).astype(np.float32) - (
            0 if zero is None else _columns(np.asarray(zero), np.asarray(x).ndim)
        )
    wide = _float(r, x)
    return wide if zero is None else r.emit("aten.sub.Tensor", wide, _float(r, zero))


def _columns(zero: Any, rank: int) -> Any:
    if zero.size == 1:
        return zero.astype(np.float32).reshape(())
    if rank < 3:
        return zero.astype(np.float32)
    return zero.astype(np.float32).reshape(-1, *[1] * (rank - 1))


@operator
def ConvInteger(
    r: Reader, a: Attributes, x: Value, weight: Value, x_zero: Value = None, zero: Value = None
) -> Any:
    if isinstance(weight, Ref):
        raise UnsupportedModel(f"ConvInteger '{a['layer']}' computes its weight")
    return _whole(r, a, Conv(r, a, _centred(r, x, x_zero), _centred(r, weight, zero)))


@operator
def MatMulInteger(
    r: Reader, a: Attributes, x: Value, y: Value, x_zero: Value = None, zero: Value = None
) -> Any:
    return _whole(r, a, MatMul(r, a, _centred(r, x, x_zero), _centred(r, y, zero)))


def _whole(r: Reader, a: Attributes, made: Ref) -> Ref:
    """Sums as the integers they are, unless all that read them make floats of them."""
    if r.file.readers(a["first"]) == {"Cast"}:
        return made
    return r.emit("aten.to.dtype", made, Special("dtype", "int32"))
