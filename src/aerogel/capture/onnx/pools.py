"""ONNX's sliding windows: where they lie, and its pools in torch's, with onnxruntime's sizes whatever the
flags.

Where both sides are padded alike torch's own pools are used. Else the image is padded to just what the
windows cover, and a mean is divided by that of a mask of what counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from aerogel.capture.nodes import LOWEST
from aerogel.capture.onnx.file import Attributes
from aerogel.capture.onnx.sizes import Size, divided, larger
from aerogel.capture.onnx.values import Reader, Value, operator
from aerogel.errors import InvalidFile, UnsupportedModel
from aerogel.ir import Ref


@dataclass(frozen=True)
class Window:
    """A sliding window: for each dimension its size, stride, dilation, and the padding before and after
    (numbers or Sizes)."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[Any]
    after: list[Any]

    @property
    def even(self) -> bool:
        """Whether both sides are padded alike, by fixed numbers."""
        fixed = not any(isinstance(p, Size) for p in self.before + self.after)
        return fixed and self.before == self.after and min(self.before, default=0) >= 0


def window(r: Reader, a: Attributes, kernel: list[int], x: Ref, pooled: bool = False) -> Window:
    """What a node's attributes say; onnxruntime's pools forget the dilation where they pad by themselves."""
    n = len(kernel)
    auto = a.get("auto_pad", "NOTSET")
    strides, dilations = list(a.get("strides") or [1] * n), list(a.get("dilations") or [1] * n)
    pads = list(a.get("pads") or [0] * (2 * n)) if auto == "NOTSET" else [0] * (2 * n)
    if (
        not len(strides) == len(dilations) == len(pads) / 2 == r.rank(x) - 2 == n
        or min(strides + dilations + kernel, default=1) < 1
    ):
        raise InvalidFile(
            f"'{a['layer']}': strides {strides}, dilations {dilations}, pads {pads} do not fit {n} dimensions"
        )
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        if pooled and (
            any(d != 1 for d in dilations) or any(k < s for k, s in zip(kernel, strides, strict=True))
        ):
            raise UnsupportedModel(
                f"'{a['layer']}': auto_pad {auto} with dilation or strides beyond the window"
            )
        sizes = r.sizes(x)[2:] if any(s != 1 for s in strides) else [0] * n
        reach = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
        total = [_same(*one) for one in zip(sizes, strides, reach, strict=True)]
        before = [t // 2 if auto == "SAME_UPPER" else (t + 1) // 2 for t in total]
        pads = before + [t - b for t, b in zip(total, before, strict=True)]
    return Window(kernel, strides, dilations, pads[:n], pads[n:])


def _same(size: Any, stride: int, reach: int) -> Any:
    """Padding that gives size / stride windows, rounded up."""
    if stride == 1:
        return reach
    return larger(((size + stride - 1) // stride - 1) * stride + reach + 1 - size, 0)


def padded(r: Reader, x: Ref, before: list[Any], after: list[Any], value: float = 0.0) -> Ref:
    """x with these numbers (or Sizes) of pixels more on each side of its images."""
    around = [side for pair in zip(reversed(before), reversed(after), strict=True) for side in pair]
    return r.emit("aten.constant_pad_nd.default", x, around, value)


def _covered(r: Reader, a: Attributes, x: Ref, w: Window) -> list[Any]:
    """How many pixels behind the image its windows cover: onnxruntime's last one begins in the image or the
    padding before it."""
    up, rest = bool(a.get("ceil_mode", 0)), list[Any]()
    for size, k, s, d, before, after in zip(
        r.sizes(x)[2:], w.kernel, w.strides, w.dilations, w.before, w.after, strict=True
    ):
        reach = d * (k - 1) + 1
        room = size + before + after - reach
        count = divided(room + (s - 1 if up else 0), s) + 1
        if up:  # one less where the last begins behind the image
            last = divided(size + before - 1, s) + 1
            count = count - larger(count - last, 0)
        rest.append((count - 1) * s + reach - size - before)
    return rest


@operator
def MaxPool(r: Reader, a: Attributes, x: Value) -> Any:
    x, kernel = r.tensor(x), list(a["kernel_shape"])
    if not r.dtype(x).is_floating_point:
        raise UnsupportedModel(f"MaxPool '{a['layer']}' is over whole numbers")
    w, op = window(r, a, kernel, x, pooled=True), f"aten.max_pool{len(kernel)}d.default"
    if w.even and all(2 * p <= k for p, k in zip(w.before, kernel, strict=True)):
        return r.emit(
            op, x, kernel, w.strides, w.before, w.dilations, bool(a.get("ceil_mode", 0)), layer=a["layer"]
        )
    x = padded(r, x, w.before, _covered(r, a, x, w), LOWEST)
    return r.emit(op, x, kernel, w.strides, [0] * len(kernel), w.dilations, False, layer=a["layer"])


@operator
def AveragePool(r: Reader, a: Attributes, x: Value) -> Any:
    x, kernel = r.tensor(x), list(a["kernel_shape"])
    w, op = window(r, a, kernel, x, pooled=True), f"aten.avg_pool{len(kernel)}d.default"
    if any(d != 1 for d in w.dilations):
        raise UnsupportedModel(f"AveragePool '{a['layer']}' is dilated")
    up, counts, none = bool(a.get("ceil_mode", 0)), bool(a.get("count_include_pad", 0)), [0] * len(kernel)
    if w.even and all(2 * p <= k for p, k in zip(w.before, kernel, strict=True)):
        return r.emit(op, x, kernel, w.strides, w.before, up, counts or not any(w.before), layer=a["layer"])
    rest = _covered(r, a, x, w)
    sums = r.emit(op, padded(r, x, w.before, rest), kernel, w.strides, none, False, True, layer=a["layer"])
    sizes = r.sizes(x)[2:]
    fixed = not any(isinstance(v, Size) for v in (*sizes, *rest))
    if counts and not up and fixed and all(v <= after for v, after in zip(rest, w.after, strict=True)):
        return sums
    mask = r.emit("aten.ones.default", [1, 1, *sizes])
    if counts:
        mask = padded(r, mask, w.before, w.after, 1.0)
        mask = padded(r, mask, none, [have - need for have, need in zip(rest, w.after, strict=True)])
    else:
        mask = padded(r, mask, w.before, rest)
    share = r.emit(op, mask, kernel, w.strides, none, False, True)
    # a window of padding alone has the mean 0
    least = r.emit("aten.clamp_min.default", share, 0.5 / math.prod(kernel))
    return r.emit("aten.div.Tensor", sums, least)


@operator
def GlobalAveragePool(r: Reader, a: Attributes, x: Value) -> Any:
    x = r.tensor(x)
    return r.emit("aten.mean.dim", x, tuple(range(2, r.rank(x))), True, layer=a["layer"])


@operator
def GlobalMaxPool(r: Reader, a: Attributes, x: Value) -> Any:
    x = r.tensor(x)
    return r.emit("aten.amax.default", x, tuple(range(2, r.rank(x))), True, layer=a["layer"])
