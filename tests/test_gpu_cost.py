"""The cost model of GPU kernels: held to machine code, to a cycle simulator, and to common sense."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aerogel.codegen.gpu import cost, nvrtc
from aerogel.ir import Conv, Dtypes, Gpu, Idle, Stats
from aerogel.methods.actsparse import gpu as actsparse
from aerogel.methods.direct import gpu as direct
from aerogel.methods.stridepack import gpu as stridepack
from benchmarks.experiments import gpu_triton, sass
from benchmarks.experiments.gpu_model import SIMULATED, cycles
from tests import counts

TARGET = Gpu("cuda", "sm_80", 108, 167936)
RUNS = json.loads(
    (Path(__file__).parent.parent / "benchmarks" / "results" / "gpu_simulated.json").read_text()
)["runs"]


def random_layer(text: str, density: float = 0.1) -> tuple[Conv, np.ndarray]:
    conv, rng = Conv.parse(text), np.random.default_rng(0)
    weight = np.where(rng.random(conv.weight_shape) < density, rng.standard_normal(conv.weight_shape), 0)
    return conv, weight.astype(np.float32)


def test_the_cost_model_counts_what_the_machine_code_has() -> None:
    """Instructions of each kernel's hot loop on sm_80, for each multiplication: the formulas within a quarter
    of what is there."""
    for text in counts.some([f"n4c64h56w56k64r3s3u1p1{kind}" for kind in ("", ":f16", ":f16.f16.f16.f16")]):
        conv, weight = random_layer(text)
        weight = weight.astype(np.float32 if conv.dtypes == Dtypes() else np.float16)
        stats = Stats.of(weight, Idle(80, 60, 50))
        for module in (direct, stridepack, *([actsparse] if conv.dtypes == Dtypes() else [])):
            offered = [c for c in module.configs(conv, TARGET, stats) if not dict(c.options).get("baked")]
            for config in offered[:3]:
                code = module.build(module.pack(weight, conv, config), conv, config)[-1].code
                seen = sass.hot_loop(gpu_triton.disassembled(nvrtc.compile_for(code, "sm_80")[0]))
                own = module.loop(config) if module is actsparse else module.loop(config, conv)
                counted, said = sum(seen.values()) / seen["mac"], own.all / own.mac
                assert abs(said - counted) <= 0.25 * counted, (
                    f"{config}: {said:.2f} in the model, {counted:.2f} in the code, a mac"
                )


def test_the_model_knows_what_is_more_work() -> None:
    """Modelled times grow with the work, and dense's is near what the data sheet allows."""
    conv, weight = random_layer("n16c256h14w14k256r3s3u1p1")
    config = next(direct.configs(conv, TARGET, Stats.of(weight)))
    few, many = (
        cost.microseconds(direct.work(conv, config, Stats(10**6, n)), cost.A100) for n in (10**4, 10**5)
    )
    assert few < many
    macs = conv.dense_flops / 2
    for kind, peak in (("f32", 19.5e12), ("tf32", 156e12), ("f16", 312e12)):
        us = cost.dense(conv, cost.A100, kind)
        assert 2 * macs / peak * 1e6 < us < 4 * 2 * macs / peak * 1e6 + 5
    assert cost.dense(conv, cost.H100, "f16") < cost.dense(conv, cost.A100, "f16")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['layer']} {run['kernel']}")
def test_modelled_cycles_are_near_the_simulated_ones(run: dict[str, Any]) -> None:
    """Simulated, not measured: see gpu_simulated.json."""
    assert 0.65 < cycles(run) / run["cycles"] < 1.35


def test_the_model_puts_kernels_in_the_order_of_the_simulator() -> None:
    """On each layer every two that are more than 5 % apart."""
    done = 0
    for one, other in combinations(RUNS, 2):
        if one["layer"] == other["layer"] and abs(one["cycles"] / other["cycles"] - 1) > 0.05:
            assert (one["cycles"] < other["cycles"]) == (cycles(one) < cycles(other)), (one, other)
            done += 1
    assert done > 30


def test_fewer_resident_warps_wait_longer() -> None:
    """Latency is hidden by blocks that fit beside each other: registers and shared memory say how many."""
    work = cost.Work(12, 4, 1e4, registers=64, shared_bytes=15_000, trips=20)
    assert cost.resident(work, SIMULATED) == 6
    large = cost.Work(12, 4, 1e4, registers=64, shared_bytes=47_000, trips=20)
    many = cost.Work(12, 4, 1e4, registers=255, shared_bytes=15_000, trips=20)
    assert cost.resident(large, SIMULATED) == 2 == cost.resident(many, SIMULATED)
    assert cost.microseconds(large, SIMULATED) > 2 * cost.microseconds(work, SIMULATED)


def test_slots_are_estimated_near_what_packing_finds() -> None:
    for text, density in (("n1c128h28w28k128r3s3u1p1", 0.1), ("n1c256h14w14k64r1s1u1p0", 0.1)):
        conv, weight = random_layer(text, density)
        stats = Stats.of(weight)
        offered = [c for c in stridepack.configs(conv, TARGET, stats) if not dict(c.options).get("baked")]
        for config in {(c["channels"], c["reorganized"]): c for c in offered if c["channels"] > 16}.values():
            exact, _ = stridepack.counted(weight, conv, config)
            assert 0.7 < stridepack.usual(conv, config, stats) / exact < 1.3, config
