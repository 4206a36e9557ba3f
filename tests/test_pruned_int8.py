"""Pruning for int8: ranges of maps, advice and slimming in bytes, blocks emptied and completed. Nothing that
depends on the clock is asserted."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import aerogel
from aerogel.backends import using
from aerogel.cli.main import app
from aerogel.errors import InvalidArgument, ShapeError
from aerogel.ir import INT8, Conv
from aerogel.pruning import quartets
from aerogel.pruning.advice import Advice, LayerAdvice
from aerogel.pruning.advise import _recipe
from aerogel.pruning.offers import recipe_for
from tests.reference_backend import ClockedCpu, by_nonzeros


def net() -> Any:
    torch.manual_seed(0)
    first, second = nn.Conv2d(8, 32, 3, padding=1), nn.Conv2d(32, 18, 3, padding=1)
    tail = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(18, 10)
    return nn.Sequential(first, nn.ReLU(), second, *tail).eval()


def images(count: int, batch: int = 4) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(batch, 8, 12, 12, generator=random) for _ in range(count)]


X = images(1, 1)[0]


def scale_of_input(ranges: str, xs: list[torch.Tensor]) -> float:
    fast = aerogel.compile(net(), X, dtype="int8", calibration=xs, ranges=ranges, tune="off")
    (quantized,) = (n for n in fast.network.graph.nodes if n.op == "quantize")  # type: ignore[union-attr]
    return quantized.quantized().scale


def test_ranges_are_cut_as_asked() -> None:
    xs = images(64)
    xs[1][0, 0, 0, 0] = 40.0
    every = torch.cat(xs)
    whole = scale_of_input("min-max", xs)
    assert whole == pytest.approx(float(every.max() - every.min()) / 255, rel=1e-5)
    most = scale_of_input("percentile", xs)
    low, high = np.percentile(every.numpy(), [0.01, 99.99])
    assert most == pytest.approx((high - low) / 255, rel=0.1), "some numbers of each image are looked at"
    assert most < scale_of_input("mean-square", xs) < 0.8 * whole


def test_ranges_have_names() -> None:
    with pytest.raises(
        InvalidArgument, match="ranges is one of mean-square, percentile, min-max; not 'best'"
    ):
        aerogel.compile(net(), X, dtype="int8", calibration=images(1), ranges="best")
    done = CliRunner().invoke(app, ["compile", "m.onnx", "-o", "m.aero", "--ranges", "best"])
    assert done.exit_code == 2
    assert "--ranges is one of" in " ".join(done.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def advice() -> Advice:
    return aerogel.advise(net(), X, dtype="int8", sparsities=(0.9,), speedup=1.5, calibration=images(2))


def test_layers_are_timed_in_bytes(advice: Advice) -> None:
    assert set(advice.model_us) == {("unstructured", 0.9), ("1x4", 0.9)}
    assert [str(INT8) in layer.conv or "int8" in layer.conv for layer in advice.layers] == [True, True, False]
    for layer in advice.layers:
        assert layer.dense_us > 0
        assert layer.lost["unstructured", 0.9] < layer.lost["1x4", 0.9] < 0.95
    assert advice.int8_us is not None
    assert "in int8\n     no zeros" in advice.table
    assert Advice.from_dict(advice.to_dict()) == advice
    assert {pattern for pattern, _ in advice.recipe.values()} <= {"unstructured", "1x4"}


def test_a_recipe_starts_from_dense_int8() -> None:
    """Torch takes 1000 us in floats; in int8 the model takes 200 without zeros, all of it in its layers."""
    point = ("1x4", 0.9)
    layers = [LayerAdvice(n, "", 100.0, {point: 10.0}, {point: 0.5}, {}) for n in "ab"]
    assert _recipe(layers, 1000.0, {point: 20.0}, 5.0, 200.0) == ({}, 5.0)
    recipe, predicted = _recipe(layers, 1000.0, {point: 20.0}, 9.0, 200.0)
    assert recipe == {"a": point}
    assert predicted == pytest.approx(1000 / 110)
    found = Advice("cpu", 1000.0, {point: 20.0}, tuple(layers), None, {}, None, {}, 200.0)
    assert recipe_for(found, {n: {"1x4": {0.9: 0.1}} for n in "ab"}, 5.0)[1] == pytest.approx(5.0)


def test_calibration_of_advice_fits_the_model() -> None:
    with pytest.raises(ShapeError, match=r"calibration\[0\]"):
        aerogel.advise(net(), X, dtype="int8", calibration=[X[:, :3]])


def test_a_network_is_slimmed_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = list[Any]()

    def score(model: nn.Module) -> float:
        judged.append(model)
        return 1.0

    named = [{"input": x} for x in images(8)]
    with using(ClockedCpu(by_nonzeros)):
        slimmed = aerogel.slim(net(), named, dtype="int8", sparsity=0.5, evaluate=score, budget_minutes=0.2)
    assert any(str(c.conv).find("int8") > 0 for c in slimmed.fast.plan.choices)
    assert {pattern for pattern, _ in slimmed.recipe.values()} == {"1x4"}
    assert isinstance(judged[-1], aerogel.Compiled), "the score is that of what runs in int8"


class Alone(nn.Module):
    """Does otherwise with a single image."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return y if x.shape[0] > 1 else y * 1.0  # type: ignore[no-any-return]


def test_batches_are_judged_in_int8() -> None:
    """Compiled for one image the model would answer batches in floats."""
    fast = list[aerogel.Compiled]()

    def score(model: Any) -> float:
        if isinstance(model, aerogel.Compiled):
            fast.append(model)
        return 1.0

    aerogel.slim(Alone(), images(4), dtype="int8", sparsity=0.5, evaluate=score, budget_minutes=0.1)
    assert fast
    assert all(one.runs([images(4)[0]]) for one in fast)


def weight(k: int, c: int, share: float) -> Any:
    rng = np.random.default_rng(0)
    full = rng.standard_normal((k, c, 3, 3)).astype(np.float32)
    return full * (rng.random(full.shape) < share), full


def test_blocks_are_of_neighbouring_channels() -> None:
    blocks = quartets.quartets((2, 6, 3, 3))
    assert len(blocks) == 2 * 2 * 9
    size = 2 * 6 * 9
    assert sorted(blocks[blocks < size].tolist()) == list(range(size))
    at = np.unravel_index(blocks[0], (2, 6, 9))
    assert [list(map(int, v)) for v in at] == [[0] * 4, [0, 1, 2, 3], [0] * 4]
    assert (blocks == size).sum() == 2 * 9 * 2, "what blocks at the edge lack"


def test_light_blocks_go_and_full_ones_are_completed() -> None:
    some, dense = weight(16, 18, 0.2)
    blocks, flat = quartets.there(some), np.append(np.abs(some.reshape(-1)), 0)
    order = quartets.lightest(some, 0.1, refilled=False)
    sums = flat[order].sum(1)
    assert (np.diff(sums) >= 0).all()
    assert sums.sum() <= 0.1 * flat.sum() < sums.sum() + np.sort(flat[blocks].sum(1))[len(order)]
    cut = np.append(some.reshape(-1), 0)
    cut[order] = 0
    cut = cut[:-1].reshape(some.shape)
    went = int(np.count_nonzero(some) - np.count_nonzero(cut))
    found = quartets.completed(cut, dense, went)
    assert went - 4 < np.count_nonzero(found) - np.count_nonzero(cut) <= went
    assert ((found == cut) | (found == dense)).all()
    assert len(quartets.there(found)) == len(quartets.there(cut)), "empty blocks stay empty"
    assert quartets.fullness(found) > quartets.fullness(cut) > quartets.fullness(some)
    all_ = quartets.lightest(some, 0.9, refilled=True)
    assert len(blocks) - len(all_) == -(-np.count_nonzero(some) // 4), "so many full blocks hold as much"


def test_reprune_keeps_the_sparsity_with_the_dense_weights() -> None:
    dense = net()
    model = aerogel.finalize(aerogel.prune(copy.deepcopy(dense), 0.8))
    before = copy.deepcopy(model)
    done = aerogel.reprune(model, X, pattern="1x4", max_weight_loss=0.3, dense=dense)
    assert "block costs" in str(done)
    for report in done.layers:
        old, new, full = (
            torch.as_tensor(m.get_submodule(report.layer).weight) for m in (before, model, dense)
        )
        gone, came = (old != 0) & (new == 0), (old == 0) & (new != 0)
        assert (int(gone.sum()), int(came.sum())) == (report.removed, report.completed)
        assert report.removed - 4 < report.completed <= report.removed or not report.removed
        assert torch.equal(new[came], full[came])
        assert report.weight_lost <= 0.3
        assert report.blocks_after >= report.blocks_before


def test_layers_are_timed_as_compile_makes_them() -> None:
    from aerogel.backends import backend_of

    some, _ = weight(8, 8, 0.5)
    held, conv = quartets.as_timed(backend_of(), some, Conv(8, 8, 3, 3, pad=(1, 1, 1, 1), n=1, h=8, w=8))
    assert conv.dtypes == INT8
    assert held.array.dtype == np.int8
    assert ((held.array != 0) <= (some != 0)).all()
    assert (np.abs(held.array).reshape(8, -1).max(1) == 127).all()


def test_reprune_says_what_goes_together() -> None:
    pruned = aerogel.prune(net(), 0.5)
    with pytest.raises(InvalidArgument, match="pattern is None or '1x4'"):
        aerogel.reprune(pruned, X, pattern="2:4")
    with pytest.raises(InvalidArgument, match="dense goes with the latter"):
        aerogel.reprune(pruned, X, dense=net())
    with pytest.raises(InvalidArgument, match="has no '0' of the same size"):
        aerogel.reprune(pruned, X, pattern="1x4", dense=nn.Sequential(nn.Conv2d(3, 3, 3)))


def test_the_command_line_advises_in_int8(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from aerogel.pruning import advise as module

    seen = dict[str, Any]()

    def advised(model: Any, *call: Any, **options: Any) -> Advice:
        seen.update(options)
        return Advice("cpu", 1.0, {("1x4", 0.5): 1.0}, (), None, {}, None)

    monkeypatch.setattr(module, "advise", advised)
    done = CliRunner().invoke(
        app, ["advise", "tests.test_pruned_int8:net", "--shape", "input=1x8x12x12", "--dtype", "int8"]
    )
    assert done.exit_code == 0, done.output
    assert (seen["dtype"], seen["patterns"]) == ("int8", None)
