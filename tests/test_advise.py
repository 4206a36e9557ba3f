"""advise() and reprune() on a small model, by a clock of the test's own."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aerogel
from aerogel.backends import using
from aerogel.pruning import reprune as module
from aerogel.pruning.advice import Advice, LayerAdvice
from aerogel.pruning.advise import _even, _recipe
from tests.reference_backend import ClockedCpu, by_nonzeros


def _model(filters: int = 64) -> nn.Module:
    torch.manual_seed(0)
    first, second = (
        nn.Conv2d(16, filters, 3, padding=1, bias=False),
        nn.Conv2d(filters, filters, 3, padding=1),
    )
    return nn.Sequential(first, nn.BatchNorm2d(filters), nn.ReLU(), second).eval()


X = torch.randn(1, 16, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def advice() -> Advice:
    with using(ClockedCpu(by_nonzeros)):
        return aerogel.advise(_model(), X, sparsities=(0.6, 0.95), speedup=1.3)


def test_every_point_is_measured(advice: Advice) -> None:
    points = {(p, s) for p in ("unstructured", "tilewise") for s in (0.6, 0.95)}
    assert set(advice.model_us) == points
    assert [layer.layer for layer in advice.layers] == ["0", "3"]
    for layer in advice.layers:
        assert set(layer.us) == points
        assert all(us > 0 for us in layer.us.values())
        assert layer.lost["unstructured", 0.6] < layer.lost["tilewise", 0.6] < layer.lost["tilewise", 0.95]
        assert layer.lost["unstructured", 0.95] == pytest.approx(0.95**2, abs=0.02), "weights drawn evenly"
    assert advice.torch_us == ClockedCpu.THEIRS
    assert set(advice.model_us.values()) == {ClockedCpu.OURS}, "by the backend's clock, as layers are"
    assert "0.6" in str(advice.to_dict())
    assert "60% zeros" in str(advice)


def test_a_recipe_is_pruned(advice: Advice) -> None:
    model = aerogel.prune(_model(), advice)
    for name, (_, share) in advice.recipe.items():
        weight: Any = model.get_submodule(name).weight
        assert (weight == 0).float().mean().item() == pytest.approx(share, abs=0.02)
    assert advice.recipe
    assert advice.predicted is not None


def test_a_plot_has_a_line_for_each_pattern(advice: Advice) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    ax = advice.plot()
    assert [line.get_label() for line in ax.get_lines()[:2]] == ["unstructured", "tilewise"]
    assert list(ax.get_lines()[0].get_xdata()) == [60, 95]
    pyplot.close("all")


@pytest.mark.parametrize(
    ("curve", "wanted"),
    [
        ([(0.5, 12.0), (0.7, 8.0)], 0.6),
        ([(0.5, 9.0), (0.7, 8.0)], 0.5),
        ([(0.5, 12.0), (0.7, 11.0)], None),
        ([(0.5, float("inf")), (0.7, 8.0)], 0.7),
        ([(0.5, 9.0), (0.7, 12.0), (0.9, 8.0)], 0.8),
    ],
)
def test_break_even(curve: list[tuple[float, float]], wanted: float | None) -> None:
    assert _even(curve, 10.0) == (None if wanted is None else pytest.approx(wanted))


def test_a_recipe_takes_least_weight_for_the_time() -> None:
    """Two layers alike, but one of them loses less: it goes first, and the other only if it must."""
    point = ("unstructured", 0.9)
    layers = [
        LayerAdvice(name, "", 100.0, {point: 10.0}, {point: lost}, {"unstructured": 0.5})
        for name, lost in (("a", 0.8), ("b", 0.5))
    ]
    recipe, predicted = _recipe(layers, 200.0, {point: 20.0}, 1.5)
    assert recipe == {"b": point}
    assert predicted == pytest.approx(200 / 110)
    assert _recipe(layers, 200.0, {point: 20.0}, 5)[0] == {"a": point, "b": point}
    assert _recipe(layers, 200.0, {point: 20.0}, 50)[1] == pytest.approx(10), "as far as it goes"


def test_a_model_in_bf16_is_advised_too() -> None:
    found = aerogel.advise(_model().bfloat16(), X.bfloat16(), sparsities=(0.9,), patterns=("unstructured",))
    assert set(found.model_us) == {("unstructured", 0.9)}


def test_advise_refuses_in_words() -> None:
    with pytest.raises(aerogel.AerogelError, match="between 0 and 1"):
        aerogel.advise(_model(), X, sparsities=(1.5,))
    with pytest.raises(aerogel.AerogelError, match="pattern is"):
        aerogel.advise(_model(), X, sparsities=(0.9,), patterns=("stripes",))


def test_repruning_stays_within_the_weight_and_holds() -> None:
    model = aerogel.finalize(aerogel.prune(_model(), 0.8))
    before = copy.deepcopy(model)
    with using(ClockedCpu(by_nonzeros)):
        done = aerogel.reprune(model, X, max_weight_loss=0.05)
    assert [r.layer for r in done.layers] == ["0", "3"]
    for report in done.layers:
        old, new = (torch.as_tensor(m.get_submodule(report.layer).weight).detach() for m in (before, model))
        gone = (old != 0) & (new == 0)
        assert int(gone.sum()) == report.removed
        assert report.weight_lost <= 0.05
        assert torch.equal(new[new != 0], old[new != 0])
        if report.removed:
            assert report.after_us < report.before_us
            assert old[gone].abs().max() <= old[new != 0].abs().median(), "light ones went"
    weight: Any = model.get_submodule("3").weight
    zeros = weight == 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(X).square().sum().backward()
    optimizer.step()
    assert torch.equal(torch.as_tensor(model.get_submodule("3").weight) == 0, zeros), "masks hold"
    assert "nonzeros" in str(done) or "nothing removed" in str(done)


def test_repruning_keeps_the_score() -> None:
    """The score is the share of weights left: exactly as many go as it allows."""
    model = aerogel.finalize(aerogel.prune(_model(), 0.8))
    layers = [
        module._Layer("0", model.get_submodule("0"), *_held(model, "0")),
        module._Layer("3", model.get_submodule("3"), *_held(model, "3")),
    ]
    steps = module._steps(layers)
    full = sum(len(layer.order) for layer in layers)
    assert len(steps) == full > 100

    def left(m: nn.Module) -> float:
        return float(sum(int(torch.as_tensor(m.get_submodule(n).weight).count_nonzero()) for n in ("0", "3")))

    before = left(model)
    assert module._within(model, layers, steps, left, 1e9) == (before, before - full)
    module._take(layers, steps, 0)
    first, last = module._within(model, layers, steps, left, 50.0)
    assert first == before
    assert 50 - full / 2 ** (module.TRIES - 1) <= first - last <= 50


def _held(model: nn.Module, name: str) -> tuple[Any, ...]:
    from aerogel.ir.conv import Conv

    weight = torch.as_tensor(model.get_submodule(name).weight).detach().numpy()
    conv = Conv(weight.shape[1], weight.shape[0], 3, 3, pad=(1, 1, 1, 1), n=1, h=28, w=28)
    return conv, weight.copy(), None, 0.001, module.leftovers(weight, conv, 0.05)


def test_leftovers_are_outside_blocks_and_light() -> None:
    """A dense block is left alone; of the rest the lightest go, until the budget is spent."""
    from aerogel.ir.conv import Conv

    conv = Conv(64, 64, n=1, h=8, w=8)
    weight = np.zeros((64, 64), np.float32)
    weight[:32, :8] = 0.001
    weight[:, 40:50] = np.random.default_rng(0).random((64, 10)) * (
        np.random.default_rng(1).random((64, 10)) < 0.2
    )
    order = module.leftovers(weight.reshape(conv.weight_shape), conv, 0.1)
    assert (order % 64 >= 40).all()
    assert np.abs(weight.reshape(-1)[order]).sum() <= 0.1 * np.abs(weight).sum()
    assert (np.diff(np.abs(weight.reshape(-1)[order])) >= 0).all()


def test_reprune_refuses_in_words() -> None:
    with pytest.raises(aerogel.AerogelError, match="between 0 and 1"):
        aerogel.reprune(_model(), X, max_weight_loss=2)
    with pytest.raises(aerogel.AerogelError, match="prune it first"):
        aerogel.reprune(_model(), X)
    with pytest.raises(aerogel.AerogelError, match="go together"):
        aerogel.reprune(_model(), X, max_drop=0.1)


def test_the_spread_is_shown_and_noise_is_named() -> None:
    point = ("unstructured", 0.9)
    quiet = Advice("cpu", 100.0, {point: 50.0}, (), None, {}, None, {point: (1.95, 2.05)})
    assert "90% zeros  2.00x  (half of the rounds 1.95 to 2.05)" in quiet.table
    assert "noisy" not in quiet.table
    busy = replace(quiet, spread={point: (1.5, 2.5)})
    assert "half of the rounds lie 67% apart. That is too noisy for a recipe" in busy.table
    assert busy.to_dict()["spread"] == {"unstructured@0.9": [1.5, 2.5]}
