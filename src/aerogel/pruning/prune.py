"""prune(), finalize(): masks held by torch's own parametrization, so that any training loop, optimizer and checkpoint works."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from aerogel.errors import AerogelError
from aerogel.pruning.masks import Shares, masks

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
SCOPES, SCORES = ("uniform", "global", "erk"), ("magnitude", "taylor")


class Recipe(Protocol):
    """What advise() gives: for each layer a pattern and a share of zeros."""

    @property
    def recipe(self) -> Mapping[str, tuple[str, float]]: ...


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


def prune(
    model: nn.Module,
    sparsity: float | Mapping[str, float] | Recipe,
    *,
    pattern: str = "unstructured",
    scope: str = "uniform",
    score: str = "magnitude",
    exclude: Iterable[str] = (),
) -> nn.Module:
    """Mask the least important weights of every convolution and Linear, in place; the model is returned.

    `sparsity` is the share of zeros, of each layer (`scope` "uniform"), of all together ("global") or spread so that larger layers
    lose more ("erk"); or {layer: share}, and layers not named keep what they have; or what advise() gave for a speedup. `pattern`
    is "unstructured", "NxM" (blocks of N filters x M input positions), "tilewise" (TW-2D), "tw1d" or "tew". `score` is "magnitude"
    or "taylor" (|weight x gradient|: call backward() first). `exclude` names layers to leave alone. What is zero already is least
    important, so calling again with more only adds zeros. Train on as you like: masks hold. finalize() makes them part of the
    weights; compile() does not need it.
    """
    if not isinstance(sparsity, int | float | Mapping):
        for kind in sorted({kind for kind, _ in sparsity.recipe.values()}):
            shares = {layer: share for layer, (own, share) in sparsity.recipe.items() if own == kind}
            prune(model, shares, pattern=kind, score=score, exclude=exclude)
        return model
    if scope not in SCOPES or score not in SCORES:
        raise AerogelError(f"scope is one of {', '.join(SCOPES)}, score one of {', '.join(SCORES)}; not '{scope}' and '{score}'")
    found = dict(prunable(model))
    unknown = [n for n in (*exclude, *(sparsity if isinstance(sparsity, Mapping) else ())) if n not in found]
    if unknown:
        raise AerogelError(f"'{unknown[0]}' is no convolution or Linear of the model; it has {', '.join(found) or 'none'}")
    wanted = {n: m for n, m in found.items() if n not in exclude and (not isinstance(sparsity, Mapping) or n in sparsity)}
    given = list(sparsity.values()) if isinstance(sparsity, Mapping) else [sparsity]
    if not all(0 <= s < 1 for s in given):
        raise AerogelError(f"sparsity is a share of zeros from 0 to less than 1, not {sparsity}")
    with torch.no_grad():
        scores = {name: _score(name, module, score) for name, module in wanted.items()}
        wanted_shares: Shares = sparsity if isinstance(sparsity, Mapping) else _shares(scores, sparsity, scope)
        for name, kept in masks(scores, wanted_shares, pattern).items():
            held = attached(wanted[name])
            held.mask.copy_(kept & held.mask)
    return model


def prunable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers with weights, by name; a wrapper's own name (DistributedDataParallel) is left out."""
    for name, module in model.named_modules():
        if isinstance(module, LAYERS):
            yield name.removeprefix("module."), module


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


def finalize(model: nn.Module) -> nn.Module:
    """Make the masks part of the weights, in place: zeros stay, what held them goes."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight"):
            held: Any = module.parametrizations
            if any(isinstance(one, Mask) for one in held["weight"]):
                _bake(module)
    return model


def as_weights(model: nn.Module) -> nn.Module:
    """The model, or where weights are computed from others (masks of ours, torch's parametrizations and pruning) a copy that has
    them as they are now."""
    if not any(parametrize.is_parametrized(m) or _hooks(m) for m in model.modules()):
        return model
    for module in model.modules():
        for hook in _hooks(module):  # what it computed is no leaf, and only leaves can be copied; the next call computes it again
            setattr(module, hook._tensor_name, getattr(module, hook._tensor_name).detach())
    copied = copy.deepcopy(model)
    for module in list(copied.modules()):
        for hook in _hooks(module):
            sys.modules["torch.nn.utils.prune"].remove(module, hook._tensor_name)
        if parametrize.is_parametrized(module):
            _bake(module)
    return copied


def _hooks(module: nn.Module) -> list[Any]:
    """torch's own pruning of a module. Whoever used it has imported it; importing it here would take a tenth of a second."""
    torchs = sys.modules.get("torch.nn.utils.prune")
    return [] if torchs is None else [h for h in module._forward_pre_hooks.values() if isinstance(h, torchs.BasePruningMethod)]


def _bake(module: nn.Module) -> None:
    """Parametrized weights become plain ones. Not by torch's own remove_parametrizations: that takes the property from a class
    which copies of the module share."""
    held: Any = module.parametrizations
    values = {name: nn.Parameter(getattr(module, name).detach().clone()) for name in held}
    del module.parametrizations
    module.__class__ = type(module).__mro__[1]
    for name, value in values.items():
        module.register_parameter(name, value)


def _score(name: str, module: nn.Module, how: str) -> Tensor:
    weight: Any = module.weight
    if how == "magnitude":
        return torch.as_tensor(weight).abs().cpu()
    gradient = _under(module).grad
    if gradient is None:
        raise AerogelError(f"score 'taylor' needs gradients, and '{name}' has none: call backward() on a loss first")
    found: Tensor = (weight * gradient).abs().cpu()
    return found


def _under(module: nn.Module) -> Tensor:
    """The parameter that is trained."""
    held: Any = module
    found: Tensor = held.parametrizations["weight"].original if parametrize.is_parametrized(module, "weight") else held.weight
    return found


def _shares(scores: Mapping[str, Tensor], sparsity: float, scope: str) -> Shares:
    if scope == "global":
        return sparsity
    return dict.fromkeys(scores, sparsity) if scope == "uniform" else erk(scores, sparsity)


def erk(scores: Mapping[str, Tensor], sparsity: float) -> dict[str, float]:
    """Erdos-Renyi-Kernel: a layer's density is in proportion to the sum of its dimensions over their product, none above 1."""
    sizes = {name: s.numel() for name, s in scores.items()}
    raw = {name: sum(s.shape) / s.numel() for name, s in scores.items()}
    full: set[str] = set()
    while True:
        wanted = (1 - sparsity) * sum(sizes.values()) - sum(sizes[n] for n in full)
        scale = wanted / sum(raw[n] * sizes[n] for n in raw if n not in full) if len(full) < len(raw) else 0.0
        over = {n for n in raw if n not in full and scale * raw[n] > 1}
        if not over:
            return {n: 0.0 if n in full else 1 - scale * raw[n] for n in raw}
        full |= over
