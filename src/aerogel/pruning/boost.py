"""boost(): small values of feature maps become zeros, so that `actsparse` has more to skip. Changes answers;
never unasked.

Paper: TACO'23 (methods/actsparse/cpu.py). ReLU keeps whatever is above 0; a boosted ReLU keeps what is above
a limit of its own. Limits are found on real inputs: one number says how much of its energy (sum of squares)
every map may lose, and is raised until the budget is spent. A limit stands only where it empties whole
vectors of pixels, which is what kernels skip: where it would not, ReLU stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from aerogel.capture import interpret
from aerogel.capture.captured import Captured
from aerogel.capture.export import capture
from aerogel.errors import InvalidArgument, printable
from aerogel.ir import Array, Idle, Node
from aerogel.progress import Progress, shown
from aerogel.pruning.mistakes import a_module, a_number, a_score, a_share, several
from aerogel.runtime.eager import Call, as_call
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.private import private
from aerogel.runtime.weights import as_weights

RELU = "aten.relu.default"
LIMITS = np.array([float(f"{v:.3g}") for v in 2.0 ** np.arange(-16, 8, 0.125)])
"""Limits that are tried: eight for each doubling."""
FEWEST = 0.02
"""A limit must empty at least this share of a map's vectors."""
WEAKEST, STRONGEST, TRIES = 1e-7, 0.5, 10
"""Between which shares of a map's energy the one that goes is looked for, and how often the score is taken
for it."""


@dataclass(frozen=True)
class Limit:
    """One ReLU: its limit (0: as it was) and the shares of its map's vectors of pixels that are zero without
    and with it."""

    layer: str
    limit: float
    before: float
    after: float


@dataclass(frozen=True)
class Boosted:
    """What `boost` did. `model` is a new module, to be compiled with the same calibration; the one given is
    as it was.

    Example:
        >>> boosted = aerogel.boost(model, [x])
        >>> text = str(boosted)    # each ReLU's limit, and how many zeros more it gives
    """

    model: nn.Module
    layers: tuple[Limit, ...]
    score: tuple[float, float]

    def __str__(self) -> str:
        changed = [one for one in self.layers if one.limit]
        lines = [
            f"{len(changed)} of {len(self.layers)} ReLUs have a limit; score {self.score[0]:.4f} "
            f"-> {self.score[1]:.4f}"
        ]
        for one in changed:
            vectors = f"zero vectors {one.before:.0%} -> {one.after:.0%}"
            lines.append(f"{printable(one.layer)}  above {one.limit:g}: {vectors}")
        return "\n".join(lines)


def boost(
    model: nn.Module,
    calibration: Iterable[Any],
    *,
    max_drop: float = 0.01,
    evaluate: Callable[[nn.Module], float] | None = None,
) -> Boosted:
    """A copy of the model whose ReLUs drop small values too, within an allowed drop. Changes answers.

    Compile what it gives with the same `calibration`: the method that skips zeros of feature maps finds more.

    Example:
        >>> boosted = aerogel.boost(model, [x], max_drop=0.01)
        >>> fast = aerogel.compile(boosted.model, (x,), calibration=[x])

    Args:
        model: A module with ReLUs.
        calibration: Real inputs, as for `compile`.
        max_drop: The score falls by at most this.
        evaluate: A function of a model that is higher when better (accuracy, 0 to 1). Without it the score is
            how near the answers to `calibration` stay, `1 - |change| / |answers|`.
    """
    a_module(model, "boost")
    a_share(max_drop, "max_drop")
    a_score(evaluate)
    calls = [
        as_call(sample, None) for sample in several(calibration, "calibration", "boost(model, [x1, x2, ...])")
    ]
    if not calls:
        raise InvalidArgument("boost needs real inputs: boost(model, [x1, x2, ...])")
    with shown(None) as progress, torch.no_grad():
        progress.begin("reading the model", 0.05)
        model = as_weights(private(model, calls[0]))
        captured = model.captured if isinstance(model, GraphModel) else capture(model, *calls[0])
        maps = _looked_at(captured, calls, progress)
        if not maps:
            raise InvalidArgument("the model has no ReLU, so nothing in it is ever skipped")
        judge = evaluate or _nearness(_with(captured, {}), calls)

        def score(other: nn.Module) -> float:
            return a_number(judge(other))

        before, low, high, limits = score(_with(captured, {})), WEAKEST, STRONGEST, dict[str, float]()
        progress.begin("scoring", 0.7)
        for number in range(TRIES):
            progress.step("scoring", number + 1, TRIES)
            share = (low * high) ** 0.5 if number else high
            tried = {name: own.limit(share) for name, own in maps.items()}
            low, high, limits = (
                (share, high, tried)
                if before - score(_with(captured, tried)) <= max_drop
                else (low, share, limits)
            )
            if low == STRONGEST:
                break
        boosted = _with(captured, limits)
        reports = [
            Limit(
                node.layer or node.name,
                limits.get(node.name, 0.0),
                own.empty(0.0),
                own.empty(limits.get(node.name, 0.0)),
            )
            for node in captured.graph.nodes
            if (own := maps.get(node.name)) is not None
        ]
        return Boosted(boosted, tuple(reports), (before, score(boosted)))


@dataclass
class _Map:
    """What ReLU gives: energy of the values up to each limit, and vectors whose largest is up to it; the last
    of each is all."""

    energy: Array
    vectors: Array

    @staticmethod
    def of(values: torch.Tensor) -> _Map:
        """Maps (n, c, h, w), or features (n, c): vectors of one."""
        own = values.float().numpy()
        flat = own.reshape(own.shape[0] * own.shape[1], -1)
        largest = np.maximum.reduceat(flat, range(0, flat.shape[1], Idle.VECTOR), axis=1)
        bins = [0.0, *LIMITS.tolist(), np.inf]
        energy, _ = np.histogram(flat, bins, weights=flat.astype(np.float64) ** 2)
        counts, _ = np.histogram(largest, bins)
        zero = np.count_nonzero(largest == 0)
        return _Map(np.cumsum(energy), np.concatenate([[zero], np.cumsum(counts)]).astype(np.float64))

    def limit(self, share: float) -> float:
        """The highest limit under which no more than this share of the energy lies; 0 where it would empty
        too few vectors."""
        under = int(np.searchsorted(self.energy[:-1], share * self.energy[-1], side="right"))
        limit = float(LIMITS[under - 1]) if under else 0.0
        return limit if self.empty(limit) - self.empty(0.0) >= FEWEST else 0.0

    def empty(self, limit: float) -> float:
        """The share of vectors that this limit leaves empty."""
        return float(
            self.vectors[0 if limit == 0 else 1 + int(np.searchsorted(LIMITS, limit))]
            / max(1.0, self.vectors[-1])
        )


def _looked_at(captured: Captured, calls: list[Call], progress: Progress) -> dict[str, _Map]:
    """Each ReLU's map over all calls, by its node's name."""
    found: dict[str, _Map] = {}
    names = [node.name for node in captured.graph.nodes if node.op == RELU]
    progress.begin("looking at inputs", 0.25)
    for number, call in enumerate(calls, 1):
        progress.step("input", number, len(calls))
        values = interpret.run(captured.graph, captured.constants, pytree.tree_leaves(call))
        for name in names:
            own = _Map.of(values[name])
            found[name] = (
                _Map(found[name].energy + own.energy, found[name].vectors + own.vectors)
                if name in found
                else own
            )
    return found


def _with(captured: Captured, limits: Mapping[str, float]) -> GraphModel:
    """The model with these limits, as torch runs it."""

    def changed(node: Node) -> Node:
        limit = limits.get(node.name, 0.0)
        return replace(node, op="aten.threshold.default", args=(node.args[0], limit, 0.0)) if limit else node

    graph = replace(captured.graph, nodes=tuple(changed(node) for node in captured.graph.nodes))
    return GraphModel(replace(captured, graph=graph), captured.constants)


def _nearness(model: nn.Module, calls: list[Call]) -> Callable[[nn.Module], float]:
    """The score without labels: how near to this model's answers others are."""

    def answers(one: nn.Module) -> list[torch.Tensor]:
        return [
            t.double()
            for args, kwargs in calls
            for t in pytree.tree_leaves(one(*args, **kwargs))
            if t.is_floating_point()
        ]

    wanted = answers(model)
    size = max(1e-300, float(sum(t.square().sum() for t in wanted)) ** 0.5)

    def score(other: nn.Module) -> float:
        away = sum(float((a - b).square().sum()) for a, b in zip(answers(other), wanted, strict=True))
        return float(1 - away**0.5 / size)

    return score
