"""The nouns in torch's words: element types, arrays as tensors, and a Conv as torch's own calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from aerogel.ir.conv import Conv
from aerogel.ir.dtypes import ELEMENTS, INT8, Array
from aerogel.ir.quantized import Requantize
from aerogel.torch_versions import require_supported_torch

require_supported_torch(torch.__version__)  # everything that uses torch imports this module

_FLOATS: dict[str, torch.dtype] = {name: getattr(torch, e.torch) for name, e in ELEMENTS.items()}
TORCH = _FLOATS | {"u8": torch.uint8, "s8": torch.int8, "s32": torch.int32}
DTYPE_NAMES = {dtype: name for name, dtype in _FLOATS.items()}
"""Of floats: bytes of a user's are no quantised numbers."""
NAMES = {dtype: name for name, dtype in TORCH.items()}


def to_torch(array: Array, dtype: str) -> torch.Tensor:
    """A tensor over the same memory, or a copy where that may not be written to (a mapped file); bf16 arrives
    as its bits."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor


def from_torch(tensor: torch.Tensor) -> Array:
    """The inverse of `to_torch`."""
    return np.asarray((tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy())


def subnormal(tensor: torch.Tensor) -> torch.Tensor | None:
    """Where floats are too small for all their digits (below 1.2e-38), None where none is. Weight decay
    leaves such weights: they add nothing to an answer, and a CPU takes a hundred times as long for each. Half
    precision has them below 6e-5, where they count and cost nothing; a number alone may be an epsilon."""
    if tensor.dtype not in (torch.float32, torch.bfloat16) or tensor.numel() < 2:
        return None
    found = (tensor.abs() < torch.finfo(tensor.dtype).tiny) & (tensor != 0)
    return found if found.any() else None


def flushed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with zeros for what is subnormal."""
    found = subnormal(tensor)
    return tensor if found is None else tensor.masked_fill(found, 0)


def plain(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv: Conv,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """torch.conv2d and one call for each step of the epilogue."""
    if conv.dtypes == INT8:
        assert bias is not None
        return in_bytes(x, weight, conv, bias, residual)
    own = None if bias is None else bias.to(x.dtype)
    x, padding = padded(x, conv)
    y = F.conv2d(x, weight, own, conv.stride, padding, dilation(conv), conv.groups)
    return epilogue(y, conv, conv.epilogue, residual)


def in_bytes(
    x: torch.Tensor, weight: torch.Tensor, conv: Conv, words: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    """A convolution in int8, to the last bit (quantized.py). torch has no such product on every CPU: floats
    hold the whole numbers, in parts that are small enough."""
    how = Requantize.parse(words.numpy(), conv.k)
    centred, own = x.float() - how.x_zero, weight.float()
    products = int(np.prod(conv.weight_shape[1:]))
    if products <= _EXACT_F32:
        parts = [(1, centred, own)]
    elif products <= _EXACT_HALVES:
        high = (centred / 16).floor()
        parts = [(16, high, own), (1, centred - 16 * high, own)]
    else:
        parts = [(1, centred.double(), own.double())]
    sums: Array = np.zeros(1, np.int64)
    for times, part, values in parts:
        image, padding = padded(part, conv)
        y = F.conv2d(image, values, None, conv.stride, padding, dilation(conv), conv.groups)
        sums = sums + times * y.double().numpy().astype(np.int64)
    sums = sums + how.x_zero * weight.flatten(1).sum(1, dtype=torch.int64).numpy()[:, None, None]
    beside = None if residual is None else residual.numpy()
    return torch.from_numpy(how.bytes_of(sums, conv, beside))


_EXACT_F32, _EXACT_HALVES = 2**24 // (255 * 128), 2**24 // (16 * 128)
"""Products of a byte, or of half a byte, and a weight whose sums f32 holds exactly."""


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
    "gelu": lambda y, _: F.gelu(y),
    "sigmoid": lambda y, _: torch.sigmoid(y),
    "hardsigmoid": lambda y, _: F.hardsigmoid(y),
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
