"""Where each layer runs: our kernels or dense, with the copies between them counted.

A layer alone misleads: it may win by less than the copies around it cost. So the copies are timed too, and
the assignment with the least total over the graph is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from aerogel.backends import Backend, Trial
from aerogel.ir import Choice, Graph
from aerogel.methods import BASELINE, METHODS
from aerogel.tune.measure import interleaved
from aerogel.tune.search import with_config

CLEARLY = 0.93
"""A later method takes a layer from an earlier one where it needs at most this share of its time: near ties
must not flip."""


ROUNDS = 5
"""Of timing a copy."""


def assigned(
    backend: Backend, graph: Graph, shapes: Mapping[str, tuple[int, ...]], choices: list[Choice]
) -> list[Choice]:
    """Move layers between our kernels and dense until the convolutions and the copies together cost least."""
    native, dense, ours = dict[str, float](), dict[str, float](), dict[str, str]()
    entries: dict[str, float] = {}
    for c in choices:
        best = c.fastest()
        dense[c.node] = best[BASELINE].timing.p50_us
        for name in METHODS:
            if name in best and name != BASELINE:
                config, spent = best[name].config, best[name].timing.p50_us
                key = f"{c.conv} {config}"
                if key not in entries:
                    entries[key] = _us(backend, backend.entry(c.conv, config))
                if spent + entries[key] < CLEARLY * native.get(c.node, np.inf):
                    native[c.node], ours[c.node] = spent + entries[key], name
    crossings = backend.crossings(graph, shapes, native.keys())
    if crossings is None:
        return choices
    timed = {call: _us(backend, call) for call in set(crossings.copies.values())}
    copies = {name: timed[call] for name, call in crossings.copies.items()}
    chosen = assign(Costs(native, dense, copies, crossings.readers))
    return [_moved(c, ours[c.node] if c.node in chosen else BASELINE) for c in choices]


def _moved(choice: Choice, wanted: str) -> Choice:
    """The choice with the method that the whole network wants."""
    alone = choice.config.method
    if alone == wanted:
        return replace(choice, reason="")
    reason = f"{alone} is faster alone, but the copies around it cost more"
    if alone == BASELINE:
        reason = "saves copies around it"
    return replace(with_config(choice, wanted), reason=reason)


def _us(backend: Backend, call: Trial | None) -> float:
    """Median microseconds of a copy; none where there is none."""
    return 0.0 if call is None else float(np.median(interleaved([call], ROUNDS, clock=backend.clock)[0]))


@dataclass(frozen=True)
class Costs:
    """Microseconds of each conv node under its best kernel of ours and under dense, and of the copies of each
    value, with who reads it in the end."""

    native: Mapping[str, float]
    dense: Mapping[str, float]
    copies: Mapping[str, float]
    readers: Mapping[str, tuple[str, ...]]

    def total(self, ours: frozenset[str]) -> float:
        """Time of the convolutions and of the copies between torch's hands and ours, if `ours` run on our
        kernels."""
        spent = sum(self.native[n] if n in ours else self.dense[n] for n in self.dense)
        for name, cost in self.copies.items():
            readers = self.readers[name]
            crossing = (
                any(r not in ours for r in readers) if name in ours else any(r in ours for r in readers)
            )
            spent += cost if crossing else 0.0
        return spent


def assign(costs: Costs) -> frozenset[str]:
    """Which conv nodes run on our kernels: the assignment of least total cost that single changes can reach.

    Starts from nothing, from everything and from each layer's own winner; changes one node at a time while
    that helps.
    """
    able = frozenset(costs.native)
    winners = frozenset(n for n in able if costs.native[n] < costs.dense[n])
    best: tuple[float, frozenset[str]] = (costs.total(frozenset()), frozenset())
    for start in (frozenset[str](), able, winners):
        current, spent = start, costs.total(start)
        while True:
            moves = [(costs.total(current ^ {n}), current ^ {n}) for n in able]
            lower = min(moves, key=lambda m: m[0], default=(spent, current))
            if lower[0] >= spent:
                break
            spent, current = lower
        best = min(best, (spent, current), key=lambda m: m[0])
    return best[1]
