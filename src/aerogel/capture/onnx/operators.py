"""ONNX's operators in torch's: one function each, found by name. What is not here runs in onnxruntime, or is
named in the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from aerogel.capture.onnx import (  # noqa: F401  they enter their operators
    layers,
    pools,
    qlinear,
    quantized,
    resize,
    shapes,
)
from aerogel.capture.onnx.file import TYPES, Attributes
from aerogel.capture.onnx.spelled import gelu, hardswish
from aerogel.capture.onnx.values import OPERATORS, Reader, Value, operator
from aerogel.errors import UnsupportedModel
from aerogel.ir import Ref, Special

UNARY = {
    "Relu": "relu",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Exp": "exp",
    "Log": "log",
    "Sqrt": "sqrt",
    "Abs": "abs",
    "Neg": "neg",
    "Erf": "erf",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "round",
    "Sign": "sign",
    "Sin": "sin",
    "Cos": "cos",
    "Tan": "tan",
    "Mish": "mish",
    "Not": "logical_not",
    "IsNaN": "isnan",
    "HardSwish": "hardswish",
}
BINARY = {"Add": "add", "Sub": "sub", "And": "logical_and", "Or": "logical_or"}
COMPARE = {"Equal": "eq", "Greater": "gt", "Less": "lt", "GreaterOrEqual": "ge", "LessOrEqual": "le"}
REDUCE = {
    "ReduceMean": "mean.dim",
    "ReduceSum": "sum.dim_IntList",
    "ReduceMax": "amax.default",
    "ReduceMin": "amin.default",
}

Build = Callable[..., Any]


def _float(r: Reader, x: Value) -> bool:
    return r.dtype(x).is_floating_point


def unary(r: Reader, a: Attributes, x: Value) -> Any:
    return r.emit(f"aten.{UNARY[a['op']]}.default", r.tensor(x), layer=a["layer"])


def binary(r: Reader, a: Attributes, x: Value, y: Value) -> Any:
    overload = {"logical_and": "default", "logical_or": "default"}.get(BINARY[a["op"]], "Tensor")
    return r.emit(f"aten.{BINARY[a['op']]}.{overload}", r.tensor(x), r.tensor(y), layer=a["layer"])


_GATED = {"aten.sigmoid.default": "silu", "aten.hardsigmoid.default": "hardswish"}


@operator
def Mul(r: Reader, a: Attributes, x: Value, y: Value) -> Any:
    """A product; x * sigmoid(x) is SiLU, which a convolution takes along, x * hardsigmoid(x) is Hardswish,
    and three factors may be GELU."""
    x, y = r.tensor(x), r.tensor(y)
    for own, gate in ((x, y), (y, x)):
        maker = r.maker(gate)
        if maker is not None and maker.op in _GATED and maker.args == (own,):
            return r.emit(f"aten.{_GATED[maker.op]}.default", own, layer=a["layer"])
    whole = gelu(r, x, y)
    if whole is not None:
        return r.emit("aten.gelu.default", whole, layer=a["layer"])
    return r.emit("aten.mul.Tensor", x, y, layer=a["layer"])


def compare(r: Reader, a: Attributes, x: Value, y: Value) -> Any:
    return r.emit(f"aten.{COMPARE[a['op']]}.Tensor", r.tensor(x), r.tensor(y), layer=a["layer"])


def reduce(r: Reader, a: Attributes, x: Value, axes: Value = None) -> Any:
    chosen = a.get("axes") if axes is None else list(r.ints(axes))
    if not chosen:
        if a.get("noop_with_empty_axes"):
            return x
        chosen = list(range(r.rank(x)))
    x = r.tensor(x)
    more = {"dtype": _named(r.dtype(x))} if a["op"] == "ReduceSum" else {}  # torch widens whole numbers
    return r.emit(
        f"aten.{REDUCE[a['op']]}", x, tuple(chosen), bool(a.get("keepdims", 1)), layer=a["layer"], **more
    )


@operator
def Div(r: Reader, a: Attributes, x: Value, y: Value) -> Any:
    x, y = r.tensor(x), r.tensor(y)
    if _float(r, x):
        whole = hardswish(r, x, y)
        return (
            r.emit("aten.hardswish.default", whole, layer=a["layer"])
            if whole
            else r.emit("aten.div.Tensor", x, y, layer=a["layer"])
        )
    return r.emit("aten.div.Tensor_mode", x, y, rounding_mode="trunc", layer=a["layer"])


@operator
def Pow(r: Reader, a: Attributes, x: Value, y: Value) -> Any:
    """In the type of the base."""
    if r.dtype(y) != r.dtype(x) and not (_float(r, x) and _is_number(y)):
        raise UnsupportedModel(f"Pow '{a['layer']}' of {r.dtype(x)} to {r.dtype(y)}")
    if _is_number(y):
        power = np.asarray(y).ravel()[0].item()
        if not _float(r, x) and power < 0:
            raise UnsupportedModel(f"Pow '{a['layer']}' of whole numbers to {power}")
        return r.emit("aten.pow.Tensor_Scalar", r.tensor(x), power, layer=a["layer"])
    if not _float(r, x):
        raise UnsupportedModel(f"Pow '{a['layer']}' of whole numbers to those of another map")
    return r.emit("aten.pow.Tensor_Tensor", r.tensor(x), r.tensor(y), layer=a["layer"])


def _is_number(value: Value) -> bool:
    """One number known now, that makes no tensor larger."""
    return not isinstance(value, Ref) and np.asarray(value).size == 1 and np.asarray(value).dtype != object


@operator
def Mod(r: Reader, a: Attributes, x: Value, y: Value) -> Any:
    if a.get("fmod"):
        return r.emit("aten.fmod.Tensor", r.tensor(x), r.tensor(y), layer=a["layer"])
    return r.emit("aten.remainder.Tensor", r.tensor(x), r.tensor(y), layer=a["layer"])


@operator
def LeakyRelu(r: Reader, a: Attributes, x: Value) -> Any:
    return r.emit("aten.leaky_relu.default", r.tensor(x), a.get("alpha", 0.01), layer=a["layer"])


@operator
def PRelu(r: Reader, a: Attributes, x: Value, slope: Value) -> Any:
    x, slope = r.tensor(x), r.tensor(slope)
    zero = r.emit("aten.clamp_max.default", x, 0)
    return r.emit(
        "aten.add.Tensor",
        r.emit("aten.relu.default", x),
        r.emit("aten.mul.Tensor", zero, slope),
        layer=a["layer"],
    )


@operator
def Elu(r: Reader, a: Attributes, x: Value) -> Any:
    return r.emit("aten.elu.default", r.tensor(x), a.get("alpha", 1.0), layer=a["layer"])


@operator
def Softplus(r: Reader, a: Attributes, x: Value) -> Any:
    return r.emit("aten.softplus.default", r.tensor(x), layer=a["layer"])


@operator
def Gelu(r: Reader, a: Attributes, x: Value) -> Any:
    return r.emit(
        "aten.gelu.default", r.tensor(x), approximate=a.get("approximate", "none"), layer=a["layer"]
    )


@operator
def HardSigmoid(r: Reader, a: Attributes, x: Value) -> Any:
    """torch's has the slope 1/6 and the shift 1/2; what differs is done to x before, and folds into its
    layer."""
    slope, shift = 6 * a.get("alpha", 0.2), 6 * (a.get("beta", 0.5) - 0.5)
    x = r.tensor(x)
    if abs(slope - 1) > 6e-6:
        x = r.emit("aten.mul.Tensor", x, slope)
    if shift:
        x = r.emit("aten.add.Tensor", x, shift)
    return r.emit("aten.hardsigmoid.default", x, layer=a["layer"])


@operator
def Clip(r: Reader, a: Attributes, x: Value, low: Value = None, high: Value = None) -> Any:
    bounds = [a.get("min"), a.get("max")]
    if isinstance(low, Ref) or isinstance(high, Ref):
        both = (None if v is None else r.tensor(v) for v in (low, high))
        return r.emit("aten.clamp.Tensor", r.tensor(x), *both, layer=a["layer"])
    for i, given in enumerate((low, high)):
        if given is not None:
            bounds[i] = np.asarray(r.known(given, "a bound of Clip")).ravel()[0].item()
    if bounds == [None, None]:
        return x
    if bounds == [0, 6] and _float(r, x):
        return r.emit("aten.hardtanh.default", r.tensor(x), 0.0, 6.0, layer=a["layer"])
    return r.emit("aten.clamp.default", r.tensor(x), *bounds, layer=a["layer"])


def extreme(name: str) -> Build:
    def build(r: Reader, a: Attributes, *values: Value) -> Any:
        found = r.tensor(values[0])
        for other in values[1:]:
            found = r.emit(f"aten.{name}.default", found, r.tensor(other), layer=a["layer"])
        return found

    return build


OPERATORS |= {"Max": extreme("maximum"), "Min": extreme("minimum")}


@operator
def Sum(r: Reader, a: Attributes, *values: Value) -> Any:
    found = r.tensor(values[0])
    for other in values[1:]:
        found = r.emit("aten.add.Tensor", found, r.tensor(other), layer=a["layer"])
    return found


@operator
def Where(r: Reader, a: Attributes, test: Value, x: Value, y: Value) -> Any:
    return r.emit("aten.where.self", r.tensor(test), r.tensor(x), r.tensor(y), layer=a["layer"])


@operator
def Cast(r: Reader, a: Attributes, x: Value) -> Any:
    if a["to"] not in TYPES:
        raise UnsupportedModel(f"Cast '{a['layer']}' gives element type {a['to']}, which torch has not")
    x = r.tensor(x)
    return x if r.dtype(x) == TYPES[a["to"]] else _cast(r, x, TYPES[a["to"]])


def _cast(r: Reader, x: Value, dtype: torch.dtype) -> Ref:
    return r.emit("aten.to.dtype", r.tensor(x), _named(dtype))


def _named(dtype: torch.dtype) -> Special:
    return Special("dtype", str(dtype).removeprefix("torch."))


def soft(name: str) -> Build:
    def build(r: Reader, a: Attributes, x: Value) -> Any:
        x = r.tensor(x)
        if r.file.opset >= 13:
            return r.emit(f"aten.{name}.int", x, a.get("axis", -1), layer=a["layer"])
        axis = a.get("axis", 1) % r.rank(x)
        if axis == r.rank(x) - 1:
            return r.emit(f"aten.{name}.int", x, axis, layer=a["layer"])
        flat = r.emit(f"aten.{name}.int", r.emit("aten.flatten.using_ints", x, axis, -1), -1)
        return r.emit("aten.reshape.default", flat, r.sizes(x), layer=a["layer"])

    return build


OPERATORS |= {"Softmax": soft("softmax"), "LogSoftmax": soft("log_softmax")}


@operator
def Identity(r: Reader, a: Attributes, x: Value) -> Any:
    return x


@operator
def Dropout(r: Reader, a: Attributes, x: Value, ratio: Value = None, training: Value = None) -> Any:
    if training is not None and np.asarray(r.known(training, "Dropout's mode")).any():
        raise UnsupportedModel(f"Dropout '{a['layer']}' is in training mode; export with model.eval()")
    return x


@operator
def ArgMax(r: Reader, a: Attributes, x: Value) -> Any:
    if a.get("select_last_index"):
        raise UnsupportedModel(f"ArgMax '{a['layer']}' selects the last index")
    return r.emit(
        "aten.argmax.default", r.tensor(x), a.get("axis", 0), bool(a.get("keepdims", 1)), layer=a["layer"]
    )


@operator
def TopK(r: Reader, a: Attributes, x: Value, k: Value) -> Any:
    (count,) = r.ints(k)
    axis = a.get("axis", -1)
    both = r.emit(
        "aten.sort.stable",
        r.tensor(x),
        stable=True,
        dim=axis,
        descending=bool(a.get("largest", 1)),
        layer=a["layer"],
    )
    # the first of equals comes first
    return [r.emit("aten.slice.Tensor", r.item(both, i), axis, 0, count) for i in range(2)]


def build(name: str) -> Build | None:
    """The function of an operator, or None."""
    for table, function in ((UNARY, unary), (BINARY, binary), (COMPARE, compare), (REDUCE, reduce)):
        if name in table:
            return function
    return OPERATORS.get(name)
