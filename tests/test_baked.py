"""baked: its machine code alone, every register and base of values; what it refuses; damaged weights."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from aerogel.backends.cpu.threads import run
from aerogel.codegen.cpu import machine
from aerogel.errors import InvalidFile, ShapeError
from aerogel.ir import Array, Config, Conv, Packed, Place, Stats, Target, host
from aerogel.methods import gpu_form
from aerogel.methods.baked import cpu as baked
from aerogel.reference import reference
from tests.suite.run import worth_it

CONV = Conv.parse("n1c8h6w6k40r3s3u1p1")
CONFIG = Config.make("baked", vectors=4, channels=3, groups=2)
HERE = pytest.mark.skipif(host().isa != "avx512", reason="its code is AVX-512's")


def _packed() -> tuple[Array, Packed]:
    rng = np.random.default_rng(3)
    kept = rng.random(CONV.weight_shape) < 0.3
    weight = (rng.standard_normal(CONV.weight_shape) * kept).astype(np.float32)
    return weight, baked.pack(weight, CONV, CONFIG)


def _ran(code: bytes, x: Array, sums: Array, values: Array, count: int) -> None:
    memory = machine.executable(code)
    pointer = ctypes.c_void_p
    body = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, ctypes.c_long)(memory.ctypes.data)
    body(x.ctypes.data, sums.ctypes.data, values.ctypes.data, count)


@HERE
@pytest.mark.parametrize("sums", [1, 7, 8, 9, 16, 17, 28])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 700])
def test_a_body_sums_what_it_was_given(sums: int, resumed: bool, count: int) -> None:
    """Every register, windows before and after x, values beyond one base, and nothing at all."""
    rng = np.random.default_rng(count + sums)
    vectors, room = 3, rng.integers(-8, 9, 2000).astype(np.float32)
    x, pixels = room[500:], 16 * vectors
    window = np.sort(rng.integers(-400, 1200, count))
    register = rng.integers(0, sums, count)
    values = rng.integers(-8, 9, count + 1).astype(np.float32)
    start = rng.integers(-8, 9, (sums, pixels)).astype(np.float32)
    wanted = start.copy() if resumed else np.zeros_like(start)
    for at, own, value in zip(window, register, values, strict=False):
        wanted[own] += value * room[500 + at : 500 + at + pixels]
    asked = rng.random(count) < 0.5
    code, another = machine.bodies(
        np.append(register, 0),
        np.append(window, 0) * 4,
        np.append(asked, True),
        np.array([0, count, count + 1]),
        np.array([sums, 1]),
        np.array([resumed, False]),
        pixels * 4,
    )
    _ran(code, x, start, values, vectors)
    assert np.array_equal(start, wanted)
    _ran(another, x, start, values[count:], vectors)
    assert np.array_equal(start[0], values[count] * room[500 : 500 + pixels])


def test_code_can_be_run_and_not_written() -> None:
    memory = machine.executable(b"\xc3" * 5000)
    kinds = []
    with open("/proc/self/maps") as lines:
        for span, kind in (line.split()[:2] for line in lines):
            first, end = (int(edge, 16) for edge in span.split("-"))
            kinds += [kind] * (first <= memory.ctypes.data < end)
    assert kinds == ["r-xp"]


@HERE
@pytest.mark.parametrize(
    "text",
    [
        "n2c40h14w14k64r3s3u1p1+bias+relu",
        "n1c16h30w31k100r3s3u2p1+bias",
        "n1c12h9w9k24r1s1u1p0g2",
        "n1c8h40w300k20r5s5u1p2+bias+add+relu",
        "n1c8h20w20k30r3s3u1p2d2+leaky_relu0.125",
    ],
)
def test_every_configuration(text: str) -> None:
    conv, rng, target = Conv.parse(text), np.random.default_rng(0), host()
    weight = (rng.integers(-8, 9, conv.weight_shape) * (rng.random(conv.weight_shape) < 0.3)).astype(
        np.float32
    )
    x, residual = (rng.integers(-8, 9, s).astype(np.float32) for s in (conv.x_shape, conv.y_shape))
    bias = rng.integers(-8, 9, conv.k).astype(np.float32)
    wide_x, wide_w, wide_b, wide_r = (a.astype(np.float64) for a in (x, weight, bias, residual))
    wanted = reference(wide_x, wide_w, conv, wide_b, wide_r)
    for config in baked.configs(conv, target, Stats.of(weight)):
        reads, writes = baked.layouts(conv, config, target, Place((1, 1, 1, 1)))
        packed = baked.pack(weight, conv, config)
        assert np.array_equal(baked.unpack(packed, conv), weight)
        kernels = baked.build(packed, conv, config, target, reads, writes)
        xb, yb, rb = reads.allocate(conv.x_shape), *(writes.allocate(conv.y_shape) for _ in range(2))
        reads.write(xb, x)
        writes.write(rb, residual)
        yb[:] = np.nan
        run(kernels, xb, yb, bias, rb if "add" in text else None)
        assert np.array_equal(writes.read(yb, conv.y_shape), wanted), config
        assert writes.dirty_border(yb, conv.y_shape) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n1c8h20w20k7r3s3u1p1", "7 filters"),
        ("n1c8h8w8k16r1s1u1p0:f16.f16.f32.f16", "written for f32"),
        ("n1c64h40000w40000k16r3s3u1p1", "2 GiB"),
    ],
)
def test_refusals_name_the_property(text: str, says: str) -> None:
    assert says in str(baked.refuse(Conv.parse(text), Target("avx512", ("f16c",)), Stats(1, 1)))
    assert "AVX-512" in str(baked.refuse(Conv.parse(text), Target("avx2"), Stats(1, 1)))
    many = Stats(10**7, 10**6)
    assert "MB of code" in str(baked.refuse(Conv.parse("n1c8h9w9k16r3s3u1p1"), Target("avx512"), many))


def test_what_is_offered_does_not_depend_on_the_place() -> None:
    """A file is looked at without one."""
    weight, _ = _packed()
    stats = worth_it(weight)
    moved = replace(stats, place=Place((2, 2, 2, 2), 32, (1, 1, 1, 1), 32))
    offered = [set(baked.configs(CONV, Target("avx512"), s)) for s in (stats, moved)]
    assert offered[0] == offered[1]
    assert len(offered[0]) >= 4


@pytest.mark.parametrize("name", ["group", "start", "register", "position", "value"])
def test_every_damaged_array_is_found(name: str) -> None:
    weight, packed = _packed()
    assert np.array_equal(baked.unpack(packed, CONV), weight)
    array = packed.arrays[name]
    damaged = [array[:-1], np.append(array, array[:1]), array.astype(np.int64), array[None]]
    for i in range(len(array) if name != "value" else 0):
        for value in {"register": (28, 255), "position": (27, 2**16 - 1)}.get(name, (-1, 10**4, 2**31 - 1)):
            damaged.append(array.copy())
            damaged[-1][i] = value
    for bad in damaged:
        with pytest.raises(InvalidFile):
            baked.unpack(Packed("baked", 1, {**packed.arrays, name: bad}, packed.meta), CONV)
    for stage in (0, 9, 2**20):
        with pytest.raises(InvalidFile):
            baked.unpack(Packed("baked", 1, packed.arrays, {"stage": stage}), CONV)


def test_a_nonzero_that_stands_twice_is_found() -> None:
    _, packed = _packed()
    a = {name: array.copy() for name, array in packed.arrays.items()}
    first = int(a["start"][0])
    a["register"][first + 1], a["position"][first + 1] = a["register"][first], a["position"][first]
    with pytest.raises(InvalidFile, match="ascending"):
        baked.check(Packed("baked", 1, a, packed.meta), CONV)


def test_a_group_across_convolution_groups_is_found() -> None:
    conv = Conv.parse("n1c8h6w6k40r3s3u1p1g2")
    weight = np.ones(conv.weight_shape, np.float32)
    packed = baked.pack(weight, conv, CONFIG)
    group = packed.arrays["group"].copy()
    group[2] += 1
    with pytest.raises(InvalidFile, match="different channels"):
        baked.check(Packed("baked", 1, {**packed.arrays, "group": group}, packed.meta), conv)


def test_windows_beyond_32_bits_are_refused() -> None:
    """Code has 32 bits for an offset: one that does not fit would read somewhere else."""
    conv = Conv.parse("n1c64h3000w3000k8r1s1u1p0")
    config, target = Config.make("baked", vectors=4, channels=64, groups=1), Target("avx512")
    packed = baked.pack(np.ones(conv.weight_shape, np.float32), conv, config)
    with pytest.raises(ShapeError, match="2 GiB"):
        baked.build(packed, conv, config, target, *baked.layouts(conv, config, target))


def test_gpus_are_told_where_to_look() -> None:
    assert "stridepack" in str(gpu_form("baked").refuse(CONV, None, Stats(1, 1)))
