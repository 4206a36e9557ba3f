"""The budget problem: the least error for what may be spent, against trying everything."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from aerogel.pruning.advice import Advice, LayerAdvice
from aerogel.pruning.offers import recipe_for
from aerogel.pruning.shares import at, even, spent


@pytest.mark.parametrize("seed", range(8))
def test_as_good_as_trying_everything(seed: int) -> None:
    """On the hull there may be one step too much; it is never more than that step's error."""
    random = np.random.default_rng(seed)
    offers = {}
    for key in range(4):
        cost = np.sort(random.uniform(1, 10, 5))[::-1]
        error = np.cumsum(random.exponential(size=5) ** 2) - 0.0
        offers[key] = list(zip(cost.tolist(), (error - error[0]).tolist(), strict=True))
    budget = float(random.uniform(10, 25))
    found = spent(offers, budget)
    cost, error = (sum(offers[k][i][part] for k, i in found.items()) for part in (0, 1))
    every = [(sum(o[0] for o in chosen), sum(o[1] for o in chosen)) for chosen in product(*offers.values())]
    within = [e for c, e in every if c <= budget]
    if not within:
        assert cost == pytest.approx(min(c for c, _ in every))
        return
    assert cost <= budget
    assert error <= min(e for c, e in every if c <= cost + 1e-9) + 1e-9, "the best at its own cost"
    step = max(b[1] - a[1] for own in offers.values() for a in own for b in own)
    assert error <= min(within) + step


def test_offers_that_cost_more_for_more_error_are_never_taken() -> None:
    assert spent({"a": [(10.0, 0.0), (12.0, 1.0), (5.0, 3.0)]}, 11.0) == {"a": 0}
    assert spent({"a": [(10.0, 0.0), (12.0, 1.0), (5.0, 3.0)]}, 6.0) == {"a": 2}
    assert spent({"a": [(10.0, 0.0)], "b": [(4.0, 0.0), (1.0, 0.5)]}, 3.0) == {"a": 0, "b": 1}


def test_a_curve_between_its_points() -> None:
    curve = {0.5: 1e-4, 0.9: 1e-2, 0.8: 1e-3}
    assert at(curve, 0.8) == pytest.approx(1e-3)
    assert at(curve, 0.85) == pytest.approx(10**-2.5)
    assert at(curve, 0.25) == pytest.approx(1e-4 / 8)
    assert at(curve, 0.0) == 0
    assert at(curve, 0.95) > at(curve, 0.9)
    assert at({0.5: 1e-2, 0.8: 1e-3}, 0.8) == pytest.approx(1e-2), "more zeros are never less error"


def test_sensitive_layers_keep_more() -> None:
    flat, steep = {0.5: 1e-5, 0.9: 1e-3, 0.98: 1e-2}, {0.5: 1e-3, 0.9: 1e-1, 0.98: 1.0}
    shares = even({"a": flat, "b": steep}, {"a": 1000, "b": 1000}, 0.8, 0.98)
    assert shares["a"] > shares["b"]
    assert sum(shares.values()) / 2 == pytest.approx(0.8, abs=0.01)
    assert even({"a": flat, "b": flat}, {"a": 10, "b": 1000}, 0.7, 0.98)["b"] == pytest.approx(0.7, abs=0.02)


def layer(name: str, dense_us: float, *us: float) -> LayerAdvice:
    points = {("unstructured", s): t for s, t in zip((0.5, 0.8, 0.9), us, strict=True)}
    return LayerAdvice(name, name, dense_us, points, dict.fromkeys(points, 0.5), {})


def test_a_recipe_takes_time_where_error_is_small() -> None:
    layers = (layer("a", 100, 90, 40, 20), layer("b", 100, 90, 40, 20), layer("c", 100, 150, 120, 110))
    model_us = {
        ("unstructured", s): sum(min(one.dense_us, one.us["unstructured", s]) for one in layers) + 10
        for s in (0.5, 0.8, 0.9)
    }
    advice = Advice("here", 310.0, model_us, layers, None, {}, None)
    low, high = {0.5: 1e-5, 0.9: 1e-4}, {0.5: 1e-2, 0.9: 1e-1}
    curves = {n: {"unstructured": c} for n, c in (("a", low), ("b", high), ("c", low))}
    recipe, predicted = recipe_for(advice, curves, 1.3)
    assert list(recipe) == ["a"], "b is sensitive, and c is slower pruned"
    assert predicted == pytest.approx(1.3, rel=0.02)
    whole, most = recipe_for(advice, curves, 100.0)
    assert whole["a"] == ("unstructured", 0.9)
    assert 0.8 < whole["b"][1] < 0.9, "the last tenth costs more than it is worth"
    assert most == pytest.approx(310 / 166, rel=0.01)
    assert Advice.from_dict(advice.to_dict()) == advice
