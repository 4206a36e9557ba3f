"""Masks held by torch's own parametrization, so that any training loop, optimizer and checkpoint works."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from aerogel.pruning.layers import as_weight
from aerogel.pruning.mistakes import a_module
from aerogel.runtime.weights import bake


class Mask(nn.Module):
    """The weight where it is kept, zero elsewhere, whatever the optimizer does to what lies under it."""

    mask: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones_like(weight, dtype=torch.bool))

    def forward(self, weight: Tensor) -> Tensor:
        return torch.where(self.mask, weight, torch.zeros((), dtype=weight.dtype, device=weight.device))

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


def attached(module: nn.Module) -> Mask:
    """The mask of a layer's weight, put there if it has none."""
    if parametrize.is_parametrized(module, "weight"):
        held: Any = module.parametrizations
        for one in held["weight"]:
            if isinstance(one, Mask):
                return one
    weight: Any = module.weight
    mask = Mask(weight)
    parametrize.register_parametrization(module, "weight", mask)
    return mask


def mark(module: nn.Module, kept: Tensor) -> None:
    """Hold what is not kept (filters x channels x kernel, or a matrix) at zero, beside what is held so
    far."""
    held = attached(module)
    held.mask.copy_(as_weight(module, kept, held.mask.shape) & held.mask.cpu())


def finalize(model: nn.Module) -> nn.Module:
    """Make the masks part of the weights, in place: zeros stay, what held them goes.

    Example:
        >>> finished = aerogel.finalize(aerogel.prune(model, 0.9))

    Args:
        model: What `prune` or `Schedule` masked.
    """
    for module in list(a_module(model, "finalize").modules()):
        if parametrize.is_parametrized(module, "weight"):
            held: Any = module.parametrizations
            if any(isinstance(one, Mask) for one in held["weight"]):
                bake(module)
    return model
