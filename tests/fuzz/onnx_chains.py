"""Families of a few nodes: arithmetic on sizes, and small networks."""

from __future__ import annotations

from tests.fuzz import onnx_elements, onnx_layers  # noqa: F401  families take turns in this order
from tests.fuzz.onnx_cases import F32, I64, Build, family
from tests.fuzz.onnx_layers import window


def size(b: Build, x: str, axis: int) -> str:
    """One size of a tensor, changed somehow, as a list of one."""
    one = b.node("Gather", b.node("Shape", x), b.const(axis, I64), axis=0)
    for _ in range(b.whole(0, 2)):
        op = b.one("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "cast", "float")
        if op == "cast":
            one = b.node(
                "Cast",
                b.node("Floor", b.node("Mul", b.node("Cast", one, to=1), b.const(b.one(0.5, 1.5, 0.7), F32))),
                to=7,
            )
        elif op == "float":
            scaled = b.node(b.one("Div", "Mul"), b.node("Cast", one, to=1), b.const(b.one(2.0, 3.0), F32))
            one = b.node("Cast", b.node("Ceil", scaled), to=7)
        else:
            b.opset = max(b.opset, 13)
            one = b.node(op, one, b.const(b.whole(2, 7), I64))
    return str(b.node("Unsqueeze", one, b.ints(0)) if b.opset >= 13 else b.node("Unsqueeze", one, axes=[0]))


@family
def sizes(b: Build) -> None:
    x = b.x("n", 4, "h", "w")
    what = b.one(
        "give", "reshape", "slice", "slice", "expand", "pad", "tile", "resize", "range", "equal", "float"
    )
    if what == "give":
        b.give(size(b, x, 2), size(b, x, 3))
    elif what == "float":
        b.give(b.node("Mul", x, b.node("Sqrt", b.node("Cast", size(b, x, 2), to=1))))
    elif what == "reshape":
        flat = b.node("Mul", *(b.node("Slice", b.node("Shape", x), b.ints(i), b.ints(i + 1)) for i in (2, 3)))
        b.give(b.node("Reshape", x, b.node("Concat", b.ints(0), b.ints(4), flat, axis=0)))
    elif what == "slice":
        ends = b.node("Concat", size(b, x, 2), axis=0)
        starts = b.one(b.ints(0), b.ints(-3), size(b, x, 3))
        b.give(b.node("Slice", x, starts, ends, b.ints(2), b.ints(b.one(1, 2))))
    elif what == "expand":
        b.give(b.node("Expand", b.x(1, 1), b.node("Concat", size(b, x, 2), size(b, x, 3), axis=0)))
    elif what == "pad":
        extra = b.node(
            "Sub", b.ints(b.whole(10, 24)), b.node("Slice", b.node("Shape", x), b.ints(3), b.ints(4))
        )
        b.give(b.node("Pad", x, b.node("Concat", b.ints(0, 0, 0, 0, 0, 0, 1), extra, axis=0)))
    elif what == "tile":
        b.give(b.node("Tile", b.x(2, 1), b.node("Concat", size(b, x, 2), b.ints(2), axis=0)))
    elif what == "resize":
        empty = ["", ""] if b.opset >= 13 else [b.const([], F32), b.const([], F32)]
        front = b.node("Slice", b.node("Shape", x), b.ints(0), b.ints(2), b.ints(0))
        whole = b.node("Concat", front, size(b, x, 2), size(b, x, 3), axis=0)
        empty = ["", ""] if b.opset >= 13 else empty
        b.give(
            b.node(
                "Resize",
                x,
                *empty,
                whole,
                mode=b.one("linear", "nearest"),
                coordinate_transformation_mode=b.one("half_pixel", "asymmetric", "align_corners"),
            )
        )
    elif what == "range":
        one = (
            b.node("Squeeze", size(b, x, 2), b.ints(0))
            if b.opset >= 13
            else b.node("Squeeze", size(b, x, 2), axes=[0])
        )
        b.give(b.node("Range", b.const(0, I64), one, b.const(b.whole(1, 3), I64)))
    else:
        b.opset = max(b.opset, 11)
        same = b.node(
            "Equal", *(b.node("Slice", b.node("Shape", x), b.ints(i), b.ints(i + 1)) for i in (2, 3))
        )
        b.give(b.node("Where", same, x, b.node("Neg", x)))


@family
def cuts(b: Build) -> None:
    """Part of an open size, then what asks for sizes: they are not the example's where there is less to
    cut."""
    x = b.node(
        "Slice",
        b.x("n", 4, "h", "w"),
        b.ints(0),
        b.ints(b.one(3, 5, 10)),
        b.ints(b.one(2, 3, -1)),
        b.ints(b.one(1, 2)),
    )
    if b.maybe():
        x = b.node("Relu", x)
    what = b.one("flatten", "shape", "expand", "softmax", "resize", "split", "pool", "reshape")
    if what == "flatten":
        b.give(b.node("Flatten", x, axis=b.one(2, 3)))
    elif what == "shape":
        b.give(b.node("Shape", x))
    elif what == "expand":
        b.give(b.node("ConstantOfShape", b.node("Shape", x)))
    elif what == "softmax":
        b.opset = 12
        b.give(b.node("Softmax", x, axis=2))
    elif what == "resize":
        roi = "" if b.opset >= 13 else b.const([], F32)
        b.give(b.node("Resize", x, roi, b.const([1, 1, 2, 1.5], F32), mode=b.one("nearest", "linear")))
    elif what == "split":
        b.opset = max(b.opset, 18)
        b.give(*b.node("Split", x, outputs=2, axis=b.one(2, 3), num_outputs=2))
    elif what == "pool":
        b.give(b.node("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_UPPER"))
    else:
        b.give(b.node("Reshape", x, b.ints(0, 2, -1)))


@family
def network(b: Build) -> None:
    """A few layers one behind the other, a branch joined again."""
    c = b.whole(1, 6)
    x = b.image(4, c)
    for _ in range(b.whole(2, 5)):
        op = b.one(
            "Conv",
            "Conv",
            "Pool",
            "Resize",
            "Pad",
            "Relu",
            "Sigmoid",
            "Norm",
            "Branch",
            "Split",
            "Clip",
            "Gate",
        )
        if op == "Conv":
            k = b.whole(1, 8)
            a = window(b, 2, 3)
            x = b.node("Conv", x, b.weight(k, c, *a["kernel_shape"]), b.weight(k) if b.maybe() else "", **a)
            c = k
        elif op == "Pool":
            kind = b.one("MaxPool", "AveragePool")
            more = {"count_include_pad": b.one(0, 1)} if kind == "AveragePool" else {}
            x = b.node(kind, x, ceil_mode=b.one(0, 1), **more, **window(b, 2, 3, dilated=False))
        elif op == "Resize":
            roi = "" if b.opset >= 13 else b.const([], F32)
            scale = b.one(2.0, 2.0, 1.5, 0.5)
            x = b.node("Resize", x, roi, b.const([1, 1, scale, scale], F32), mode=b.one("nearest", "linear"),
                       coordinate_transformation_mode=b.one("asymmetric", "half_pixel", "align_corners"),
                       nearest_mode=b.one("floor", "round_prefer_floor"))  # fmt: skip
        elif op == "Pad":
            x = b.node(
                "Pad",
                x,
                b.ints(0, 0, *(b.whole(0, 2) for _ in range(2)), 0, 0, *(b.whole(0, 2) for _ in range(2))),
                mode="edge",
            )
        elif op == "Norm":
            x = b.node(
                "BatchNormalization", x, b.weight(c), b.weight(c), b.weight(c), b.const([1.5] * c, F32)
            )
        elif op == "Branch":
            x = (
                b.node(b.one("Add", "Mul", "Concat"), x, b.node("Relu", x))
                if b.maybe(0.7)
                else b.node("Add", x, x)
            )
            if b.nodes[-1].op_type == "Concat":
                b.nodes[-1].attribute.add(name="axis", type=2, i=1)
                c *= 2
        elif op == "Split" and c > 1 and b.opset >= 18:
            parts = b.node("Split", x, outputs=2, axis=1, num_outputs=2)
            x = b.node("Concat", parts[1], parts[0], axis=1)
        elif op == "Clip":
            x = b.node("Clip", x, b.const(0, F32), b.const(6, F32))
        elif op == "Gate":
            x = b.node("Mul", x, b.node("Sigmoid", x))
        elif op in ("Relu", "Sigmoid"):
            x = b.node(op, x)
    b.give(b.node("Identity", x))
