"""What prune() is asked for: which layers, in which pattern, how far; and the masks that give it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from aerogel.errors import InvalidArgument
from aerogel.pruning.advice import Point
from aerogel.pruning.held import Mask
from aerogel.pruning.layers import prunable
from aerogel.pruning.masks import Shares, as_block, masks, most
from aerogel.pruning.mistakes import a_module, a_share, no_layer

SCOPES, SCORES = ("uniform", "global", "erk", "error"), ("magnitude", "taylor", "wanda", "obs")
FROM_DATA = ("wanda", "obs")
"""Scores that look at what the layers are given."""


class HasRecipe(Protocol):
    """What advise() and slim() give: for each layer a pattern and a share of zeros."""

    @property
    def recipe(self) -> Mapping[str, Point]: ...


Sparsity = float | Mapping[str, float] | Mapping[str, Point] | HasRecipe


class Asked(NamedTuple):
    """A layer that is to be pruned."""

    module: nn.Module
    pattern: str
    share: float


def masked(scores: Mapping[str, Tensor], asked: Mapping[str, Asked], scope: str) -> dict[str, Tensor]:
    """What is kept of each layer, by scores of filters x channels x kernel."""
    shares: Shares = {name: one.share for name, one in asked.items()}
    if scope == "global":
        shares = next(one.share for one in asked.values())
    elif scope == "erk":
        shares = erk(scores, next(one.share for one in asked.values()))
    found: dict[str, Tensor] = {}
    for pattern in dict.fromkeys(one.pattern for one in asked.values()):
        own = {name: score for name, score in scores.items() if asked[name].pattern == pattern}
        found |= masks(own, shares, pattern)
    return found


def chosen(
    model: nn.Module, sparsity: Any, pattern: str, scope: str, score: str, exclude: Collection[str]
) -> dict[str, Asked]:
    """The layers that are to be pruned, by name, and what each is asked for; or the sentence that says what
    is wrong."""
    found = dict(prunable(a_module(model, "prune")))
    if not found:
        raise InvalidArgument(
            "the model has no convolution (Conv1d, Conv2d, Conv3d, or transposed) and no Linear to prune"
        )
    if scope not in SCOPES or score not in SCORES:
        raise InvalidArgument(
            f"scope is one of {', '.join(SCOPES)}, score one of {', '.join(SCORES)}; not '{scope}' "
            f"and '{score}'"
        )
    points = _points(sparsity, pattern, found)
    for name in (*exclude, *points):
        if name not in found:
            raise no_layer(name, found)
    for own, share in points.values():
        as_block(own)
        if share > most(own):
            raise InvalidArgument(f"pattern {own} has {most(own):.0%} zeros at most, not {share:.0%}")
    wanted = {name: Asked(found[name], *points[name]) for name in points if name not in exclude}
    if not wanted:
        raise InvalidArgument(
            "no layer is left to prune: "
            + ("sparsity names none" if not points else "exclude names them all")
        )
    lazy = [name for name, one in wanted.items() if isinstance(one.module.weight, UninitializedParameter)]
    if lazy:
        raise InvalidArgument(f"'{lazy[0]}' has no weight yet: call the model once on an example first")
    for name, one in wanted.items():
        why = why_not(one.module, score)
        if why:
            raise InvalidArgument(f"'{name}' {why}")
    return wanted


def why_not(module: nn.Module, score: str) -> str:
    """What keeps a layer from being pruned: its weight is not there, or computed from others; "" where
    nothing does."""
    weight: Any = module.weight
    if weight.is_meta:
        return "has no weight yet, the model is on the meta device: load its weights first"
    if not parametrize.is_parametrized(module, "weight"):
        if "weight" in module._parameters:
            return ""
        return (
            "computes its weight by a hook (torch.nn.utils.prune, or an old weight_norm): make it plain "
            "first, torch.nn.utils.prune.remove(layer, 'weight')"
        )
    held: Any = module.parametrizations
    if score in ("obs", "taylor") and not all(isinstance(one, Mask) for one in held["weight"]):
        return (
            f"computes its weight (weight_norm, or another parametrization), and score '{score}' has to "
            "change it: torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight') first"
        )
    return ""


def _points(sparsity: Any, pattern: str, layers: Iterable[str]) -> dict[str, Point]:
    """For each layer its pattern and share."""
    if hasattr(sparsity, "recipe"):
        sparsity = sparsity.recipe
        if not sparsity:
            raise InvalidArgument(
                "there is no recipe: ask for a speedup that pruning can give, advise(model, args, "
                "speedup=1.5), or let slim() spend more of the score, max_drop=0.02"
            )
    if not isinstance(sparsity, Mapping):
        return dict.fromkeys(layers, (pattern, a_share(sparsity, "sparsity", zero=True)))
    return {name: _point(name, said, pattern) for name, said in sparsity.items()}


def _point(name: str, said: Any, pattern: str) -> Point:
    """A share, or a pattern and a share (JSON has them as a list)."""
    own, share = said if isinstance(said, tuple | list) and len(said) == 2 else (pattern, said)
    return own, a_share(share, f"sparsity of '{name}'", zero=True)


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
