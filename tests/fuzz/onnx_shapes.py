"""Families of operators that move, cut, join and enlarge."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import numpy_helper

from tests.fuzz.onnx_cases import BOOL, F32, I32, I64, U8, Build, family


def axes_as(b: Build, since: int, x: str, op: str, axes: list[int] | None, **more: Any) -> str:
    """Axes as an attribute before an opset, as an input since."""
    if axes is None:
        made = b.node(op, x, **more)
    elif b.opset < since:
        made = b.node(op, x, axes=axes, **more)
    else:
        made = b.node(op, x, b.ints(*axes), **more)
    return str(made)


@family
def split(b: Build) -> None:
    axis, count = b.one(None, 0, 1, 1, 1, 2, -1), b.whole(1, 4)
    c = b.whole(2, 11)
    x = b.x("h", c, "w") if axis in (1,) else b.x("h", c, c)
    if axis in (None, 0):
        b.inputs.clear()
        x = b.x(c, "h", "w")
    if b.maybe(0.2):  # an open size in parts
        b.inputs.clear()
        x, axis, c = b.x("n", "h", "w"), 1, 0
        if b.opset < 18:
            b.sets = [{**s, "h": max(count, s["h"] // count * count)} for s in b.sets]
    if c and b.maybe():
        cuts = sorted(b.whole(0, c) for _ in range(count - 1))
        sizes = [hi - lo for lo, hi in zip([0, *cuts], [*cuts, c], strict=True)]
        made = b.node("Split", x, *([b.ints(*sizes)] if b.opset >= 13 else []), outputs=count, axis=axis,
                      split=sizes if b.opset < 13 else None)  # fmt: skip
    elif b.opset >= 18:
        made = b.node("Split", x, outputs=count, axis=axis, num_outputs=count)
    else:
        if c:
            b.inputs = [
                (n, [count * 2 if d == c else d for d in dims], k, draw) for n, dims, k, draw in b.inputs
            ]
        made = b.node("Split", x, outputs=count, axis=axis)
    b.give(*(made if isinstance(made, list) else [made]))


@family
def pad(b: Build) -> None:
    mode = b.one(None, "constant", "constant", "reflect", "edge", *(["wrap"] if b.opset >= 19 else []))
    rank = b.one(2, 3, 4, 4)
    kind = b.one(F32, F32, I64, I32) if b.opset >= 13 else F32
    x = b.x(*["n", b.whole(1, 5), "h", "w"][4 - rank :], dtype=kind)
    low = b.one(0, 0, -1)
    if mode == "reflect":
        b.sets = [{k: max(v, 4) for k, v in s.items()} for s in b.sets]
    some = b.opset >= 18 and b.maybe(0.4)
    chosen = [b.one(-1, rank - 1), 0] if some else list(range(rank))
    sides = [b.whole(low, 3) if i in (rank - 1, rank - 2, -1) or b.maybe(0.2) else 0 for i in chosen * 2]
    fill = b.const(b.one(1, 3), kind) if mode in (None, "constant") and b.maybe() else ""
    b.give(b.node("Pad", x, b.ints(*sides), fill, b.ints(*chosen) if some else "", mode=mode))


@family
def slices(b: Build) -> None:
    x = b.x(b.whole(2, 9), "h", "w", dtype=b.one(F32, F32, I64))
    count = b.whole(1, 3)
    axes = b.random.sample([0, 1, 2, -1, -2] if count < 2 else [0, 1, 2], count)
    far = [-(2**31), -30, -3, -2, -1, 0, 1, 2, 3, 5, 30, 2**31 - 1, 2**63 - 1]
    starts, ends = ([b.one(*far) for _ in axes] for _ in range(2))
    steps = [b.one(1, 1, 1, 2, 3, -1, -1, -2) for _ in axes]
    more = [b.ints(*axes)] if b.maybe(0.8) else [""]
    more += [b.ints(*steps)] if b.maybe(0.7) else []
    b.give(b.node("Slice", x, b.ints(*starts), b.ints(*ends), *more))


@family
def gathers(b: Build) -> None:
    op = b.one("Gather", "Gather", "Gather", "GatherElements", "GatherND")
    c = b.whole(2, 6)
    kind = b.one(I64, I32)
    if op == "GatherND":
        b.give(b.node(op, b.x(c, 3, "w"), b.const(b.numbers.integers(-2, 2, (4, 2)), I64)))
        return
    axis = b.one(None, 0, 1, -1)
    place = [c if i == (axis or 0) % 3 else d for i, d in enumerate(("n", "h", "w"))]
    x = b.x(*place, dtype=b.one(F32, I64))
    if op == "GatherElements":
        shape = [2 if isinstance(d, int) else d for d in place]
        index = b.x(*shape, dtype=kind, draw=lambda s: b.numbers.integers(-c, c, s).astype(kind))
    elif b.maybe(0.3):
        index = b.x(
            *b.one(("h",), ("n", "l"), ()),
            dtype=kind,
            draw=lambda s: b.numbers.integers(-c, c, s).astype(kind),
        )
    else:
        index = b.const(b.numbers.integers(-c, c, b.one((), (1,), (3,), (2, 2), (0,))), kind)
    b.give(b.node(op, x, index, axis=axis))


@family
def reshape(b: Build) -> None:
    c = 2 * b.whole(1, 4)
    x = b.x("n", c, "h", "w", dtype=b.one(F32, I64, BOOL))
    wanted = b.one(
        [0, -1],
        [0, 0, -1],
        [-1],
        [0, 2, -1],
        [0, c // 2, 2, -1, 1],
        [0, c, 0, 0],
        [0, 0, 0, -1],
        [-1, c],
        [1, -1, 2],
    )
    allow = b.one(None, 0, 1) if b.opset >= 14 and 0 not in wanted else None
    b.give(b.node("Reshape", x, b.ints(*wanted), allowzero=allow))


@family
def squeezes(b: Build) -> None:
    kind = b.one(F32, I64)
    if b.maybe():
        x = b.x(1, "h", 1, "w", dtype=kind)
        axes = b.one(None, [0], [2], [0, 2], [-2], [-4, 2])
        b.give(axes_as(b, 13, x, "Squeeze", axes))
    else:
        x = b.x("h", "w", dtype=kind)
        b.give(axes_as(b, 13, x, "Unsqueeze", b.one([0], [2], [-1], [0, 3], [3, 0], [-1, 0], [1, 2])))


@family
def joins(b: Build) -> None:
    axis = b.one(0, 1, 2, -1, -3)
    kind = b.one(F32, I64)
    sizes = ["n", b.whole(1, 5), "w"]
    parts = []
    for _ in range(b.whole(1, 3)):
        own = list(sizes)
        if b.maybe():
            own[axis % 3] = b.whole(1, 4)
        parts.append(b.x(*own, dtype=kind))
    b.give(b.node("Concat", *parts, axis=axis))


@family
def flips(b: Build) -> None:
    op = b.one("Flatten", "Transpose", "DepthToSpace", "SpaceToDepth", "Trilu", "Identity", "ReverseSequence")
    if op == "Flatten":
        axis = b.one(None, 0, 1, 2, 3, 4, -1, -2, -4)
        b.give(b.node(op, b.x("n", 3, "h", "w", dtype=b.one(F32, I64)), axis=axis))
    elif op == "Transpose":
        b.give(
            b.node(
                op,
                b.image(dtype=b.one(F32, I64, U8)),
                perm=b.one(None, [0, 2, 3, 1], [3, 2, 1, 0], [1, 0, 3, 2]),
            )
        )
    elif op == "DepthToSpace":
        size = b.one(1, 2, 3)
        b.give(
            b.node(
                op, b.image(4, size * size * b.whole(1, 3)), blocksize=size, mode=b.one(None, "DCR", "CRD")
            )
        )
    elif op == "SpaceToDepth":
        size = b.one(1, 2, 3)
        b.sets = [{**s, "h": s["h"] * size, "w": s["w"] * size} for s in b.sets]
        b.give(b.node(op, b.image(), blocksize=size))
    elif op == "Trilu":
        b.opset = max(b.opset, 14)
        offset = b.const(b.one(-1, 0, 2), I64) if b.maybe() else ""
        b.give(b.node(op, b.x("n", "h", "w"), offset, upper=b.one(None, 0, 1)))
    elif op == "Identity":
        b.give(b.node(op, b.image()))
    else:
        lengths = b.x("n", dtype=I64, draw=lambda s: b.numbers.integers(1, 3, s))
        b.sets = [{**s, "h": max(3, s["h"])} for s in b.sets]
        b.give(b.node(op, b.x("h", "n", 2), lengths, time_axis=0, batch_axis=1))


@family
def enlarges(b: Build) -> None:
    op = b.one("Expand", "Tile", "ConstantOfShape", "Range", "OneHot")
    c = b.whole(1, 4)
    if op == "Expand":
        x = b.x(*b.one((c, 1), (1,), ("n", 1, 1), ("n", c, "w"), (1, "h", 1)), dtype=b.one(F32, I64))
        rank = len(b.inputs[0][1])
        wanted = [1 if d != 1 else b.whole(1, 4) for d in b.inputs[0][1]]
        if b.maybe(0.3):
            wanted = [b.whole(1, 3), *wanted]
        elif rank > 1 and b.maybe(0.3):
            wanted = wanted[1:]
        b.give(b.node(op, x, b.ints(*wanted)))
    elif op == "Tile":
        b.give(
            b.node(
                op, b.x("n", c, "w", dtype=b.one(F32, I64)), b.ints(*(b.whole(0, 3) or 1 for _ in range(3)))
            )
        )
    elif op == "ConstantOfShape":
        value = b.one(None, np.array([1.5], F32), np.array([2], I64), np.array([True]))
        given = None if value is None else numpy_helper.from_array(value)
        b.give(b.node(op, b.node("Shape", b.x("n", "h", 3)), value=given))
    elif op == "Range":
        size = b.node("Gather", b.node("Shape", b.x("h", 2)), b.const(0, I64), axis=0)
        start, step = b.const(b.one(0, 1, -2, 30), I64), b.const(b.one(1, 2, 3, -1, -2), I64)
        if b.maybe():
            size, start, step = (
                b.node("Cast", size, to=1),
                b.const(b.real(), F32),
                b.const(b.one(0.5, 1.0, 1.5, -0.75), F32),
            )
        b.give(b.node(op, start, size, step))
    else:
        index = b.x("n", "h", dtype=b.one(I64, I32), draw=None)
        depth = b.const(b.whole(2, 6), I64)
        kind = b.one(F32, I64)
        b.give(b.node(op, index, depth, b.const([0, 3], kind), axis=b.one(None, 0, 1, -1, -2)))


@family
def reductions(b: Build) -> None:
    op = "Reduce" + b.one("Mean", "Sum", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
    kind = b.one(F32, F32, F32, I64, I32) if op not in ("ReduceLogSum", "ReduceLogSumExp") else F32
    x = b.x("n", 3, "h", "w", dtype=kind)
    if op == "ReduceLogSum":
        x = b.node("Abs", x)
    axes = b.one(None, [1], [2, 3], [-1], [0], [-1, 1], [0, 1, 2, 3], [-2])
    since = 13 if op == "ReduceSum" else 18
    more = {"keepdims": b.one(None, 0, 1)}
    if b.opset >= since:
        more["noop_with_empty_axes"] = b.one(None, None, 0, 1)
        if b.maybe(0.1):
            axes = []
    b.give(axes_as(b, since, x, op, axes, **more))


@family
def choices(b: Build) -> None:
    op = b.one("ArgMax", "ArgMin", "TopK", "TopK", "NonZero", "CumSum")
    kind = b.one(F32, F32, I64, I32)
    x = b.x("n", 5, "h", dtype=kind)
    if op.startswith("Arg"):
        last = b.one(None, 0, 1) if b.opset >= 12 else None
        b.give(b.node(op, x, axis=b.one(None, 0, 1, -1), keepdims=b.one(None, 0, 1), select_last_index=last))
    elif op == "TopK":
        a = {"axis": b.one(1, -2), "largest": b.one(None, 0, 1), "sorted": b.one(None, 1)}
        b.give(*b.node(op, x, b.ints(b.whole(1, 5)), outputs=2, **a))
    elif op == "NonZero":
        b.give(b.node(op, x))
    else:
        axis = b.const(b.one(0, 1, 2, -1), b.one(I64, I32))
        b.give(b.node(op, x, axis, exclusive=b.one(None, 0, 1), reverse=b.one(None, 0, 1)))
