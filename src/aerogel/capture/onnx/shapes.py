"""ONNX's operators on shapes: moving, cutting, joining, enlarging. Many of them run on sizes while the file
is read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aerogel.capture.onnx.file import Attributes
from aerogel.capture.onnx.sizes import Size, array_of, larger, smaller
from aerogel.capture.onnx.values import MOST_FOLDED, OPERATORS, Reader, Value, operator
from aerogel.errors import InvalidFile, UnsupportedModel
from aerogel.ir import Ref, Special


def _axes(r: Reader, a: Attributes, given: Value) -> list[int] | None:
    if given is not None:
        return [int(v) for v in r.ints(given)]
    return list(a["axes"]) if "axes" in a else None


@operator
def Shape(r: Reader, a: Attributes, x: Value) -> Any:
    sizes = r.sizes(x) if isinstance(x, Ref) else list(np.asarray(x).shape)
    sizes = sizes[slice(*slice(a.get("start", 0), a.get("end", len(sizes))).indices(len(sizes)))]
    return array_of(sizes)


@operator
def Size_(r: Reader, a: Attributes, x: Value) -> Any:
    sizes = r.sizes(x) if isinstance(x, Ref) else list(np.asarray(x).shape)
    return array_of([math.prod(sizes)])[0]


OPERATORS["Size"] = OPERATORS.pop("Size_")


@operator
def Reshape(r: Reader, a: Attributes, x: Value, shape: Value) -> Any:
    wanted = list(r.ints(shape))
    if not isinstance(x, Ref):
        return np.asarray(x).reshape([w for w in wanted if not isinstance(w, Size)])
    if not a.get("allowzero"):
        own = r.sizes(x) if 0 in [w for w in wanted if not isinstance(w, Size)] else []
        wanted = [own[i] if not isinstance(w, Size) and w == 0 else w for i, w in enumerate(wanted)]
    if wanted.count(-1) == 0 and sum(isinstance(w, Size) for w in wanted) == 1:
        wanted = [-1 if isinstance(w, Size) else w for w in wanted]  # one open size follows from the others
    return r.emit("aten.reshape.default", x, wanted, layer=a["layer"])


@operator
def Flatten(r: Reader, a: Attributes, x: Value) -> Any:
    x, axis = r.tensor(x), a.get("axis", 1)
    axis = axis + r.rank(x) if axis < 0 else axis
    if axis == 1:
        one = r.rank(x) == 1
        return (
            r.emit("aten.unsqueeze.default", x, 1)
            if one
            else r.emit("aten.flatten.using_ints", x, 1, -1, layer=a["layer"])
        )
    sizes = r.sizes(x)
    return r.emit(
        "aten.reshape.default", x, [math.prod(sizes[:axis]), math.prod(sizes[axis:])], layer=a["layer"]
    )


@operator
def Squeeze(r: Reader, a: Attributes, x: Value, axes: Value = None) -> Any:
    chosen = _axes(r, a, axes)
    if not isinstance(x, Ref):
        return np.squeeze(np.asarray(x), None if chosen is None else tuple(chosen))
    if chosen is None:
        if any(isinstance(s, str) for s in r.shape(x)):
            raise InvalidFile(
                f"Squeeze '{a['layer']}' names no axes: how many dimensions are left depends on "
                "sizes that are open"
            )
        chosen = [i for i, s in enumerate(r.shape(x)) if s == 1]
    return r.emit("aten.squeeze.dims", x, chosen, layer=a["layer"])


@operator
def Unsqueeze(r: Reader, a: Attributes, x: Value, axes: Value = None) -> Any:
    chosen = _axes(r, a, axes) or []
    rank = r.rank(x) + len(chosen)
    if not isinstance(x, Ref):
        return np.expand_dims(np.asarray(x), tuple(chosen))
    for axis in sorted(c % rank for c in chosen):
        x = r.emit("aten.unsqueeze.default", x, axis, layer=a["layer"])
    return x


@operator
def Transpose(r: Reader, a: Attributes, x: Value) -> Any:
    order = a.get("perm") or list(reversed(range(r.rank(x))))
    return r.emit("aten.permute.default", r.tensor(x), order, layer=a["layer"])


@operator
def Concat(r: Reader, a: Attributes, *values: Value) -> Any:
    if not any(isinstance(v, Ref) for v in values):
        return np.concatenate([np.atleast_1d(np.asarray(v)) for v in values], a["axis"])
    return r.emit("aten.cat.default", tuple(r.tensor(v) for v in values), a["axis"], layer=a["layer"])


@operator
def Split(r: Reader, a: Attributes, x: Value, parts: Value = None) -> Any:
    x = r.tensor(x)
    axis = a.get("axis", 0) % r.rank(x)
    sizes = list(r.ints(parts)) if parts is not None else list(a.get("split") or [])
    if not sizes:
        whole, count = r.sizes(x)[axis], a.get("num_outputs", a["outputs"])
        each = (whole + count - 1) // count  # the last is smaller where they cannot be alike
        sizes = [each] * (count - 1) + [whole - each * (count - 1)]
    both = r.emit("aten.split_with_sizes.default", x, sizes, axis, layer=a["layer"])
    return [r.item(both, i) for i in range(len(sizes))]


@operator
def Slice(r: Reader, a: Attributes, x: Value, *given: Value) -> Any:
    if given:
        starts, ends = (list(r.ints(v)) for v in given[:2])
        axes = list(r.ints(given[2])) if len(given) > 2 and given[2] is not None else list(range(len(starts)))
        steps = list(r.ints(given[3])) if len(given) > 3 and given[3] is not None else [1] * len(starts)
    else:
        starts, ends = list(a["starts"]), list(a["ends"])
        axes, steps = list(a.get("axes") or range(len(starts))), [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or any(
        isinstance(s, Size) or s == 0 for s in steps
    ):
        raise InvalidFile(
            f"Slice '{a['layer']}' has {len(starts)} starts, {len(ends)} ends, {len(axes)} axes, "
            f"steps {steps}"
        )
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not isinstance(x, Ref):
            x = np.take(
                np.asarray(x), list(_span(int(start), int(end), step, np.asarray(x).shape[axis])), axis
            )
        elif step < 0:
            x = _cut(r, x, _backwards(r, a, x, start, end, axis, step), axis)
        else:
            x = _cut(r, x, r.emit("aten.slice.Tensor", x, axis, start, end, step, layer=a["layer"]), axis)
    return x


def _cut(r: Reader, x: Ref, cut: Ref, axis: int) -> Ref:
    """Part of a dimension; of an open one it may be less at sizes that are neither example's."""
    have, length = (r.shape(v)[axis] for v in (x, cut))
    if not isinstance(have, int) and isinstance(length, int) and length > 1:
        r.loosen(cut, () if axis % r.rank(x) == 1 else (1,))
    return cut


_LAST = (2**31 - 1, 2**63 - 1)
"""Ends that mean "all of it": for onnxruntime backwards too."""


def _span(start: int, end: int, step: int, size: int) -> range:
    """The places a slice takes, its ends clamped as ONNX has it."""
    end = -size - 1 if step < 0 and end in _LAST else end
    low, high = (0, size) if step > 0 else (-1, size - 1)
    start, end = (v + size if v < 0 else v for v in (start, end))
    return range(min(max(start, 0), high), min(max(end, low), high), step)


def _backwards(r: Reader, a: Attributes, x: Ref, start: Any, end: Any, axis: int, step: int) -> Ref:
    """A slice against the order: of the flipped tensor, from and to the mirrored places."""
    if isinstance(start, Size) or isinstance(end, Size):
        raise UnsupportedModel(
            f"Slice '{a['layer']}' steps back from {start} to {end}, which depend on sizes"
        )
    size = r.sizes(x)[axis]
    first = smaller(-1 - start, size - 1) if start < 0 else larger(size - 1 - start, 0)
    last = size if end in _LAST else smaller(-1 - end, size) if end < 0 else larger(size - 1 - end, 0)
    turned = r.emit("aten.flip.default", x, [axis], layer=a["layer"])
    return r.emit("aten.slice.Tensor", turned, axis, first, last, -step, layer=a["layer"])


@operator
def Gather(r: Reader, a: Attributes, x: Value, index: Value) -> Any:
    axis = a.get("axis", 0)
    if not isinstance(x, Ref) and not isinstance(index, Ref):
        return np.take(np.asarray(x), np.asarray(r.known(index, "an index")).astype(np.int64), axis)
    if not isinstance(index, Ref) and np.asarray(index).ndim == 0:
        (one,) = r.ints(index)
        return r.emit("aten.select.int", r.tensor(x), axis, one, layer=a["layer"])
    flat = r.emit("aten.reshape.default", r.tensor(index), [-1])
    if isinstance(index, Ref) or np.asarray(index).min(initial=0) < 0:
        whole = r.sizes(r.tensor(x))[axis]
        flat = r.emit("aten.remainder.Scalar", flat, whole)
    got = r.emit("aten.index_select.default", r.tensor(x), axis, flat, layer=a["layer"])
    if r.rank(index) == 1:
        return got
    sizes, own = r.sizes(r.tensor(x)), r.sizes(r.tensor(index))
    axis %= len(sizes)
    return r.emit("aten.reshape.default", got, [*sizes[:axis], *own, *sizes[axis + 1 :]])


@operator
def Expand(r: Reader, a: Attributes, x: Value, shape: Value) -> Any:
    wanted = r.ints(shape)
    x = r.tensor(x)
    own = [1] * (len(wanted) - r.rank(x)) + r.sizes(x)
    more = len(own) - len(wanted)
    joined = own[:more] + [
        o if not isinstance(w, Size) and w == 1 else w for o, w in zip(own[more:], wanted, strict=True)
    ]
    return r.emit("aten.expand.default", x, joined, layer=a["layer"])


@operator
def Tile(r: Reader, a: Attributes, x: Value, repeats: Value) -> Any:
    return r.emit("aten.repeat.default", r.tensor(x), r.ints(repeats), layer=a["layer"])


@operator
def ConstantOfShape(r: Reader, a: Attributes, shape: Value) -> Any:
    wanted, fill = r.ints(shape), a.get("value", np.zeros(1, np.float32))
    if not any(isinstance(w, Size) for w in wanted):
        if math.prod(wanted) > MOST_FOLDED or min(wanted, default=0) < 0:
            raise InvalidFile(f"ConstantOfShape '{a['layer']}' asks for {wanted}")
        return np.full(wanted, fill.ravel()[0], fill.dtype)
    dtype = Special("dtype", str(r.dtype(fill)).removeprefix("torch."))
    return r.emit("aten.full.default", wanted, fill.ravel()[0].item(), dtype=dtype, layer=a["layer"])


@operator
def Range(r: Reader, a: Attributes, start: Value, end: Value, step: Value) -> Any:
    dtype = r.dtype(start)
    (first,), (last,), (by,) = (r.ints(v) for v in (start, end, step))
    if isinstance(by, Size) or by == 0:
        raise UnsupportedModel(f"Range '{a['layer']}' has the step {by}")
    far = last - first if by > 0 else first - last
    count = larger((far + abs(by) - 1) // abs(by), 0)
    if not isinstance(count, Size) and count > MOST_FOLDED:
        raise InvalidFile(f"Range '{a['layer']}' asks for {count} numbers")
    made = r.emit(
        "aten.arange.default",
        count,
        dtype=Special("dtype", str(dtype).removeprefix("torch.")),
        layer=a["layer"],
    )
    made = made if by == 1 else r.emit("aten.mul.Scalar", made, by)
    return made if not isinstance(first, Size) and first == 0 else r.emit("aten.add.Scalar", made, first)


@operator
def Pad(
    r: Reader, a: Attributes, x: Value, pads: Value = None, value: Value = None, axes: Value = None
) -> Any:
    x, mode = r.tensor(x), a.get("mode", "constant")
    around = list(r.ints(pads)) if pads is not None else list(a["pads"])
    rank = r.rank(x)
    chosen = [int(v) % rank for v in r.ints(axes)] if axes is not None else list(range(rank))
    before, after = [0] * rank, [0] * rank
    for i, axis in enumerate(chosen):
        before[axis], after[axis] = around[i], around[len(chosen) + i]
    flat = [side for pair in zip(reversed(before), reversed(after), strict=True) for side in pair]
    while len(flat) > 2 and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    if mode == "constant":
        fill = (
            a.get("value", 0.0)
            if value is None
            else np.asarray(r.known(value, "Pad's value")).ravel()[0].item()
        )
        return r.emit("aten.constant_pad_nd.default", x, flat, fill, layer=a["layer"])
    name = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}[mode]
    return r.emit("aten.pad.default", x, flat, name, None, layer=a["layer"])


@operator
def DepthToSpace(r: Reader, a: Attributes, x: Value) -> Any:
    if a.get("mode", "DCR") == "CRD":
        return r.emit("aten.pixel_shuffle.default", r.tensor(x), a["blocksize"], layer=a["layer"])
    x, b = r.tensor(x), a["blocksize"]
    n, c, h, w = r.sizes(x)
    six = r.emit("aten.reshape.default", x, [n, b, b, c // (b * b), h, w])
    moved = r.emit("aten.permute.default", six, [0, 3, 4, 1, 5, 2])
    return r.emit("aten.reshape.default", moved, [n, c // (b * b), h * b, w * b], layer=a["layer"])


@operator
def SpaceToDepth(r: Reader, a: Attributes, x: Value) -> Any:
    if a.get("mode", "DCR") != "DCR":
        raise UnsupportedModel(f"SpaceToDepth '{a['layer']}' in mode {a['mode']}")
    x, b = r.tensor(x), a["blocksize"]
    n, c, h, w = r.sizes(x)
    six = r.emit("aten.reshape.default", x, [n, c, h // b, b, w // b, b])
    moved = r.emit("aten.permute.default", six, [0, 3, 5, 1, 2, 4])
    return r.emit("aten.reshape.default", moved, [n, c * b * b, h // b, w // b], layer=a["layer"])
