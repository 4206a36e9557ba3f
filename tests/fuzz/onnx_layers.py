"""Families of layers: convolutions, pools, resizes, normalisation, products."""

from __future__ import annotations

from typing import Any

from tests.fuzz.onnx_cases import BOOL, F32, I8, U8, Build, family


def window(b: Build, n: int, most: int = 4, dilated: bool = True) -> dict[str, Any]:
    """Attributes of a sliding window, any flag given or left out."""
    kernel = [b.whole(1, most) for _ in range(n)]
    a: dict[str, Any] = {"kernel_shape": kernel}
    if b.maybe(0.7):
        a["strides"] = [b.whole(1, 3) for _ in range(n)]
    if dilated and b.maybe(0.3):
        a["dilations"] = [b.whole(1, 2) for _ in range(n)]
    how = b.one("none", "even", "even", "uneven", "uneven", "SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET")
    if how == "even":
        a["pads"] = [b.whole(0, k - 1) for k in kernel] * 2
    elif how == "uneven":
        a["pads"] = [b.whole(0, k - 1) for k in kernel * 2]
    elif how != "none":
        a["auto_pad"] = how
    return a


@family
def average_pool(b: Build) -> None:
    n = b.one(1, 2, 2, 2, 3)
    a = window(b, n, dilated=b.opset >= 19)
    b.give(
        b.node(
            "AveragePool",
            b.image(n + 2),
            ceil_mode=b.one(None, 0, 1, 1),
            count_include_pad=b.one(None, 0, 1),
            **a,
        )
    )


@family
def max_pool(b: Build) -> None:
    n = b.one(1, 2, 2, 2, 3)
    a = window(b, n)
    kind = b.one(F32, F32, F32, I8, U8) if b.opset >= 12 else F32
    two = b.maybe(0.2)
    given = {"ceil_mode": b.one(None, 0, 1, 1), "storage_order": b.one(None, 0, 1) if two else None}
    made = b.node("MaxPool", b.image(n + 2, dtype=kind), outputs=1 + two, **given, **a)
    b.give(*(made if two else [made]))


@family
def global_pool(b: Build) -> None:
    op = b.one("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "LpPool", "LRN")
    x = b.image(b.one(3, 4, 4, 5) if op != "LRN" else 4)
    a: dict[str, Any] = {}
    if op == "LpPool":
        x = b.image(4)
        b.inputs = b.inputs[-1:]
        a = {**window(b, 2, dilated=b.opset >= 18), "p": b.one(1, 2, 3)}
    elif op == "LRN":
        a = {
            "size": b.one(1, 3, 5),
            "alpha": b.one(None, 0.01),
            "beta": b.one(None, 0.5),
            "bias": b.one(None, 2.0),
        }
    b.give(b.node(op, x, **a))


@family
def convolution(b: Build) -> None:
    n = b.one(1, 2, 2, 2, 3)
    a = window(b, n)
    group = b.one(1, 1, 2, 4)
    c, k = group * b.whole(1, 3), group * b.whole(1, 4)
    weight = b.weight(k, c // group, *a["kernel_shape"])
    if b.maybe():
        del a["kernel_shape"]
    bias = b.weight(k) if b.maybe() else ""
    b.give(
        b.node("Conv", b.image(n + 2, c), weight, bias, group=group if group > 1 or b.maybe() else None, **a)
    )


@family
def transposed_convolution(b: Build) -> None:
    n = b.one(1, 2, 2, 3)
    a = window(b, n)
    group = b.one(1, 1, 2)
    c, k = group * b.whole(1, 3), b.whole(1, 4)
    weight = b.weight(c, k, *a["kernel_shape"])
    strides = a.get("strides", [1] * n)
    if b.maybe(0.3):
        a["output_padding"] = [b.whole(0, s - 1) for s in strides]
    if b.maybe(0.15):
        a.pop("pads", None)
        a["output_shape"] = [b.whole(8, 24) for _ in range(n)]
    bias = b.weight(k * group) if b.maybe() else ""
    b.give(b.node("ConvTranspose", b.image(n + 2, c), weight, bias, group=group, **a))


@family
def resize(b: Build) -> None:
    rank = b.one(3, 4, 4, 4, 4, 4, 5)
    x = b.image(rank)
    mode = b.one("nearest", "nearest", "linear", "linear", "cubic")
    where = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", None]
    where += ["tf_half_pixel_for_nn"] if b.opset < 13 else []
    where += ["half_pixel_symmetric"] if b.opset >= 19 else []
    a: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": b.one(*where)}
    if mode == "nearest":
        a["nearest_mode"] = b.one(None, "floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
    elif mode == "cubic":
        a |= {"cubic_coeff_a": b.one(None, None, -0.5), "exclude_outside": b.one(None, None, 0, 1)}
    if b.opset >= 18 and mode != "nearest":
        a["antialias"] = b.one(None, None, None, 0, 1)
    n = rank - 2
    if b.maybe(0.6):
        one = b.one(1.5, 1.5, 2.0, 2.0, 0.5, 1.3, 0.7, 3.0, 1.25, 0.6, 1.1, 1.1, 4.0, 2.5)
        factors = [one if b.maybe(0.7) else b.one(1.0, 2.0, 1.7, 0.8) for _ in range(n)]
        if b.opset >= 18 and b.maybe(0.3):
            b.give(b.node("Resize", x, "", b.const(factors, F32), axes=list(range(2, rank)), **a))
        else:
            roi = b.one("", b.const([], F32)) if b.opset >= 13 else b.const([], F32)
            b.give(b.node("Resize", x, roi, b.const([1, 1, *factors], F32), **a))
        return
    empty = ["", ""] if b.opset >= 13 else [b.const([], F32), b.const([], F32)]
    if b.opset >= 18 and b.maybe(0.4):
        a["keep_aspect_ratio_policy"] = b.one(None, "stretch", "not_larger", "not_smaller")
        b.give(
            b.node(
                "Resize",
                x,
                *empty,
                b.ints(*(b.whole(1, 24) for _ in range(n))),
                axes=list(range(2, rank)),
                **a,
            )
        )
        return
    shape = b.node("Shape", x)
    front = b.node("Slice", shape, b.ints(0), b.ints(2), b.ints(0))
    if b.maybe(0.4):
        back = b.ints(*(b.whole(1, 24) for _ in range(n)))
    else:
        back = b.node("Slice", shape, b.ints(2), b.ints(rank), b.ints(0))
        back = b.node(b.one("Mul", "Add", "Mul"), back, b.ints(b.whole(2, 3)))
    b.give(b.node("Resize", x, *empty, b.node("Concat", front, back, axis=0), **a))


@family
def upsample(b: Build) -> None:
    b.opset = b.one(9, 10)
    scales = b.const([1, 1, b.one(1.0, 2.0, 3.0, 1.5, 0.5, 0.7), b.one(1.0, 2.0, 3.0, 2.5, 0.5)], F32)
    b.give(
        b.node(
            "Upsample" if b.opset == 9 else "Resize", b.image(), scales, mode=b.one(None, "nearest", "linear")
        )
    )


@family
def normalisation(b: Build) -> None:
    op = b.one(
        "InstanceNormalization",
        "LayerNormalization",
        "GroupNormalization",
        "LpNormalization",
        "MeanVarianceNormalization",
    )
    eps = b.one(None, 1e-2)
    rank = b.one(3, 4, 5)
    c = 2 * b.whole(1, 4)
    x = b.image(rank, c)
    if op == "InstanceNormalization":
        b.give(b.node(op, x, b.weight(c), b.weight(c), epsilon=eps))
    elif op == "LayerNormalization":
        b.opset = max(b.opset, 17)
        b.inputs.clear()
        sizes = [b.whole(2, 5) for _ in range(3)]
        axis = b.one(None, -1, 1, 2, -2)
        own = sizes[(3 if axis is None else axis % 4) - 1 :]
        shift = b.weight(*own) if b.maybe() else ""
        three = b.maybe(0.2)
        made = b.node(
            op, b.x("n", *sizes), b.weight(*own), shift, outputs=3 if three else 1, axis=axis, epsilon=eps
        )
        b.give(*(made if three else [made]))
    elif op == "GroupNormalization":
        b.opset = b.one(18, 21)
        groups = b.one(1, 2)
        count = c if b.opset == 21 else groups
        b.give(b.node(op, x, b.weight(count), b.weight(count), num_groups=groups, epsilon=eps))
    elif op == "LpNormalization":
        b.give(b.node(op, x, axis=b.one(None, 1, -1), p=b.one(None, 1, 2)))
    else:
        b.opset = max(b.opset, 13)
        b.give(b.node(op, x, axes=b.one(None, [1], [2], [0, 1])))


@family
def batch_normalisation(b: Build) -> None:
    c = b.whole(1, 6)
    variance = b.const(b.numbers.random(c) + 0.1, F32)
    training = b.opset >= 14 and b.maybe(0.2)
    a = {"epsilon": b.one(None, 1e-2), "momentum": b.one(None, 0.5), "training_mode": 1 if training else None}
    given = (b.image(b.one(3, 4, 5), c), b.weight(c), b.weight(c), b.weight(c), variance)
    made = b.node("BatchNormalization", *given, outputs=3 if training else 1, **a)
    b.give(*(made if training else [made]))


@family
def dropout(b: Build) -> None:
    x = b.image()
    if b.opset < 12:
        made = b.node("Dropout", x, outputs=b.one(1, 2), ratio=b.one(None, 0.3))
    else:
        ratio = b.const(b.one(0.0, 0.5), F32) if b.maybe() else ""
        mode = b.const(False, BOOL) if ratio and b.maybe() else ""
        made = b.node("Dropout", x, ratio, mode, outputs=b.one(1, 2))
    b.give(*(made if isinstance(made, list) else [made]))


@family
def gemm(b: Build) -> None:
    k, m, turned, other = b.whole(1, 8), b.whole(1, 8), b.one(None, 0, 1), b.one(None, 0, 1)
    x = b.x(k, "h") if turned else b.x("h", k)
    y = [m, k] if other else [k, m]
    right = b.weight(*y) if b.maybe(0.7) else b.x(*y)
    third = b.one("", b.weight(m), b.weight(1, m), b.weight(1), b.const(1.5, F32), b.x("h", 1), b.x("h", m))
    b.inputs = [i for i in b.inputs if i[0] in (x, right, third)]
    scales = {"alpha": b.one(None, None, 0.5), "beta": b.one(None, None, 0.25)}
    b.give(b.node("Gemm", x, right, third, transA=turned, transB=other, **scales))


@family
def product(b: Build) -> None:
    k, m = b.whole(1, 8), b.whole(1, 8)
    if b.maybe(0.4):
        equation, left, right = b.one(
            ("nhk,km->nhm", ("n", "h", k), (k, m)), ("nhk,nwk->nhw", ("n", "h", k), ("n", "w", k)), ("ij->ji",
            ("h", "w"), None), ("nhk,nhk->n", ("n", "h", k), ("n", "h", k)), ("...ij,...jk->...ik", ("n", 2,
            "h", k), ("n", 2, k, "w")), ("ii->i", (k, k), None),
        )  # fmt: skip
        b.opset = max(b.opset, 12)
        b.give(b.node("Einsum", b.x(*left), *([b.x(*right)] if right else []), equation=equation))
        return
    left = b.one((k,), ("h", k), ("n", "h", k), ("n", 2, "h", k))
    known, given = b.one((k,), (k, m), (1, k, m)), b.one((k,), (k, "w"), ("n", 1, k, m))
    b.give(b.node("MatMul", b.x(*left), b.weight(*known) if b.maybe() else b.x(*given)))
