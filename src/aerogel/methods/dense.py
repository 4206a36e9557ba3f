"""`dense`: the strongest dense convolution torch offers. It is a member of the choice set, not a fallback.

Four candidates: both memory layouts, plain `torch.conv2d` or oneDNN with the weight reordered once and bias, activation and
residual add fused, through the ops that inductor's freezing uses. Those are private: where this torch lacks one, the plain form
remains. Wins below about two thirds zeros, and where a layer is too small for anything to matter.

Packed: the weight as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from aerogel.candidate import Config, Kernel, Packed, Stats
from aerogel.errors import InvalidFile
from aerogel.layout import NUMPY, Array, Layout
from aerogel.problem import Conv
from aerogel.target import Target

NAME, PAPER = "dense", "torch and oneDNN"
SUMMARY = "torch's own convolution: both layouts, plain or oneDNN with the weight reordered and the epilogue fused"
VERSION = 1

TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
KINDS = {dtype: kind for kind, dtype in TORCH.items()}
LAYOUTS = ("contiguous", "channels_last")
_FUSED = {"relu": ("relu", ""), "relu6": ("hardtanh", ""), "silu": ("swish", ""), "hardswish": ("hardswish", "")}


def private_ops(kind: str = "f32") -> tuple[Any, Any] | None:
    """oneDNN's (reorder weight, fused convolution), or None where this torch has not both or this CPU not the element type."""
    reorder = getattr(torch._C._nn, "mkldnn_reorder_conv2d_weight", None)
    fused = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
    if reorder is None or fused is None or not torch._C._has_mkldnn:
        return None
    able = {"f16": "_is_mkldnn_fp16_supported", "bf16": "_is_mkldnn_bf16_supported"}.get(kind)
    return (reorder, fused) if able is None or getattr(torch.ops.mkldnn, able, bool)() else None


def refuse(conv: Conv, target: Target, stats: Stats) -> str | None:
    d = conv.dtypes
    if len({d.input, d.weight, d.output}) != 1:
        return f"torch wants one element type throughout, not {d}"
    if conv.n == 0:
        return "an empty batch has nothing to time"
    return None


def configs(conv: Conv, target: Target, stats: Stats) -> Iterator[Config]:
    """Prepacked channels_last first: it wins most layers. A Linear has one form."""
    if conv.n is not None and _features(conv):
        yield Config.make(NAME, channels_last=0, prepacked=0)
        return
    for prepacked in (1, 0) if private_ops(conv.dtypes.input) else (0,):
        for layout in (1, 0):
            yield Config.make(NAME, channels_last=layout, prepacked=prepacked)


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    return Packed(NAME, VERSION, {"weight": weight})


def unpack(packed: Packed, conv: Conv) -> Array:
    weight = packed.arrays.get("weight")
    good = weight is not None and weight.shape == conv.weight_shape and weight.dtype == NUMPY[conv.dtypes.weight]
    if weight is None or not good or (packed.format, packed.version) != (NAME, VERSION):
        raise InvalidFile(f"not a {NAME} version {VERSION} weight of {conv.layer()}")
    return weight


def layouts(
    conv: Conv, config: Config, target: Target, border: tuple[int, int, int, int], pitch: int = 0, x_pitch: int = 0
) -> tuple[Layout, Layout]:
    """torch's own layouts, which have no border whatever is asked for."""
    kind = LAYOUTS[config["channels_last"]]
    return Layout(kind, conv.size[1], dtype=conv.dtypes.input), Layout(kind, conv.out[1], dtype=conv.dtypes.output)


def build(
    packed: Packed, conv: Conv, config: Config, target: Target, reads: Layout, writes: Layout, rows: int | None = None
) -> list[Kernel]:
    weight = to_torch(unpack(packed, conv), conv.dtypes.weight)
    if _features(conv):
        return [Kernel(f"{NAME} {conv}", reads, writes, call=_linear(weight, conv))]
    call = _prepacked(weight, conv) if config["prepacked"] else _plain(weight, conv, config)
    return [Kernel(f"{NAME} {conv}", reads, writes, call=call)]


def to_torch(array: Array, dtype: str) -> torch.Tensor:
    """A tensor over the same memory; bf16 arrives as its bits."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor


def from_torch(tensor: torch.Tensor) -> Array:
    """The inverse of `to_torch`."""
    return np.asarray((tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy())


Call = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]


def _plain(weight: torch.Tensor, conv: Conv, config: Config) -> Call:
    if config["channels_last"]:
        weight = weight.contiguous(memory_format=torch.channels_last)
    return lambda x, bias, residual: plain(x, weight, conv, bias, residual)


def _linear(weight: torch.Tensor, conv: Conv) -> Call:
    """One torch call: each gives up the GIL, and beside a busy thread waits for it."""
    flat = weight.flatten(1)

    def call(x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        own = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
        if x.dim() == 2:
            return _after(F.linear(x, flat, own), conv, conv.epilogue, residual)
        return _after(F.linear(x.flatten(1), flat, own)[:, :, None, None], conv, conv.epilogue, residual)

    return call


def plain(
    x: torch.Tensor, weight: torch.Tensor, conv: Conv, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """torch.conv2d and one call for each step of the epilogue."""
    own = None if bias is None else bias.to(x.dtype)
    x, padding = _padded(x, conv)
    y = F.conv2d(x, weight, own, conv.stride, padding, _dilation(conv), conv.groups)
    return _after(y, conv, conv.epilogue, residual)


def _features(conv: Conv) -> bool:
    """Whether this is a Linear: one pixel, one tap, every channel read by every filter."""
    return (conv.size, conv.r, conv.s, conv.groups, conv.pad) == ((1, 1), 1, 1, 1, (0, 0, 0, 0))


def _prepacked(weight: torch.Tensor, conv: Conv) -> Call:
    ops = private_ops(conv.dtypes.input)
    assert ops is not None
    reorder, fused = ops
    top, left, bottom, right = conv.pad
    even = (top, left) == (bottom, right)
    padding = [top, left] if even else [0, 0]
    n, c, h, w = conv.x_shape
    size = [n, c, h, w] if even else [n, c, h + top + bottom, w + left + right]
    shape = (padding, list(conv.stride), _dilation(conv), conv.groups)
    packed = reorder(weight.to_mkldnn(), *shape, size)
    steps = tuple(e for e in conv.epilogue if e != "bias")
    if steps[:1] == ("add",):
        after = steps[2:] if steps[1:2] == ("relu",) else steps[1:]
        unary = "relu" if steps[1:2] == ("relu",) else None

        def call(x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
            x, _ = _padded(x, conv)
            own = None if bias is None else bias.to(x.dtype)
            y = fused.binary(x, residual, packed, own, *shape, "add", 1.0, unary, [], None)
            return _after(y, conv, after, residual)

        return call
    attribute, scalars, algorithm = _attribute(steps[0]) if steps else ("none", [], "")
    after = steps[attribute != "none" :]

    def call_unary(x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        x, _ = _padded(x, conv)
        own = None if bias is None else bias.to(x.dtype)
        y = fused(x, packed, own, *shape, attribute, scalars, algorithm)
        return _after(y, conv, after, residual)

    return call_unary


def _dilation(conv: Conv) -> list[int]:
    """A kernel one wide has no dilation. oneDNN under torch 2.13 crashes when told of one (channels_last, groups, padding)."""
    return [d if size > 1 else 1 for d, size in zip(conv.dilation, (conv.r, conv.s), strict=True)]


def _attribute(step: str) -> tuple[str, list[float], str]:
    """oneDNN's name of an activation, with its numbers; "none" of one it has not."""
    if step.startswith("above"):
        return "none", [], ""
    if step.startswith("leaky"):
        return "leaky_relu", [float(step[5:])], ""
    name, algorithm = _FUSED[step]
    return name, [0.0, 6.0] if step == "relu6" else [], algorithm


def _padded(x: torch.Tensor, conv: Conv) -> tuple[torch.Tensor, tuple[int, int]]:
    """torch pads both sides alike; what differs is padded beforehand."""
    top, left, bottom, right = conv.pad
    if (top, left) == (bottom, right):
        return x, (top, left)
    return F.pad(x, (left, right, top, bottom)), (0, 0)


def _after(y: torch.Tensor, conv: Conv, steps: tuple[str, ...], residual: torch.Tensor | None) -> torch.Tensor:
    """What was not fused, as torch ops."""
    for step in steps:
        if step == "add":
            assert residual is not None
            y = y + residual
        elif step != "bias":
            y = _ACTIVATE[conv.activation or ""](y, conv.parameter)
    return y


_ACTIVATE: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "relu": lambda y, _: F.relu(y),
    "relu6": lambda y, _: F.relu6(y),
    "leaky": lambda y, slope: F.leaky_relu(y, slope),
    "above": lambda y, limit: F.threshold(y, limit, 0.0),
    "silu": lambda y, _: F.silu(y),
    "hardswish": lambda y, _: F.hardswish(y),
}
