"""GPU kernels without a GPU: executed by PoCL on the shared cases, watched by Oclgrind, compiled for real architectures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aerogel
from aerogel.candidate import Stats
from aerogel.codegen.gpu import nvrtc, spf
from aerogel.errors import AerogelError, InvalidFile
from aerogel.methods.gpu import METHODS, direct, method, stridepack
from aerogel.problem import Conv
from aerogel.runtime import gpu
from aerogel.runtime.gpu.opencl import OpenCL
from aerogel.target import Gpu
from benchmarks import gpu_facts, patterns
from benchmarks.sim import write
from tests.suite.gpu import sweep

ROOT = Path(__file__).parent.parent
TARGET = Gpu("cuda", "sm_80", 108, 167936)
OURS = METHODS[1:]
COUNTS = {"exact": 180, "edges": 150, "real": 120, "special": 80}


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("name", OURS)
def test_the_shared_cases_run_right_on_an_opencl_device(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    count = 12 if request.config.getoption("--quick") else COUNTS[kind]
    done = sweep(name, kind, range(count))
    assert not done.failures, "\n".join(done.failures)
    assert done.ran >= 0.9 * count


def _random(text: str, density: float = 0.1) -> tuple[Conv, np.ndarray]:
    conv, rng = Conv.parse(text), np.random.default_rng(0)
    weight = np.where(rng.random(conv.weight_shape) < density, rng.standard_normal(conv.weight_shape), 0)
    return conv, weight.astype(np.float32)


@pytest.mark.parametrize("kind", write.KINDS)
@pytest.mark.parametrize("text", ["n2c70h9w11k40r3s3u1p1+bias+relu", "n1c300h5w6k33r1s1u1p0+bias+add"])
def test_layers_of_several_stages_and_groups(kind: str, text: str) -> None:
    """The shared cases have few channels; and the opponent of benchmarks/sim is in none of them."""
    conv, weight = _random(text)
    launches, last = write.launches_of(conv, weight, kind, None)
    device, rng = OpenCL(), np.random.default_rng(1)
    x, residual = (torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for s in (conv.x_shape, conv.y_shape))
    bias, layout = torch.from_numpy(rng.standard_normal(conv.k).astype(np.float32)), "channels_last" if last else "contiguous"
    y, found = device.fresh(conv.y_shape, layout)
    buffers = {"y": y, "bias": device.resident(bias, layout)}
    device.prepared(launches)(buffers | {n: device.resident(t, layout) for n, t in (("x", x), ("residual", residual))})
    wanted = torch.conv2d(x.double(), torch.from_numpy(weight).double(), bias.double(), conv.stride, conv.pad[:2])
    wanted = wanted + residual if "add" in conv.steps else wanted.relu()
    assert (found() - wanted).abs().max() < 1e-4


RACES = """
import numpy as np, sys, torch
from aerogel.candidate import Config
from aerogel.problem import Conv
from aerogel.runtime.gpu.module import Layer
from aerogel.runtime.gpu.opencl import OpenCL
conv, config = Conv.parse(sys.argv[1]), Config.parse(sys.argv[2])
weight = np.where(np.random.default_rng(0).random(conv.weight_shape) < 0.3, 1, 0).astype(np.float32)
y = Layer(OpenCL(), conv, config, weight)(torch.ones(conv.x_shape), torch.zeros(conv.k), None)
assert torch.equal(y, torch.conv2d(torch.ones(conv.x_shape), torch.from_numpy(weight), None, 1, conv.pad[:2]))
"""
TINY = {
    "direct": "direct/chunk=8,filters=2,images=1,per=1,pixels=32,rows=2",
    "stridepack": "stridepack/baked=0,buffers=2,channels=8,reorganized=1,tile_p=1,tile_q=1,warps_p=1,warps_q=2,wide=4",
    "one buffer": "stridepack/baked=0,buffers=1,channels=8,reorganized=0,tile_p=1,tile_q=1,warps_p=1,warps_q=2,wide=1",
    "baked": "stridepack/baked=1,buffers=1,channels=8,reorganized=0,tile_p=1,tile_q=1,warps_p=1,warps_q=1,wide=1",
}


@pytest.mark.skipif(shutil.which("oclgrind") is None, reason="needs Debian's oclgrind")
@pytest.mark.parametrize("form", TINY)
def test_no_thread_races_another(form: str) -> None:
    command = ["oclgrind", "--data-races", sys.executable, "-c", RACES, "n1c12h3w4k4r3s3u1p1+bias", TINY[form]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "race" not in done.stderr + done.stdout, done.stderr[:2000]
    assert "Invalid" not in done.stderr, done.stderr[:2000]


@pytest.mark.parametrize("arch", gpu_facts.ARCHS)
@pytest.mark.parametrize("kind", write.KINDS)
def test_every_kernel_compiles_without_spills(kind: str, arch: str) -> None:
    conv, weight = _random("n1c64h56w56k64r3s3u1p1+bias+add+silu")
    for launch in write.launches_of(conv, weight, kind, None)[0]:
        code, facts = nvrtc.compile_for(launch.code, arch)
        assert code[:4] == b"\x7fELF"
        assert facts.spilled == 0
        assert gpu_facts.occupancy(launch.code, facts, arch) >= 0.25


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_tiles_are_copied_without_registers(tmp_path: Path) -> None:
    conv, weight = _random("n1c64h56w56k64r3s3u1p1+bias")
    (tmp_path / "kernel.cu").write_text(write.launches_of(conv, weight, "stridepack", None)[0][0].code.text())
    for arch, wanted in (("sm_80", True), ("sm_75", False)):
        command = ["nvcc", "-ptx", f"-arch={arch}", "-o", str(tmp_path / "kernel.ptx"), str(tmp_path / "kernel.cu")]
        subprocess.run(command, check=True)
        assert ("cp.async.cg.shared.global" in (tmp_path / "kernel.ptx").read_text()) == wanted


@pytest.mark.skipif(shutil.which("clang-19") is None, reason="needs Debian's clang-19")
@pytest.mark.parametrize("kind", write.KINDS)
def test_every_kernel_compiles_for_amd(kind: str) -> None:
    conv, weight = _random("n1c64h56w56k64r3s3u1p1+bias+add+silu")
    for launch in write.launches_of(conv, weight, kind, None)[0]:
        facts = gpu_facts.amd(launch.code)
        assert facts["spilled"] == 0
        assert 0 < facts["registers"] <= (512 if kind == "baked" else 128), "clang moves the weights of baked code into registers"


def test_no_kernel_uses_more_registers_than_it_did() -> None:
    """Facts that are written down are a promise: a rise is looked at before it is."""
    known = {r["kernel"]: r for r in _facts()["kernels"] if r["target"] == "sm_80"}
    for code in gpu_facts.variants("sm_80"):
        row = gpu_facts.compiled(code, "sm_80")
        assert row["registers"] <= known[row["kernel"]]["registers"] + 4, row["kernel"]
        assert row["spilled"] == 0
        assert row["occupancy"] >= known[row["kernel"]]["occupancy"] - 0.01, row["kernel"]


def _facts() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / "gpu_facts.json").read_text())  # type: ignore[no-any-return]


def test_padding_and_wavefronts_are_as_written_down() -> None:
    path = gpu_facts.PATTERNS / "resnet50-90.npz"
    if not path.exists():
        pytest.skip("the real patterns are not here")
    known = _facts()["patterns"]["resnet50-90"]
    assert known["best"]["after"] <= 1.35
    for row, own in zip(known["layers"][:6], patterns.load(path), strict=False):
        assert json.loads(json.dumps(gpu_facts.layer((own.conv, own.mask, True)))) == {k: v for k, v in row.items() if k != "layer"}


def test_reorganized_slots_take_each_nonzero_once_and_no_bank_twice() -> None:
    conv, weight = _random("c96k70r3s3u1p1", 0.2)
    offered = [c for c in stridepack.configs(conv, TARGET, Stats.of(weight)) if c["reorganized"]]
    config = next(c for c in offered if c["channels"] == 32)
    places, counts, _ = stridepack.units(dict(stridepack.pack(weight, conv, config).arrays), conv, config)
    slots = spf.reorganized(places, counts)
    for own, order, count in zip(places, slots, counts, strict=True):
        for lane in range(spf.LANES):
            taken = order[:, lane][order[:, lane] >= 0]
            assert sorted(taken.tolist()) == list(range(count[lane]))
        longest = max(int(count.max()), int(np.bincount(np.unique(own[order.max(0) >= 0]) % 32).max(initial=0)))
        assert len(order) <= 1.25 * longest + 2, "far from what Koenig's theorem allows"
    assert spf.wavefronts(places, slots) == sum(len(s) for s in slots), "some slot has two words of a bank"
    assert spf.wavefronts(places, spf.in_order(counts)) > 1.5 * sum(len(s) for s in slots), "nothing was gained"


@pytest.mark.parametrize("name", OURS)
def test_a_damaged_weight_is_refused(name: str) -> None:
    conv, weight = _random("n1c40h6w6k36r3s3u1p1")
    own = method(name)
    config = next(c for c in own.configs(conv, TARGET, Stats.of(weight)) if not dict(c.options).get("baked"))
    packed = own.pack(weight, conv, config)
    for array, value in (("position", 10**6), ("filter", 77), ("start", 5), *([("order", 10**6)] if name == "stridepack" else [])):
        broken = {n: a.copy() for n, a in packed.arrays.items()}
        broken[array].reshape(-1)[1] = value
        with pytest.raises(InvalidFile):
            own.build(type(packed)(packed.format, packed.version, broken, packed.meta), conv, config)


def test_refusals_are_sentences() -> None:
    stats = Stats(100, 10)
    assert "f32" in (direct.refuse(Conv.parse("n1c8h8w8k8r3s3u1p1:f16"), TARGET, stats) or "")
    assert "shared memory" in (stridepack.refuse(Conv.parse("n1c8h99w99k8r3s3u1p1d40"), TARGET, stats) or "")
    assert "2^31" in (direct.refuse(Conv.parse("n1c4096h1024w1024k8r1s1u1p0"), TARGET, stats) or "")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("kind", write.KINDS)
def test_a_file_for_the_simulator_compiles(kind: str, tmp_path: Path) -> None:
    conv, weight = _random("n1c32h28w28k32r3s3u1p1+bias+relu")
    (tmp_path / "layer.cu").write_text(write.source(conv, weight, kind))
    for arch in ("sm_75", "sm_80"):
        command = ["nvcc", "-std=c++11", f"-arch={arch}", "-cubin", "-o", str(tmp_path / "layer"), str(tmp_path / "layer.cu")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 40, 3, padding=1), nn.Conv2d(40, 40, 3, 2, 1)
        self.norm, self.head = nn.BatchNorm2d(40), nn.Linear(40, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        return self.head(torch.relu(self.norm(self.second(y))).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("tune", ["off", "fast"])
def test_compile_takes_the_same_path_on_a_device(tune: str) -> None:
    model, x = Small().eval(), torch.randn(2, 3, 12, 10)
    aerogel.prune(model, 0.8, exclude=["head"])
    aerogel.finalize(model)
    with gpu.using(OpenCL()):
        fast = aerogel.compile(model, (x,), tune=tune)
    said = str(aerogel.explain(fast))
    assert "opencl-" in said
    assert [c.layer for c in fast.plan.choices] == ["first", "second", "head"]
    if tune == "off":
        assert "direct" in said
    else:
        assert all({t[0].method for t in c.tried} == set(METHODS) for c in fast.plan.choices[:2]), "every method was timed"
    for size in ((2, 3, 12, 10), (1, 3, 9, 9)):
        other = torch.randn(size)
        torch.testing.assert_close(fast(other), model(other).detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(AerogelError, match="precision"), gpu.using(OpenCL()):
        aerogel.compile(model, (x,), dtype=torch.float16)


def test_arguments_of_cuda_launches_have_the_kernels_types() -> None:
    """As far as it goes without a device: cuda-core packs what we hand it into the bytes that the kernel expects."""
    import ctypes

    from cuda.core._kernel_arg_handler import ParamHolder

    from aerogel.runtime.gpu.cuda import pointer_or_number

    conv, weight = _random("n1c8h6w6k8r3s3u1p1+bias")
    config = next(direct.configs(conv, TARGET, Stats.of(weight)))
    launch = direct.build(direct.pack(weight, conv, config), conv, config)[-1]
    tensors = {name: torch.zeros(4) for name in ("x", "y", "scratch")}
    given = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in launch.arguments]
    packed = [pointer_or_number(a, tensors) for a in given]
    assert packed[2] == packed[3] == tensors["y"].data_ptr(), "a layer without bias or residual is given y in its place"
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


def test_the_benchmark_for_gpus_runs_here(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--device",
        "opencl",
        "--quick",
        "--json",
        str(tmp_path / "rows"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert len(rows) == 2
    assert all(row["error"][name] < 1e-4 for row in rows for name in OURS)
    assert all(any(form.startswith(f"dense {p}") for form in row["us"]) for row in rows for p in ("fp32", "tf32", "fp16"))


def test_without_the_extras_nothing_of_it_is_imported() -> None:
    script = "import sys, aerogel, aerogel.compiler; sys.exit(bool({'pyopencl', 'cuda.core'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", script], check=True)
