"""The line that is said of a compiled model: a layer counts as sparse only where zeros are skipped, and a
faster runtime comes first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aerogel
from aerogel.backends import using
from aerogel.backends.meter import Sample
from aerogel.formats.values import count_values
from aerogel.ir import GRAPH, Beside, Choice, Config, Conv, Idle, Plan, Timing, host
from aerogel.methods import cpu_form
from aerogel.runtime import peers
from aerogel.runtime.headline import (
    count_sparse_flops,
    describe_kernels,
    describe_peers,
    represent,
    skips_zeros,
)
from aerogel.runtime.module import Compiled
from tests.onnx_files import everything
from tests.reference_backend import Reference

DENSE_WEIGHT = "aerogel's dense-weight kernels"


def choice(method: str, sparsity: float, work: float | None = None, idle: Idle | None = None) -> Choice:
    config = Config.make(method)
    return Choice("a", "a", Conv(16, 16).at(1, 8, 8), config, sparsity=sparsity, work=work, idle=idle)


@pytest.mark.parametrize(
    ("method", "sparsity", "work", "sparse"),
    [
        ("dense", 0.9, None, False),
        ("direct", 0.9, 0.1, True),
        ("direct", 0.9, None, True),
        ("direct", 0.0, None, False),
        ("direct", 0.001, 0.999, False),
        ("tilewise", 0.0, 1.0, False),
        ("tilewise", 0.0, None, False),
        ("tilewise", 0.35, 1.0, False),
        ("tilewise", 0.75, 0.25, True),
        ("depthwise", 0.5, 1.3, False),
    ],
)
def test_a_layer_is_sparse_where_zeros_are_skipped(
    method: str, sparsity: float, work: float | None, sparse: bool
) -> None:
    assert skips_zeros(choice(method, sparsity, work)) == sparse


def test_zeros_of_maps_count_where_a_kernel_skips_them() -> None:
    idle = Idle(60, 40, 10)
    assert skips_zeros(choice("actsparse", 0.0, 1.0, idle))
    assert not skips_zeros(choice("actsparse", 0.0, 1.0, Idle(60, 0, 0)))
    assert not skips_zeros(choice("tilewise", 0.0, 1.0, idle))


def test_kernels_are_counted_by_kind() -> None:
    dense, sparse, ours = choice("dense", 0.0), choice("direct", 0.9, 0.1), choice("tilewise", 0.0, 1.0)
    assert describe_kernels([dense, sparse]) == "1 of 2 layers on sparse kernels"
    assert describe_kernels([dense, ours, ours]) == f"2 of 3 layers on {DENSE_WEIGHT}"
    assert describe_kernels([sparse, ours]) == f"1 of 2 layers on sparse kernels, 1 on {DENSE_WEIGHT}"
    assert count_sparse_flops([dense, ours, sparse]) == pytest.approx(1 / 3)
    assert count_sparse_flops([]) == 0


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3)).eval()


def test_a_dense_model_has_no_layer_on_a_sparse_kernel(tmp_path: Path) -> None:
    """57 of 66 layers of a dense LRASPP were called sparse: they are tiles without zeros."""
    model, x = _network(), torch.randn(1, 16, 12, 12)
    fast = aerogel.compile(model, x, tune="off")
    state: dict[str, torch.Tensor] = model.state_dict()
    tiles = tuple(_on_tiles(c, state[f"{c.layer}.weight"].numpy()) for c in fast.plan.choices)
    timed = replace(fast.plan, choices=tiles, model=Timing.of([2.0], [3.0]))
    said = Compiled(model, fast.network, timed, GRAPH)
    report = aerogel.explain(said)
    for text in (repr(said), report.headline):
        assert f"2 of 2 layers on {DENSE_WEIGHT}" in text
        assert "sparse kernels" not in text.replace("enough for sparse kernels", "")
    assert "keep that" in report.headline, "a dense runtime may be better"
    page = report.save(tmp_path / "report.html").read_text()
    assert "<b>0 of 2</b>layers on sparse kernels" in page
    assert report.memory["nonzeros and their positions"] == report.memory["dense weights"]


def _on_tiles(choice: Choice, weight: Any) -> Choice:
    config = Config.make("tilewise", filters=8, channels=16, groups=1)
    packed = cpu_form("tilewise").pack(weight, choice.conv, config)
    return replace(choice, config=config, work=count_values(packed) / weight.size)


@pytest.mark.parametrize(("share", "sparse"), [(0.9, True), (0.0, False)])
def test_compile_counts_what_its_kernels_multiply(share: float, sparse: bool) -> None:
    model = _network() if not share else aerogel.prune(_network(), share)
    fast = aerogel.compile(model, torch.randn(1, 16, 12, 12), tune="off", methods=("direct", "dense"))
    for c in fast.plan.choices:
        assert (c.work is not None) == (c.config.method != "dense")
        assert c.work is None or c.work == pytest.approx(1 - c.sparsity, abs=1e-9)
        assert skips_zeros(c) == sparse


def test_random_zeros_that_a_tile_multiplies_are_not_skipped() -> None:
    """Of 20 % random zeros tiles leave out next to nothing."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((64, 64, 3, 3)) * (rng.random((64, 64, 3, 3)) > 0.2)).astype(np.float32)
    config = Config.make("tilewise", filters=16, channels=64, groups=1)
    packed = cpu_form("tilewise").pack(weight, Conv(64, 64, 3, 3), config)
    assert count_values(packed) / weight.size > 0.95
    assert not skips_zeros(choice("tilewise", 0.2, count_values(packed) / weight.size))


def plan(onnxruntime: Beside | None = None, openvino: Beside | None = None) -> Plan:
    timing = Timing.of([80.5], [120.75])
    layers = (choice("tilewise", 0.0, 1.0),)
    return Plan(host(), layers, timing, onnxruntime=onnxruntime, openvino=openvino)


def test_a_faster_runtime_comes_first() -> None:
    slow = plan(onnxruntime=Beside(58700.0, 80500.0))
    words = "onnxruntime takes 58.7 ms, aerogel 80.5 ms: keep onnxruntime"
    assert describe_peers(slow) == words
    fast = Compiled(_network(), None, slow, GRAPH)
    assert aerogel.explain(fast).headline.startswith(f"{words}. 1.50x over the faster torch layout; ")
    assert repr(fast).startswith(
        "Compiled(Sequential, onnxruntime is faster: 58.7 ms, aerogel 80.5 ms, 1.50x over torch, "
    )
    both = plan(onnxruntime=Beside(58700.0, 80500.0, True), openvino=Beside(50000.0, 80500.0, True))
    assert describe_peers(both) == (
        "onnxruntime takes 58.7 ms, OpenVINO takes 50.0 ms, aerogel 80.5 ms: keep OpenVINO "
        "(measured on a busy machine)"
    )
    quick = plan(onnxruntime=Beside(58700.0, 20000.0))
    assert describe_peers(quick) == "onnxruntime takes 58.7 ms, aerogel 20.0 ms: aerogel is faster"
    assert "is faster" not in represent("A", quick, GRAPH)


def test_explain_says_what_was_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aerogel.report.explain.is_installed", lambda name: name == "onnxruntime")
    fast = Compiled(_network(), None, plan(), GRAPH)
    assert (
        "timed beside torch; onnxruntime is installed and may be faster: aerogel bench MODEL --against "
        "torch,onnxruntime; OpenVINO is not installed"
    ) in aerogel.explain(fast).notes
    known = Compiled(_network(), None, plan(onnxruntime=Beside(1.0, 2.0)), GRAPH)
    assert "timed beside torch, onnxruntime; OpenVINO is not installed" in aerogel.explain(known).notes


class Slower(Reference):
    """Ours takes 80.5 ms; other runtimes 58.7; torch twice as long."""

    OURS, THEIRS = 80500.0, 161000.0

    def meter_on_host(self, run: Callable[[], object], repeats: int) -> Sample:
        us = self.clock(run, repeats)
        return Sample(us if us == self.OURS else 58700.0)


def test_an_onnx_file_is_timed_beside_every_runtime_that_is_installed(tmp_path: Path) -> None:
    path = everything(tmp_path / "model.onnx")
    with using(Slower({"dense": 30.0, "direct": 10.0})):
        fast = aerogel.compile(path, shapes={"x": (1, 3, 12, 12)}, progress=False)
    present = [name for name in peers.TITLES if peers.is_installed(name)]
    assert set(fast.plan.peers()) == {peers.TITLES[name] for name in present}
    if present:
        assert "takes 58.7 ms" in aerogel.explain(fast).headline
        assert "keep " in aerogel.explain(fast).headline


def test_a_runtime_that_refuses_a_file_is_no_peer_of_it(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"no model")
    assert peers.open_installed(tmp_path / "m.onnx", ("x",), (torch.zeros(1),)) == {}
