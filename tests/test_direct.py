"""direct: what it refuses, and what a damaged or foreign weight does to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from aerogel.errors import InvalidFile, PlanMismatch, ShapeError
from aerogel.ir import Array, Config, Conv, Packed, Place, Stats, Target, host
from aerogel.methods.direct import cpu as direct

CONV = Conv.parse("n1c8h6w6k6r3s3u1p1")
CONFIG = Config.make("direct", vectors=2, channels=4, groups=2, ahead=0, aligned=0)
AVX2, PLAIN = Target("avx2", ("f16c",)), Target("generic")
ANY = Stats(1, 1)


def _packed() -> tuple[Array, Packed]:
    rng = np.random.default_rng(3)
    weight = (rng.standard_normal(CONV.weight_shape) * (rng.random(CONV.weight_shape) < 0.3)).astype(
        np.float32
    )
    return weight, direct.pack(weight, CONV, CONFIG)


@pytest.mark.parametrize(
    ("text", "target", "says"),
    [
        ("c8k6r1s1u1p0:f16", PLAIN, "F16C"),
        ("c8k6r1s1u1p0:f16.f16.f16.f16", AVX2, "fp16 arithmetic"),
        ("c8k6r1s1u1p0:f16.f16.bf16.f16", AVX2, "sums in bf16"),
        ("c8k6r1s1u1p0:f32.f32.f16.f32", Target("avx512", ("avx512fp16",)), "fp16 input and weights"),
        ("n1c64h8192w8192k6r1s1u1p0", AVX2, "GiB"),
    ],
)
def test_refusals_name_the_property(text: str, target: Target, says: str) -> None:
    assert says in str(direct.refuse(Conv.parse(text), target, ANY))


@pytest.mark.parametrize("name", ["group", "row", "start", "position", "value"])
def test_every_damaged_array_is_found(name: str) -> None:
    """Each entry of each array out of range; a value may be any number, so only its length and type count."""
    weight, packed = _packed()
    assert np.array_equal(direct.unpack(packed, CONV), weight)
    array = packed.arrays[name]
    damaged = [array[:-1], np.append(array, array[:1]), array.astype(np.int64), array[None]]
    for i in range(len(array) if name != "value" else 0):
        for value in (8 * 3 * 3, 2**16 - 1) if name == "position" else (-1, 10**4, 2**31 - 1):
            damaged.append(array.copy())
            damaged[-1][i] = value
    for bad in damaged:
        with pytest.raises(InvalidFile):
            direct.unpack(
                Packed(packed.format, packed.version, {**packed.arrays, name: bad}, packed.meta), CONV
            )


def test_foreign_formats_are_refused() -> None:
    _, packed = _packed()
    for bad in (
        replace(packed, format="dense"),
        replace(packed, version=2),
        replace(packed, meta={"channel_blocks": 7}),
    ):
        with pytest.raises(InvalidFile):
            direct.unpack(bad, CONV)
    with pytest.raises(ShapeError, match="weight of shape"):
        direct.pack(np.zeros((6, 8, 1, 1), np.float32), CONV, CONFIG)


def test_layouts_that_would_read_outside_are_refused() -> None:
    _, packed = _packed()
    reads, writes = direct.layouts(CONV, CONFIG, host(), Place((1, 1, 1, 1)))
    assert direct.build(packed, CONV, CONFIG, host(), reads, writes)
    wider = replace(reads, border=(2, 1, 2, 1))
    assert direct.build(packed, CONV, CONFIG, host(), wider, writes), "a wider border than needed is welcome"
    for bad in (
        (replace(reads, border=(0, 1, 1, 1)), writes),
        (replace(reads, slack=0), writes),
        (replace(reads, pitch=reads.pitch + 1), writes),
        (replace(reads, dtype="f16"), writes),
        (replace(reads, kind="channels_last"), writes),
        (reads, replace(writes, kind="channels_last")),
        (reads, replace(writes, slack=-1)),
    ):
        with pytest.raises((PlanMismatch, ShapeError)):
            direct.build(packed, CONV, CONFIG, host(), *bad)


def test_filters_by_length_or_in_order() -> None:
    """By length, the longest row of each group and block of channels first; or as they are numbered."""
    weight, by_length = _packed()
    in_order = direct.pack(weight, CONV, Config.make("direct", **dict(CONFIG.options), in_order=1))
    assert np.array_equal(direct.unpack(in_order, CONV), weight)
    for packed, ordered in ((by_length, False), (in_order, True)):
        rows, lengths = packed.arrays["row"], np.diff(packed.arrays["start"])
        edges = packed.arrays["group"] * packed.meta["channel_blocks"]
        for low, high in pairwise(edges.tolist()):
            for part in np.split(np.arange(low, high), packed.meta["channel_blocks"]):
                assert (np.diff(rows[part] if ordered else -lengths[part]) >= 0).all()
    assert not np.array_equal(by_length.arrays["row"], in_order.arrays["row"])


def test_one_packing_serves_every_image_size() -> None:
    """pack never sees n, h or w."""
    weight, packed = _packed()
    other = direct.pack(weight, CONV.at(5, 31, 17), CONFIG)
    assert all(np.array_equal(packed.arrays[n], other.arrays[n]) for n in packed.arrays)


def test_images_beyond_32_bit_offsets_are_refused_before_allocation() -> None:
    conv = Conv.parse("n1c8h16384w16384k6r3s3u1p1")
    reads, writes = direct.layouts(conv, CONFIG, host())
    with pytest.raises(ShapeError, match="2 GiB"):
        direct.build(_packed()[1], conv, CONFIG, host(), reads, writes)


def test_slack_covers_what_the_last_run_reads() -> None:
    """Counted here from the picture in codegen/cpu/rows.py: a run that does not start a vector reads one
    vector more."""
    rng, target = np.random.default_rng(0), host()
    lanes, bounded = target.vector_bytes // 4, 0
    for _ in range(300):
        r, s, h, w, v = (int(rng.integers(*span)) for span in ((1, 4), (1, 4), (4, 30), (4, 70), (1, 8)))
        pad = tuple(int(rng.integers(0, side)) for side in (r, s, r, s))
        conv = Conv(3, 4, r, s, pad=(pad[0], pad[1], pad[2], pad[3]), n=1, h=h, w=w)
        config = Config.make("direct", vectors=v, channels=3, groups=1, ahead=0, aligned=1)
        reads, _ = direct.layouts(conv, config, target)
        plane, (p, q) = reads.plane(h, w), conv.out
        # bands begin at any row, so a block may begin at the last pixel
        last_block = (p - 1) * reads.pitch + q - 1
        furthest = 0
        for i in range(r):
            for j in range(s):
                window = 2 * plane + (i - pad[0]) * reads.pitch + j - pad[1]
                furthest = max(
                    furthest, last_block + window - window % lanes + (v + (window % lanes > 0)) * lanes
                )
        assert furthest <= 3 * plane + reads.slack
        bounded += furthest == 3 * plane + reads.slack
    assert bounded > 50, "in many of them it is the slack that decides"
