"""ONNX's operators on shapes: moving, cutting, joining, enlarging. Many of them run on sizes while the file is read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aerogel.capture.onnx_file import Attributes
from aerogel.capture.onnx_values import MOST_FOLDED, OPERATORS, Reader, Size, Value, operator
from aerogel.errors import InvalidFile, UnsupportedModel
from aerogel.graph import Ref, Special


def _axes(r: Reader, a: Attributes, given: Value) -> list[int] | None:
    if given is not None:
        return [int(v) for v in r.ints(given)]
    return list(a["axes"]) if "axes" in a else None


@operator
def Shape(r: Reader, a: Attributes, x: Value) -> Any:  # noqa: N802
    sizes = r.sizes(x) if isinstance(x, Ref) else list(np.asarray(x).shape)
    sizes = sizes[a.get("start", 0) : a.get("end", len(sizes))]
    return _array(sizes)


@operator
def Size_(r: Reader, a: Attributes, x: Value) -> Any:  # noqa: N802
    sizes = r.sizes(x) if isinstance(x, Ref) else list(np.asarray(x).shape)
    return _array([math.prod(sizes)])[0]


OPERATORS["Size"] = OPERATORS.pop("Size_")


def _array(values: list[Any]) -> Any:
    if any(isinstance(v, Size) for v in values):
        made = np.empty(len(values), object)
        made[:] = values
        return made
    return np.array(values, np.int64)


@operator
def Reshape(r: Reader, a: Attributes, x: Value, shape: Value) -> Any:  # noqa: N802
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
def Flatten(r: Reader, a: Attributes, x: Value) -> Any:  # noqa: N802
    x, axis = r.tensor(x), a.get("axis", 1)
    axis = axis + r.rank(x) if axis < 0 else axis
    if axis == 1:
        one = r.rank(x) == 1
        return r.emit("aten.unsqueeze.default", x, 1) if one else r.emit("aten.flatten.using_ints", x, 1, -1, layer=a["layer"])
    sizes = r.sizes(x)
    return r.emit("aten.reshape.default", x, [math.prod(sizes[:axis]), math.prod(sizes[axis:])], layer=a["layer"])


@operator
def Squeeze(r: Reader, a: Attributes, x: Value, axes: Value = None) -> Any:  # noqa: N802
    chosen = _axes(r, a, axes)
    if not isinstance(x, Ref):
        return np.squeeze(np.asarray(x), None if chosen is None else tuple(chosen))
    if chosen is None:
        chosen = [i for i, s in enumerate(r.shape(x)) if s == 1]
    return r.emit("aten.squeeze.dims", x, chosen, layer=a["layer"])


@operator
def Unsqueeze(r: Reader, a: Attributes, x: Value, axes: Value = None) -> Any:  # noqa: N802
    chosen = _axes(r, a, axes) or []
    rank = r.rank(x) + len(chosen)
    if not isinstance(x, Ref):
        return np.expand_dims(np.asarray(x), tuple(chosen))
    for axis in sorted(c % rank for c in chosen):
        x = r.emit("aten.unsqueeze.default", x, axis, layer=a["layer"])
    return x


@operator
def Transpose(r: Reader, a: Attributes, x: Value) -> Any:  # noqa: N802
    order = a.get("perm") or list(reversed(range(r.rank(x))))
    return r.emit("aten.permute.default", r.tensor(x), order, layer=a["layer"])


@operator
def Concat(r: Reader, a: Attributes, *values: Value) -> Any:  # noqa: N802
    if not any(isinstance(v, Ref) for v in values):
        return np.concatenate([np.atleast_1d(np.asarray(v)) for v in values], a["axis"])
    return r.emit("aten.cat.default", tuple(r.tensor(v) for v in values), a["axis"], layer=a["layer"])


@operator
def Split(r: Reader, a: Attributes, x: Value, parts: Value = None) -> Any:  # noqa: N802
    x, axis = r.tensor(x), a.get("axis", 0)
    sizes = list(r.ints(parts)) if parts is not None else list(a.get("split") or [])
    if not sizes:
        whole, count = r.shape(x)[axis], a.get("num_outputs", a["outputs"])
        if not isinstance(whole, int):
            raise UnsupportedModel(f"Split '{a['layer']}' cuts an open size into {count} parts")
        each = -(-whole // count)
        sizes = [min(each, whole - i * each) for i in range(count)]
    both = r.emit("aten.split_with_sizes.default", x, sizes, axis, layer=a["layer"])
    return [r.item(both, i) for i in range(len(sizes))]


@operator
def Slice(r: Reader, a: Attributes, x: Value, *given: Value) -> Any:  # noqa: N802
    if given:
        starts, ends = (list(r.ints(v)) for v in given[:2])
        axes = list(r.ints(given[2])) if len(given) > 2 and given[2] is not None else list(range(len(starts)))
        steps = list(r.ints(given[3])) if len(given) > 3 and given[3] is not None else [1] * len(starts)
    else:
        starts, ends = list(a["starts"]), list(a["ends"])
        axes, steps = list(a.get("axes") or range(len(starts))), [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise InvalidFile(f"Slice '{a['layer']}' has {len(starts)} starts, {len(ends)} ends, {len(axes)} axes")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not isinstance(x, Ref):
            cut = [slice(None)] * np.asarray(x).ndim
            low, high = (int(v) if abs(int(v)) < 2**31 else None for v in (start, end))
            cut[axis] = slice(low, high, int(step))
            x = np.asarray(x)[tuple(cut)]
        elif step < 0:
            if step != -1 or isinstance(start, Size) or start != -1:
                raise UnsupportedModel(f"Slice '{a['layer']}' steps back by {step}")
            x = r.emit("aten.flip.default", x, [axis], layer=a["layer"])
        else:
            x = r.emit("aten.slice.Tensor", x, axis, start, end, step, layer=a["layer"])
    return x


@operator
def Gather(r: Reader, a: Attributes, x: Value, index: Value) -> Any:  # noqa: N802
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
def Expand(r: Reader, a: Attributes, x: Value, shape: Value) -> Any:  # noqa: N802
    wanted = r.ints(shape)
    x = r.tensor(x)
    own = [1] * (len(wanted) - r.rank(x)) + r.sizes(x)
    more = len(own) - len(wanted)
    joined = own[:more] + [o if not isinstance(w, Size) and w == 1 else w for o, w in zip(own[more:], wanted, strict=True)]
    return r.emit("aten.expand.default", x, joined, layer=a["layer"])


@operator
def Tile(r: Reader, a: Attributes, x: Value, repeats: Value) -> Any:  # noqa: N802
    return r.emit("aten.repeat.default", r.tensor(x), r.ints(repeats), layer=a["layer"])


@operator
def ConstantOfShape(r: Reader, a: Attributes, shape: Value) -> Any:  # noqa: N802
    wanted, fill = r.ints(shape), a.get("value", np.zeros(1, np.float32))
    if not any(isinstance(w, Size) for w in wanted):
        if math.prod(wanted) > MOST_FOLDED or min(wanted, default=0) < 0:
            raise InvalidFile(f"ConstantOfShape '{a['layer']}' asks for {wanted}")
        return np.full(wanted, fill.ravel()[0], fill.dtype)
    kind = Special("dtype", str(r.dtype(fill)).removeprefix("torch."))
    return r.emit("aten.full.default", wanted, fill.ravel()[0].item(), dtype=kind, layer=a["layer"])


@operator
def Range(r: Reader, a: Attributes, start: Value, end: Value, step: Value) -> Any:  # noqa: N802
    (first,), (last,), (by,) = (r.ints(v) for v in (start, end, step))
    return r.emit("aten.arange.start_step", first, last, by, layer=a["layer"])


@operator
def Pad(r: Reader, a: Attributes, x: Value, pads: Value = None, value: Value = None, axes: Value = None) -> Any:  # noqa: N802
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
        fill = a.get("value", 0.0) if value is None else np.asarray(r.known(value, "Pad's value")).ravel()[0].item()
        return r.emit("aten.constant_pad_nd.default", x, flat, fill, layer=a["layer"])
    kind = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}[mode]
    return r.emit("aten.pad.default", x, flat, kind, None, layer=a["layer"])


@operator
def DepthToSpace(r: Reader, a: Attributes, x: Value) -> Any:  # noqa: N802
    if a.get("mode", "DCR") == "CRD":
        return r.emit("aten.pixel_shuffle.default", r.tensor(x), a["blocksize"], layer=a["layer"])
    x, b = r.tensor(x), a["blocksize"]
    n, c, h, w = r.sizes(x)
    six = r.emit("aten.reshape.default", x, [n, b, b, c // (b * b), h, w])
    moved = r.emit("aten.permute.default", six, [0, 3, 4, 1, 5, 2])
    return r.emit("aten.reshape.default", moved, [n, c // (b * b), h * b, w * b], layer=a["layer"])


@operator
def SpaceToDepth(r: Reader, a: Attributes, x: Value) -> Any:  # noqa: N802
    if a.get("mode", "DCR") != "DCR":
        raise UnsupportedModel(f"SpaceToDepth '{a['layer']}' in mode {a['mode']}")
    x, b = r.tensor(x), a["blocksize"]
    n, c, h, w = r.sizes(x)
    six = r.emit("aten.reshape.default", x, [n, c, h // b, b, w // b, b])
    moved = r.emit("aten.permute.default", six, [0, 3, 5, 1, 2, 4])
    return r.emit("aten.reshape.default", moved, [n, c * b * b, h // b, w // b], layer=a["layer"])


@operator
def Resize(r: Reader, a: Attributes, x: Value, *given: Value) -> Any:  # noqa: N802
    """Nearest by whole factors and (bi)linear over the image, as torch has them; other modes are onnxruntime's."""
    x = r.tensor(x)
    scales, sizes = (given[-1], None) if len(given) < 3 else (given[1], given[2])
    if scales is not None and np.asarray(scales).size == 0:
        scales = None
    mode, where = a.get("mode", "nearest"), a.get("coordinate_transformation_mode", "half_pixel")
    if r.rank(x) != 4 or (scales is None) == (sizes is None) or a.get("axes"):
        raise UnsupportedModel(f"Resize '{a['layer']}' is not over the height and width of images")
    factors = None if scales is None else [float(v) for v in np.asarray(r.known(scales, "Resize's scales")).ravel()]
    own = r.sizes(x)
    if factors is not None:
        target = [_scaled(size, factor) for size, factor in zip(own[2:], factors[2:], strict=True)]
    else:
        target = list(r.ints(sizes))[2:]
        shown = [[t.both[e] if isinstance(t, Size) else t for t in target] for e in range(2)]
        ratios = {
            (t[0] / b.shape[2], t[1] / b.shape[3]) for t, b in zip(shown, (r.blank[e][x.name] for e in range(2)), strict=True)
        }
        factors = [1.0, 1.0, *next(iter(ratios))] if len(ratios) == 1 else None
    blanks = [blank[x.name] for blank in r.blank]
    if mode == "nearest":
        how, whole = (where, a.get("nearest_mode", "round_prefer_floor")), factors is not None and all(f == int(f) for f in factors)
        if how == ("asymmetric", "floor") or (whole and how == ("half_pixel", "round_prefer_floor")):
            return r.emit("aten.upsample_nearest2d.default", x, target, layer=a["layer"])
    exact = factors is None or all(b.shape[i] * f == int(b.shape[i] * f) for b in blanks for i, f in enumerate(factors))
    lone = any(not isinstance(t, Size) and t == 1 for t in target)
    plain = where in ("half_pixel", "pytorch_half_pixel", "align_corners") and not a.get("antialias")
    if mode == "linear" and plain and exact and not lone:
        return r.emit("aten.upsample_bilinear2d.default", x, target, where == "align_corners", layer=a["layer"])
    raise UnsupportedModel(f"Resize '{a['layer']}' by {mode}, {where}")


def _scaled(size: Any, factor: float) -> Any:
    if factor == int(factor):
        return size * int(factor)
    return (size * factor).rounded("floor") if isinstance(size, Size) else int(size * factor)


@operator
def Upsample(r: Reader, a: Attributes, x: Value, scales: Value) -> Any:  # noqa: N802
    own = Attributes(a, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    return Resize(r, own, x, None, scales, None)
