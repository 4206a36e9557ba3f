"""ONNX's Resize in torch's operators, where torch has the very same formula at all sizes; else it is
onnxruntime's.

Nearest pixels below or above are looked up by onnxruntime's own float32 formula (how it rounds differs
between its versions); enlargements by whole numbers, which torch computes alike, are torch's. Linear and
cubic take torch's kernels with the scale that ONNX computes with: the given one, or that of the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aerogel.capture.onnx.file import Attributes
from aerogel.capture.onnx.sizes import Size, larger, smaller
from aerogel.capture.onnx.values import Reader, Value, operator
from aerogel.errors import InvalidFile, UnsupportedModel
from aerogel.ir import Ref, Special

_SMOOTH = {"linear": {3: "linear1d", 4: "bilinear2d", 5: "trilinear3d"}, "cubic": {4: "bicubic2d"}}
_PLACES = ("asymmetric", "half_pixel", "pytorch_half_pixel", "align_corners")
_FLOAT = Special("dtype", "float32")


@dataclass(frozen=True)
class _Axis:
    """One dimension: its size, the size it gets, and ONNX's scale where that is the same at all sizes."""

    i: int
    size: Any
    out: Any
    scale: float | None

    @property
    def stays(self) -> bool:
        return self.scale == 1.0

    @property
    def may_stay(self) -> bool:
        """Whether its size may stay in spite of its scale: torch then copies, onnxruntime if all dimensions
        do."""
        if isinstance(self.size, Size):
            return self.scale is not None and 1 < self.scale < 1.5
        return self.size == self.out > 1 and not self.stays


@operator
def Resize(r: Reader, a: Attributes, x: Value, *given: Value) -> Any:
    x, layer = r.tensor(x), a["layer"]
    mode, where, nearest = _modes(r, a)
    scales, sizes = (given[0], None) if r.file.opset < 11 else (*given[1:3], None, None)[:2]
    if (
        a.get("antialias")
        or where == "tf_crop_and_resize"
        or a.get("keep_aspect_ratio_policy", "stretch") != "stretch"
    ):
        raise UnsupportedModel(f"Resize '{layer}' by {mode}, {where}, is smoothed, cut or keeps its ratio")
    axes = _axes(r, a, x, scales, sizes)
    touched = [axis for axis in axes if not axis.stays]
    if not touched:
        return x
    if any(axis.may_stay for axis in touched):
        raise UnsupportedModel(f"Resize '{layer}' has a scale so near to 1 that small sizes stay as they are")
    if mode == "nearest":
        if all(_as_torch(axis.scale, where, nearest) for axis in axes[2:]) and all(
            axis.i > 1 for axis in touched
        ):
            op = f"aten.upsample_nearest{len(axes) - 2}d.default"
            if len(axes) in (4, 5) and r.dtype(x) == torch.float32:
                return r.emit(op, x, [axis.out for axis in axes[2:]], layer=layer)
        for axis in touched:
            x = r.emit("aten.index_select.default", x, axis.i, _nearest(r, axis, where, nearest), layer=layer)
        return x
    kernel = _SMOOTH.get(mode, {}).get(len(axes))
    plain = a.get("cubic_coeff_a", -0.75) == -0.75 and not a.get("exclude_outside", 0)
    symmetric = where == "half_pixel_symmetric" and all(
        _whole(axis.scale) for axis in axes if axis.scale is not None
    )
    known = where in ("half_pixel", "pytorch_half_pixel", "align_corners") or symmetric
    if (
        kernel is None
        or not plain
        or not known
        or any(axis.i < 2 for axis in touched)
        or r.dtype(x) != torch.float32
    ):
        raise UnsupportedModel(f"Resize '{layer}' by {mode}, {where}")
    targets, factors = [axis.out for axis in axes[2:]], [_factor(axis, where) for axis in axes[2:]]
    return r.emit(
        f"aten.upsample_{kernel}.default", x, targets, where == "align_corners", *factors, layer=layer
    )


@operator
def Upsample(r: Reader, a: Attributes, x: Value, scales: Value) -> Any:
    return Resize(r, a, x, scales)


def _modes(r: Reader, a: Attributes) -> tuple[str, str, str]:
    """How pixels are computed, where they lie, and which one is nearest."""
    mode = a.get("mode", "nearest")
    if r.file.opset < 11:
        return mode, "asymmetric", "simple"
    return (
        mode,
        a.get("coordinate_transformation_mode", "half_pixel"),
        a.get("nearest_mode", "round_prefer_floor"),
    )


def _axes(r: Reader, a: Attributes, x: Ref, scales: Value, sizes: Value) -> list[_Axis]:
    own = r.sizes(x)
    chosen = [i % len(own) for i in a.get("axes") or range(len(own))]
    factors = None if scales is None else np.asarray(r.known(scales, "Resize's scales"), np.float32).ravel()
    if factors is not None and factors.size == 0:
        factors = None
    if (factors is None) == (sizes is None) or len(set(chosen)) < len(chosen):
        raise InvalidFile(f"Resize '{a['layer']}' takes scales or sizes, one of them")
    wanted = list(r.ints(sizes)) if factors is None else list(factors)
    if len(wanted) != len(chosen):
        raise InvalidFile(
            f"Resize '{a['layer']}' has {len(wanted)} scales or sizes for {len(chosen)} dimensions"
        )
    axes = [_Axis(i, size, size, 1.0) for i, size in enumerate(own)]
    for i, value in zip(chosen, wanted, strict=True):
        if factors is None:
            axes[i] = _Axis(i, own[i], value, _ratio(r, x, i, own[i], value))
        else:
            if not 0 < value < 2**31:
                raise InvalidFile(f"Resize '{a['layer']}' has the scale {value}")
            axes[i] = _Axis(i, own[i], _scaled(own[i], value), float(value))
    return axes


def _scaled(size: Any, factor: Any) -> Any:
    """size * factor in float32, cut off, as onnxruntime computes it."""
    if _whole(factor):
        return size * int(factor)
    if isinstance(size, Size):
        return (size.cast(torch.float32) * float(factor)).cast(torch.int64)
    return int(np.float32(size) * np.float32(factor))


def _whole(factor: float | None) -> bool:
    return factor is not None and factor == int(factor)


def _ratio(r: Reader, x: Ref, i: int, size: Any, out: Any) -> float | None:
    """out / size where it is known at all sizes: both are fixed, or one is the other times a number."""
    if not isinstance(size, Size) and not isinstance(out, Size):
        return float(np.float32(out) / np.float32(size)) if size else None
    made = r.made.get(out.name) if isinstance(out, Size) else None
    times = 1
    if made is not None and made.op == "int.mul":
        inner = [arg for arg in made.args if isinstance(arg, Ref)]
        times = next((arg for arg in made.args if isinstance(arg, int)), 0)
        made = r.made.get(inner[0].name) if len(inner) == 1 else None
    same = made is not None and made.op == "aten.sym_size.int" and made.args == (x, i)
    return float(times) if same and times else None


def _factor(axis: _Axis, where: str) -> Any:
    """The scale torch is to compute with; None: that of the sizes.

    Of a single pixel, `pytorch_half_pixel` takes the first, which a scale of 1 does too.
    """
    if where != "pytorch_half_pixel" or (axis.scale is not None and axis.scale >= 1):
        return axis.scale
    single = larger(2 - axis.out, 0)
    return larger(axis.out / axis.size if axis.scale is None else axis.scale, single)


def _as_torch(scale: float | None, where: str, nearest: str) -> bool:
    """Whether torch's nearest pixel is onnxruntime's at this scale, looked at one by one."""
    if scale is None or not _whole(scale):
        return False
    for size in (*range(1, 20), 2048):
        out = np.arange(int(size * scale))
        theirs = np.clip(_known_nearest(out, np.float32(scale), size, where, nearest), 0, size - 1)
        ours = np.minimum(
            np.floor(out.astype(np.float32) * (np.float32(size) / np.float32(max(1, len(out))))), size - 1
        )
        if scale not in (1, 2) and not np.array_equal(theirs, ours):
            return False
        if scale in (1, 2) and not np.array_equal(theirs, out // int(scale)):
            return False
    return True


def _known_nearest(out: Any, scale: Any, size: int, where: str, nearest: str) -> Any:
    """onnxruntime's nearest pixels by its two most frequent formulas; -1 for others."""
    half = np.float32(0.5)
    place = out.astype(np.float32)
    if (where, nearest) in (("asymmetric", "floor"), ("asymmetric", "simple")):
        return np.floor(place / scale)
    if (where, nearest) == ("half_pixel", "round_prefer_floor"):
        return np.ceil((place + half) / scale - half - half)
    return np.full(out.shape, -1.0) if size > 1 else np.zeros(out.shape)


def _nearest(r: Reader, axis: _Axis, where: str, nearest: str) -> Ref:
    """For each pixel of a resized dimension the one it is taken from, in float32 as onnxruntime computes
    it."""
    if where not in ("asymmetric", "half_pixel", "pytorch_half_pixel", "align_corners") or nearest not in (
        "floor",
        "ceil",
        "simple",
    ):
        raise UnsupportedModel(f"Resize takes the nearest pixel by {where}, {nearest}")
    place = r.emit("aten.arange.default", axis.out, dtype=_FLOAT)
    if where == "align_corners":
        at = r.emit("aten.mul.Scalar", place, axis.size - 1)
        at = r.emit("aten.div.Scalar", at, larger(axis.out - 1, 1))
    else:
        at = _scaled_place(r, axis, where, place)
    up = nearest == "ceil" or (nearest == "simple" and axis.scale is not None and axis.scale < 1)
    at = r.emit(f"aten.{'ceil' if up else 'floor'}.default", at)
    return r.emit(
        "aten.to.dtype", r.emit("aten.clamp.default", at, 0, axis.size - 1), Special("dtype", "int64")
    )


def _scaled_place(r: Reader, axis: _Axis, where: str, place: Ref) -> Ref:
    """Where a pixel lies in the image before, by the scale."""
    if axis.scale is not None:
        scale = r.tensor(np.float32(axis.scale))
    else:
        both = [r.emit("aten.scalar_tensor.default", v, dtype=_FLOAT) for v in (axis.out, axis.size)]
        scale = r.emit("aten.div.Tensor", *both)
    if where == "asymmetric":
        return r.emit("aten.div.Tensor", place, scale)
    at = r.emit("aten.div.Tensor", r.emit("aten.add.Scalar", place, 0.5), scale)
    at = r.emit("aten.sub.Scalar", at, 0.5)
    if where == "pytorch_half_pixel":  # a single pixel is the first
        return r.emit("aten.mul.Scalar", at, smaller(axis.out - 1, 1))
    return at
