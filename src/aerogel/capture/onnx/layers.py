"""ONNX's layers in torch's: convolutions, normalisation, products of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from aerogel.capture.onnx.file import Attributes
from aerogel.capture.onnx.pools import padded, window
from aerogel.capture.onnx.values import Reader, Value, operator
from aerogel.errors import InvalidFile, UnsupportedModel
from aerogel.ir import Ref


@operator
def Conv(r: Reader, a: Attributes, x: Value, weight: Value, bias: Value = None) -> Any:
    x, held = r.tensor(x), r.tensor(weight)
    n = r.rank(held) - 2
    if n not in (1, 2, 3):
        raise UnsupportedModel(f"Conv '{a['layer']}' has {n} dimensions")
    kernel = tuple(int(v) for v in r.blank[0][held.name].shape[2:])
    if tuple(a.get("kernel_shape", kernel)) != kernel:
        raise InvalidFile(
            f"Conv '{a['layer']}' says its kernel is {a['kernel_shape']}, its weight that it is {kernel}"
        )
    w = window(r, a, list(kernel), x)
    x, pads = (x, w.before) if w.even else (padded(r, x, w.before, w.after), [0] * n)
    more = (w.strides, pads, w.dilations, a.get("group", 1))
    return r.emit(
        f"aten.conv{n}d.default", x, held, None if bias is None else r.tensor(bias), *more, layer=a["layer"]
    )


@operator
def ConvTranspose(r: Reader, a: Attributes, x: Value, weight: Value, bias: Value = None) -> Any:
    x, held = r.tensor(x), r.tensor(weight)
    n = r.rank(held) - 2
    if a.get("output_shape") or a.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise UnsupportedModel(f"ConvTranspose '{a['layer']}' with an output_shape or pads of its own")
    w = window(r, a, [int(v) for v in r.blank[0][held.name].shape[2:]], x)
    if not w.even or n not in (1, 2):
        raise UnsupportedModel(f"ConvTranspose '{a['layer']}' with uneven pads or in {n} dimensions")
    extra = list(a.get("output_padding") or [0] * n)
    more = (w.strides, w.before, extra, a.get("group", 1), w.dilations)
    op = "aten.conv_transpose1d.default" if n == 1 else "aten.conv_transpose2d.input"
    return r.emit(op, x, held, None if bias is None else r.tensor(bias), *more, layer=a["layer"])


@operator
def BatchNormalization(r: Reader, a: Attributes, x: Value, *rest: Value) -> Any:
    if a.get("training_mode"):
        raise UnsupportedModel(
            f"BatchNormalization '{a['layer']}' is in training mode; export with model.eval()"
        )
    values = [r.tensor(v) for v in rest[:4]]
    return r.emit(
        "aten.batch_norm.default",
        r.tensor(x),
        *values,
        False,
        0.1,
        a.get("epsilon", 1e-5),
        True,
        layer=a["layer"],
    )


@operator
def InstanceNormalization(r: Reader, a: Attributes, x: Value, scale: Value, shift: Value) -> Any:
    more = (None, None, True, 0.1, a.get("epsilon", 1e-5), True)
    return r.emit(
        "aten.instance_norm.default", r.tensor(x), r.tensor(scale), r.tensor(shift), *more, layer=a["layer"]
    )


@operator
def LayerNormalization(r: Reader, a: Attributes, x: Value, scale: Value, shift: Value = None) -> Any:
    x, axis = r.tensor(x), a.get("axis", -1) % r.rank(x)
    sizes = r.sizes(x)[axis:]
    beside = None if shift is None else r.tensor(shift)
    return r.emit(
        "aten.layer_norm.default", x, sizes, r.tensor(scale), beside, a.get("epsilon", 1e-5), layer=a["layer"]
    )


@operator
def Gemm(r: Reader, a: Attributes, x: Value, y: Value, z: Value = None) -> Any:
    x = r.tensor(x)
    if a.get("transA"):
        x = r.emit("aten.t.default", x)
    if not isinstance(y, Ref) and a.get("alpha", 1.0) == 1.0:
        weight = y if a.get("transB") else r.turned(y, (1, 0))
        within = a.get("beta", 1.0) == 1.0 and np.asarray(z).shape == np.asarray(weight).shape[:1]
        if z is None or (within and not isinstance(z, Ref)):
            bias = None if z is None else r.tensor(z)
            return r.emit("aten.linear.default", x, r.tensor(weight), bias, layer=a["layer"])
        product = r.emit("aten.linear.default", x, r.tensor(weight), layer=a["layer"])
        return r.emit("aten.add.Tensor", product, r.tensor(z), alpha=a.get("beta", 1.0))
    right = r.tensor(y)
    if a.get("transB"):
        right = r.emit("aten.t.default", right)
    product = r.emit("aten.matmul.default", x, right)
    if a.get("alpha", 1.0) != 1.0:
        product = r.emit("aten.mul.Scalar", product, a["alpha"])
    if z is None:
        return product
    return r.emit("aten.add.Tensor", product, r.tensor(z), alpha=a.get("beta", 1.0), layer=a["layer"])


@operator
def MatMul(r: Reader, a: Attributes, x: Value, y: Value) -> Any:
    if isinstance(x, Ref) and not isinstance(y, Ref) and np.asarray(y).ndim == 2:
        weight = r.tensor(r.turned(y, (1, 0)))
        return r.emit("aten.linear.default", x, weight, layer=a["layer"])
    return r.emit("aten.matmul.default", r.tensor(x), r.tensor(y), layer=a["layer"])
