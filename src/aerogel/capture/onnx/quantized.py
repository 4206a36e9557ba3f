"""ONNX's quantised operators. A map that is quantised holds bytes with the file's own scale and zero point;
what is dequantised, computed and quantised again may run in integers (capture/integers.py), and else in
floats between the same bytes.

Signed bytes are held as unsigned ones, 128 more and a zero point 128 more: products and their corrections are
the same integers. `Reader.bytes` knows which value of the file stands in which bytes of ours.

A file that trains has no bytes: a map keeps the range of the integers (a clamp, which often stands for a
ReLU), so that gradients pass. Integer products (ConvInteger) are whole numbers in f32, exact up to 2^24.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from aerogel.capture.onnx.file import Attributes
from aerogel.capture.onnx.layers import Conv, MatMul
from aerogel.capture.onnx.values import Reader, Value, operator
from aerogel.errors import InvalidFile, UnsupportedModel
from aerogel.ir import Quantized, Ref, Special

_BYTES = (torch.uint8, torch.int8)
SIGNED = 128
"""What signed bytes are less than ours."""


def meaning(r: Reader, a: Attributes, scale: Value, zero: Value, dtype: torch.dtype) -> Quantized | None:
    """What bytes of a map of this type mean: the file's scale and zero point, for unsigned bytes. None where
    that is more than one scale, or of other integers than bytes."""
    factor = np.asarray(r.known(scale, "a scale"))
    middle = np.zeros(1, np.uint8) if zero is None else np.asarray(r.known(zero, "a zero point"))
    if zero is not None and r.dtype(zero) != dtype:
        raise InvalidFile(f"{a['op']} '{a['layer']}' has a zero point of another type than its integers")
    if factor.size != 1 or middle.size != 1 or factor.dtype != np.float32 or dtype not in _BYTES:
        return None
    step = float(factor.reshape(()))
    if not np.finfo(np.float32).tiny <= step < np.inf:
        raise InvalidFile(f"{a['op']} '{a['layer']}' has the scale {step}, which is no scale of bytes")
    return Quantized(step, int(middle.reshape(())) + (SIGNED if dtype == torch.int8 else 0))


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
    """Bytes; where the file trains and nobody wants the integers, the range that they have."""
    x = r.tensor(x)
    dtype = torch.uint8 if zero is None else r.dtype(zero)
    plain = not a.get("block_size") and not a.get("output_dtype")
    if not plain or dtype not in _BYTES or r.dtype(x) != torch.float32:
        raise UnsupportedModel(f"QuantizeLinear '{a['layer']}' is by blocks or to another type than bytes")
    if r.trains and _read_back(r, a, scale, zero):
        return _ranged(r, a, x, scale, zero, dtype)
    how = meaning(r, a, scale, zero, dtype)
    if how is not None:
        return in_bytes(r, a, x, how, dtype)
    factor = _along(r, a, scale, r.rank(x)).astype(np.float32)
    middle = 0 if zero is None else _along(r, a, zero, r.rank(x)).astype(np.float32)
    y = r.emit("aten.round.default", r.emit("aten.div.Tensor", x, r.tensor(factor)))
    y = r.emit("aten.add.Tensor", y, r.tensor(np.asarray(middle, np.float32)))
    limits = torch.iinfo(dtype)
    y = r.emit("aten.clamp.default", y, limits.min, limits.max)
    return r.emit("aten.to.dtype", y, Special("dtype", str(dtype).removeprefix("torch.")), layer=a["layer"])


def in_bytes(r: Reader, a: Attributes, x: Ref, how: Quantized, dtype: torch.dtype) -> Ref:
    """A map as the bytes of this meaning; the value has the file's own element type."""
    own = r.emit("quantize", x, how.scale, how.zero, layer=a["layer"])
    value = own
    if dtype == torch.int8:
        wide = r.emit("aten.to.dtype", own, Special("dtype", "int16"))
        moved = r.emit("aten.sub.Scalar", wide, SIGNED)
        value = r.emit("aten.to.dtype", moved, Special("dtype", "int8"))
    r.bytes[value.name] = own.name, how
    return value


def _ranged(r: Reader, a: Attributes, x: Ref, scale: Value, zero: Value, dtype: torch.dtype) -> Ref:
    """The range of the integers, in the map's own unit."""
    factor = _along(r, a, scale, r.rank(x)).astype(np.float64)
    middle = 0 if zero is None else _along(r, a, zero, r.rank(x)).astype(np.float64)
    limits = torch.iinfo(dtype)
    low, high = (limits.min - middle) * factor, (limits.max - middle) * factor
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
    if (known := dequantized(r, a, x, scale, zero)) is not None:
        return known
    x = r.tensor(x)
    if x.name in r.ranged:
        return x
    if a.get("block_size") or r.dtype(scale) != torch.float32 or r.dtype(x).is_floating_point:
        raise UnsupportedModel(
            f"DequantizeLinear '{a['layer']}' is by blocks or to another type than float32"
        )
    how = meaning(r, a, scale, zero, r.dtype(x)) if r.dtype(x) in _BYTES else None
    if how is not None and x.name in r.bytes and r.bytes[x.name][1] == how:
        return r.emit("dequantize", Ref(r.bytes[x.name][0]), how.scale, how.zero, layer=a["layer"])
    wide, rank = _float(r, x), r.rank(x)
    if zero is not None:
        wide = r.emit("aten.sub.Tensor", wide, r.tensor(_along(r, a, zero, rank).astype(np.float32)))
    made = r.emit("aten.mul.Tensor", wide, r.tensor(_along(r, a, scale, rank)), layer=a["layer"])
    if how is None or r.trains or rank < 2:
        return made
    own = r.emit("quantize", made, how.scale, how.zero, layer=a["layer"])  # others' integers, as an input
    return r.emit("dequantize", own, how.scale, how.zero, layer=a["layer"])


def dequantized(r: Reader, a: Attributes, x: Value, scale: Value, zero: Value = None) -> Any:
    """Constant integers as numbers, with the step between them kept in mind; None where that is not what a
    node does."""
    held = [v for v in (x, scale, zero) if v is not None]
    if any(isinstance(v, Ref) or np.asarray(v).dtype == object for v in held) or a.get("block_size"):
        return None
    array, factor = np.asarray(x), np.asarray(scale)
    if array.dtype.name not in ("int8", "uint8", "int32") or factor.dtype != np.float32 or factor.ndim > 1:
        return None
    whole = array.astype(np.int64)
    if zero is not None:
        whole = whole - np.asarray(_along(r, a, zero, array.ndim)).astype(np.int64)
    with np.errstate(all="ignore"):  # scales of strangers
        made = whole.astype(np.float32) * _along(r, a, scale, array.ndim)
    if made.shape != array.shape:
        raise InvalidFile(f"{a['op']} '{a['layer']}' has scales of another shape than what they scale")
    axis = a.get("axis", 1) % max(1, array.ndim)
    if array.dtype != np.int32 and array.ndim > 1:
        r.steps_of[id(made)] = made, factor.ravel(), axis if factor.size > 1 else None
    return made


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
