"""Layout copies and pooling: exact, inside guard pages, on every ISA, on any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aerogel.backends.cpu.lower import pooling
from aerogel.backends.cpu.lower.convert import convert
from aerogel.backends.cpu.threads import Segment
from aerogel.capture.nodes import pooling_of
from aerogel.codegen.cpu.abi import Kernel
from aerogel.errors import PlanMismatch
from aerogel.ir import Array, Layout, Node, Ref, here_levels, host
from tests import counts
from tests.suite.guard import Guarded

REGIONS = Guarded(), Guarded(), Guarded()


def _run(
    kernels: list[Kernel],
    x: Array,
    reads: Layout,
    writes: Layout,
    y_shape: tuple[int, int, int, int],
    back: bool,
    threads: int,
) -> Array:
    xb = REGIONS[0].place(reads.elements(x.shape), x.dtype, back)
    reads.write(xb, x)
    yb = REGIONS[1].place(writes.elements(y_shape), x.dtype, back)
    scratch = REGIONS[2].place(max(k.scratch_bytes for k in kernels) * threads, np.dtype(np.uint8), back)
    bound = [(k, k.bind(x=xb.ctypes.data, y=yb.ctypes.data, scratch=scratch.ctypes.data)) for k in kernels]
    Segment(bound, threads)()
    assert (yb[len(yb) - writes.slack :].view(np.uint8) == 0xFF).all(), "the slack is nobody's"
    return yb[: len(yb) - writes.slack].copy()


def _layout(rng: np.random.Generator, kind: str, w: int, dtype: str) -> Layout:
    border = tuple(int(v) for v in rng.integers(0, 4, 4))
    slack = int(rng.integers(0, 20))
    if kind in ("contiguous", "channels_last"):
        return Layout(kind, w, dtype=dtype)
    if kind == "planar":
        pitch = w + max(border[1], border[3]) + int(rng.integers(0, 3))
        return Layout("planar", pitch, (border[0], border[1], border[2], border[3]), slack, dtype)
    u, v = (int(s) for s in rng.integers(1, 4, 2))
    kept = int(rng.integers(1, u + 1)), int(rng.integers(1, v + 1))
    pitch = -(-(w + border[1] + border[3]) // v) + int(rng.integers(0, 3))
    return Layout("phases", pitch, (border[0], border[1], border[2], border[3]), slack, dtype, (u, v), kept)


@pytest.mark.parametrize("source", ["contiguous", "channels_last", "planar"])
@pytest.mark.parametrize("target", ["contiguous", "planar", "phases"])
@pytest.mark.parametrize("isa", here_levels())
def test_copies_are_exact(source: str, target: str, isa: str) -> None:
    machine = host().lower(isa)
    for seed in counts.seeds("copies"):
        rng = np.random.default_rng(seed)
        dtype = ("f32", "f16")[seed % 2]
        n, c, h, w = (int(v) for v in rng.integers(1, (3, 6, 20, 40)))
        x = rng.standard_normal((n, c, h, w)).astype(np.float16 if dtype == "f16" else np.float32)
        reads, writes = _layout(rng, source, w, dtype), _layout(rng, target, w, dtype)
        wanted = np.full(writes.elements(x.shape), np.nan, x.dtype)
        writes.write(wanted, x)
        kernels = convert((n, c, h, w), reads, writes, machine)
        got = _run(kernels, x, reads, writes, (n, c, h, w), bool(seed % 4 < 2), 1 + seed % 3)
        assert np.array_equal(got, wanted[: len(got)]), f"seed {seed}: {reads} -> {writes}, {x.shape}"


def test_copies_that_do_not_exist_are_refused() -> None:
    plain = Layout("contiguous", 4)
    for source, target in (
        (plain, Layout("channels_last", 4)),
        (Layout("phases", 4), plain),
        (Layout("contiguous", 4, dtype="bf16"), Layout("contiguous", 4, dtype="f16")),
    ):
        with pytest.raises(PlanMismatch):
            convert((1, 1, 4, 4), source, target, host())


@pytest.mark.parametrize("isa", here_levels())
def test_pooling_is_torchs(isa: str) -> None:
    machine = host().lower(isa)
    for seed in counts.seeds("copies"):
        rng = np.random.default_rng(seed)
        n, c, h, w = (int(v) for v in rng.integers((1, 1, 3, 3), (3, 5, 30, 50)))
        window = tuple(int(v) for v in rng.integers(1, 4, 2))
        stride, dilation = (tuple(int(v) for v in rng.integers(1, 4, 2)) for _ in range(2))
        pad = tuple(int(rng.integers(0, v // 2 + 1)) for v in window)
        x = rng.standard_normal((n, c, h, w)).astype(np.float32)
        x[rng.random(x.shape) < 0.02] = np.nan
        x[rng.random(x.shape) < 0.02] = -np.inf
        if h + 2 * pad[0] <= dilation[0] * (window[0] - 1) or w + 2 * pad[1] <= dilation[1] * (window[1] - 1):
            continue
        if seed % 2:
            wanted = torch.nn.functional.max_pool2d(
                torch.from_numpy(x), window, stride, pad, dilation
            ).numpy()
            node = Node("y", "aten.max_pool2d.default", (Ref("x"), window, stride, pad, dilation))
        else:
            x = np.nan_to_num(np.round(x * 8), neginf=0.0)
            wanted = torch.nn.functional.avg_pool2d(torch.from_numpy(x).double(), window, stride, pad).numpy()
            node = Node("y", "aten.avg_pool2d.default", (Ref("x"), window, stride, pad))
        own = pooling_of(node)
        assert own is not None
        reads = Layout("planar", w + 2, (1, 1, 1, 1), 16)
        q = wanted.shape[3]
        writes = Layout("planar", q + 1, (2, 1, 0, 1), 3)
        shape = (n, c, wanted.shape[2], q)
        made = pooling.kernel(own, (n, c, h, w), shape, reads, writes, machine)
        got = _run([made], x, reads, writes, shape, bool(seed % 2), 1 + seed % 3)
        buffer = np.append(got, np.zeros(writes.slack, np.float32))
        assert np.allclose(
            writes.read(buffer, shape), wanted, rtol=2e-7 if seed % 2 == 0 else 0, atol=0, equal_nan=True
        ), f"seed {seed}: {own} on {x.shape}"
        assert writes.dirty_border(buffer, shape) == 0


@pytest.mark.parametrize("isa", here_levels())
def test_the_mean_of_an_image(isa: str) -> None:
    for seed, (h, w) in enumerate([(1, 1), (7, 7), (1, 40), (33, 9), (20, 65)]):
        rng = np.random.default_rng(seed)
        x = rng.integers(-9, 9, (2, 5, h, w)).astype(np.float32)
        own = pooling_of(
            Node("y", "aten.mean.dim", (Ref("x"), (2, 3) if seed % 2 else (-1, -2), bool(seed % 2)))
        )
        assert own is not None
        reads, writes, shape = Layout("planar", w + 1, (1, 1, 1, 1), 16), Layout("planar", 1), (2, 5, 1, 1)
        got = _run(
            [pooling.kernel(own, x.shape, shape, reads, writes, host().lower(isa))],
            x,
            reads,
            writes,
            shape,
            True,
            1 + seed % 3,
        )
        wanted = x.astype(np.float64).mean((2, 3), keepdims=True)
        assert np.allclose(writes.read(got, shape), wanted, rtol=2e-7, atol=0)
    for args in ((Ref("x"), (2,)), (Ref("x"), (1, 2)), (Ref("x"), None), (Ref("x"), (2, 3), Ref("n"))):
        assert pooling_of(Node("y", "aten.mean.dim", args)) is None
    assert pooling_of(Node("y", "aten.mean.dim", (Ref("x"), (2, 3)), {"dtype": Ref("d")})) is None


@pytest.mark.parametrize(
    "args",
    [(Ref("x"), (2, 2), (2, 2), (0, 0), (1, 1), True), (Ref("x"), (Ref("n"), 2)), ((Ref("x"),), (2, 2))],
)
def test_pooling_that_is_not_ours_is_left_to_torch(args: tuple[object, ...]) -> None:
    assert pooling_of(Node("y", "aten.max_pool2d.default", args)) is None
    assert (
        pooling_of(Node("y", "aten.avg_pool2d.default", (Ref("x"), (2, 2), (2, 2), (0, 0), False, False)))
        is None
    )
