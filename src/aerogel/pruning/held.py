"""Masks held by torch's own parametrization, so that any training loop, optimizer and checkpoint works."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from aerogel.pruning.layers import as_weight, under
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
    """Make the masks part of the weights, in place: zeros stay, what held them goes. An optimizer goes on:
    parameters are the same objects. Only layers that share one under different masks get one each.

    Example:
        >>> finished = aerogel.finalize(aerogel.prune(model, 0.9))

    Args:
        model: What `prune` or `Schedule` masked.
    """
    found = {module: held for module in a_module(model, "finalize").modules() if (held := masks_of(module))}
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    weights, kept = {module: under(module) for module in found}, dict[int, list[Tensor]]()
    for module, held in found.items():
        kept.setdefault(id(weights[module]), []).append(torch.stack([one.mask for one in held]).all(0))
    for module, held in found.items():
        weight, computed = weights[module], len(_over(module)) > len(held)
        alike = kept[id(weight)]
        bake(module)
        if computed or owners[id(weight)] != len(alike) or not all(one.equal(alike[0]) for one in alike):
            continue
        weight.data.masked_fill_(~alike[0], 0)
        module._parameters["weight"] = weight  # type: ignore[assignment]
    return model


def masks_of(module: nn.Module) -> list[Mask]:
    """The masks of a layer's weight."""
    return [one for one in _over(module) if isinstance(one, Mask)]


def _over(module: nn.Module) -> list[nn.Module]:
    """What a weight goes through."""
    held: Any = module.parametrizations if parametrize.is_parametrized(module, "weight") else {"weight": ()}
    return list(held["weight"])
