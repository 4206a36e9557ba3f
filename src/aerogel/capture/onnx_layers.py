"""ONNX's layers in torch's: convolutions, normalisation, pooling, products of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from aerogel.capture.onnx_file import Attributes
from aerogel.capture.onnx_values import Reader, Value, operator
from aerogel.errors import InvalidFile, UnsupportedModel
from aerogel.graph import Ref


def _window(
    a: Attributes, sizes: tuple[int, ...], image: tuple[int | str, ...]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Strides, dilations, padding before and after of a sliding window over an image."""
    n = len(sizes)
    auto = a.get("auto_pad", "NOTSET")
    strides, dilations = list(a.get("strides") or [1] * n), list(a.get("dilations") or [1] * n)
    pads = list(a.get("pads") or [0] * (2 * n))
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        total = [d * (k - 1) for k, d in zip(sizes, dilations, strict=True)]
        for i, (size, stride) in enumerate(zip(image, strides, strict=True)):
            if stride != 1 and not isinstance(size, int):
                raise UnsupportedModel(f"'{a['layer']}': auto_pad {auto} with a stride over an open size; export explicit pads")
            if stride != 1 and isinstance(size, int):
                total[i] = max(0, (-(-size // stride) - 1) * stride + total[i] + 1 - size)
        before = [t // 2 if auto == "SAME_UPPER" else t - t // 2 for t in total]
        pads = before + [t - b for t, b in zip(total, before, strict=True)]
    elif auto == "VALID":
        pads = [0] * (2 * n)
    if len(strides) != n or len(dilations) != n or len(pads) != 2 * n or min(strides + dilations, default=1) < 1:
        raise InvalidFile(f"'{a['layer']}': strides {strides}, dilations {dilations}, pads {pads} do not fit {n} dimensions")
    return strides, dilations, pads[:n], pads[n:]


def _padded(r: Reader, x: Ref, before: list[int], after: list[int], value: float = 0.0) -> tuple[Ref, list[int]]:
    """x with what padding both sides do not share, and what they do."""
    if before == after and min(before, default=0) >= 0:
        return x, before
    around = [side for pair in zip(reversed(before), reversed(after), strict=True) for side in pair]
    return r.emit("aten.constant_pad_nd.default", x, around, value), [0] * len(before)


@operator
def Conv(r: Reader, a: Attributes, x: Value, weight: Value, bias: Value = None) -> Any:  # noqa: N802
    x, held = r.tensor(x), r.tensor(weight)
    n = r.rank(held) - 2
    if n not in (1, 2, 3):
        raise UnsupportedModel(f"Conv '{a['layer']}' has {n} dimensions")
    kernel = tuple(int(v) for v in r.blank[0][held.name].shape[2:])
    if tuple(a.get("kernel_shape", kernel)) != kernel:
        raise InvalidFile(f"Conv '{a['layer']}' says its kernel is {a['kernel_shape']}, its weight that it is {kernel}")
    strides, dilations, before, after = _window(a, kernel, r.shape(x)[2:])
    x, pads = _padded(r, x, before, after)
    more = (strides, pads, dilations, a.get("group", 1))
    return r.emit(f"aten.conv{n}d.default", x, held, None if bias is None else r.tensor(bias), *more, layer=a["layer"])


@operator
def ConvTranspose(r: Reader, a: Attributes, x: Value, weight: Value, bias: Value = None) -> Any:  # noqa: N802
    x, held = r.tensor(x), r.tensor(weight)
    n = r.rank(held) - 2
    strides, dilations, before, after = _window(a, tuple(int(v) for v in r.blank[0][held.name].shape[2:]), r.shape(x)[2:])
    if before != after or n not in (1, 2) or a.get("output_shape") or a.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise UnsupportedModel(f"ConvTranspose '{a['layer']}' with uneven pads or an output_shape")
    extra = list(a.get("output_padding") or [0] * n)
    more = (strides, before, extra, a.get("group", 1), dilations)
    op = "aten.conv_transpose1d.default" if n == 1 else "aten.conv_transpose2d.input"
    return r.emit(op, x, held, None if bias is None else r.tensor(bias), *more, layer=a["layer"])


@operator
def BatchNormalization(r: Reader, a: Attributes, x: Value, *rest: Value) -> Any:  # noqa: N802
    if a.get("training_mode"):
        raise UnsupportedModel(f"BatchNormalization '{a['layer']}' is in training mode; export with model.eval()")
    values = [r.tensor(v) for v in rest[:4]]
    return r.emit("aten.batch_norm.default", r.tensor(x), *values, False, 0.1, a.get("epsilon", 1e-5), True, layer=a["layer"])


@operator
def InstanceNormalization(r: Reader, a: Attributes, x: Value, scale: Value, shift: Value) -> Any:  # noqa: N802
    more = (None, None, True, 0.1, a.get("epsilon", 1e-5), True)
    return r.emit("aten.instance_norm.default", r.tensor(x), r.tensor(scale), r.tensor(shift), *more, layer=a["layer"])


@operator
def LayerNormalization(r: Reader, a: Attributes, x: Value, scale: Value, shift: Value = None) -> Any:  # noqa: N802
    x, axis = r.tensor(x), a.get("axis", -1) % r.rank(x)
    sizes = r.sizes(x)[axis:]
    beside = None if shift is None else r.tensor(shift)
    return r.emit("aten.layer_norm.default", x, sizes, r.tensor(scale), beside, a.get("epsilon", 1e-5), layer=a["layer"])


@operator
def MaxPool(r: Reader, a: Attributes, x: Value) -> Any:  # noqa: N802
    x, kernel = r.tensor(x), list(a["kernel_shape"])
    strides, dilations, before, after = _window(a, tuple(kernel), r.shape(x)[2:])
    x, pads = _padded(r, x, before, after, float("-inf"))
    if any(2 * p > k for p, k in zip(pads, kernel, strict=True)):
        raise UnsupportedModel(f"MaxPool '{a['layer']}' pads more than half of its window")
    op = f"aten.max_pool{len(kernel)}d.default"
    return r.emit(op, x, kernel, strides, pads, dilations, bool(a.get("ceil_mode", 0)), layer=a["layer"])


@operator
def AveragePool(r: Reader, a: Attributes, x: Value) -> Any:  # noqa: N802
    x, kernel = r.tensor(x), list(a["kernel_shape"])
    strides, dilations, before, after = _window(a, tuple(kernel), r.shape(x)[2:])
    counts = bool(a.get("count_include_pad", 0))
    if before != after and not counts:
        raise UnsupportedModel(f"AveragePool '{a['layer']}' leaves uneven padding out of its mean")
    if any(d != 1 for d in dilations):
        raise UnsupportedModel(f"AveragePool '{a['layer']}' is dilated")
    x, pads = _padded(r, x, before, after)
    op = f"aten.avg_pool{len(kernel)}d.default"
    even = counts or not any(pads)
    return r.emit(op, x, kernel, strides, pads, bool(a.get("ceil_mode", 0)), even, layer=a["layer"])


@operator
def GlobalAveragePool(r: Reader, a: Attributes, x: Value) -> Any:  # noqa: N802
    x = r.tensor(x)
    return r.emit("aten.mean.dim", x, tuple(range(2, r.rank(x))), True, layer=a["layer"])


@operator
def GlobalMaxPool(r: Reader, a: Attributes, x: Value) -> Any:  # noqa: N802
    x = r.tensor(x)
    return r.emit("aten.amax.default", x, tuple(range(2, r.rank(x))), True, layer=a["layer"])


@operator
def Gemm(r: Reader, a: Attributes, x: Value, y: Value, z: Value = None) -> Any:  # noqa: N802
    x = r.tensor(x)
    if a.get("transA"):
        x = r.emit("aten.t.default", x)
    if (
        not isinstance(y, Ref)
        and a.get("alpha", 1.0) == 1.0
        and a.get("beta", 1.0) == 1.0
        and r.rank(z if z is not None else 0) < 2
    ):
        weight = np.asarray(y) if a.get("transB") else np.ascontiguousarray(np.asarray(y).T)
        named = r.tensor(y if a.get("transB") else weight)
        return r.emit("aten.linear.default", x, named, None if z is None else r.tensor(z), layer=a["layer"])
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
def MatMul(r: Reader, a: Attributes, x: Value, y: Value) -> Any:  # noqa: N802
    if isinstance(x, Ref) and not isinstance(y, Ref) and np.asarray(y).ndim == 2:
        return r.emit("aten.linear.default", x, r.tensor(np.ascontiguousarray(np.asarray(y).T)), layer=a["layer"])
    return r.emit("aten.matmul.default", r.tensor(x), r.tensor(y), layer=a["layer"])
