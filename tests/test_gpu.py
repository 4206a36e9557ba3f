"""GPU kernels without a GPU: executed by PoCL on the shared cases, watched by Oclgrind, compiled for real
architectures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aerogel.backends.gpu.layer import Layer
from aerogel.backends.gpu.opencl import OpenCL
from aerogel.codegen.gpu import nvrtc
from aerogel.errors import InvalidFile
from aerogel.ir import Config, Conv, Gpu, Idle, Pool, Stats, Weight
from aerogel.methods import gpu_form
from aerogel.methods.actsparse import gpu as actsparse
from aerogel.methods.direct import gpu as direct
from aerogel.methods.stridepack import gpu as stridepack
from benchmarks.experiments import gpu_facts, gpu_triton, sass
from benchmarks.experiments.sim import write
from benchmarks.zoo import patterns
from tests import counts
from tests.suite.gpu import sweep

ROOT = Path(__file__).parent.parent
TARGET = Gpu("cuda", "sm_80", 108, 167936)
OURS = ("direct", "stridepack", "actsparse")
SHARES = {
    "exact": 0.22,
    "edges": 0.19,
    "real": 0.15,
    "special": 0.12,
    "half": 0.18,
    "half-edges": 0.09,
    "half-special": 0.05,
}
"""Half of those in f16 are of types that these methods refuse; actsparse has zeros of x in their place."""
IDLE = {"exact": 0.22, "edges": 0.2, "real": 0.15, "special": 0.12, "idle": 0.23, "idle-special": 0.08}


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for n in OURS for k in (IDLE if n == "actsparse" else SHARES)]
)
def test_the_shared_cases_run_right_on_an_opencl_device(
    name: str, kind: str, ran: Callable[[str, int], None]
) -> None:
    seeds = counts.seeds("opencl", (IDLE if name == "actsparse" else SHARES)[kind])
    ran(f"opencl: {name}", len(seeds))
    done = sweep(name, kind, seeds)
    assert not done.failures, "\n".join(done.failures)
    assert done.ran >= (0.45 if kind.startswith("half") else 0.9) * len(seeds) - 1


def _random(text: str, density: float = 0.1) -> tuple[Conv, np.ndarray]:
    conv, rng = Conv.parse(text), np.random.default_rng(0)
    weight = np.where(rng.random(conv.weight_shape) < density, rng.standard_normal(conv.weight_shape), 0)
    return conv, weight.astype(np.float32)


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", [k for k in write.KINDS if k != "pooled"])
@pytest.mark.parametrize("text", ["n2c70h9w11k40r3s3u1p1+bias+relu", "n1c300h5w6k33r1s1u1p0+bias+add"])
def test_layers_of_several_stages_and_groups(kind: str, text: str) -> None:
    """The shared cases have few channels; and the opponent of benchmarks/sim is in none of them."""
    conv, weight = _random(text)
    launches, last = write.launches_of(conv, weight, kind, None)
    device, rng = OpenCL(), np.random.default_rng(1)
    x, residual = (
        torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for s in (conv.x_shape, conv.y_shape)
    )
    bias, layout = (
        torch.from_numpy(rng.standard_normal(conv.k).astype(np.float32)),
        "channels_last" if last else "contiguous",
    )
    y, found = device.fresh(conv.y_shape, layout)
    buffers = {
        "y": y,
        "bias": device.resident(bias, layout),
        "counts": device.fresh((launches[0].grid[0] * 99,), "contiguous")[0],
    }
    device.prepared(launches)(
        buffers | {n: device.resident(t, layout) for n, t in (("x", x), ("residual", residual))}
    )
    wanted = torch.conv2d(
        x.double(), torch.from_numpy(weight).double(), bias.double(), conv.stride, conv.pad[:2]
    )
    wanted = wanted + residual if "add" in conv.steps else wanted.relu()
    assert (found() - wanted).abs().max() < 1e-4


def test_pixels_below_the_last_row_are_not_read() -> None:
    conv = Conv.parse("n1c1h5w8k2r1s1u1p0")
    weight = np.ones(conv.weight_shape, np.float32)
    for per, wanted in ((4, 1), (1, 0)):
        config = Config.parse(f"direct/filters=1,images=1,per={per},pixels=32,rows=2")
        launch = direct.build(direct.pack(weight, conv, config), conv, config)[0]
        assert dict(launch.code.macros)["CHECKED"] == wanted


def test_pixels_below_each_other_with_a_stride() -> None:
    conv = Conv.parse("n1c3h13w9k5r3s3u2p1")
    config = Config.parse("direct/filters=1,images=1,per=4,pixels=32,rows=2")
    x = torch.arange(3 * 13 * 9, dtype=torch.float32).view(conv.x_shape)
    y = Layer(OpenCL(), conv, config, Weight(np.ones(conv.weight_shape, np.float32)))(x, None, None)
    assert torch.equal(y, torch.conv2d(x, torch.ones(conv.weight_shape), None, 2, 1))


RACES = """
import numpy as np, sys, torch
from aerogel.ir import Config, Conv, Weight
from aerogel.backends.gpu.layer import Layer
from aerogel.backends.gpu.opencl import OpenCL
conv, config = Conv.parse(sys.argv[1]), Config.parse(sys.argv[2])
weight = np.where(np.random.default_rng(0).random(conv.weight_shape) < 0.3, 1, 0).astype(np.float32)
y = Layer(OpenCL(), conv, config, Weight(weight))(torch.ones(conv.x_shape), torch.zeros(conv.k), None)
assert torch.equal(y, torch.conv2d(torch.ones(conv.x_shape), torch.from_numpy(weight), None, 1, conv.pad[:2]))
"""
TINY = {
    "direct": "direct/filters=2,images=1,per=2,pixels=32,rows=2",
    "stridepack":
        "stridepack/baked=0,buffers=2,channels=8,deep=1,reorganized=1,tile_p=1,tile_q=1,warps_p=1,warps_q=2,wide=4",
    "one buffer":
        "stridepack/baked=0,buffers=1,channels=8,deep=1,reorganized=0,tile_p=1,tile_q=1,warps_p=1,warps_q=2,wide=1",
    "baked":
        "stridepack/baked=1,buffers=1,channels=8,deep=1,reorganized=0,tile_p=1,tile_q=1,warps_p=1,warps_q=1,wide=1",
    "baked, 16 bytes at a time":
        "stridepack/baked=1,buffers=1,channels=8,deep=1,reorganized=0,tile_p=1,tile_q=1,warps_p=1,warps_q=1,wide=4",
    "actsparse": "actsparse/channels=8,filters=1,lists=0,tile_p=1,tile_q=2,warps_p=1,warps_q=2,wide=4",
    "actsparse by lists":
        "actsparse/channels=32,filters=2,lists=1,tile_p=2,tile_q=2,warps_p=1,warps_q=2,wide=4",
}  # fmt: skip


@pytest.mark.skipif(shutil.which("oclgrind") is None, reason="needs Debian's oclgrind")
@pytest.mark.parametrize("form", TINY)
def test_no_thread_races_another(form: str) -> None:
    command = [
        "oclgrind",
        "--data-races",
        sys.executable,
        "-c",
        RACES,
        "n1c12h3w4k4r3s3u1p1+bias",
        TINY[form],
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "race" not in done.stderr + done.stdout, done.stderr[:2000]
    assert "Invalid" not in done.stderr, done.stderr[:2000]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Of what is compiled for architectures that are not here, CI takes some; a night takes everything."""
    if "arch" in metafunc.fixturenames:
        metafunc.parametrize(("kind", "arch"), counts.some(list(product(write.KINDS, gpu_facts.ARCHS))))


def test_every_kernel_compiles_without_spills(kind: str, arch: str) -> None:
    conv, weight = _random(f"n1c64h56w56k64r3s3u1p1+bias{'' if kind == 'pooled' else '+add'}+silu")
    for launch in write.launches_of(conv, weight, kind, None)[0]:
        code, facts = nvrtc.compile_for(launch.code, arch)
        assert code[:4] == b"\x7fELF"
        assert facts.spilled == 0
        assert gpu_facts.occupancy(launch.code, facts, arch) >= 0.25


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "text", ["n1c64h56w56k64r3s3u1p1+bias", "n1c128h28w28k512r1s1u1p0", "n1c32h28w28k40r3s3u2p1"]
)
def test_the_dense_opponent_keeps_x_in_registers(text: str, tmp_path: Path) -> None:
    """In PTX, which a simulator runs as it stands: at most 0.3 loads of x for each FMA."""
    source = write.launches_of(*_random(text), "dense", None)[0][0].code.text()
    (tmp_path / "kernel.cu").write_text(source)
    ptx = tmp_path / "kernel.ptx"
    subprocess.run(
        ["nvcc", "-ptx", "-arch=sm_75", "-o", str(ptx), str(tmp_path / "kernel.cu")],
        check=True,
        capture_output=True,
    )
    loads, macs = (ptx.read_text().count(name) for name in ("ld.shared", "fma.rn.f32"))
    assert macs >= 64
    assert 0 < loads <= 0.3 * macs


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_tiles_are_copied_without_registers(tmp_path: Path) -> None:
    conv, weight = _random("n1c64h56w56k64r3s3u1p1+bias")
    (tmp_path / "kernel.cu").write_text(write.launches_of(conv, weight, "stridepack", None)[0][0].code.text())
    for arch, wanted in (("sm_80", True), ("sm_75", False)):
        command = [
            "nvcc",
            "-ptx",
            f"-arch={arch}",
            "-o",
            str(tmp_path / "kernel.ptx"),
            str(tmp_path / "kernel.cu"),
        ]
        subprocess.run(command, check=True)
        assert ("cp.async.cg.shared.global" in (tmp_path / "kernel.ptx").read_text()) == wanted


@pytest.mark.skipif(shutil.which("clang-19") is None, reason="needs Debian's clang-19")
@pytest.mark.parametrize("kind", write.KINDS)
def test_every_kernel_compiles_for_amd(kind: str) -> None:
    conv, weight = _random(f"n1c64h56w56k64r3s3u1p1+bias{'' if kind == 'pooled' else '+add'}+silu")
    for launch in write.launches_of(conv, weight, kind, None)[0]:
        facts = gpu_facts.amd(launch.code)
        assert facts["spilled"] == 0
        # clang moves the weights of baked code into registers; 256 leave room for two waves of eight
        assert 0 < facts["registers"] <= {"baked": 512, "dense": 256}.get(kind, 128)


@pytest.mark.parametrize("kind", ["direct", "stridepack"])
@pytest.mark.parametrize("dtypes", ["f16", "f16.f16.f16.f16"])
def test_f16_compiles_everywhere(kind: str, dtypes: str) -> None:
    conv, weight = _random(f"n1c64h56w56k64r3s3u1p1:{dtypes}+bias+add+silu")
    code = write.launches_of(conv, weight.astype(np.float16), kind, None)[0][-1].code
    for arch in counts.some(gpu_facts.ARCHS):
        cubin, facts = nvrtc.compile_for(code, arch)
        assert facts.spilled == 0
        assert gpu_facts.occupancy(code, facts, arch) >= 0.25
    instructions = sass.hot_loop(gpu_triton.disassembled(cubin))
    assert instructions["mac"], "no HFMA2 or FFMA in its hot loop"
    if shutil.which("clang-19"):
        assert gpu_facts.amd(code)["spilled"] == 0


@pytest.mark.parametrize("sums", ["f32", "f16"])
@pytest.mark.parametrize("name", ["direct", "stridepack"])
def test_f16_of_several_stages(name: str, sums: str) -> None:
    """More channels than a stage, more nonzeros than a chunk: small whole numbers, so that f16 is exact."""
    conv, rng = Conv.parse(f"n1c300h7w6k33r1s1u1p0:f16.f16.{sums}.f16+bias"), np.random.default_rng(0)
    weight = (rng.integers(-1, 2, conv.weight_shape) * (rng.random(conv.weight_shape) < 0.95)).astype(
        np.float16
    )
    x, bias = torch.from_numpy(rng.integers(0, 2, conv.x_shape).astype(np.float16)), torch.ones(conv.k)
    own = gpu_form(name)
    config = next(
        c for c in own.configs(conv, TARGET, Stats.of(weight)) if dict(c.options).get("channels", 0) < 256
    )
    y = Layer(OpenCL(), conv, config, Weight(weight))(x, bias, None)
    assert torch.equal(y.float(), torch.conv2d(x.float(), torch.from_numpy(weight).float(), bias))


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", ["max", "average"])
def test_pooling_in_the_same_kernel_has_the_same_bits(kind: str) -> None:
    """Small integers, so that sums are exact: any window, stride and padding."""
    device, rng, done = OpenCL(), np.random.default_rng(0), 0
    for window, step, pad in ((2, 2, 0), (3, 2, 1), (3, 3, 0), (2, 1, 1), (3, 1, 0)):
        conv = Conv.parse(f"n2c{5 + window}h9w11k40r3s3u{1 + step % 2}p1+bias+relu")
        pool = Pool(kind, (window, window), (step, step), (pad, pad), (1, 1))
        weight = (rng.integers(-2, 3, conv.weight_shape) * (rng.random(conv.weight_shape) < 0.5)).astype(
            np.float32
        )
        x, bias = (
            torch.from_numpy(rng.integers(-2, 3, s).astype(np.float32)) for s in (conv.x_shape, (conv.k,))
        )
        stats = Stats.of(weight, Idle(50, 30, 20))
        offered = actsparse.configs(conv, TARGET, stats)
        lists = (window + step) % 2
        config = next(c for c in offered if c["lists"] == lists and actsparse.takes_pool(conv, c, pool))
        got = Layer(device, conv, config, Weight(weight), pool)(x, bias, None)
        wanted = torch.conv2d(x, torch.from_numpy(weight), bias, conv.stride, 1).relu()
        if kind == "max":
            wanted = torch.max_pool2d(wanted, window, step, pad)
        else:
            wanted = torch.nn.functional.avg_pool2d(wanted.double(), window, step, pad).float()
        torch.testing.assert_close(got, wanted, rtol=1e-6 if kind == "average" else 0, atol=0)
        done += 1
    assert done == 5


def test_lists_skip_every_zero_and_nothing_else() -> None:
    """What is left is counted: the share of x that is not zero, inside of the image."""
    conv, weight = _random("n1c40h8w16k70r3s3u1p1", 1.0)
    config = Config.parse(
        "actsparse/channels=32,filters=4,lists=1,tile_p=2,tile_q=2,warps_p=2,warps_q=4,wide=4"
    )
    layer = Layer(OpenCL(), conv, config, Weight(weight))
    x = torch.from_numpy(np.random.default_rng(1).standard_normal(conv.x_shape).astype(np.float32))
    x[torch.from_numpy(np.random.default_rng(2).random(conv.x_shape) < 0.7)] = 0
    wanted = torch.conv2d(x.double(), torch.from_numpy(weight).double(), None, 1, 1)
    assert (layer(x, None, None) - wanted).abs().max() < 1e-4
    assert abs(layer.active() - 0.3) < 0.06
    layer(torch.zeros_like(x), None, None)
    assert layer.active() == 0


def test_no_kernel_uses_more_registers_than_it_did() -> None:
    """Facts that are written down are a promise: a rise is looked at before it is."""
    known = {frozenset(r["kernel"].split()): r for r in _facts()["kernels"] if r["target"] == "sm_80"}
    for code in counts.some(gpu_facts.variants("sm_80")):
        row = gpu_facts.compiled(code, "sm_80")
        before = known[frozenset(row["kernel"].split())]
        assert row["registers"] <= before["registers"] + 4, row["kernel"]
        assert row["spilled"] == 0
        assert row["occupancy"] >= before["occupancy"] - 0.01, row["kernel"]


def _facts() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / "gpu_facts.json").read_text())  # type: ignore[no-any-return]


def test_padding_and_wavefronts_are_as_written_down() -> None:
    path = gpu_facts.PATTERNS / "resnet50-90.npz"
    if not path.exists():
        pytest.skip("the real patterns are not here")
    known = _facts()["patterns"]["resnet50-90"]
    assert known["best"]["after"] <= 1.35
    for row, own in zip(known["layers"][:6], patterns.load(path), strict=False):
        assert json.loads(json.dumps(gpu_facts.layer((own.conv, own.mask, True)))) == {
            k: v for k, v in row.items() if k != "layer"
        }


HARM: dict[str, dict[str, int | None]] = {
    "direct": {"position": 10**6, "filter": 77, "start": 5},
    "stridepack": {"position": 10**6, "filter": None, "start": 5, "order": 10**6},
    "actsparse": {"position": 10**6, "first": 10**6},
    "tilewise": {
        "position": 10**6,
        "filter": None,
        "start": 10**6,
        "member": None,
        "panel": 10**6,
        "tile_position": 10**6,
    },
}
"""What is put into the second place of an array; None: what stands in the first."""


@pytest.mark.parametrize("name", HARM)
def test_a_damaged_weight_is_refused(name: str) -> None:
    conv, weight = _random("n1c40h6w6k36r3s3u1p1")
    weight[:, :10], own = 1, gpu_form(name)
    config = next(
        c
        for c in own.configs(conv, TARGET, Stats.of(weight, Idle(80, 60, 40)))
        if not dict(c.options).get("baked")
    )
    packed = own.pack(weight, conv, config)
    own.build(packed, conv, config)
    for array, value in HARM[name].items():
        broken = {n: a.copy() for n, a in packed.arrays.items()}
        broken[array].reshape(-1)[1] = broken[array].reshape(-1)[0] if value is None else value
        with pytest.raises(InvalidFile):
            own.build(type(packed)(packed.format, packed.version, broken, packed.meta), conv, config)


def test_refusals_are_sentences() -> None:
    stats = Stats(100, 10)
    assert "f32" in (direct.refuse(Conv.parse("n1c8h8w8k8r3s3u1p1:bf16"), TARGET, stats) or "")
    assert "calibration" in (actsparse.refuse(Conv.parse("n1c8h8w8k8r3s3u1p1"), TARGET, stats) or "")
    tilewise, conv = gpu_form("tilewise"), Conv.parse("n1c8h8w8k8r3s3u1p1")
    assert "tf32" in (tilewise.refuse(conv, TARGET, stats) or "")
    assert "Triton" in (tilewise.refuse(conv, replace(TARGET, kind="opencl"), stats) or "")
    able = replace(TARGET, tf32=True)
    assert "share" in (tilewise.refuse(conv, able, stats) or "") or "neighbouring" in (
        tilewise.refuse(conv, able, stats) or ""
    )
    assert "64 bits" in (tilewise.refuse(Conv.parse("n1c8h20w20k8r9s9u1p0"), able, stats) or "")
    assert "shared memory" in (stridepack.refuse(Conv.parse("n1c8h99w99k8r3s3u1p1d40"), TARGET, stats) or "")
    assert "2^31" in (direct.refuse(Conv.parse("n1c4096h1024w1024k8r1s1u1p0"), TARGET, stats) or "")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("form", [*write.KINDS, "direct f16", "stridepack f16"])
def test_a_file_for_the_simulator_compiles(form: str, tmp_path: Path) -> None:
    kind, _, half = form.partition(" ")
    conv, weight = _random(f"n1c32h28w28k32r3s3u1p1{':f16.f16.f16.f16' if half else ''}+bias+relu")
    weight = weight.astype(np.float16) if half else weight
    (tmp_path / "layer.cu").write_text(write.source(conv, weight, kind))
    for arch in ("sm_75", "sm_80"):
        command = [
            "nvcc",
            "-std=c++11",
            f"-arch={arch}",
            "-cubin",
            "-o",
            str(tmp_path / "layer"),
            str(tmp_path / "layer.cu"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]
