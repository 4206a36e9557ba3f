"""compile() on a device: the same path as on the CPU, on PoCL through OpenCL."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aerogel
from aerogel.backends import using
from aerogel.backends.gpu.backend import OnGpu
from aerogel.backends.gpu.opencl import OpenCL
from aerogel.backends.gpu.runner import LOOK, GpuRunner
from aerogel.ir import Choice, Config, Conv, Gpu, Idle, Plan, Stats, Timing, Tried
from aerogel.methods.actsparse import gpu as actsparse
from aerogel.methods.direct import gpu as direct
from aerogel.runtime.reading import network_of
from tests import counts

ROOT = Path(__file__).parent.parent
TARGET = Gpu("cuda", "sm_80", 108, 167936)


def _random(text: str, density: float = 0.1) -> tuple[Conv, np.ndarray]:
    conv, rng = Conv.parse(text), np.random.default_rng(0)
    weight = np.where(rng.random(conv.weight_shape) < density, rng.standard_normal(conv.weight_shape), 0)
    return conv, weight.astype(np.float32)


class Quick(OpenCL):
    """A device on which a call takes as long as what it writes, and torch longer than that."""

    written = 0

    def clock(self, run: Callable[[], object], repeats: int) -> float:
        self.written = 0
        run()
        return 1.0 + self.written if self.written else 1e9

    def fresh(self, shape: tuple[int, ...], layout: str, dtype: torch.dtype = torch.float32) -> Any:
        self.written += int(np.prod(shape))
        return super().fresh(shape, layout, dtype)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 40, 3, padding=1), nn.Conv2d(40, 40, 3, 2, 1)
        self.norm, self.head = nn.BatchNorm2d(40), nn.Linear(40, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        return self.head(torch.relu(self.norm(self.second(y))).mean((2, 3)))  # type: ignore[no-any-return]


def test_a_layer_that_skips_zeros_goes_back_to_torch_when_there_are_none() -> None:
    """And it pools in its own kernel until then. Choices as the tuner would make them on a GPU where it
    pays."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 40, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(40, 8, 1)
    ).eval()
    empty, full = torch.randn(1, 4, 12, 12), torch.randn(1, 4, 12, 12)
    empty[:, :3] = 0
    device = OpenCL()
    network, _ = network_of(model, ((empty,), {}), None)
    first, last = network.convs()
    conv, idle = first.conv.at(1, 12, 12) if first.conv else None, Idle(75, 75, 75)
    assert conv is not None
    weight = network.weight(first).array
    config = next(actsparse.configs(conv, TARGET, Stats.of(weight, idle)))
    theirs = Config.make("dense", channels_last=0)
    timing = Timing(1.0, 1.0, 1.0, 1)
    tried = (Tried(config, timing), Tried(theirs, timing))
    choice = Choice("0", first.name, conv, config, pooled=True, limit=0.5, tried=tried)
    plan = Plan(TARGET, (choice, Choice("3", last.name, last.conv or conv, theirs)))
    runner = GpuRunner(network, device, plan)

    def body(x: torch.Tensor) -> Any:
        return runner([x])[0]

    with torch.no_grad():
        torch.testing.assert_close(body(empty), model(empty), rtol=1e-4, atol=1e-5)
        layer = next(iter(runner._layers.values()))
        assert layer is not None
        assert layer.pool is not None
        assert 0.2 < layer.active() <= 0.5
        assert runner._watch._paused == 0
        paused = []
        for _ in range(LOOK + 1):
            torch.testing.assert_close(body(full), model(full), rtol=1e-4, atol=1e-5)
            paused.append(runner._watch._paused > 0)
    assert any(paused), "it skips nothing and is still asked"


def test_calibration_is_used_on_a_device() -> None:
    model = nn.Sequential(nn.Conv2d(8, 40, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)).eval()
    x = torch.randn(1, 8, 10, 10)
    x[:, :7] = 0
    with using(OnGpu(OpenCL())):
        fast = aerogel.compile(model, (x,), methods=("actsparse",), calibration=[(x,)])
    (choice,) = fast.plan.choices
    assert choice.idle is not None
    assert any(c.method == "actsparse" for c in choice.configs())
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_what_wins_on_a_device_is_joined_and_limited() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 40, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(40, 8, 3, padding=1)
    ).eval()
    x = torch.randn(1, 8, 10, 10)
    x[:, :7] = 0
    with using(OnGpu(Quick())):
        fast = aerogel.compile(model, (x,), methods=("actsparse",), calibration=[(x,)])
    first = fast.plan.choices[0]
    assert first.config.method == "actsparse"
    assert first.limit == 1.0, "on this device it always pays"
    assert first.pooled
    assert "pool" in str(aerogel.explain(fast, verbose=True))
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.turns(2)
@pytest.mark.parametrize("half", ["asked for", "the model's own"])
def test_half_precision_on_a_device(half: str) -> None:
    model, x = Small().eval(), torch.randn(2, 3, 12, 10)
    aerogel.prune(model, 0.8, exclude=["head"])
    aerogel.finalize(model)
    asked = torch.float16 if half == "asked for" else None
    given, images = (model, x) if asked else (copy.deepcopy(model).half(), x.half())
    with using(OnGpu(Quick())):
        fast = aerogel.compile(given, (images,), dtype=asked, methods=("direct", "stridepack"))
    convs = [c for c in fast.plan.choices if c.layer != "head"]
    assert {str(c.conv.dtypes) for c in convs} == {"f16.f16.f16.f16" if asked else "f16"}
    assert all(c.config.method in ("direct", "stridepack") for c in convs)
    with torch.no_grad():
        got = fast(images)
        assert got.dtype == images.dtype
        assert (got.float() - model(x)).abs().max() < 2e-2


@pytest.mark.turns(2)
@pytest.mark.parametrize("tune", ["off", "fast"])
def test_compile_takes_the_same_path_on_a_device(tune: str) -> None:
    model, x = Small().eval(), torch.randn(2, 3, 12, 10)
    aerogel.prune(model, 0.8, exclude=["head"])
    aerogel.finalize(model)
    with using(OnGpu(OpenCL())):
        fast = aerogel.compile(model, (x,), tune=tune)
    said = str(aerogel.explain(fast, verbose=True))
    assert "opencl-" in said
    assert [c.layer for c in fast.plan.choices] == ["first", "second", "head"]
    if tune == "off":
        assert "direct" in said
    else:
        timed = {"dense", "direct", "stridepack"}  # the others need Triton or calibration
        assert all({t.method for t in c.configs()} == timed for c in fast.plan.choices[:2]), (
            "every method was timed"
        )
    for size in ((2, 3, 12, 10), (1, 3, 9, 9)):
        other = torch.randn(size)
        torch.testing.assert_close(fast(other), model(other).detach(), rtol=1e-4, atol=1e-5)
    with using(OnGpu(OpenCL())):
        again = aerogel.compile(model, (x,), plan=fast.plan)
    assert again.plan.choices == fast.plan.choices
    torch.testing.assert_close(again(x), fast(x), rtol=1e-4, atol=1e-5)


def test_arguments_of_cuda_launches_have_the_kernels_types() -> None:
    """As far as it goes without a device: cuda-core packs what we hand it into the bytes that the kernel
    expects."""
    import ctypes

    from cuda.core._kernel_arg_handler import ParamHolder

    from aerogel.backends.gpu.cuda import pointer_or_number

    conv, weight = _random("n1c8h6w6k8r3s3u1p1+bias")
    config = next(direct.configs(conv, TARGET, Stats.of(weight)))
    launch = direct.build(direct.pack(weight, conv, config), conv, config)[-1]
    tensors = {name: torch.zeros(4) for name in ("x", "y", "scratch")}
    given = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in launch.arguments]
    packed = [pointer_or_number(a, tensors) for a in given]
    assert packed[2] == packed[3] == tensors["y"].data_ptr(), (
        "a layer without bias or residual is given y in its place"
    )
    held = ParamHolder(packed)
    slots = (ctypes.c_void_p * len(packed)).from_address(held.ptr)
    for slot, argument in zip(slots, packed, strict=True):
        assert slot is not None
        kind = (
            ctypes.c_float
            if isinstance(argument, np.float32)
            else ctypes.c_int32
            if isinstance(argument, np.int32)
            else ctypes.c_int64
        )
        assert kind.from_address(slot).value == argument


@pytest.mark.skipif(counts.by_day(), reason=counts.BY_NIGHT)
def test_the_benchmark_for_gpus_runs_here(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.experiments.gpu",
        "--device",
        "opencl",
        "--quick",
        "--json",
        str(tmp_path / "rows"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert len(rows) == 2
    assert all(row["error"][name] < 1e-4 for row in rows for name in ("direct", "stridepack"))
    assert all(row["error"][f"{name} f16"] < 2e-2 for row in rows for name in ("direct", "stridepack"))
    assert all(
        any(form.startswith(f"dense {p}") for form in row["us"])
        for row in rows
        for p in ("fp32", "tf32", "fp16")
    )


def test_without_the_extras_nothing_of_it_is_imported() -> None:
    script = (
        "import sys, aerogel, aerogel.compiler; sys.exit(bool({'pyopencl', 'cuda.core', 'triton'} & "
        "set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
