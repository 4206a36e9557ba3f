"""Sparse feature maps: what is counted as zero, when the method refuses, what happens when the data
changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aerogel
from aerogel.backends import using, watch
from aerogel.backends.cpu.threads import run
from aerogel.backends.cpu.trial import built, rotating
from aerogel.codegen.cpu.abi import native
from aerogel.errors import InvalidFile
from aerogel.ir import (
    Config,
    Conv,
    Idle,
    Place,
    Plan,
    Stats,
    Target,
    Timing,
    Tried,
    Weight,
    here_levels,
    host,
)
from aerogel.methods.actsparse import cpu as actsparse
from aerogel.methods.dense import cpu as dense
from aerogel.reference import reference
from aerogel.tune import activity
from tests.reference_backend import ClockedCpu, by_nonzeros
from tests.small_models import right, runs

CONV = Conv.parse("n1c32h14w14k40r3s3u1p1+bias+relu")
IDLE = Idle(90, 90, 90)


def _numbers(conv: Conv, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    weight, x = (rng.integers(-8, 9, shape).astype(np.float32) for shape in (conv.weight_shape, conv.x_shape))
    return weight, x, rng.integers(-8, 9, conv.k).astype(np.float32)


def test_zeros_are_counted_at_three_grains() -> None:
    x = np.ones((1, 4, 16, 16), np.float32)
    x[0, 0] = 0  # a channel: 256 elements, 16 vectors, 4 tiles
    x[0, 1, :8, :8] = -0.0  # a tile: 64 elements, no vector of 16
    x[0, 2, 3] = 0  # a row: 16 elements, one vector
    assert Idle.of(x) == Idle(round(100 * 336 / 1024), round(100 * 17 / 64), round(100 * 5 / 16))
    assert Idle.of(np.zeros((2, 3, 5, 7), np.float32)) == Idle(100, 100, 100)
    assert Idle.of(np.zeros((0, 3, 5, 7), np.float32)) == Idle(0, 0, 0)


def test_refusals_name_the_property() -> None:
    weight, _, _ = _numbers(CONV)
    assert "compile(calibration=...)" in str(actsparse.refuse(CONV, host(), Stats.of(weight)))
    assert "3 % of its input's vectors" in str(
        actsparse.refuse(CONV, host(), Stats.of(weight, Idle(40, 3, 0)))
    )
    half = Conv.parse("n1c16h6w6k70r3s3u1p1:f16.f16.f16.f16")
    assert "summed in f32" in str(actsparse.refuse(half, host(), Stats.of(weight, IDLE)))
    assert actsparse.refuse(CONV, host(), Stats.of(weight, IDLE)) is None


@pytest.mark.turns(3)
@pytest.mark.parametrize("isa", here_levels())
def test_every_panel_is_exact(isa: str) -> None:
    """Every number of filters, width and block that is offered, dense weights and unstructured ones, an empty
    filter among them."""
    target, (weight, x, bias) = host().lower(isa), _numbers(CONV)
    x[:, ::3] = 0
    x[:, 1, 3:9] = -0.0
    sparse = weight * (np.random.default_rng(1).random(weight.shape) < 0.2)
    sparse[7] = 0
    for own in (weight, sparse):
        wanted = reference(x.astype(np.float64), own.astype(np.float64), CONV, bias.astype(np.float64))
        for config in actsparse.configs(CONV, target, Stats.of(own, IDLE)):
            reads, writes = actsparse.layouts(CONV, config, target, Place((1, 1, 1, 1)))
            packed = actsparse.pack(own, CONV, config)
            assert np.array_equal(actsparse.unpack(packed, CONV), own)
            kernels = actsparse.build(packed, CONV, config, target, reads, writes)
            xb, yb = reads.allocate(CONV.x_shape), writes.allocate(CONV.y_shape)
            reads.write(xb, x)
            yb[:] = np.nan
            run(kernels, xb, yb, bias)
            assert np.array_equal(writes.read(yb, CONV.y_shape), wanted), config
            assert writes.dirty_border(yb, CONV.y_shape) == 0


def test_both_sparse_stores_what_a_panel_keeps() -> None:
    """Positions that no filter of a panel keeps take no room; tile-wise weights are tiles."""
    weight = np.ones(CONV.weight_shape, np.float32)
    weight[:, ::2] = 0
    weight[20:, :8] = 0
    config = Config.make("actsparse", filters=4, width=1, vectors=1, chunk=256, channels=32, groups=1)
    packed = actsparse.pack(weight, CONV, config)
    assert packed.arrays["tile_row"].tolist() == [0, 16 * 9, 28 * 9]
    assert packed.arrays["panel"].size == 20 * 16 * 9 + 20 * 12 * 9


def test_active_windows_are_counted() -> None:
    """A channel without zeros is active under every tap, up to the border's zeros; one of zeros never."""
    conv = Conv.parse("n1c8h16w16k8r1s1u1p0")
    weight, x, bias = _numbers(conv)
    x[:] = 1
    x[:, 2:] = 0
    config = Config.make("actsparse", filters=8, width=1, vectors=4, chunk=256, channels=8, groups=1)
    kernels = native(built(conv, config, Weight(weight), replace(host().lower("generic"), threads=1)))
    rotating(kernels, conv, x, bias, 1, 1)()
    counts = kernels[0].counts
    assert counts is not None
    active, seen = counts.reshape(-1, 8).sum(0)[:2]
    assert (active, seen) == (2 * 64, 8 * 64)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 40, 3, 1, 1), nn.ReLU()).eval()


def _planned(model: nn.Module, x: torch.Tensor, most: float) -> aerogel.Compiled:
    """Both layers skip zeros, with such a limit."""
    found, timing = aerogel.compile(model, x, tune="off").plan, Timing(1.0, 1.0, 1.0, 1)
    assert isinstance(found.target, Target)
    choices = []
    for choice in found.choices:
        weight = np.ones(choice.conv.weight_shape, np.float32)
        config = next(actsparse.configs(choice.conv, found.target, Stats.of(weight, IDLE)))
        other = next(dense.configs(choice.conv, found.target, Stats.of(weight)))
        tried = (Tried(config, timing), Tried(other, timing))
        choices.append(replace(choice, config=config, tried=tried, idle=IDLE, limit=most))
    return aerogel.compile(model, x, plan=replace(found, choices=tuple(choices)))


def _skipped(fast: aerogel.Compiled) -> bool:
    """Whether the next call skips, without taking it."""
    return bool(runs(fast)._watch._paused == 0)


def test_dense_data_falls_back_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FIRST", 3)
    model, empty, full = _model(), torch.zeros(1, 8, 14, 14), torch.rand(1, 8, 14, 14) + 0.1
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.get_parameter("bias").fill_(-0.01)
    fast = _planned(model, full, 0.5)
    for _ in range(3):
        right(model, fast, empty)
        assert _skipped(fast)
    right(model, fast, full)
    assert not _skipped(fast), "more windows were active than pays"
    for _ in range(3):
        assert not _skipped(fast)
        right(model, fast, full)
    assert _skipped(fast), "tried again"
    right(model, fast, full)
    for _ in range(6):
        assert not _skipped(fast), "for twice as long"
        right(model, fast, full)
    right(model, fast, empty)
    assert _skipped(fast)
    methods = [
        {s.label.split()[0] for p in program.parts for s in p.natives}
        for program in runs(fast).programs.values()
    ]
    assert sorted("actsparse" in m for m in methods) == [False, True]


def test_a_pooled_layer_is_watched_too() -> None:
    model = nn.Sequential(*_model(), nn.MaxPool2d(2)).eval()
    full = torch.rand(1, 8, 14, 14) + 0.1
    plan = _planned(model, full, 0.2).plan
    fast = aerogel.compile(
        model, full, plan=replace(plan, choices=tuple(replace(c, pooled=True) for c in plan.choices))
    )
    right(model, fast, full)
    (program,) = runs(fast).programs.values()
    assert any("pooled" in s.label for part in program.parts for s in part.natives)
    runs(fast)._watch._limits.pop(plan.choices[0].node)  # only the pooled one counts
    runs(fast)._watch._paused = 0
    right(model, fast, full)
    assert not _skipped(fast)


@pytest.mark.parametrize("most", [-0.1, 1.1, float("nan")])
def test_a_limit_is_a_share_and_has_a_way_back(most: float) -> None:
    fast = _planned(_model(), torch.rand(1, 8, 14, 14), 0.5)
    with pytest.raises(InvalidFile, match="limit"):
        Plan.from_json(
            replace(fast.plan, choices=tuple(replace(c, limit=most) for c in fast.plan.choices)).to_json()
        )
    alone = tuple(replace(c, tried=c.tried[:1]) for c in fast.plan.choices)
    with pytest.raises(InvalidFile, match="nothing else was timed"):
        Plan.from_json(replace(fast.plan, choices=alone).to_json())


def test_a_limit_of_one_never_falls_back() -> None:
    model, full = _model(), torch.rand(1, 8, 14, 14) + 0.1
    fast = _planned(model, full, 1.0)
    right(model, fast, full)
    assert _skipped(fast)


def test_plans_and_files_keep_what_was_measured(tmp_path: Path) -> None:
    model, x = _model(), torch.rand(1, 8, 14, 14)
    fast = _planned(model, x, 0.5)
    assert Plan.from_json(fast.plan.to_json()) == fast.plan
    aerogel.save(fast, tmp_path / "m.aero")
    again = aerogel.load(tmp_path / "m.aero")
    assert again.plan.choices == fast.plan.choices
    assert torch.equal(again(x), fast(x))
    assert "falls back where more than 50%" in str(aerogel.explain(again, verbose=True))
    assert "90 % of its input's elements" in str(aerogel.explain(again, verbose=True))
    assert "90 % of vectors of pixels" in aerogel.explain(again)._repr_html_()


@pytest.mark.usefixtures("one_thread")
def test_calibration_lets_the_method_win(tmp_path: Path) -> None:
    """Most channels of the second layer's input are dead, so that it takes three times fewer products."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 128, 3, 1, 1), nn.ReLU(), nn.Conv2d(128, 128, 3, 1, 1), nn.ReLU()
    ).eval()
    x = torch.rand(1, 3, 28, 28)
    with torch.no_grad():
        model[0].get_parameter("bias")[:116] = -50
    with using(ClockedCpu(by_nonzeros)):
        without = aerogel.compile(model, x, store=tmp_path)
    assert all(c.config.method != "actsparse" and c.idle is None for c in without.plan.choices)
    assert "calibration" in str(aerogel.explain(without, layer="2"))
    with using(ClockedCpu(by_nonzeros)):
        fast = aerogel.compile(model, x, store=tmp_path, calibration=[x, torch.rand(2, 3, 28, 28)])
    second = fast.plan.choices[1]
    assert second.config.method == "actsparse"
    assert second.idle is not None
    assert second.idle.vectors >= 90
    assert second.limit is not None
    assert second.limit > 0.2
    right(model, fast, x)


def test_a_sample_of_another_size_is_fitted() -> None:
    own = activity.Seen(IDLE, np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5))
    assert own.fitted((1, 3, 2, 9)).shape == (1, 3, 2, 9)
    assert np.array_equal(own.fitted((3, 3, 4, 5))[2], own.images[0])
