"""prune(), finalize(): masks held by torch's own parametrization, so that any training loop, optimizer and
checkpoint works."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from aerogel.errors import InvalidArgument
from aerogel.pruning.masks import Shares, as_block, masks
from aerogel.pruning.mistakes import a_module, a_share, no_layer, several
from aerogel.runtime.weights import bake

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

    Train on as you like: masks hold. `finalize` makes them part of the weights; `compile` does not need it.
    What is zero already is least important, so calling again with more only adds zeros.

    Example:
        >>> pruned = aerogel.prune(model, 0.9, exclude=["0"])

    Args:
        model: Any module.
        sparsity: The share of zeros; or `{layer: share}`, and layers not named keep what they have; or the
            `Advice` that `advise` gave for a speedup.
        pattern: "unstructured", "4x1" (blocks of filters x input positions), "tilewise" (TW-2D), "tw1d" or
            "tew".
        scope: The share is that of each layer ("uniform"), of all together ("global"), or spread so that
            larger layers lose more ("erk").
        score: "magnitude", or "taylor" (the size of weight x gradient: call `backward()` first).
        exclude: Layers to leave alone.
    """
    left_out = several(exclude, "exclude", "exclude=['head']")
    if hasattr(sparsity, "recipe"):
        return _followed(model, sparsity.recipe, score, left_out)
    asked = chosen(model, sparsity, pattern, scope, score, left_out)
    with torch.no_grad():
        scores = {name: _score(name, module, score) for name, (module, _) in asked.items()}
        shares: Shares = {name: share for name, (_, share) in asked.items()}
        if not isinstance(sparsity, Mapping):
            shares = _shares(scores, a_share(sparsity, "sparsity", zero=True), scope)
        for name, kept in masks(scores, shares, pattern).items():
            held = attached(asked[name][0])
            held.mask.copy_(kept & held.mask)
    return model


def chosen(
    model: nn.Module, sparsity: Any, pattern: str, scope: str, score: str, exclude: Collection[str]
) -> dict[str, tuple[nn.Module, float]]:
    """The layers that are to be pruned, by name, and the share each is asked for; or the sentence that says
    what is wrong."""
    found = dict(prunable(a_module(model, "prune")))
    if not found:
        raise InvalidArgument("the model has no convolution (Conv1d, Conv2d, Conv3d) and no Linear to prune")
    if scope not in SCOPES or score not in SCORES:
        raise InvalidArgument(
            f"scope is one of {', '.join(SCOPES)}, score one of {', '.join(SCORES)}; not '{scope}' "
            f"and '{score}'"
        )
    as_block(pattern)
    for name in (*exclude, *(sparsity if isinstance(sparsity, Mapping) else ())):
        if name not in found:
            raise no_layer(name, found)
    if isinstance(sparsity, Mapping):
        shares = {
            name: a_share(share, f"sparsity of '{name}'", zero=True) for name, share in sparsity.items()
        }
    else:
        shares = dict.fromkeys(found, a_share(sparsity, "sparsity", zero=True))
    wanted = {name: (found[name], shares[name]) for name in found if name in shares and name not in exclude}
    if not wanted:
        raise InvalidArgument(
            "no layer is left to prune: "
            + ("sparsity names none" if not shares else "exclude names them all")
        )
    lazy = [name for name, (module, _) in wanted.items() if isinstance(module.weight, UninitializedParameter)]
    if lazy:
        raise InvalidArgument(f"'{lazy[0]}' has no weight yet: call the model once on an example first")
    return wanted


def _followed(
    model: nn.Module, recipe: Mapping[str, tuple[str, float]], score: str, exclude: Collection[str]
) -> nn.Module:
    """The model pruned as advise() said. Everything is looked at before anything is pruned."""
    a_module(model, "prune")
    kinds = {
        pattern: {n: share for n, (own, share) in recipe.items() if own == pattern}
        for pattern, _ in sorted(recipe.values())
    }
    if not kinds:
        raise InvalidArgument(
            "the advice has no recipe: ask for a speedup that pruning can give, advise(model, "
            "args, speedup=1.5)"
        )
    kept = {
        pattern: {n: share for n, share in own.items() if n not in exclude} for pattern, own in kinds.items()
    }
    for pattern, own in kinds.items():
        chosen(model, own, pattern, "uniform", score, [])
    for pattern, own in kept.items():
        if own:
            prune(model, own, pattern=pattern, score=score)
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


def _score(name: str, module: nn.Module, how: str) -> Tensor:
    weight: Any = module.weight
    if how == "magnitude":
        return torch.as_tensor(weight).abs().cpu()
    gradient = _under(module).grad
    if gradient is None:
        raise InvalidArgument(
            f"score 'taylor' needs gradients, and '{name}' has none: call backward() on a loss first"
        )
    found: Tensor = (weight * gradient).abs().cpu()
    return found


def _under(module: nn.Module) -> Tensor:
    """The parameter that is trained."""
    held: Any = module
    found: Tensor = (
        held.parametrizations["weight"].original
        if parametrize.is_parametrized(module, "weight")
        else held.weight
    )
    return found


def _shares(scores: Mapping[str, Tensor], sparsity: float, scope: str) -> Shares:
    if scope == "global":
        return sparsity
    return dict.fromkeys(scores, sparsity) if scope == "uniform" else erk(scores, sparsity)


def erk(scores: Mapping[str, Tensor], sparsity: float) -> dict[str, float]:
    """Erdos-Renyi-Kernel: a layer's density is in proportion to the sum of its dimensions over their product,
    none above 1."""
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
