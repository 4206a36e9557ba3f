"""reprune(): performance-aware re-pruning. Weights go that cost time on this machine and carry little.

Paper: Rumi et al. (PACT'20). Nonzeros inside a dense block (formats/clusters.py) cost little; those left
over cost loads of their own. For every pruned layer the cost of a leftover is measured, not counted: the
chosen kernel is timed with all and with half of them. Leftovers go in the order of microseconds saved for the
share of the layer's weight (L1) lost, until a layer has lost `max_weight_loss`, or the whole model `max_drop`
of what `evaluate` says. A layer that is then no faster gets its weights back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from aerogel.backends import Backend, backend_of
from aerogel.capture.nodes import problem
from aerogel.errors import InvalidArgument, printable
from aerogel.formats import clusters
from aerogel.ir import Array, Choice, Conv, Dtypes, Weight
from aerogel.methods import BASELINE, METHODS
from aerogel.progress import shown
from aerogel.pruning.held import attached
from aerogel.pruning.layers import TRANSPOSED, prunable
from aerogel.pruning.mistakes import a_module, a_number, a_score, a_share, real
from aerogel.runtime.eager import as_call
from aerogel.runtime.private import private
from aerogel.runtime.reading import network_of
from aerogel.runtime.weights import as_weights
from aerogel.tune import search

GAIN = 1.01
"""A layer is faster where it takes so much less time."""
TRIES = 7
"""How often `evaluate` is called to find how much may go."""


@dataclass(frozen=True)
class LayerReport:
    """One layer: what ran it before and after, microseconds alone, the share of nonzeros in dense blocks,
    what was removed."""

    layer: str
    conv: str
    before: str
    before_us: float
    after: str
    after_us: float
    blocks_before: float
    blocks_after: float
    nonzeros: int
    removed: int
    weight_lost: float
    ns_per_nonzero: float


@dataclass(frozen=True)
class Repruned:
    """What `reprune` did. `model` is the model itself, with masks that hold while it is trained on.

    Example:
        >>> repruned = aerogel.reprune(aerogel.prune(model, 0.8), (x,))
        >>> text = str(repruned)    # layer by layer: what went, and the time before and after
    """

    model: nn.Module
    layers: tuple[LayerReport, ...]
    score: tuple[float, float] | None

    @property
    def speedup(self) -> float:
        """Of the layers' times added up, measured alone; compile() measures the model."""
        return (
            sum(r.before_us for r in self.layers) / max(1e-9, sum(r.after_us for r in self.layers))
            if self.layers
            else 1.0
        )

    def __str__(self) -> str:
        lines = [
            f"{sum(r.removed for r in self.layers)} weights removed, layers {self.speedup:.2f}x as "
            "fast as before"
        ]
        for r in self.layers:
            blocks = f"{r.blocks_before:.0%} -> {r.blocks_after:.0%} in blocks"
            times = f"{r.before} {r.before_us:.0f} us -> {r.after} {r.after_us:.0f} us"
            gone = (
                f"{r.removed} of {r.nonzeros} nonzeros, {r.weight_lost:.1%} of its weight"
                if r.removed
                else "nothing removed"
            )
            lines.append(f"{printable(r.layer)}  {r.conv}")
            lines.append(f"    {times}; {gone}; {blocks}; a nonzero costs {r.ns_per_nonzero:.2f} ns")
        if self.score is not None:
            lines.append(f"score {self.score[0]:.4f} -> {self.score[1]:.4f}")
        return "\n".join(lines)


@dataclass
class _Layer:
    """A layer at work: `order` are leftovers by weight, lightest first, as far as the budget reaches."""

    name: str
    module: nn.Module
    conv: Conv
    weight: Array
    before: Choice
    cost_us: float
    order: Array
    gone: int = 0

    def cut(self) -> Array:
        cut = self.weight.copy()
        cut.reshape(-1)[self.order[: self.gone]] = 0
        return cut


def reprune(
    model: nn.Module,
    args: Any,
    *,
    max_weight_loss: float = 0.05,
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
        evaluate: A function of the model that is higher when better.
        max_drop: How much of `evaluate`'s number may be lost.
    """
    a_module(model, "reprune")
    a_share(max_weight_loss, "max_weight_loss")
    if a_score(evaluate) is not None and max_drop is not None and not 0 <= real(max_drop) < math.inf:
        raise InvalidArgument(f"max_drop is how much of evaluate's number may be lost, not {max_drop!r}")
    if (evaluate is None) != (max_drop is None):
        raise InvalidArgument(
            "evaluate and max_drop go together: what to measure, and how much of it may be lost"
        )
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
                known[key] = _cost(backend, weight, conv)
            found.append(
                _Layer(name, module, conv, weight, *known[key], leftovers(weight, conv, max_weight_loss))
            )
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
            reports.append(_again(backend, layer))
    return Repruned(model, tuple(reports), score)


def _pruned(model: nn.Module, args: Any) -> list[tuple[str, nn.Module, Conv, Array]]:
    """Layers with zeros: name, module, problem and weight as a convolution's."""
    call = as_call(args, None)
    network, _ = network_of(as_weights(private(model, call)), call, None)
    shapes, modules = network.shapes(network.captured.flat(*call)), dict(prunable(model))
    found = []
    for node in network.convs():
        module: Any = modules.get(node.layer or "")
        if module is None or isinstance(module, TRANSPOSED):  # its network has another weight
            continue
        conv = problem(node, shapes)
        weight = module.weight.detach().float().numpy().reshape(conv.weight_shape)
        if 0 < np.count_nonzero(weight) < weight.size:
            found.append((node.layer or "", module, replace(conv, dtypes=Dtypes()), weight.copy()))
    return found


def _cost(backend: Backend, weight: Array, conv: Conv) -> tuple[Choice, float]:
    """The layer's fastest kernel, and microseconds for each nonzero left over: with all of them, and with
    every second one."""
    choice = search.time_layer(backend, conv, Weight(weight), METHODS, search.EFFORTS["fast"])
    if choice.config.method == BASELINE:
        return choice, 0.0
    left = _left(weight, conv)
    if len(left) < 2:
        return choice, 0.0
    half = weight.copy()
    half.reshape(-1)[left[::2]] = 0
    pairs = [(Weight(weight), choice.config), (Weight(half), choice.config)]
    whole_us, half_us = search.medians(backend, pairs, conv, search.EFFORTS["fast"].rounds)
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
            size = np.abs(layer.weight.reshape(-1)).astype(np.float64)
            worth.append(layer.cost_us * size.sum() / np.maximum(size[layer.order], 1e-300))
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
    mask.copy_(torch.from_numpy((weight != 0).reshape(mask.shape)))


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


def _again(backend: Backend, layer: _Layer) -> LayerReport:
    """Time a layer that lost weights beside what it was; if it is no faster, it gets them back."""
    before, after = layer.before, layer.before
    before_us = before.chosen_us()
    assert before_us is not None
    middle = before_us
    cut = layer.cut()
    if layer.gone:
        after = search.time_layer(backend, layer.conv, Weight(cut), METHODS, search.EFFORTS["fast"])
        rounds = search.EFFORTS["fast"].rounds
        pairs = [(Weight(layer.weight), before.config), (Weight(cut), after.config)]
        before_us, middle = search.medians(backend, pairs, layer.conv, rounds)
        if before_us < GAIN * middle:
            layer.gone, cut, after, middle = 0, layer.weight, before, before_us
            _mask(layer, cut)
    size = np.abs(layer.weight).sum()
    blocks = [1 - len(_left(w, layer.conv)) / max(1, int(np.count_nonzero(w))) for w in (layer.weight, cut)]
    return LayerReport(
        layer.name,
        str(layer.conv),
        before.config.method,
        before_us,
        after.config.method,
        middle,
        blocks[0],
        blocks[1],
        int(np.count_nonzero(layer.weight)),
        layer.gone,
        float(1 - np.abs(cut).sum() / size),
        layer.cost_us * 1e3,
    )
