"""ONNX's operators on integers (QOperator form): their inputs dequantised, the operator on numbers, its
output quantised. That is what they mean and what QDQ files write out; capture/integers.py makes integers of
both.

Those of onnxruntime's own domain are here by name too, as its quantize_static writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aerogel.capture.onnx.file import Attributes
from aerogel.capture.onnx.layers import Conv, Gemm, MatMul
from aerogel.capture.onnx.pools import AveragePool, GlobalAveragePool
from aerogel.capture.onnx.quantized import DequantizeLinear, QuantizeLinear, in_bytes
from aerogel.capture.onnx.values import OPERATORS, Reader, Value, operator
from aerogel.errors import UnsupportedModel
from aerogel.ir import Array, Ref

MICROSOFT = (
    "DequantizeLinear",
    "QGemm",
    "QLinearAdd",
    "QLinearAveragePool",
    "QLinearConcat",
    "QLinearGlobalAveragePool",
    "QLinearLeakyRelu",
    "QLinearMul",
    "QLinearSigmoid",
    "QuantizeLinear",
)
"""Operators of the domain com.microsoft that are read."""
MOVES = ("MaxPool", "Resize")
"""What takes integers and gives some of them: read as if it stood between numbers."""


def moved(function: Callable[..., Any], r: Reader, a: Attributes, x: Ref, *rest: Value) -> Ref:
    """One of MOVES on bytes of ours."""
    own, how = r.bytes[x.name]
    y = function(r, a, r.emit("dequantize", Ref(own), how.scale, how.zero, layer=a["layer"]), *rest)
    if not isinstance(y, Ref):
        raise UnsupportedModel(f"{a['op']} '{a['layer']}' gives more than a map of integers")
    return in_bytes(r, a, y, how, r.dtype(x))


def _along(a: Attributes, axis: int) -> Attributes:
    """The attributes of a node whose weight has a scale for each part of one axis."""
    return Attributes({**a, "axis": axis})


@operator
def QLinearConv(
    r: Reader, a: Attributes, x: Value, x_scale: Value, x_zero: Value, weight: Value, scale: Value,
    zero: Value, y_scale: Value, y_zero: Value, bias: Value = None,
) -> Any:  # fmt: skip
    if isinstance(weight, Ref) or isinstance(scale, Ref) or a.get("channels_last"):
        raise UnsupportedModel(f"QLinearConv '{a['layer']}' computes its weight, or has its channels last")
    held = DequantizeLinear(r, _along(a, 0), weight, scale, zero)
    y = Conv(r, a, DequantizeLinear(r, a, x, x_scale, x_zero), held, _bias(r, a, bias, x_scale, scale))
    return QuantizeLinear(r, a, y, y_scale, y_zero)


def _bias(r: Reader, a: Attributes, bias: Value, x_scale: Value, scale: Value) -> Array | None:
    """Integers in units of a product of scales, as numbers."""
    if bias is None:
        return None
    unit = np.asarray(r.known(x_scale, "a scale"), np.float32).ravel()
    unit = unit * np.asarray(r.known(scale, "a scale"), np.float32).ravel()
    factor = unit if unit.size > 1 else unit[0]
    return np.asarray(np.asarray(r.known(bias, "a bias")).astype(np.float32) * factor)


@operator
def QLinearMatMul(
    r: Reader, a: Attributes, x: Value, x_scale: Value, x_zero: Value, y: Value, scale: Value, zero: Value,
    z_scale: Value, z_zero: Value,
) -> Any:  # fmt: skip
    right = DequantizeLinear(r, _along(a, -1), y, scale, zero)
    made = MatMul(r, a, DequantizeLinear(r, _along(a, -2), x, x_scale, x_zero), right)
    return QuantizeLinear(r, a, made, z_scale, z_zero)


@operator
def QGemm(
    r: Reader, a: Attributes, x: Value, x_scale: Value, x_zero: Value, y: Value, scale: Value, zero: Value,
    bias: Value = None, z_scale: Value = None, z_zero: Value = None,
) -> Any:  # fmt: skip
    right = DequantizeLinear(r, _along(a, 0 if a.get("transB") else 1), y, scale, zero)
    added = _bias(r, a, bias, x_scale, scale)
    if added is not None:  # in units of the whole product, alpha among it
        added = added * np.float32(a.get("alpha", 1.0))
    made = Gemm(r, a, DequantizeLinear(r, a, x, x_scale, x_zero), right, added)
    return made if z_scale is None else QuantizeLinear(r, a, made, z_scale, z_zero)


def _pair(op: str) -> Callable[..., Any]:
    def build(
        r: Reader, a: Attributes, x: Value, x_scale: Value, x_zero: Value, y: Value, y_scale: Value,
        y_zero: Value, z_scale: Value, z_zero: Value = None,
    ) -> Any:  # fmt: skip
        both = DequantizeLinear(r, a, x, x_scale, x_zero), DequantizeLinear(r, a, y, y_scale, y_zero)
        made = r.emit(f"aten.{op}.Tensor", *map(r.tensor, both), layer=a["layer"])
        return QuantizeLinear(r, a, made, z_scale, z_zero)

    return build


def _one(function: Callable[..., Any]) -> Callable[..., Any]:
    def build(
        r: Reader, a: Attributes, x: Value, x_scale: Value, x_zero: Value, y_scale: Value,
        y_zero: Value = None,
    ) -> Any:  # fmt: skip
        if a.get("channels_last"):
            raise UnsupportedModel(f"{a['op']} '{a['layer']}' has its channels last")
        made = function(r, a, r.tensor(DequantizeLinear(r, a, x, x_scale, x_zero)))
        return QuantizeLinear(r, a, made, y_scale, y_zero)

    return build


OPERATORS |= {
    "QLinearAdd": _pair("add"),
    "QLinearMul": _pair("mul"),
    "QLinearAveragePool": _one(AveragePool),
    "QLinearGlobalAveragePool": _one(GlobalAveragePool),
    "QLinearSigmoid": _one(lambda r, a, x: r.emit("aten.sigmoid.default", x)),
    "QLinearLeakyRelu": _one(lambda r, a, x: r.emit("aten.leaky_relu.default", x, a.get("alpha", 0.01))),
}


@operator
def QLinearConcat(r: Reader, a: Attributes, scale: Value, zero: Value, *parts: Value) -> Any:
    if len(parts) % 3:
        raise UnsupportedModel(f"QLinearConcat '{a['layer']}' has a part without a scale or a zero point")
    maps = [r.tensor(DequantizeLinear(r, a, *parts[i : i + 3])) for i in range(0, len(parts), 3)]
    return QuantizeLinear(r, a, r.emit("aten.cat.default", tuple(maps), a["axis"]), scale, zero)
