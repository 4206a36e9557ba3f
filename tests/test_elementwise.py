"""What no convolution takes along and stays on our planes: sums, products, gates, lone activations, maxima
over padding, enlarged maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aerogel
from aerogel.backends.cpu.lower.convert import Enlarge, convert
from aerogel.backends.cpu.lower.elementwise import Elementwise, kernel
from aerogel.backends.cpu.threads import Segment
from aerogel.ir import NUMPY, Array, Layout, here_levels, host
from tests.small_models import right, runs, sparse
from tests.suite.guard import Guarded

REGIONS = Guarded(), Guarded(), Guarded(), Guarded()
KINDS = {
    "add": lambda x, z, g: x + z,
    "mul": lambda x, z, g: x * z,
    "gate": lambda x, z, g: x * g,
    "gated": lambda x, z, g: x + x * g,
    "alone": lambda x, z, g: x,
}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def _numbers(rng: np.random.Generator, dtype: str, *shape: int) -> Tensor:
    """Small whole numbers: sums and products are exact."""
    return torch.from_numpy(rng.integers(-5, 6, shape).astype(np.float32)).to(DTYPES[dtype])


def _placed(region: Guarded, value: Tensor, layout: Layout, back: bool) -> Array:
    shape = (value.shape[0], value.shape[1], value.shape[2], value.shape[3])
    buffer = region.place(layout.elements(shape), np.dtype(NUMPY[layout.dtype]), back)
    bits = value.view(torch.int16).numpy().view(np.uint16) if layout.dtype == "bf16" else value.numpy()
    layout.write(buffer, bits)
    return buffer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", here_levels())
def test_exact_inside_guard_pages(kind: str, dtype: str, isa: str) -> None:
    machine = host().lower(isa)
    if (isa, dtype) == ("generic", "f16"):
        pytest.skip("no kernel takes fp16 there")
    for seed in range(12):
        rng = np.random.default_rng(seed)
        n, c, h, w = (int(v) for v in rng.integers(1, (3, 6, 20, 40)))
        x, z, g = (_numbers(rng, dtype, *s) for s in ((n, c, h, w), (n, c, h, w), (n, c, 1, 1)))
        left, right_, top = (int(v) for v in rng.integers(0, 4, 3))
        plane = Layout("planar", w + max(left, right_) + seed % 3, (top, left, 1, right_), 16, dtype)
        gates = Layout("planar", 1 + seed % 2, (seed % 2,) * 4, 3, dtype)
        step = "relu" if seed % 2 else None
        own = Elementwise(kind, "x", "z" * (kind in ("add", "mul")) or None, "g", step)
        made = kernel(own, (n, c, h, w), plane, gates, machine)
        xb, zb, gb = (
            _placed(r, v, at, seed % 4 < 2)
            for r, v, at in zip(REGIONS, (x, z, g), (plane, plane, gates), strict=False)
        )
        yb = REGIONS[3].place(len(xb), xb.dtype, seed % 4 < 2)
        bound = made.bind(x=xb.ctypes.data, y=yb.ctypes.data, residual=zb.ctypes.data, bias=gb.ctypes.data)
        Segment([(made, bound)], 1 + seed % 3)()
        wanted = KINDS[kind](x.float(), z.float(), g.float()).to(DTYPES[dtype])
        wanted = F.relu(wanted) if step else wanted
        expected = np.zeros(len(xb), xb.dtype)
        plane.write(
            expected,
            wanted.view(torch.int16).numpy().view(np.uint16) if dtype == "bf16" else wanted.numpy(),
        )
        real = len(xb) - plane.slack
        assert np.array_equal(yb[:real], expected[:real]), f"seed {seed}"
        assert (yb[real:].view(np.uint8) == 0xFF).all(), "the slack is nobody's"


@pytest.mark.parametrize("repeat", [2, 4, 8])
@pytest.mark.parametrize("isa", here_levels())
def test_enlarged_maps_are_exact(repeat: int, isa: str) -> None:
    machine = host().lower(isa)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        woven = repeat < 8 and seed % 2 == 1
        n, c, h, w = (int(v) for v in rng.integers(1, (3, 4, 9, 40)))
        x = _numbers(rng, "f32", n, c * (repeat**2 if woven else 1), h, w)
        shape = tuple(x.shape)
        wanted = F.pixel_shuffle(x, repeat) if woven else F.interpolate(x, scale_factor=repeat)
        width = w * repeat
        reads, writes = (
            Layout("planar", w + 1, (1, 1, 1, 1), 16),
            Layout("planar", width + 1 + seed % 3, (1, 0, 1, 1), 16),
        )
        (made,) = convert(shape, reads, writes, machine, larger=Enlarge(repeat, woven))  # type: ignore[arg-type]
        xb = _placed(REGIONS[0], x, reads, seed % 4 < 2)
        count = writes.elements(tuple(wanted.shape))  # type: ignore[arg-type]
        yb = REGIONS[1].place(count, np.dtype(np.float32), seed % 4 < 2)
        Segment([(made, made.bind(x=xb.ctypes.data, y=yb.ctypes.data))], 1 + seed % 3)()
        expected = np.zeros(count, np.float32)
        writes.write(expected, wanted.numpy())
        real = count - writes.slack
        assert np.array_equal(yb[:real], expected[:real]), f"seed {seed}"


class Within(nn.Module):
    """Convolutions, what is between them, and one after."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], channels: int = 8) -> None:
        super().__init__()
        self.between = between
        self.enter, self.leave = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(channels, 5, 3, padding=1)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.other = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.between(self, self.enter(x)))  # type: ignore[no-any-return]

    def gate(self, x: Tensor, last: Callable[[Tensor], Tensor] = torch.sigmoid) -> Tensor:
        return last(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))


def _gates(m: Within, x: Tensor) -> Tensor:
    return x * m.gate(x)


def _gate_first(m: Within, x: Tensor) -> Tensor:
    return m.gate(x, F.hardsigmoid) * x


def _gated(m: Within, x: Tensor) -> Tensor:
    return x + x * m.gate(x, F.hardsigmoid)


def _of_another(m: Within, x: Tensor) -> Tensor:
    return x + F.relu(m.other(x)) * m.gate(x)


def _read_twice(m: Within, x: Tensor) -> Tensor:
    y = x * m.gate(x)
    return F.relu(x + y) * y


def _with_itself(m: Within, x: Tensor) -> Tensor:
    y = x + x
    return y * y


def _activated(m: Within, x: Tensor) -> Tensor:
    return F.gelu(x) + F.silu(m.other(F.leaky_relu(x, 0.2)) + F.hardtanh(x, 0, 6)) * F.hardswish(x)


def _after_both(m: Within, x: Tensor) -> Tensor:
    y = m.other(x)
    return F.gelu(torch.cat([x, y, F.relu(x + y)], 1))


def _padded_maximum(m: Within, x: Tensor) -> Tensor:
    return F.max_pool2d(F.pad(F.relu(x), (0, 1, 0, 1), value=torch.finfo(torch.float32).min), 2, 1)


def _woven(m: Within, x: Tensor) -> Tensor:
    return torch.sigmoid(F.relu(m.up(x) * 2.0 - 1))


BETWEEN = {
    "gates": (_gates, 8),
    "the gate first": (_gate_first, 8),
    "gated": (_gated, 8),
    "of another": (_of_another, 8),
    "read twice": (_read_twice, 8),
    "with itself": (_with_itself, 8),
    "activated": (_activated, 8),
    "after both": (_after_both, 24),
    "a padded maximum": (_padded_maximum, 8),
    "woven": (_woven, 4),
}


@pytest.mark.parametrize("what", BETWEEN)
@pytest.mark.parametrize("batch", [1, 2])
def test_nothing_is_left_to_torch(what: str, batch: int) -> None:
    between, channels = BETWEEN[what]
    model, x = sparse(Within(between, channels)), torch.randn(batch, 3, 9, 21)
    with torch.no_grad():
        model.up.weight *= torch.rand_like(model.up.weight) < 0.2  # type: ignore[union-attr,operator,arg-type]
    fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    right(model, fast, torch.randn(batch, 3, 9, 21))
    (program,) = runs(fast).programs.values()
    assert [part.node for part in program.parts if part.node is not None] == []
    right(model, fast, torch.randn(batch, 3, 16, 16))


def test_a_map_and_its_gated_self_are_one_kernel() -> None:
    model, x = sparse(Within(_gated)), torch.randn(1, 3, 9, 21)
    fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    (program,) = runs(fast).programs.values()
    labels = [step.label.split()[0] for part in program.parts for step in part.natives]
    assert labels.count("gated") == 1
    assert not {"gate", "add"} & set(labels)


def _told_apart(y: Tensor) -> Tensor:
    """The lowest float from an infinity."""
    return torch.where(y.isinf(), 7.0, y * 1e-38)


def _minus_infinity(m: Within, x: Tensor) -> Tensor:
    lowest = torch.finfo(torch.float32).min
    return _told_apart(F.max_pool2d(F.pad(torch.log(F.relu(x)), (0, 1, 0, 1), value=lowest), 2, 1))


def _wide_padding(m: Within, x: Tensor) -> Tensor:
    lowest = torch.finfo(torch.float32).min
    return _told_apart(F.max_pool2d(F.pad(F.relu(x), (0, 3, 0, 1), value=lowest), 2, 1))


def _spread(m: Within, x: Tensor) -> Tensor:
    lowest = torch.finfo(torch.float32).min
    return _told_apart(F.max_pool2d(F.pad(F.relu(m.other(x)), (1, 1, 1, 1), value=lowest), 2, 1, 0, 2))


def _negative(m: Within, x: Tensor) -> Tensor:
    return F.max_pool2d(F.pad(F.relu(x) - 1, (0, 1, 0, 1), value=-0.5), 2, 1)


def _broadcast(m: Within, x: Tensor) -> Tensor:
    return x + m.gate(x) + x.mean(1, keepdim=True) * x[:, :, :1]


@pytest.mark.parametrize("between", [_minus_infinity, _wide_padding, _spread, _broadcast])
def test_what_only_looks_like_it(between: Callable[[Any, Tensor], Tensor]) -> None:
    model, x = sparse(Within(between)), torch.randn(1, 3, 9, 21)
    fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    right(model, fast, torch.randn(1, 3, 1, 1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gates_in_half_precision(dtype: str) -> None:
    model, x = sparse(Within(_gated)), torch.randn(1, 3, 9, 21)
    fast = aerogel.compile(model, x, tune="off", dtype=dtype)
    with torch.no_grad():
        wanted = model(x)
        assert (fast(x) - wanted).abs().max() < 0.05 * wanted.abs().max()
