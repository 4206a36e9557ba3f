"""What each layer offers: so much time for so much error. Both curves are measured, here and on real inputs;
the recipe for a speedup is the budget problem that they make."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from aerogel.pruning.advice import Advice, LayerAdvice, Point, line_through
from aerogel.pruning.masks import most
from aerogel.pruning.shares import STEP, Curve, Offer, at, spent

MOST = 0.98
"""Zeros of a layer, at most."""
LAST = 0.1
"""Of what all layers can save, this part costs more than it is worth: a goal beyond is out of reach."""


def recipe_for(
    advice: Advice, curves: Mapping[str, Mapping[str, Curve]], speedup: float
) -> tuple[dict[str, Point], float]:
    """The points of the layers at the least error for this speedup, and the speedup that they are predicted
    to have: less than asked for where the layers do not offer it."""
    slope, rest = line_through(advice.layers, advice.dense_us, advice.model_us)
    offers = [_offers(layer, curves.get(layer.layer, {})) for layer in advice.layers]
    dense = sum(layer.dense_us for layer in advice.layers)
    least = sum(min(us for _, (us, _) in own) for own in offers)
    budget = max((advice.torch_us / speedup - rest) / slope, least + LAST * (dense - least))
    chosen = spent({i: [offer for _, offer in own] for i, own in enumerate(offers)}, budget)
    points = {
        layer.layer: point
        for i, layer in enumerate(advice.layers)
        if (point := offers[i][chosen[i]][0]) is not None
    }
    total = sum(offers[i][number][1][0] for i, number in chosen.items())
    return points, advice.torch_us / (rest + slope * total)


def _offers(layer: LayerAdvice, curves: Mapping[str, Curve]) -> list[tuple[Point | None, Offer]]:
    """Dense, and every share of every pattern: its time between the points measured by a straight line."""
    found: list[tuple[Point | None, Offer]] = [(None, (layer.dense_us, 0.0))]
    for pattern, curve in curves.items():
        known = sorted((s, us) for (p, s), us in layer.us.items() if p == pattern)
        for (low, slow), (high, fast) in pairwise([(0.0, layer.dense_us), *known]):
            for step in range(round(low / STEP) + 1, round(high / STEP) + 1):
                share = step * STEP
                if low == 0.0 and share < high:  # nothing was measured below the first point
                    continue
                us = slow + (fast - slow) * (share - low) / (high - low)
                if us < layer.dense_us and share <= min(MOST, most(pattern)) + 1e-9:
                    found.append(((pattern, round(share, 4)), (us, at(curve, share))))
    return found
