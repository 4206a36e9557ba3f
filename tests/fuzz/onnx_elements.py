"""Families of operators element by element: activations, arithmetic, comparisons, casts, quantised maps."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.fuzz.onnx_cases import BOOL, F16, F32, F64, I8, I32, I64, U8, Build, family

NUMBER = {F32: 1, U8: 2, I8: 3, I32: 6, I64: 7, BOOL: 9, F16: 10, F64: 11}
SINCE = {"Mish": 18, "HardSwish": 14, "Gelu": 20}


def positive(b: Build, *dims: Any, dtype: Any = F32) -> str:
    return b.x(*dims, dtype=dtype, draw=lambda s: (np.abs(b.array(s, dtype)) + 1).astype(dtype))


def _signs(b: Build, shape: Any) -> Any:
    return np.where(b.numbers.random(shape) < 0.5, -1, 1)


@family
def unary(b: Build) -> None:
    op = b.one(
        "Relu", "Sigmoid", "Tanh", "Exp", "Abs", "Neg", "Erf", "Floor", "Ceil", "Round", "Sign", "Sin", "Cos",
        "Tan", "Mish", "IsNaN", "HardSwish", "Softsign", "Atan", "Sinh", "Reciprocal", "Log", "Sqrt", "Not",
        "IsInf", "Acos", "Cosh", "Asinh",
    )  # fmt: skip
    b.opset = max(b.opset, SINCE.get(op, 0))
    kind = b.one(F32, I64, I32) if op in ("Abs", "Neg", "Sign") else BOOL if op == "Not" else F32
    if op == "Relu" and b.opset >= 14:
        kind = b.one(F32, I32)
    if op in ("Floor", "Ceil", "Round", "Sqrt", "Exp") and b.maybe(0.2):
        kind = F64
    dims = ("n", 3, "h", "w")
    x = positive(b, *dims) if op in ("Log", "Sqrt", "Reciprocal") and kind == F32 else b.x(*dims, dtype=kind)
    if op in ("Floor", "Ceil", "Round") and kind == F32:
        x = b.node("Mul", x, b.const(0.5, F32))
    b.give(b.node(op, x))


@family
def activations(b: Build) -> None:
    op = b.one(
        "LeakyRelu",
        "Elu",
        "Selu",
        "Celu",
        "ThresholdedRelu",
        "HardSigmoid",
        "Softplus",
        "Gelu",
        "PRelu",
        "PRelu",
        "Shrink",
    )
    b.opset = max(b.opset, {"Celu": 12, "Gelu": 20}.get(op, 0))
    c = b.whole(1, 5)
    x = b.image(4, c)
    if op == "PRelu":
        shape = b.one((1,), (c, 1, 1), (1, c, 1, 1), (), (1, 1, 1))
        b.give(b.node(op, x, b.weight(*shape) if b.maybe(0.8) else b.x(*shape)))
        return
    a: dict[str, Any] = {}
    if op in ("LeakyRelu", "Elu", "Celu", "ThresholdedRelu", "HardSigmoid", "Selu"):
        a["alpha"] = (
            b.one(None, 0.3, 0.5, 1 / 6) if op in ("HardSigmoid", "Celu") else b.one(None, 0.3, 1.5, -0.5)
        )
    if op == "HardSigmoid":
        a["beta"] = b.one(None, 0.5, 0.25)
    if op == "Gelu":
        a["approximate"] = b.one(None, "none", "tanh")
    if op == "Shrink":
        a |= {"lambd": 0.5, "bias": b.one(None, 0.25)}
    b.give(b.node(op, x, **a))


@family
def softmax(b: Build) -> None:
    op = b.one("Softmax", "LogSoftmax", "Hardmax")
    b.give(b.node(op, b.x("n", 4, "h", "w"), axis=b.one(None, 0, 1, 2, 3, -1, -2, -3)))


@family
def clip(b: Build) -> None:
    kind = b.one(F32, F32, I64, I8, U8) if b.opset >= 12 else F32
    ends = [b.const(v, kind) if b.maybe(0.7) else "" for v in b.one((0, 6), (1, 3), (3, 1), (0, 5))]
    if kind == F32 and b.maybe(0.2):
        ends[b.whole(0, 1)] = b.x()
    b.give(b.node("Clip", b.x("n", 3, "h", dtype=kind), *ends))


@family
def arithmetic(b: Build) -> None:
    op = b.one(
        "Add", "Sub", "Mul", "Div", "Div", "Pow", "Pow", "Mod", "Mod", "Max", "Min", "Sum", "Mean", "BitShift"
    )
    kind = b.one(F32, F32, I64, I32)
    if op in ("Sum", "Mean"):
        kind = F32
    if op == "BitShift":
        kind = U8
    if op in ("Max", "Min"):
        b.opset = max(b.opset, 12)
    right = b.one((3, 1, 1), (1,), (), ("h", "w"), ("n", 3, "h", "w"), ("n", 1, 1, 1))
    x = b.x("n", 3, "h", "w", dtype=kind)
    other = b.one(F32, I64, I32) if op == "Pow" and b.opset >= 12 else kind
    if op in ("Pow", "Div", "Mod", "BitShift"):
        if op == "Pow" and kind == F32:
            b.inputs.clear()
            x = positive(b, "n", 3, "h", "w")
        if op in ("Pow", "BitShift") and b.maybe(0.6):
            y = b.const(
                b.one(0, 1, 2, 3) if other != F32 or op != "Pow" else b.one(2.0, 0.5, 1.5, -1.0), other
            )
            if op == "Pow" and kind != F32 and other == F32:
                y = b.const(2.0, F32)
        elif op == "BitShift":
            y = b.x(*right, dtype=kind, draw=lambda s: b.numbers.integers(0, 5, s).astype(U8))
        elif op == "Pow":
            y = b.x(*right, dtype=other, draw=lambda s: b.numbers.integers(0, 4, s).astype(other))
        else:
            y = b.x(
                *right,
                dtype=kind,
                draw=lambda s: ((np.abs(b.array(s, kind)) + 1) * _signs(b, s)).astype(kind),
            )
    else:
        y = b.x(*right, dtype=kind) if b.maybe(0.7) else b.const(b.array((3, 1, 1), kind), kind)
    a: dict[str, Any] = {}
    if op == "Mod":
        a["fmod"] = 1 if kind == F32 else b.one(None, 0, 1)
    if op == "BitShift":
        a["direction"] = b.one("LEFT", "RIGHT")
    given = [x, y]
    if op in ("Max", "Min", "Sum", "Mean"):
        given = given[: b.whole(1, 2)] + ([b.x(1, dtype=kind)] if b.maybe(0.3) else [])
        b.inputs = [i for i in b.inputs if i[0] in given]
    if b.maybe(0.3) and op in ("Add", "Sub", "Mul") and y.startswith("x"):
        given.reverse()
    b.give(b.node(op, *given, **a))


@family
def comparisons(b: Build) -> None:
    op = b.one("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual", "And", "Or", "Xor", "Where")
    b.opset = max(b.opset, 12)
    if op in ("And", "Or", "Xor"):
        b.give(b.node(op, b.x("n", 3, "h", dtype=BOOL), b.x(*b.one((3, 1), ("h",), (1,)), dtype=BOOL)))
    elif op == "Where":
        kind = b.one(F32, I64, U8)
        other = b.x(*b.one(("n", 3, "h"), (1,), ("h",)), dtype=kind)
        b.give(
            b.node(
                op,
                b.x(*b.one(("n", 3, "h"), (3, 1), ("h",)), dtype=BOOL),
                b.x("n", 3, "h", dtype=kind),
                other,
            )
        )
    else:
        kind = b.one(F32, I64, I32)
        right = b.const(b.array((3, 1), kind), kind) if b.maybe() else b.x("n", 1, "h", dtype=kind)
        b.give(b.node(op, b.x("n", 3, "h", dtype=kind), right))


@family
def casts(b: Build) -> None:
    kinds = [F32, F64, F16, I32, I64, U8, I8, BOOL]
    start, end = b.one(*kinds), b.one(*kinds)
    op = b.one("Cast", "Cast", "CastLike") if b.opset >= 15 else "Cast"
    x = b.x("n", 3, "h", dtype=start)
    if end == U8 and start in (F32, F64, F16):
        x = b.node("Abs", x)
    b.give(b.node(op, x, to=NUMBER[end]) if op == "Cast" else b.node(op, x, b.const([0], end)))


@family
def quantised(b: Build) -> None:
    op = b.one(
        "QuantizeLinear",
        "DequantizeLinear",
        "both",
        "both",
        "other",
        "DynamicQuantizeLinear",
        "QLinearConv",
        "ConvInteger",
        "MatMulInteger",
        "QLinearMatMul",
    )
    b.opset = max(b.opset, 13)
    kind, c = b.one(U8, I8), b.whole(1, 4)
    zero = b.const(b.whole(0, 5), kind)
    scale = b.const(b.one(0.05, 0.1, 0.5), F32)
    along = b.maybe(0.4)
    if along and op in ("QuantizeLinear", "DequantizeLinear", "both"):
        scale, zero = b.const(b.numbers.random(c) + 0.05, F32), b.const(b.numbers.integers(0, 5, c), kind)
    axis = b.one(None, 1, -3) if along else None
    if op == "QuantizeLinear":
        b.give(b.node(op, b.image(4, c), scale, zero if along or b.maybe(0.7) else "", axis=axis))
    elif op == "DequantizeLinear":
        b.give(b.node(op, b.image(4, c, kind), scale, zero if along or b.maybe(0.7) else "", axis=axis))
    elif op == "both":
        b.step = 0.6
        b.give(
            b.node(
                "DequantizeLinear",
                b.node("QuantizeLinear", b.image(4, c), scale, zero, axis=axis),
                scale,
                zero,
                axis=axis,
            )
        )
    elif op == "other":  # read with another scale than it was written with
        b.step = 0.6
        other = b.const(1.5, F32)
        b.give(b.node("DequantizeLinear", b.node("QuantizeLinear", b.image(4, c), scale, zero), other, zero))
    elif op == "DynamicQuantizeLinear":
        b.give(*b.node(op, b.image(4, c), outputs=3))
    elif op == "QLinearConv":
        weight, w_zero = b.weight(3, c, 2, 2, dtype=I8), b.const(0, I8)
        x = b.x("n", c, "h", "w", dtype=U8)
        u_zero = b.const(3, U8)
        b.give(
            b.node(
                op,
                x,
                scale,
                u_zero,
                weight,
                scale,
                w_zero,
                b.const(1.0, F32),
                u_zero,
                kernel_shape=[2, 2],
                pads=[1, 1, 1, 1],
            )
        )
    elif op == "ConvInteger":
        pads = b.one(None, [1, 0, 1, 0], [1, 1, 0, 0])
        b.give(
            b.node(
                op,
                b.image(4, c, U8),
                b.weight(3, c, 2, 2, dtype=U8),
                b.const(2, U8) if b.maybe(0.7) else "",
                pads=pads,
            )
        )
    elif op == "MatMulInteger":
        zeros = [b.const(2, U8), b.const(1, I8)] if b.maybe() else []
        b.give(b.node(op, b.x("n", "h", c, dtype=U8), b.weight(c, 5, dtype=I8), *zeros))
    else:
        one, u_zero = b.const(1.0, F32), b.const(3, U8)
        b.give(
            b.node(
                op,
                b.x("n", "h", c, dtype=U8),
                scale,
                u_zero,
                b.weight(c, 5, dtype=U8),
                scale,
                u_zero,
                one,
                u_zero,
            )
        )
