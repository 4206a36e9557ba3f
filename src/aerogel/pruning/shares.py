"""How far each layer is pruned: the least error for what may be spent, as one budget for all layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

Key = TypeVar("Key")
Offer = tuple[float, float]
"""What a choice costs (weights kept, microseconds) and the error it brings."""
Curve = Mapping[float, float]
"""The error at each share of zeros."""
STEP = 0.01
"""Between the shares that a curve is read at."""


def spent(offers: Mapping[Key, Sequence[Offer]], budget: float) -> dict[Key, int]:
    """One offer for each key, the least summed error at a summed cost within the budget; where nothing is,
    the cheapest.

    Lagrange: on the lower hull of each key's offers, the step that saves most for its error comes first.
    """
    hulls = {key: _hull(own) for key, own in offers.items()}
    now = {key: hull[0] for key, hull in hulls.items()}
    steps = sorted(
        (_slope(offers[key][a], offers[key][b]), number, key, b)
        for number, (key, hull) in enumerate(hulls.items())
        for a, b in pairwise(hull)
    )
    cost = sum(offers[key][i][0] for key, i in now.items())
    for _, _, key, i in steps:
        if cost <= budget:
            break
        cost += offers[key][i][0] - offers[key][now[key]][0]
        now[key] = i
    return now


def _slope(a: Offer, b: Offer) -> float:
    """Error for what is saved."""
    return (b[1] - a[1]) / (a[0] - b[0])


def _hull(offers: Sequence[Offer]) -> list[int]:
    """From the offer of the least error to the cheapest, those that a straight line between others does not
    beat."""
    found: list[int] = []
    for i in sorted(range(len(offers)), key=lambda i: (offers[i][1], offers[i][0])):
        if found and offers[i][0] >= offers[found[-1]][0]:
            continue
        while len(found) > 1 and _slope(offers[found[-2]], offers[found[-1]]) >= _slope(
            offers[found[-2]], offers[i]
        ):
            found.pop()
        found.append(i)
    return found


def at(curve: Curve, share: float) -> float:
    """The error at any share: in logarithms between what was measured, below it by the third power."""
    known, most = list[tuple[float, float]](), 1e-12
    for level, error in sorted(curve.items()):
        most = max(most, error)
        known.append((level, most))
    if share <= known[0][0]:
        return known[0][1] * (share / known[0][0]) ** 3
    for (low, small), (high, large) in pairwise(known):
        if share <= high:
            part = (share - low) / (high - low)
            return math.exp((1 - part) * math.log(small) + part * math.log(large))
    return known[-1][1] * 10 ** ((share - known[-1][0]) * 100)


def even(
    curves: Mapping[str, Curve], sizes: Mapping[str, int], sparsity: float, most: float
) -> dict[str, float]:
    """Shares of all layers that make this share of all their weights, at the least summed error; none above
    `most`."""
    grid = [i * STEP for i in range(round(1 / STEP)) if i * STEP <= most + 1e-9]
    offers = {name: [(sizes[name] * (1 - t), at(curve, t)) for t in grid] for name, curve in curves.items()}
    total = sum(sizes[name] for name in curves)
    found = {name: grid[i] for name, i in spent(offers, total * (1 - sparsity)).items()}
    over = sum(sizes[name] * share for name, share in found.items()) / max(1e-30, total * sparsity)
    return {name: share / max(1.0, over) for name, share in found.items()}
