"""Pruning that repairs: layer by layer, in the order in which they run, the weights that stay are fitted to
what the dense network's layer answers, from what the already pruned network gives it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aerogel.errors import InvalidArgument
from aerogel.progress import Progress
from aerogel.pruning import obs
from aerogel.pruning.asked import Asked, masked
from aerogel.pruning.curves import curves
from aerogel.pruning.gram import Sums, gathered, order, own, parts, targets
from aerogel.pruning.held import attached, mark
from aerogel.pruning.layers import as_weight, filters_first, owned_once, prunable, under
from aerogel.pruning.masks import most
from aerogel.pruning.norms import settle
from aerogel.pruning.shares import even
from aerogel.pruning.walk import Lost, Walk
from aerogel.runtime.eager import Call, images
from aerogel.runtime.private import copied
from aerogel.runtime.weights import as_weights, flush


def calls_of(calibration: Any, what: str) -> list[Call]:
    """Calibration as calls of the model."""
    if calibration is None:
        raise InvalidArgument(
            f"{what} looks at real inputs: give some hundred images, calibration=[x1, x2, ...]"
        )
    if isinstance(calibration, Tensor):
        calibration = [calibration[i : i + 32] for i in range(0, len(calibration), 32)]
    if isinstance(calibration, str | bytes | Mapping) or not isinstance(calibration, Iterable):
        raise InvalidArgument(
            f"calibration is a list of the model's inputs, not a {type(calibration).__name__}: say "
            "calibration=[x1, x2, ...]"
        )
    found = [_call(one) for one in calibration]
    if not found:
        raise InvalidArgument("calibration is empty: give some hundred images (a loader may be used up)")
    return found


def _call(one: Any) -> Call:
    if isinstance(one, Mapping):
        return (), dict(one)
    if isinstance(one, Tensor):
        return (one,), {}
    if isinstance(one, tuple | list):
        return tuple(one), {}
    raise InvalidArgument(
        f"calibration holds a {type(one).__name__}; each input is a tensor, a tuple of arguments, or a dict"
    )


def there(model: nn.Module, calls: Iterable[Call]) -> list[Call]:
    """The calls on the model's device; those without an image are left out."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    moved = [pytree.tree_map_only(Tensor, lambda t: t.detach().to(device), call) for call in calls]
    found = [(args, kwargs) for args, kwargs in moved if images((args, kwargs))]
    if not found:
        raise InvalidArgument("the inputs given hold no image: their first dimension is 0")
    return found


def repaired(
    model: nn.Module,
    asked: Mapping[str, Asked],
    scope: str,
    score: str,
    calls: Sequence[Call],
    progress: Progress,
) -> nn.Module:
    """The model pruned by what its layers are given, in place. The work is done on a copy: what fails in the
    middle leaves the model as it was."""
    with torch.no_grad():
        work = copied(model)
        _pruned(work, _of(work, asked), scope, score, calls, progress)
        for one in asked.values():
            attached(one.module)
        model.load_state_dict(work.state_dict())
    return model


def _of(copied: nn.Module, asked: Mapping[str, Asked]) -> dict[str, Asked]:
    """The same of a copy's layers."""
    own = dict(prunable(copied))
    return {name: one._replace(module=own[name]) for name, one in asked.items()}


def _pruned(
    model: nn.Module,
    asked: Mapping[str, Asked],
    scope: str,
    score: str,
    calls: Sequence[Call],
    progress: Progress,
) -> None:
    dense = flush(as_weights(copy.deepcopy(model)))
    modules = dict(prunable(dense))
    runs = order(dense, {name: modules[name] for name in asked}, calls[0])
    able = {name: modules[name] for name in runs if owned_once(model, asked[name].module)}
    progress.begin("looking at the layers", 0.5 if scope == "error" else 0.0)
    asked = spread(asked, able, dense, scope, calls, progress)
    progress.begin("pruning", 0.5 if scope == "error" else 1.0)
    if score == "obs":
        repair(model, dense, asked, able, calls, progress)
    elif score == "wanda":
        _wanda(asked, able, dense, calls)
    for name in [name for name in asked if score == "magnitude" or name not in able]:
        module = asked[name].module
        _by_size({name: asked[name]}, {name: filters_first(module, _weight(module).abs())})
    settle(model, dense, calls)


def spread(
    asked: Mapping[str, Asked],
    modules: Mapping[str, nn.Module],
    dense: nn.Module,
    scope: str,
    calls: Sequence[Call],
    progress: Progress,
) -> dict[str, Asked]:
    """What each layer is asked for, by the scope."""
    if scope == "uniform":
        return dict(asked)
    sizes = {name: filters_first(one.module, _weight(one.module).abs()) for name, one in asked.items()}
    if scope == "error":
        pattern, share = next((one.pattern, one.share) for one in asked.values())
        found = curves(dense, modules, [pattern], calls, progress)
        known = {name: own[pattern] for name, own in found.items()}
        weights = {name: size.numel() for name, size in sizes.items()}
        rates = even(known, weights, share, min(0.99, most(pattern)))
    else:
        rates = {name: 1 - float(kept.double().mean()) for name, kept in masked(sizes, asked, scope).items()}
    return {name: one._replace(share=rates.get(name, one.share)) for name, one in asked.items()}


def repair(
    model: nn.Module,
    dense: nn.Module,
    asked: Mapping[str, Asked],
    modules: Mapping[str, nn.Module],
    calls: Sequence[Call],
    progress: Progress,
) -> None:
    """Each layer of the model that is asked for, in the order of `modules` (the dense network's)."""
    for name in modules:
        attached(asked[name].module)
    before = copy.deepcopy(model.state_dict())

    def fit(walk: Walk | None) -> None:
        number = 0
        for part in parts(modules):
            wanted = targets(dense, part, calls)
            for name in part:
                number += 1
                progress.step("layer", number, len(modules), name)
                module, answers = asked[name].module, wanted.pop(name)
                once = all(len(runs) == 1 for runs in answers)
                given = walk.inputs(module) if walk is not None and once else None
                sums = gathered(model, module, answers, calls, given).checked(name)
                _fit(asked[name], part[name], sums)

    try:
        with Walk(model, [asked[name].module for name in modules], calls) as walk:
            fit(walk)
            walk.check()
    except Lost:
        model.load_state_dict(before)
        fit(None)


def _fit(one: Asked, dense: nn.Module, sums: Sums) -> None:
    """The mask of one layer, and its weights fitted to what the dense one answers."""
    dense_weight = filters_first(dense, _weight(dense))
    problem = obs.Problem.of(sums, dense_weight)
    held = filters_first(one.module, attached(one.module).mask.cpu())
    kept = obs.mask(problem, one.pattern, one.share, held & (dense_weight != 0))
    fitted = obs.fitted(problem, kept.flatten(1))
    weight = under(one.module)
    weight.data.copy_(as_weight(one.module, fitted, weight.shape))
    mark(one.module, kept)


def _wanda(
    asked: Mapping[str, Asked], modules: Mapping[str, nn.Module], dense: nn.Module, calls: Sequence[Call]
) -> None:
    """A weight counts by its size times the size of what it meets."""
    for part in parts(modules):
        for name, sums in own(dense, part, calls).items():
            weight = filters_first(part[name], _weight(part[name]))
            met = sums.gram.diagonal(dim1=1, dim2=2).sqrt()[:, None]
            score = (weight.reshape(sums.cross.shape).abs() * met).reshape(weight.shape)
            _by_size({name: asked[name]}, {name: score})


def _by_size(asked: Mapping[str, Asked], scores: Mapping[str, Tensor]) -> None:
    for name, kept in masked(scores, asked, "uniform").items():
        mark(asked[name].module, kept)


def _weight(module: nn.Module) -> Tensor:
    held: Any = module.weight
    found: Tensor = held.detach().cpu()
    return found
