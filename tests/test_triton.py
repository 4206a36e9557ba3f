"""Kernels in Triton: executed by its interpreter on the shared cases, compiled for real architectures in
processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aerogel.backends.gpu import jit
from aerogel.backends.gpu.device import FORMAT, Queue
from aerogel.backends.gpu.runner import GpuRunner
from aerogel.codegen.gpu import cost
from aerogel.formats import panels
from aerogel.ir import Choice, Config, Conv, Gpu, Idle, Plan, Stats
from aerogel.methods import gpu_form
from aerogel.methods.actsparse import gpu as actsparse
from aerogel.methods.direct import gpu as direct
from aerogel.methods.stridepack import gpu as stridepack
from aerogel.runtime.reading import network_of
from tests import counts
from tests.suite import gpu as suite
from tests.suite import interpreter

ROOT = Path(__file__).parent.parent
SHARES = {
    "exact": 0.22,
    "edges": 0.19,
    "real": 0.16,
    "special": 0.1,
    "half": 0.13,
    "half-edges": 0.12,
    "half-special": 0.08,
}
"""Half of those in 16 bits are of mixed types, which are refused."""
KINDS = {
    "sm_80": {"HMMA"},
    "sm_90": {"HMMA", "HGMMA"},
    "sm_100": {"HMMA", "UTCHMMA"},
    "gfx942": {"MFMA"},
}


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("name", suite.TRITON)
def test_the_shared_cases_run_right_in_the_interpreter(
    name: str, kind: str, ran: Callable[[str, int], None]
) -> None:
    seeds = counts.seeds("triton", SHARES[kind])
    ran(f"triton: {name}", len(seeds))
    done = suite.sweep(name, kind, seeds)
    assert not done.failures, "\n".join(done.failures)
    assert done.ran >= (0.45 if kind.startswith("half") else 0.9) * len(seeds) - 1


def _tiled(conv: Conv, seed: int = 0) -> np.ndarray:
    """Filters in runs of 32 that keep the same positions, and a few elements besides."""
    rng = np.random.default_rng(seed)
    kept = np.repeat(rng.random((-(-conv.k // 32), *conv.weight_shape[1:])) < 0.3, 32, axis=0)[: conv.k]
    kept = kept | (rng.random(conv.weight_shape) < 0.005)
    return (rng.integers(1, 4, conv.weight_shape) * kept).astype(np.float32)


@pytest.mark.parametrize(
    "text",
    [
        "n2c70h9w11k130r3s3u1p1+bias+relu",
        "n1c300h6w5k40r1s1u2p0+relu+add",
        "n1c64h8w8k96r3s3u2p1g2+bias",
        "n1c8h12w11k40r7s7u2p3",
    ],
)
@pytest.mark.turns(4)
def test_layers_of_many_channels(text: str) -> None:
    """Several steps of positions, several panels of a tile, leftovers: more than the shared cases have. Whole
    numbers."""
    conv, rng = Conv.parse(text), np.random.default_rng(1)
    weight, own = _tiled(conv), gpu_form("tilewise")
    x, residual = (rng.integers(-2, 3, s).astype(np.float32) for s in (conv.x_shape, conv.y_shape))
    bias = rng.integers(-2, 3, conv.k).astype(np.float32)
    images, held, own_bias = map(torch.from_numpy, (x, weight, bias * ("bias" in conv.steps)))
    wanted = torch.conv2d(images, held, own_bias, conv.stride, conv.pad[0], 1, conv.groups)
    wanted = wanted.relu() if "relu" in conv.steps else wanted
    wanted = wanted + torch.from_numpy(residual) if "add" in conv.steps else wanted
    for config in panels.configs("tilewise", conv, suite.target("tilewise"), 1000, 10):
        launches = own.build(own.pack(weight, conv, config), conv, config)
        assert [launch.code.entry for launch in launches] == ["gathered", "leftovers"], (
            "all tiles in one launch, the rest in another"
        )
        placed = {"x": x.transpose(0, 2, 3, 1), "residual": residual.transpose(0, 2, 3, 1), "bias": bias}
        placed["y"] = np.full(wanted.permute(0, 2, 3, 1).shape, np.nan, np.float32)
        y = interpreter.run(launches, {n: np.ascontiguousarray(a) for n, a in placed.items()})
        assert np.array_equal(y.transpose(0, 3, 1, 2), wanted.numpy()), str(config)


class Interpreted:
    """A device whose kernels Triton interprets, on torch's tensors where they lie."""

    target = Gpu("cuda", "sm_80", 108, 166912, tf32=True)

    def prepared(self, launches: Any) -> Queue:
        scratch = torch.zeros(max(16, *(launch.scratch_bytes for launch in launches)), dtype=torch.uint8)
        queues = [jit.prepared(launch, lambda tensor: tensor) for launch in launches]

        def queue(buffers: Any) -> None:
            for one in queues:
                one({**buffers, "scratch": scratch})

        return queue

    def resident(self, tensor: torch.Tensor, layout: str) -> torch.Tensor:
        return tensor.contiguous(memory_format=FORMAT[layout]) if tensor.dim() == 4 else tensor

    def fresh(self, shape: tuple[int, ...], layout: str, dtype: torch.dtype = torch.float32) -> Any:
        y = torch.empty(shape, dtype=dtype, memory_format=FORMAT[layout])
        return y, lambda: y

    def clock(self, run: Any, repeats: int) -> float:
        raise AssertionError("nothing is timed in an interpreter")

    def captured(self, run: Any) -> Any:
        return run

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_network_runs_on_torch_tensors(dtype: torch.dtype) -> None:
    """As on a GPU: the module hands torch's tensors to Triton, in any of the three types."""
    interpreter.mend()
    layers = nn.Conv2d(8, 48, 3, padding=1), nn.Conv2d(48, 64, 3, 2, 1)
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1]).eval()
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(
                torch.from_numpy(_tiled(Conv(layer.in_channels, layer.out_channels, 3, 3))) / 8
            )
        model, x = model.to(dtype), torch.randn(1, 8, 10, 9).to(dtype)
        network, _ = network_of(model, ((x,), {}), None)
        choices = [
            Choice(node.name, node.name, node.conv, Config.make("tilewise", pixels=64, filters=64, warps=8))
            for node in network.convs()
            if node.conv is not None
        ]
        plan = Plan(Interpreted().target, tuple(choices))
        got, wanted = GpuRunner(network, Interpreted(), plan)([x])[0], model.float()(x.float())
    assert got.dtype == dtype
    assert (got.float() - wanted).abs().max() <= wanted.abs().max() * (
        1e-5 if dtype == torch.float32 else 3e-2
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """CI compiles some programs for one of the targets, a night all of them for all."""
    if "beginning" in metafunc.fixturenames:
        beginnings = range(9) if counts.mode() == "nightly" else [counts.seed() % 9]
        metafunc.parametrize(
            ("target", "beginning"), [(t, b) for t in counts.some(list(KINDS)) for b in beginnings]
        )


def test_kernels_compile_without_spills_and_use_the_matrix_units(
    target: str, beginning: int, tmp_path: Path
) -> None:
    path = tmp_path / "rows.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.experiments.gpu_triton",
        target,
        "--few",
        str(beginning),
        "--json",
        str(path),
    ]
    free = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=free, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(path.read_text())
    known = {
        r["kernel"]: r
        for r in json.loads((ROOT / "benchmarks" / "results" / "gpu_facts.json").read_text())["triton"]
        if r["target"] == target
    }
    assert len({row["kernel"].split()[1] for row in rows}) == 3, "f16, bf16 and tf32"
    for row in rows:
        assert row["spilled"] == 0, row
        assert not row["kernel"].startswith("gathered") or (
            row["matrix"] and set(row["matrix"]) <= KINDS[target]
        ), row
        assert row["registers"] <= known[row["kernel"]]["registers"] + 8, row
        if target == "sm_80":
            assert row["occupancy"] >= 0.25, row
    newest = KINDS[target] - {"HMMA"}
    for row in rows:
        assert set(row["matrix"]) & newest >= set(known[row["kernel"]]["matrix"]) & newest, (
            "it used newer instructions"
        )
    assert any(set(row["matrix"]) & KINDS[target] for row in known.values())


def test_the_model_counts_what_triton_makes() -> None:
    """Instructions of a step of gathered on sm_80: the formula within 30 % of the code, as gpu_facts wrote it
    down."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "gpu_facts.json").read_text())["triton"]
    seen = 0
    for row in rows:
        if row["target"] != "sm_80" or not row["kernel"].startswith("gathered"):
            continue
        words = dict(word.split("=") for word in row["kernel"].split() if "=" in word)
        config = Config.make(
            "tilewise", pixels=int(words["block_m"]), filters=int(words["block_n"]), warps=int(words["warps"])
        )
        kind = {"fp32": "", "fp16": ":f16", "bf16": ":bf16"}[row["kernel"].split()[1]]
        conv = Conv.parse(f"n1c64h8w8k64r3s3u1p{words['border']}{kind}")
        said, counted = panels.loop(config, conv).all, row["loop"]
        assert abs(said - counted) <= 0.3 * counted, (
            f"{row['kernel']}: {said:.0f} in the model, {counted} in the code"
        )
        seen += 1
    assert seen >= 20


def test_configurations_come_in_the_order_of_their_modelled_times() -> None:
    conv, able = Conv.parse("n16c256h14w14k256r3s3u1p1"), suite.target("tilewise")
    stats = Stats(2359296 // 4, 147456, 0, 600, 147456, 100, Idle(80, 70, 60))
    for name in ("direct", "stridepack", "tilewise", "blockgemm", "actsparse"):
        offered = [c for c in gpu_form(name).configs(conv, able, stats) if not dict(c.options).get("baked")]
        assert len(offered) > 2, name
        times = [cost.microseconds(_work(name, conv, c, stats), cost.A100, True) for c in offered]
        assert times == sorted(times), name
        assert times[0] < times[-1], name


def _work(name: str, conv: Conv, config: Config, stats: Stats) -> cost.Work:
    if name in suite.TRITON:
        return panels.work(conv, config, stats.nonzeros, 0, 128 if name == "tilewise" else 32)
    return {"direct": direct.work, "stridepack": stridepack.work, "actsparse": actsparse.work}[name](
        conv, config, stats
    )
