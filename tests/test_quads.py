"""Maps of bytes in quads: copies into them and out of them, the largest of their windows, on every ISA."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from aerogel.backends.cpu.lower import pooling
from aerogel.backends.cpu.lower.convert import Enlarge, convert
from aerogel.backends.cpu.threads import Segment
from aerogel.codegen.cpu import copy
from aerogel.codegen.cpu.abi import Kernel
from aerogel.codegen.cpu.elements import CopyCode
from aerogel.errors import PlanMismatch
from aerogel.ir import Array, Layout, Pool, Quantized, Shape, here_levels, host

LEVELS = here_levels()


def ran(kernels: list[Kernel], x: Array, target: Layout, shape: Shape) -> Array:
    """What the kernels write into a buffer full of something else."""
    y = target.allocate(shape)
    y.view(np.uint8)[:] = 0xAB
    scratch = np.zeros(max(k.scratch_bytes for k in kernels) + 64, np.uint8)
    at = scratch.ctypes.data + -scratch.ctypes.data % 64
    Segment([(k, k.bind(x=x.ctypes.data, y=y.ctypes.data, scratch=at)) for k in kernels], 1)()
    return y


def laid(x: Array, layout: Layout, zero: int = 0) -> Array:
    shape = (x.shape[0], x.shape[1], x.shape[2], x.shape[3])
    buffer = layout.allocate(shape)
    layout.write(buffer, x, zero)
    return buffer


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(25))
def test_copies_of_bytes(level: str, seed: int) -> None:
    """Numbers into quads (planar, in phases), quads into quads, bytes and numbers; borders hold the zero."""
    rng, target = np.random.default_rng(seed), host().lower(level)
    n, c, h, w = (int(v) for v in rng.integers(1, (3, 14, 12, 20)))
    shape = (n, c, h, w)
    how = Quantized(float(np.float32(rng.random() * 0.1 + 0.001)), int(rng.integers(256)))
    x = (rng.standard_normal(shape) * 8).astype(np.float32)
    q = how.bytes_of(x)
    top, left, bottom, right = (int(v) for v in rng.integers(0, 3, 4))
    planar = Layout(
        "planar", w + max(left, right) + int(rng.integers(3)), (top, left, bottom, right), 0, "u8"
    )
    u, v = (int(s) for s in rng.integers(1, 4, 2))
    phases = Layout("phases", -(-(w + left + right) // v) + 1, planar.border, 0, "u8", (u, v), (u, v))
    for source in (
        Layout("contiguous", w),
        Layout("channels_last", w),
        Layout("planar", w + 1, (1, 0, 1, 1)),
    ):
        given = laid(x, source)
        for into in (planar, phases):
            got = ran(convert(shape, source, into, target, how=how), given, into, shape)
            if c % 4 == 0:  # else the last quad has channels that nobody reads
                np.testing.assert_array_equal(got, laid(q, into, how.zero))
            elif into is planar:
                np.testing.assert_array_equal(planar.read(got, shape), q)
                assert planar.dirty_border(got, shape, how.zero) == 0
    held = laid(q, planar, how.zero)
    got = ran(convert(shape, planar, phases, target, how=how), held, phases, shape)
    np.testing.assert_array_equal(got, laid(q, phases, how.zero))
    for plain in (Layout("contiguous", w), Layout("planar", w + 2, (0, 1, 1, 0))):
        got = ran(convert(shape, planar, plain, target, how=how), held, plain, shape)
        np.testing.assert_array_equal(plain.read(got, shape), how.numbers_of(q))
    single = Layout("contiguous", w, dtype="u8")
    got = ran(convert(shape, planar, single, target, how=how), held, single, shape)
    np.testing.assert_array_equal(single.read(got, shape), q)
    got = ran(convert(shape, single, planar, target, how=how), got, planar, shape)
    np.testing.assert_array_equal(planar.read(got, shape), q)


def test_numbers_that_are_none_are_the_lowest_byte() -> None:
    shape, how = (1, 4, 1, 16), Quantized(0.5, 100)
    x = np.tile(np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.25, 0.75, -0.25], np.float32), 8)
    source, into = Layout("contiguous", 16), Layout("planar", 16, dtype="u8")
    got = ran(convert(shape, source, into, host(), how=how), x.reshape(shape).copy(), into, shape)
    wanted = [0, 255, 0, 255, 0, 100, 102, 100]  # halves to even
    np.testing.assert_array_equal(into.read(got, shape).ravel(), np.tile(wanted, 8))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(12))
def test_the_largest_of_bytes(level: str, seed: int) -> None:
    rng, target = np.random.default_rng(seed), host().lower(level)
    n, c, h, w = (int(v) for v in rng.integers((1, 1, 4, 4), (3, 14, 14, 40)))
    window, step = (int(v) for v in rng.integers(1, 4, 2))
    pad, zero = int(rng.integers(0, window // 2 + 1)), int(rng.integers(256))
    own = Pool("max", (window,) * 2, (step,) * 2, (pad,) * 2, (1, 1))
    p, q = own.out(h, w)
    x = rng.integers(0, 256, (n, c, h, w)).astype(np.uint8)
    reads, writes = (Layout("planar", size + 1, (1, 1, 1, 1), pooling.SLACK, "u8") for size in (w, q))
    kernel = pooling.kernel(own, (n, c, h, w), (n, c, p, q), reads, writes, target, zero)
    got = ran([kernel], laid(x, reads, zero), writes, (n, c, p, q))
    wanted = torch.nn.functional.max_pool2d(torch.from_numpy(x.astype(np.float32)), window, step, pad)
    np.testing.assert_array_equal(writes.read(got, (n, c, p, q)), wanted.numpy().astype(np.uint8))
    assert writes.dirty_border(got, (n, c, p, q), zero) == 0


def test_maps_of_bytes_are_enlarged_and_joined() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (1, 8, 5, 6)).astype(np.uint8)
    reads, writes = Layout("planar", 7, (1, 1, 1, 1), 0, "u8"), Layout("planar", 13, (1, 1, 1, 1), 0, "u8")
    made = convert((1, 8, 5, 6), reads, writes, host(), larger=Enlarge(2), how=Quantized(1.0, 9))
    got = ran(made, laid(x, reads, 9), writes, (1, 8, 10, 12))
    np.testing.assert_array_equal(writes.read(got, (1, 8, 10, 12)), x.repeat(2, 2).repeat(2, 3))
    whole = (1, 12, 5, 6)
    got = ran(convert((1, 8, 5, 6), reads, reads, host(), (4, 12)), laid(x, reads), reads, whole)
    np.testing.assert_array_equal(reads.read(got, whole)[:, 4:], x)
    with pytest.raises(PlanMismatch, match="no kernel copies"):
        convert((1, 8, 5, 6), reads, reads, host(), (2, 12))


def test_a_name_of_code_is_of_one_text() -> None:
    """Code is found by its name: what copies bytes is not what copies floats as wide, whose border is 0."""
    codes = [
        CopyCode(LEVELS[0], reads, writes, 1, 1, joins, parts)
        for reads, writes in product(("f32", "f16", "u8"), repeat=2)
        for joins, parts in ((False, False), (writes == "u8", False), (False, reads == "u8"))
        if reads == writes or "f32" in (reads, writes)
    ]
    texts: dict[str, set[str]] = {}
    for code in dict.fromkeys(codes):
        if code.same or code.joins or code.parts or "u8" not in (code.reads, code.writes):
            texts.setdefault(str(code), set()).add(copy.emit(code))
    assert len(texts) >= 8
    assert all(len(own) == 1 for own in texts.values())
