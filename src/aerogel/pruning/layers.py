"""Layers that can be pruned, seen as matrices: filters x positions (c, r, s), and what meets each position.

A convolution is a product: its weight as a matrix times the patches of its input, one column for each pixel
of its output. Groups are products side by side, a Linear is a convolution of one pixel, a transposed
convolution one of its input with zeros between the pixels and its kernel turned around.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, *TRANSPOSED)


def prunable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers with weights, by name; a wrapper's own name (DistributedDataParallel) is left out."""
    wrapped = [name for name, _ in model.named_children()] == ["module"]
    for name, module in model.named_modules():
        if isinstance(module, LAYERS):
            yield name.removeprefix("module.") if wrapped else name, module


def groups(module: nn.Module) -> int:
    """Products side by side."""
    found = getattr(module, "groups", 1)
    assert isinstance(found, int)
    return found


def filters_first(module: nn.Module, weight: Tensor) -> Tensor:
    """A layer's weight, or anything of its shape, as filters x channels x kernel."""
    if not isinstance(module, TRANSPOSED):
        return weight
    many = groups(module)
    grouped = weight.reshape(many, weight.shape[0] // many, *weight.shape[1:]).transpose(1, 2)
    return grouped.reshape(many * weight.shape[1], -1, *weight.shape[2:])


def as_weight(module: nn.Module, filters: Tensor, shape: torch.Size) -> Tensor:
    """The way back, to the shape of the weight, from filters x channels x kernel or a matrix."""
    if not isinstance(module, TRANSPOSED):
        return filters.reshape(shape)
    many = groups(module)
    grouped = filters.reshape(many, shape[1], shape[0] // many, *shape[2:])
    return grouped.transpose(1, 2).reshape(shape)


def under(module: nn.Module) -> Tensor:
    """The parameter that is trained: what a mask lies on, or the weight itself; of a weight that is made of
    several parameters (weight_norm) what they make."""
    held: Any = module
    own = held.parametrizations["weight"] if parametrize.is_parametrized(module, "weight") else None
    original: Tensor | None = getattr(own, "original", None)
    found: Tensor = held.weight if original is None else original
    return found


def owned_once(model: nn.Module, module: nn.Module) -> bool:
    """Whether no other module of the model has the layer's weight too, as a tied embedding has."""
    mine = under(module)
    return sum(p is mine for m in model.modules() for p in m._parameters.values()) == 1


def windows(module: nn.Module, x: Tensor) -> Tensor:
    """What each pixel of the output is made of: a view, images x pixels in each dimension x channels x
    kernel."""
    if isinstance(module, nn.Linear):
        return x if x.dim() > 1 else x[None]
    layer: Any = module
    rank = len(layer.kernel_size)
    x = x if x.dim() == rank + 2 else x.unsqueeze(0)
    if isinstance(module, TRANSPOSED):
        x, stride = _spread(layer, x), (1,) * rank
    else:
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x, stride = F.pad(x, layer._reversed_padding_repeated_twice, mode), layer.stride
    for i, (side, dilation, step) in enumerate(zip(layer.kernel_size, layer.dilation, stride, strict=True)):
        x = x.unfold(2 + i, dilation * (side - 1) + 1, step)[..., ::dilation]
    return x.movedim(1, 1 + rank)


def _spread(layer: Any, x: Tensor) -> Tensor:
    """The input of a transposed convolution, with zeros between its pixels and around them."""
    for i, stride in enumerate(layer.stride):
        wide = x.new_zeros(*x.shape[: 2 + i], (x.shape[2 + i] - 1) * stride + 1, *x.shape[3 + i :])
        wide[(slice(None),) * (2 + i) + (slice(None, None, stride),)] = x
        x = wide
    around = [
        (d * (k - 1) - p, d * (k - 1) - p + o)
        for d, k, p, o in zip(
            layer.dilation, layer.kernel_size, layer.padding, layer.output_padding, strict=True
        )
    ]
    return F.pad(x, [side for pair in reversed(around) for side in pair])


def columns(module: nn.Module, picked: Tensor) -> Tensor:
    """Windows of some pixels as groups x pixels x positions, in the order of the weight's matrix."""
    if isinstance(module, TRANSPOSED):
        picked = picked.flip(tuple(range(2, picked.dim())))
    many = groups(module)
    return picked.reshape(len(picked), many, -1).transpose(0, 1)


def results(module: nn.Module, y: Tensor) -> Tensor:
    """A layer's answer without its bias, pixels last but one: images x pixels in each dimension x filters."""
    held: Any = module
    if isinstance(module, nn.Linear):
        y = y if y.dim() > 1 else y[None]
    else:
        rank = len(held.kernel_size)
        y = (y if y.dim() == rank + 2 else y.unsqueeze(0)).movedim(1, -1)
    return y if held.bias is None else y - held.bias.detach()
