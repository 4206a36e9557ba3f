"""Convolution and pooling in one kernel: the same bits as the two apart, within its buffers, and in a
plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import aerogel
from aerogel.backends.cpu.lower import pooling
from aerogel.backends.cpu.lower.pooled import kernel as with_pool
from aerogel.backends.cpu.threads import Segment
from aerogel.capture.nodes import pairs
from aerogel.codegen.cpu.abi import Kernel, native
from aerogel.ir import NUMPY, Conv, Dtypes, Layout, Plan, Pool, from_float64, host
from aerogel.methods import cpu_form
from tests.small_models import right, runs
from tests.suite.guard import Guarded
from tests.suite.run import worth_it

REGIONS = {name: Guarded() for name in ("x", "y", "z", "bias", "scratch")}


def _case(rng: np.random.Generator) -> tuple[Conv, Pool, tuple[int, int, int, int]]:
    """A convolution and a pooling that fits what it gives."""
    while True:
        r, stride, window = (int(rng.choice(of)) for of in ((1, 3), (1, 1, 2), (2, 3)))
        pad, step = int(rng.choice([0, window // 2])), int(rng.integers(1, 4))
        n, c, k, h, w = (
            int(rng.integers(low, high)) for low, high in ((1, 3), (1, 9), (1, 20), (5, 40), (5, 40))
        )
        epilogue = (("bias", "relu"), (), ("bias", "leaky_relu0.5"))[int(rng.integers(3))]
        kinds = Dtypes() if rng.random() < 0.7 else Dtypes.of("bf16")
        conv = Conv(
            c, k, r, r, (stride, stride), (r // 2,) * 4, dtypes=kinds, epilogue=epilogue, n=n, h=h, w=w
        )
        size = [(have + 2 * pad - window) // step + 1 for have in conv.out]
        if min(size) > 0:
            kind = str(rng.choice(["max", "average"]))
            return conv, Pool(kind, (window,) * 2, (step,) * 2, (pad,) * 2, (1, 1)), (n, k, size[0], size[1])


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", ["direct", "stridepack", "tilewise", "actsparse"])
def test_the_same_bits_as_apart(name: str) -> None:
    rng, module, joined = np.random.default_rng(0), cpu_form(name), 0
    for _ in range(100):
        conv, pooled, shape = _case(rng)
        weight, x = (
            rng.integers(-4, 5, s) * (rng.random(s) < 0.4) for s in (conv.weight_shape, conv.x_shape)
        )
        held, given = (from_float64(a.astype(np.float64), conv.dtypes.input) for a in (weight, x))
        target = replace(
            host(), l2_bytes=int(rng.choice([2_000, 20_000, 1 << 20])), threads=int(rng.integers(1, 3))
        )
        configs = list(islice(module.configs(conv, target, worth_it(held)), 6))
        config = configs[int(rng.integers(len(configs)))]
        packed, (reads, writes) = (
            module.pack(held, conv, config),
            module.layouts(conv, config, target),
        )
        writes, after = (
            replace(writes, slack=max(16, writes.slack)),
            Layout("planar", shape[3] + 1, (1, 1, 1, 1), 16, writes.dtype),
        )
        together = with_pool(packed, conv, config, target, reads, pooled, shape, after)
        if together is None:
            continue
        joined += 1
        two = native(module.build(packed, conv, config, target, reads, writes))
        second = pooling.kernel(pooled, conv.y_shape, shape, writes, after, target)
        bias, answers = rng.integers(-4, 5, conv.k).astype(np.float32), []
        for back in (False, True):
            buffers = {
                n: REGIONS[n].place(layout.elements(s), NUMPY[layout.dtype], back)
                for n, layout, s in (
                    ("x", reads, conv.x_shape),
                    ("y", writes, conv.y_shape),
                    ("z", after, shape),
                )
            }
            reads.write(buffers["x"], given)
            _run([(k, "x", "y") for k in two] + [(second, "y", "z")], buffers, bias, target.threads, back)
            answers.append(after.read(buffers["z"], shape).copy())
            buffers["z"].view(np.uint8)[:] = 0xFF
            _run([(together, "x", "z")], buffers, bias, target.threads, back)
            answers.append(after.read(buffers["z"], shape).copy())
            assert after.dirty_border(buffers["z"], shape) == 0, f"{conv} {pooled} {config}"
        assert len({a.tobytes() for a in answers}) == 1, f"{conv} {pooled} {config}"
    assert joined > 80


def _run(
    steps: list[tuple[Kernel, str, str]],
    buffers: dict[str, np.ndarray],
    bias: np.ndarray,
    threads: int,
    back: bool,
) -> None:
    scratch = REGIONS["scratch"].place(
        max(k.scratch_bytes for k, _, _ in steps) * threads, np.dtype(np.uint8), back
    )
    places = {"bias": REGIONS["bias"].copy(bias, back).ctypes.data, "scratch": scratch.ctypes.data}
    bound = [(k, k.bind(x=buffers[x].ctypes.data, y=buffers[y].ctypes.data, **places)) for k, x, y in steps]
    Segment(bound, threads)()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 3, 1, 1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, 1, 1),
        nn.ReLU(),
        nn.AvgPool2d(3, 2, 1),
    ]
    model = nn.Sequential(*layers, nn.Conv2d(32, 8, 1)).eval()
    aerogel.prune(model, 0.8)
    return model


def test_a_plan_joins_them_and_needs_less_memory(tmp_path: Path) -> None:
    model, x = _model(), torch.randn(2, 3, 40, 40)
    apart = aerogel.compile(model, x, tune="off", methods=["direct", "dense"])
    plan = replace(apart.plan, choices=tuple(replace(c, pooled=True) for c in apart.plan.choices))
    assert Plan.from_json(plan.to_json()) == plan
    fast = aerogel.compile(model, x, plan=plan)
    right(model, fast, x)
    assert torch.equal(fast(x), apart(x))
    (program,), (before,) = runs(fast).programs.values(), runs(apart).programs.values()
    labels = [s.label for part in program.parts for s in part.natives]
    assert [label for label in labels if "pool" in label] == ["direct 0, pooled", "direct 3, pooled"]
    assert program.arena_bytes < 0.7 * before.arena_bytes
    aerogel.save(fast, tmp_path / "m.aero")
    assert torch.equal(aerogel.load(tmp_path / "m.aero")(x), apart(x))


def test_only_what_nobody_else_reads_is_joined() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.other = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.conv(x).relu()
            return nn.functional.max_pool2d(y, 2), self.other(y)

    fast = aerogel.compile(Both().eval(), torch.randn(1, 3, 16, 16), tune="off")
    assert fast.network is not None
    assert pairs(fast.network.graph) == {}
    alone = aerogel.compile(_model(), torch.randn(1, 3, 16, 16), tune="off")
    assert alone.network is not None
    assert len(pairs(alone.network.graph)) == 2
