"""The nouns in torch's words: element types, arrays as tensors, and a Conv as torch's own calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from aerogel.ir.conv import Conv
from aerogel.ir.dtypes import ELEMENTS, Array

TORCH: dict[str, torch.dtype] = {name: getattr(torch, element.torch) for name, element in ELEMENTS.items()}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH.items()}


def to_torch(array: Array, dtype: str) -> torch.Tensor:
    """A tensor over the same memory, or a copy where that may not be written to (a mapped file); bf16 arrives
    as its bits."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor


def from_torch(tensor: torch.Tensor) -> Array:
    """The inverse of `to_torch`."""
    return np.asarray((tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy())


def plain(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv: Conv,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """torch.conv2d and one call for each step of the epilogue."""
    own = None if bias is None else bias.to(x.dtype)
    x, padding = padded(x, conv)
    y = F.conv2d(x, weight, own, conv.stride, padding, dilation(conv), conv.groups)
    return epilogue(y, conv, conv.epilogue, residual)


def dilation(conv: Conv) -> list[int]:
    """A kernel one wide has no dilation. oneDNN under torch 2.13 crashes when told of one (channels_last,
    groups, padding)."""
    return [d if size > 1 else 1 for d, size in zip(conv.dilation, (conv.r, conv.s), strict=True)]


def padded(x: torch.Tensor, conv: Conv) -> tuple[torch.Tensor, tuple[int, int]]:
    """torch pads both sides alike; what differs is padded beforehand."""
    top, left, bottom, right = conv.pad
    if (top, left) == (bottom, right):
        return x, (top, left)
    return F.pad(x, (left, right, top, bottom)), (0, 0)


def epilogue(
    y: torch.Tensor, conv: Conv, steps: tuple[str, ...], residual: torch.Tensor | None
) -> torch.Tensor:
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
    "leaky_relu": lambda y, slope: F.leaky_relu(y, slope),
    "threshold": lambda y, limit: F.threshold(y, limit, 0.0),
    "silu": lambda y, _: F.silu(y),
    "hardswish": lambda y, _: F.hardswish(y),
}


def private_ops(dtype: str = "f32") -> tuple[Any, Any] | None:
    """oneDNN's (reorder weight, fused convolution), or None where this torch has not both or this CPU not the
    element type."""
    reorder = getattr(torch._C._nn, "mkldnn_reorder_conv2d_weight", None)
    fused = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
    if reorder is None or fused is None or not torch._C._has_mkldnn:
        return None
    able = {"f16": "_is_mkldnn_fp16_supported", "bf16": "_is_mkldnn_bf16_supported"}.get(dtype)
    return (reorder, fused) if able is None or getattr(torch.ops.mkldnn, able, bool)() else None
