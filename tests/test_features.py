"""A dense Linear at the end of a pruned network: it stays in the segment, and its answers are torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aerogel
from aerogel.backends.cpu.lower import features
from aerogel.backends.cpu.threads import Segment
from aerogel.ir import Conv, Layout, here_levels, host
from tests.small_models import right, runs, sparse


def _headed(channels: int, act: nn.Module) -> Any:
    body = nn.Sequential(nn.Conv2d(3, channels, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return sparse(nn.Sequential(body, nn.Linear(channels, 33), act, nn.Linear(33, 7)))


@pytest.mark.parametrize(("channels", "act"), [(1, nn.ReLU()), (64, nn.SiLU()), (130, nn.LeakyReLU(0.2))])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_dense_head_stays_in_the_segment(channels: int, act: nn.Module, batch: int) -> None:
    model, x = _headed(channels, act), torch.randn(batch, 3, 9, 9)
    fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    (program,) = runs(fast).programs.values()
    labels = [s.label.split()[0] for part in program.parts for s in part.natives]
    assert labels.count("dot") == (2 if batch <= features.FEW else 0)
    assert ("(dot)" in str(aerogel.explain(fast, verbose=True))) == (batch <= features.FEW)
    for arena in runs(fast).memory.arenas:
        arena.buffer.view(np.float32)[:] = np.nan
    right(model, fast, torch.randn(batch, 3, 9, 9))
    x[0] = torch.nan
    assert torch.equal(fast(x).isnan(), model(x).isnan())


@pytest.mark.parametrize("isa", here_levels())
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_sums_are_exact_on_integers(isa: str, threads: int) -> None:
    rng = np.random.default_rng(0)
    for seed in range(40):
        n, c, k = int(rng.integers(1, 3)), int(rng.integers(1, 200)), int(rng.integers(1, 40))
        conv = Conv(c, k, epilogue=("bias", "add", "relu") if seed % 2 else (), n=n, h=1, w=1)
        weight, x = (rng.integers(-9, 9, shape).astype(np.float32) for shape in ((k, c, 1, 1), conv.x_shape))
        bias, residual = (rng.integers(-9, 9, shape).astype(np.float32) for shape in ((k,), conv.y_shape))
        reads, writes = Layout("planar", 3, (1, 1, 0, 1)), Layout("planar", 2, (0, 1, 1, 0))
        xb, yb, old = (
            reads.allocate(conv.x_shape),
            writes.allocate(conv.y_shape),
            writes.allocate(conv.y_shape),
        )
        reads.write(xb, x)
        writes.write(old, residual)
        yb[:] = np.nan
        made = features.kernel(weight, conv, reads, writes, host().lower(isa))
        scratch = np.full(made.scratch_bytes // 4 * threads, np.nan, np.float32)
        block = made.bind(
            x=xb.ctypes.data,
            y=yb.ctypes.data,
            bias=bias.ctypes.data,
            residual=old.ctypes.data,
            scratch=scratch.ctypes.data,
        )
        Segment([(made, block)], threads)()
        wanted = np.einsum("kc,nc->nk", weight[:, :, 0, 0], x[:, :, 0, 0])[:, :, None, None]
        if seed % 2:
            wanted = np.maximum(wanted + bias[None, :, None, None] + residual, 0)
        assert np.array_equal(writes.read(yb, conv.y_shape), wanted)
        assert writes.dirty_border(yb, conv.y_shape) == 0
