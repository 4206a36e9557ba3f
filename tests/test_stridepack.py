"""stridepack: every register block, what it refuses, and what a damaged or foreign weight does to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from aerogel.backends.cpu.threads import run
from aerogel.errors import InvalidFile, PlanMismatch, ShapeError
from aerogel.ir import Array, Config, Conv, Packed, Place, Stats, Target, here_levels, host
from aerogel.methods.direct import cpu as direct
from aerogel.methods.stridepack import cpu as stridepack
from aerogel.reference import reference

CONV = Conv.parse("n1c8h6w6k6r3s3u1p1")
CONFIG = Config.make("stridepack", rows=2, columns=1, channels=4, groups=2, ahead=0)


def _packed() -> tuple[Array, Packed]:
    rng = np.random.default_rng(3)
    weight = (rng.standard_normal(CONV.weight_shape) * (rng.random(CONV.weight_shape) < 0.3)).astype(
        np.float32
    )
    return weight, stridepack.pack(weight, CONV, CONFIG)


@pytest.mark.parametrize("isa", here_levels())
@pytest.mark.parametrize("name", ["direct", "stridepack"])
def test_every_register_block(name: str, isa: str) -> None:
    """The suite goes through few blocks of kernels that depend on the shape; here is every one, exactly, on
    one problem."""
    module, target = {"direct": direct, "stridepack": stridepack}[name], host().lower(isa)
    conv, rng = Conv.parse("n1c6h15w61k5r3s3u1p1+bias+relu"), np.random.default_rng(0)
    weight = (rng.integers(-8, 9, conv.weight_shape) * (rng.random(conv.weight_shape) < 0.3)).astype(
        np.float32
    )
    x, bias = (
        rng.integers(-8, 9, conv.x_shape).astype(np.float32),
        rng.integers(-8, 9, conv.k).astype(np.float32),
    )
    wanted = reference(x.astype(np.float64), weight.astype(np.float64), conv, bias.astype(np.float64))
    blocks: dict[object, Config] = {}
    for config in module.configs(conv, target, Stats.of(weight)):
        options = dict(config.options)
        if name == "stridepack" or options["aligned"]:
            blocks.setdefault((options.get("vectors"), options.get("rows"), options.get("columns")), config)
    assert len(blocks) >= (6 if name == "direct" else 20)
    for config in blocks.values():
        reads, writes = module.layouts(conv, config, target, Place((1, 1, 1, 1)))
        kernels = module.build(module.pack(weight, conv, config), conv, config, target, reads, writes)
        xb, yb = reads.allocate(conv.x_shape), writes.allocate(conv.y_shape)
        reads.write(xb, x)
        yb[:] = np.nan
        run(kernels, xb, yb, bias)
        assert np.array_equal(writes.read(yb, conv.y_shape), wanted), config
        assert writes.dirty_border(yb, conv.y_shape) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n1c8h20w20k6r8s1u1p0", "three bits"),
        ("n1c8h20w20k6r1s9u1p0", "three bits"),
        ("n1c8h8w8k6r1s1u1p0:f16.f16.bf16.f16", "sums in bf16"),
        ("n1c8h90000w8k6r2s1u1p0d90000", "two bytes"),
    ],
)
def test_refusals_name_the_property(text: str, says: str) -> None:
    conv = (
        Conv.parse(text)
        if "d90000" not in text
        else replace(Conv.parse("n1c8h90001w8k6r2s1u1p0"), dilation=(90_000, 1))
    )
    assert says in str(stridepack.refuse(conv, Target("avx2", ("f16c",)), Stats(1, 1)))


def test_positions_are_two_bytes() -> None:
    """The paper's stride packed filter: s | r << 3 | (c mod TILE_C) << 6."""
    weight = np.zeros(CONV.weight_shape, np.float32)
    weight[4, 6, 2, 1] = 5
    packed = stridepack.pack(weight, CONV, CONFIG)
    assert packed.arrays["position"].dtype == np.uint16
    assert packed.arrays["position"].tolist() == [1 | 2 << 3 | 6 % 4 << 6]


def test_filters_are_dealt_so_that_groups_take_equal_time() -> None:
    conv, rng = Conv.parse("c64k256r1s1u1p0"), np.random.default_rng(0)
    # filters grow denser: equal runs of them would be far from equal work
    density = np.sort(rng.random(256))[:, None]
    weight = (rng.random((256, 64)) < density).astype(np.float32)[:, :, None, None]
    packed = stridepack.pack(
        weight, conv, Config.make("stridepack", rows=1, columns=1, channels=64, groups=8, ahead=0)
    )
    edges, order = packed.arrays["group"], packed.arrays["filter"]
    work = [int(np.count_nonzero(weight[order[low:high]])) for low, high in pairwise(edges)]
    assert max(work) < 1.05 * min(work)
    grouped = Conv.parse("c64k256r1s1u1p0g4")
    packed = stridepack.pack(
        weight[:, :16], grouped, Config.make("stridepack", rows=1, columns=1, channels=16, groups=3, ahead=0)
    )
    assert len(packed.arrays["group"]) == 4 * 3 + 1
    assert np.array_equal(stridepack.unpack(packed, grouped), weight[:, :16])


@pytest.mark.parametrize("name", ["group", "filter", "row", "start", "position", "value"])
def test_every_damaged_array_is_found(name: str) -> None:
    weight, packed = _packed()
    assert np.array_equal(stridepack.unpack(packed, CONV), weight)
    array = packed.arrays[name]
    damaged = [array[:-1], np.append(array, array[:1]), array.astype(np.int64), array[None]]
    for i in range(len(array) if name != "value" else 0):
        for value in (3, 3 << 3, 4 << 6, 2**16 - 1) if name == "position" else (-1, 10**4, 2**31 - 1):
            damaged.append(array.copy())
            damaged[-1][i] = value
    for bad in damaged:
        with pytest.raises(InvalidFile):
            stridepack.unpack(
                Packed(packed.format, packed.version, {**packed.arrays, name: bad}, packed.meta), CONV
            )


def test_foreign_formats_are_refused() -> None:
    _, packed = _packed()
    for bad in (
        replace(packed, format="direct"),
        replace(packed, version=2),
        replace(packed, meta={"stage": 9}),
        replace(packed, meta={}),
    ):
        with pytest.raises(InvalidFile):
            stridepack.unpack(bad, CONV)
    with pytest.raises(ShapeError, match="weight of shape"):
        stridepack.pack(np.zeros((6, 8, 1, 1), np.float32), CONV, CONFIG)


def test_a_group_that_reads_other_channels_is_refused() -> None:
    conv = Conv.parse("c8k6r1s1u1p0g2")
    packed = stridepack.pack(np.ones((6, 4, 1, 1), np.float32), conv, CONFIG)
    mixed = packed.arrays["filter"][::-1].copy()
    mixed[[0, -1]] = mixed[[-1, 0]]
    with pytest.raises(InvalidFile, match="different channels"):
        stridepack.unpack(
            Packed(packed.format, packed.version, {**packed.arrays, "filter": mixed}, packed.meta), conv
        )


def test_layouts_that_would_read_outside_are_refused() -> None:
    _, packed = _packed()
    reads, writes = stridepack.layouts(CONV, CONFIG, host(), Place((1, 1, 1, 1)))
    assert stridepack.build(packed, CONV, CONFIG, host(), reads, writes)
    wider, _ = stridepack.layouts(CONV, CONFIG, host(), Place((1, 1, 1, 1), x_pitch=reads.pitch + 5))
    assert stridepack.build(packed, CONV, CONFIG, host(), wider, writes), (
        "input and output may have different pitches"
    )
    for bad in (
        (replace(reads, border=(0, 1, 1, 1)), writes),
        (replace(reads, slack=reads.slack - 1), writes),
        (replace(reads, dtype="f16"), writes),
        (replace(reads, kind="channels_last"), writes),
        (reads, replace(writes, kind="channels_last")),
        (reads, replace(writes, slack=-1)),
    ):
        with pytest.raises((PlanMismatch, ShapeError)):
            stridepack.build(packed, CONV, CONFIG, host(), *bad)
