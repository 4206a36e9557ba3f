"""reprune(): performance-aware re-pruning. Weights go that cost time on this machine and carry little.

Paper: Rumi et al. (PACT'20). Nonzeros inside a dense block (formats/clusters.py) cost little; those left
over cost loads of their own. For every pruned layer the cost of a leftover is measured, not counted: the
chosen kernel is timed with all and with half of them. Leftovers go in the order of microseconds saved for the
share of the layer's weight (L1) lost, until a layer has lost `max_weight_loss`, or the whole model `max_drop`
of what `evaluate` says. A layer that is then no faster gets its weights back.

With pattern "1x4" the same of blocks of four input channels (quartets.py), timed in int8: light ones are
emptied, and of the dense weights as many come back as went, into blocks that are there anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from aerogel.arguments import check_call
from aerogel.backends import Backend, backend_of
from aerogel.capture.nodes import problem
from aerogel.errors import InvalidArgument
from aerogel.formats import clusters
from aerogel.ir import Array, Choice, Conv, Dtypes, Weight
from aerogel.methods import BASELINE, METHODS
from aerogel.progress import shown
from aerogel.pruning import quartets
from aerogel.pruning.asked import why_not
from aerogel.pruning.held import attached
from aerogel.pruning.layers import TRANSPOSED, prunable, under
from aerogel.pruning.mistakes import a_module, a_number, a_score, a_share, real
from aerogel.pruning.repruned import LayerReport, Repruned
from aerogel.runtime.eager import as_call
from aerogel.runtime.private import private
from aerogel.runtime.reading import network_of
from aerogel.runtime.weights import as_weights
from aerogel.tune import search

GAIN = 1.01
"""A layer is faster where it takes so much less time."""
TRIES = 7
"""How often `evaluate` is called to find how much may go."""


@dataclass
class _Layer:
    """A layer at work: `order` are leftovers by weight, or rows of them that go together, lightest first, as
    far as the budget reaches; `given` are dense weights that may come back."""

    name: str
    module: nn.Module
    conv: Conv
    weight: Array
    before: Choice
    cost_us: float
    order: Array
    gone: int = 0
    given: Array | None = None

    def emptied(self) -> Array:
        cut = np.append(self.weight.reshape(-1), 0)
        cut[self.order[: self.gone]] = 0
        return cut[:-1].reshape(self.weight.shape).astype(self.weight.dtype)

    def cut(self) -> Array:
        """What is left, and came back."""
        cut = self.emptied()
        if self.given is None or not self.gone:
            return cut
        return quartets.completed(cut, self.given, int(np.count_nonzero(self.weight) - np.count_nonzero(cut)))

    def sizes(self) -> Array:
        """Of what goes together, its share of the layer's L1 norm."""
        size = np.append(np.abs(self.weight.reshape(-1)).astype(np.float64), 0.0)
        found: Array = size[self.order].reshape(len(self.order), -1).sum(1) / size.sum()
        return found


def reprune(
    model: nn.Module,
    args: Any = (),
    *,
    max_weight_loss: float = 0.05,
    pattern: str | None = None,
    dense: nn.Module | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    max_drop: float | None = None,
) -> Repruned:
    """Remove weights that cost time here and carry little, in place (performance-aware re-pruning, PACT'20).

    The model is pruned already, by whatever pruner. Masks hold afterwards: fine-tune, then compile.

    Example:
        >>> repruned = aerogel.reprune(aerogel.prune(model, 0.8), (x,), max_weight_loss=0.05)

    Args:
        model: A pruned module.
        args: An example call, as for `compile`.
        max_weight_loss: No layer loses more than this share of its L1 norm.
        pattern: "1x4" empties blocks of four input channels, for int8, where layers are timed then.
        dense: With "1x4", the model before pruning: as many of its weights come back as went, into blocks
            that are not empty, so that the sparsity stays.
        evaluate: A function of the model that is higher when better.
        max_drop: How much of `evaluate`'s number may be lost.
    """
    check_call(a_module(model, "reprune"), as_call(args, None), "reprune")
    a_share(max_weight_loss, "max_weight_loss")
    if a_score(evaluate) is not None and max_drop is not None and not 0 <= real(max_drop) < math.inf:
        raise InvalidArgument(f"max_drop is how much of evaluate's number may be lost, not {max_drop!r}")
    if (evaluate is None) != (max_drop is None):
        raise InvalidArgument(
            "evaluate and max_drop go together: what to measure, and how much of it may be lost"
        )
    if pattern not in (None, quartets.PATTERN) or (dense is not None and pattern is None):
        raise InvalidArgument(
            f"pattern is None or '{quartets.PATTERN}', and dense goes with the latter; not {pattern!r}"
        )
    originals = {} if dense is None else dict(prunable(a_module(dense, "reprune")))
    backend, found = backend_of(), list[_Layer]()
    with shown(None) as progress, torch.no_grad():
        known: dict[str, tuple[Choice, float]] = {}
        progress.begin("reading the model", 0.05)
        layers = _pruned(model, args)
        progress.begin("timing layers", 0.45)
        for number, (name, module, conv, weight) in enumerate(layers, 1):
            progress.step("layer", number, len(layers), name)
            key = f"{conv} {np.count_nonzero(weight) / weight.size:.2f}"
            if key not in known:
                known[key] = _cost(backend, weight, conv, pattern)
            given = None if dense is None else _original(originals, name, weight)
            order = (
                quartets.lightest(weight, max_weight_loss, refilled=given is not None)
                if pattern
                else leftovers(weight, conv, max_weight_loss)
            )
            found.append(_Layer(name, module, conv, weight, *known[key], order, given=given))
        if not found:
            raise InvalidArgument(
                "no convolution or Linear of the model has zeros; prune it first: aerogel.prune(model, 0.8)"
            )
        steps = _steps(found)
        score = (
            None if evaluate is None or max_drop is None else _within(model, found, steps, evaluate, max_drop)
        )
        if score is None:
            _take(found, steps, len(steps))
        reports = []
        progress.begin("timing layers again", 0.5)
        for number, layer in enumerate(found, 1):
            progress.step("re-pruned layer", number, len(found), layer.name)
            reports.append(_again(backend, layer, pattern))
    return Repruned(model, tuple(reports), score)


def _pruned(model: nn.Module, args: Any) -> list[tuple[str, nn.Module, Conv, Array]]:
    """Layers with zeros: name, module, problem and weight as a convolution's."""
    call = as_call(args, None)
    here, (there,) = backend_of(call).host(as_weights(private(model, call)), [call])
    network, _ = network_of(here, there, None)
    shapes, modules = network.shapes(network.captured.flat(*there)), dict(prunable(model))
    found, seen = [], set[str]()
    for node in network.convs():
        module: Any = modules.get(node.layer or "")
        if module is None or isinstance(module, TRANSPOSED):  # its network has another weight
            continue
        if node.layer in seen:  # runs again: it has one mask, and counts as where it runs first
            continue
        seen.add(node.layer or "")
        conv = problem(node, shapes)
        weight = module.weight.detach().float().cpu().numpy().reshape(conv.weight_shape)
        if 0 < np.count_nonzero(weight) < weight.size:
            if why := why_not(module, "magnitude"):
                raise InvalidArgument(f"'{node.layer}' {why}")
            found.append((node.layer or "", module, replace(conv, dtypes=Dtypes()), weight.copy()))
    return found


def _original(layers: dict[str, nn.Module], name: str, like: Array) -> Array:
    """A layer's dense weight."""
    weight: Any = getattr(layers.get(name), "weight", None)
    if weight is None or weight.numel() != like.size:
        raise InvalidArgument(f"dense is the model before pruning, and has no '{name}' of the same size")
    found: Array = weight.detach().float().cpu().numpy().reshape(like.shape)
    return found


def _timed(backend: Backend, weight: Array, conv: Conv, pattern: str | None) -> tuple[Weight, Conv]:
    """A layer in the precision that the pattern is for."""
    return quartets.as_timed(backend, weight, conv) if pattern else (Weight(weight), conv)


def _cost(backend: Backend, weight: Array, conv: Conv, pattern: str | None) -> tuple[Choice, float]:
    """The layer's fastest kernel, and microseconds for each nonzero left over, or block that is there: with
    all of them, and with every second one."""
    held, problem_ = _timed(backend, weight, conv, pattern)
    choice = search.time_layer(backend, problem_, held, METHODS, search.EFFORTS["fast"])
    if choice.config.method == BASELINE:
        return choice, 0.0
    left = quartets.there(weight) if pattern else _left(weight, conv)
    if len(left) < 2:
        return choice, 0.0
    half = np.append(weight.reshape(-1), 0)
    half[left[::2]] = 0
    fewer, _ = _timed(backend, half[:-1].reshape(weight.shape).astype(weight.dtype), conv, pattern)
    pairs = [(held, choice.config), (fewer, choice.config)]
    whole_us, half_us = search.medians(backend, pairs, problem_, search.EFFORTS["fast"].rounds)
    return choice, max(0.0, (whole_us - half_us) / len(left[::2]))


def _left(weight: Array, conv: Conv) -> Array:
    """Where nonzeros stand outside all dense blocks."""
    left = weight.reshape(conv.k, -1) != 0
    for filters, positions in clusters.tiles(weight, conv):
        left[np.ix_(filters, positions)] = False
    return np.flatnonzero(left)


def leftovers(weight: Array, conv: Conv, share: float) -> Array:
    """Where nonzeros outside all dense blocks stand, the lightest first, until they make this share of the
    layer's L1 norm."""
    left, size = _left(weight, conv), np.abs(weight.reshape(-1)).astype(np.float64)
    order = left[np.argsort(size[left], kind="stable")]
    return order[: int(np.searchsorted(np.cumsum(size[order]), share * size.sum(), side="right"))]


def _steps(layers: list[_Layer]) -> Array:
    """Which layer loses its next leftover, best first: microseconds for the share of the layer's weight."""
    worth, owner = list[Array](), list[Array]()
    for i, layer in enumerate(layers):
        if layer.cost_us > 0:
            worth.append(layer.cost_us / np.maximum(layer.sizes(), 1e-300))
            owner.append(np.full(len(layer.order), i))
    if not worth:
        return np.zeros(0, np.int64)
    return np.concatenate(owner)[np.argsort(-np.concatenate(worth), kind="stable")]


def _take(layers: list[_Layer], steps: Array, count: int) -> None:
    """Remove the first `count`, in the model."""
    gone = np.bincount(steps[:count], minlength=len(layers))
    for layer, own in zip(layers, gone.tolist(), strict=True):
        layer.gone = own
        _mask(layer, layer.cut())


def _mask(layer: _Layer, weight: Array) -> None:
    mask = attached(layer.module).mask
    kept = torch.from_numpy((weight != 0).reshape(mask.shape)).to(mask.device)
    mask.copy_(kept)
    if layer.given is not None:
        held = under(layer.module).data
        held.copy_(torch.where(kept, torch.from_numpy(weight.reshape(mask.shape)).to(held), held))


def _within(
    model: nn.Module, layers: list[_Layer], steps: Array, evaluate: Callable[[nn.Module], float], drop: float
) -> tuple[float, float]:
    """As many as keep the score, found by halving; the score before and after."""
    before, low, high = a_number(evaluate(model)), 0, len(steps) + 1
    count = len(steps)
    for _ in range(TRIES):
        _take(layers, steps, count)
        low, high = (count, high) if before - a_number(evaluate(model)) <= drop else (low, count)
        if high - low <= 1:
            break
        count = (low + high) // 2
    _take(layers, steps, low)
    return before, a_number(evaluate(model))


def _again(backend: Backend, layer: _Layer, pattern: str | None) -> LayerReport:
    """Time a layer that lost weights beside what it was; if it is no faster, it gets them back."""
    before, after = layer.before, layer.before
    before_us = before.chosen_us()
    assert before_us is not None
    middle = before_us
    if layer.gone:
        whole, _ = _timed(backend, layer.weight, layer.conv, pattern)
        cut, conv = _timed(backend, layer.cut(), layer.conv, pattern)
        after = search.time_layer(backend, conv, cut, METHODS, search.EFFORTS["fast"])
        pairs = [(whole, before.config), (cut, after.config)]
        before_us, middle = search.medians(backend, pairs, conv, search.EFFORTS["fast"].rounds)
        if before_us < GAIN * middle:
            layer.gone, after, middle = 0, before, before_us
            _mask(layer, layer.weight)
    emptied, left = layer.emptied(), layer.cut()
    size = np.abs(layer.weight).sum()
    blocks = [
        quartets.fullness(w) if pattern else 1 - len(_left(w, layer.conv)) / max(1, int(np.count_nonzero(w)))
        for w in (layer.weight, left)
    ]
    many = int(np.count_nonzero(layer.weight))
    return LayerReport(
        layer.name,
        str(before.conv),
        before.config.method,
        before_us,
        after.config.method,
        middle,
        blocks[0],
        blocks[1],
        many,
        many - int(np.count_nonzero(emptied)),
        float(1 - np.abs(emptied).sum() / size),
        layer.cost_us * 1e3,
        int(np.count_nonzero(left) - np.count_nonzero(emptied)),
        pattern or "",
    )
