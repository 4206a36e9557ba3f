"""tilewise and blockgemm: which tiles they find, every register block, what they refuse, and what a damaged
weight does to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

import aerogel
from aerogel.backends import using
from aerogel.backends.cpu.backend import Cpu
from aerogel.backends.cpu.threads import run
from aerogel.errors import InvalidFile, PlanMismatch
from aerogel.formats import clusters
from aerogel.ir import Array, Config, Conv, Packed, Place, Stats, Target, here_levels, host, majority
from aerogel.methods.blockgemm import cpu as blockgemm
from aerogel.methods.tilewise import cpu as tilewise
from aerogel.pruning.masks import masks
from aerogel.reference import reference
from aerogel.runtime.reading import network_of
from aerogel.tune.search import group_layers
from tests.reference_backend import ClockedCpu, by_nonzeros

CONV = Conv.parse("n1c16h6w6k70r3s3u1p1")
OPTIONS = {"filters": 4, "width": 2, "vectors": 4, "rows": 32, "channels": 8, "groups": 2, "ahead": 0}
BOTH = pytest.mark.parametrize("module", [tilewise, blockgemm], ids=["tilewise", "blockgemm"])


def _pruned(conv: Conv, pattern: str, sparsity: float = 0.75, seed: int = 0) -> Array:
    weight = np.random.default_rng(seed).standard_normal(conv.weight_shape).astype(np.float32)
    return np.asarray(
        weight * masks({"": torch.from_numpy(np.abs(weight))}, {"": sparsity}, pattern)[""].numpy()
    )


def _planted(filters: int = 128, positions: int = 400, clusters: int = 4) -> tuple[Array, Array]:
    """Clusters of filters with positions of their own, shuffled, and a few nonzeros anywhere; and who belongs
    together."""
    rng = np.random.default_rng(1)
    mask, order = rng.random((filters, positions)) < 0.02, rng.permutation(filters)
    for own in np.split(order, clusters):
        mask[np.ix_(own, rng.permutation(positions)[: positions // 8])] = True
    return mask, order


def test_tilewise_finds_what_pruning_left() -> None:
    """TW-2D of a layer with 128 surviving filters and more: tiles of 128, all nonzeros inside."""
    conv = Conv.parse("n1c64h6w6k300r3s3u1p1")
    weight = _pruned(conv, "tilewise")
    found = tilewise.tiles(weight, conv)
    alive = np.flatnonzero(weight.reshape(300, -1).any(1))
    assert [len(filters) for filters, _ in found] == [128, len(alive) - 128]
    assert sum(len(f) * len(p) for f, p in found) == np.count_nonzero(weight)
    assert Stats.of(weight).shared == np.count_nonzero(weight)
    assert tilewise.refuse(conv, host(), Stats.of(weight)) is None


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("c64k70r1s1u1p0", True),
        ("c3k32r3s3u2p1", True),
        ("c64k70r3s3u1p1", False),
        ("c64k64r3s3u1p1g64", False),
    ],
)
def test_a_small_layer_without_zeros_is_one_tile(text: str, taken: bool) -> None:
    """Not one with long filters, which a dense library is made for, nor one with nothing to share."""
    conv = Conv.parse(text)
    weight = np.ones(conv.weight_shape, np.float32)
    why = tilewise.refuse(conv, host(), Stats.of(weight))
    assert (why is None) == taken
    assert taken or "a dense library" in str(why)
    if taken:
        ((filters, positions),) = tilewise.tiles(weight, conv)
        assert (len(filters), len(positions)) == (conv.k, weight[0].size)


def test_single_elements_of_tew_are_rows() -> None:
    conv = Conv.parse("n1c64h6w6k128r3s3u1p1")
    weight = _pruned(conv, "tew")
    packed = tilewise.pack(weight, conv, Config.make("tilewise", **OPTIONS))
    inside = sum(len(f) * len(p) for f, p in tilewise.tiles(weight, conv))
    assert 0 < len(packed.arrays["value"]) < 0.15 * np.count_nonzero(weight)
    assert len(packed.arrays["value"]) + inside >= np.count_nonzero(weight)


def test_clusters_are_found_again() -> None:
    mask, order = _planted()
    found = clusters.clusters(mask)
    assert {tuple(sorted(own)) for own in np.split(order, 4)} == {tuple(c.tolist()) for c in found}
    inside = sum(int(majority(mask[c]).sum()) for c in found)
    random = sum(int(majority(mask[c]).sum()) for c in np.split(np.arange(128), 4))
    assert inside > 0.8 * mask.sum() > 4 * random


@BOTH
@pytest.mark.parametrize("isa", here_levels())
def test_every_register_block(module: ModuleType, isa: str) -> None:
    """Exactly, on one problem: tiles, what is left over, an empty filter, a last panel that is not full."""
    target, conv, rng = (
        host().lower(isa),
        Conv.parse("n1c6h15w21k37r3s3u1p1+bias+relu"),
        np.random.default_rng(0),
    )
    kept = np.repeat(rng.random((1, *conv.weight_shape[1:])) < 0.3, conv.k, axis=0) ^ (
        rng.random(conv.weight_shape) < 0.03
    )
    kept[5] = False
    weight = (rng.integers(1, 9, conv.weight_shape) * kept).astype(np.float32)
    x, bias = (
        rng.integers(-8, 9, conv.x_shape).astype(np.float32),
        rng.integers(-8, 9, conv.k).astype(np.float32),
    )
    wanted = reference(x.astype(np.float64), weight.astype(np.float64), conv, bias.astype(np.float64))
    blocks: dict[tuple[int, int], Config] = {}
    for config in module.configs(conv, target, Stats.of(weight)):
        blocks.setdefault((config["filters"], config["width"]), config)
    assert len(blocks) > 15
    for config in blocks.values():
        reads, writes = module.layouts(conv, config, target, Place((1, 1, 1, 1)))
        kernels = module.build(module.pack(weight, conv, config), conv, config, target, reads, writes)
        xb, yb = reads.allocate(conv.x_shape), writes.allocate(conv.y_shape)
        reads.write(xb, x)
        yb[:] = np.nan
        run(kernels, xb, yb, bias)
        assert np.array_equal(writes.read(yb, conv.y_shape), wanted), config
        assert writes.dirty_border(yb, conv.y_shape) == 0


def test_refusals_name_the_property() -> None:
    here, loose = Target("avx512", ("avx512fp16", "f16c")), Stats.of(_pruned(CONV, "unstructured", 0.9))
    assert "pattern='tilewise'" in str(tilewise.refuse(CONV, here, loose))
    assert "most like it" in str(blockgemm.refuse(CONV, here, loose))
    half = Conv.parse("n1c16h6w6k70r3s3u1p1:f16.f16.f16.f16")
    for module in (tilewise, blockgemm):
        assert "summed in f32" in str(module.refuse(half, here, loose))
        long = replace(CONV, c=64)
        assert "zeros" in str(module.refuse(long, here, Stats.of(_pruned(long, "tilewise", 0.1))))
        assert "GiB" in str(module.refuse(replace(CONV, h=50_000, w=50_000), here, loose))


@BOTH
def test_damage_is_found(module: ModuleType) -> None:
    weight = _pruned(CONV, "tew", 0.6)
    packed = module.pack(weight, CONV, Config.make(module.NAME, **OPTIONS))
    assert np.array_equal(module.unpack(packed, CONV), weight)
    assert len(packed.arrays["tile"]) == 3, "two groups of filters"

    def unpack(**arrays: Array) -> None:
        module.unpack(Packed(packed.format, packed.version, {**packed.arrays, **arrays}, packed.meta), CONV)

    a = packed.arrays
    for name in ("tile", "tile_row", "tile_panel"):
        for bad in (a[name][:-1], a[name][::-1].copy(), a[name] + 1, a[name].astype(np.int64), a[name][:0]):
            with pytest.raises(InvalidFile):
                unpack(**{name: bad})
    with pytest.raises(InvalidFile, match="outside the filter"):
        unpack(
            tile_position=np.where(
                np.arange(len(a["tile_position"])) == 3, 16 * 9, a["tile_position"]
            ).astype(np.int32)
        )
    with pytest.raises(InvalidFile, match="another group"):
        unpack(member=np.where(a["member"] >= 0, 69 - a["member"], -1).astype(np.int32))
    with pytest.raises(InvalidFile, match="twice"):
        unpack(
            member=np.where(np.arange(len(a["member"])) == 1, a["member"][0], a["member"]).astype(np.int32)
        )
    with pytest.raises(InvalidFile, match="fit each other"):
        unpack(panel=a["panel"][:-1])
    with pytest.raises(InvalidFile, match="element type"):
        unpack(panel=a["panel"].astype(np.float64))
    with pytest.raises(InvalidFile, match="not a"):
        module.unpack(Packed("direct", 1, a, packed.meta), CONV)


@BOTH
def test_a_layout_without_slack_is_refused(module: ModuleType) -> None:
    config = Config.make(module.NAME, **OPTIONS)
    packed = module.pack(_pruned(CONV, "tilewise"), CONV, config)
    reads, writes = module.layouts(CONV, config, host())
    with pytest.raises(PlanMismatch, match=module.NAME):
        module.build(packed, CONV, config, host(), replace(reads, slack=0), writes)


TWIN = Conv.parse("n1c32h10w10k32r3s3u1p1")


def _twins(*weights: Array) -> nn.Sequential:
    """Layers with the same problem and as many zeros."""
    layers = [nn.Conv2d(TWIN.c, TWIN.k, 3, padding=1) for _ in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data = torch.from_numpy(weight)
    return nn.Sequential(*layers).eval()


def test_a_layer_pruned_tile_wise_is_no_twin_of_one_that_is_not() -> None:
    """Same problem, same sparsity: timed apart, because another method may win."""
    model = _twins(*(_pruned(TWIN, pattern) for pattern in ("tilewise", "unstructured", "unstructured")))
    network, _ = network_of(model, ((torch.zeros(TWIN.x_shape),), {}), None)
    groups = group_layers(Cpu(), network, network.shapes([torch.zeros(TWIN.x_shape)]))
    assert [len(group) for group in groups] == [1, 2]


def test_layers_of_which_a_method_refuses_one_are_no_twins(tmp_path: Path) -> None:
    """They shared the record of the first, which named a method that refuses the second: the file of such a
    model did not load."""
    rng, weights = np.random.default_rng(0), list[Array]()
    for share in (0.65, 0.3):  # of its positions that a filter shares with the next
        own = np.zeros((TWIN.k, 288), np.float32)
        for k in range(0, TWIN.k, 2):
            places = rng.permutation(288)
            same, apart = places[: int(28 * share)], places[int(28 * share) :]
            for i in (0, 1):
                kept = np.concatenate([same, apart[i * 140 : i * 140 + 28 - len(same)]])
                own[k + i, kept] = rng.standard_normal(28)
        weights.append(own.reshape(TWIN.weight_shape))
    first, second = (Stats.of(own) for own in weights)
    assert first.nonzeros == second.nonzeros
    assert blockgemm.refuse(TWIN, host(), first) is None
    assert "share" in str(blockgemm.refuse(TWIN, host(), second))
    x = torch.randn(TWIN.x_shape)
    with using(ClockedCpu(by_nonzeros)):
        fast = aerogel.compile(_twins(*weights), x, progress=False, store=tmp_path / "store")
    assert fast.network is not None
    aerogel.save(fast, tmp_path / "model.aero")
    assert torch.equal(aerogel.load(tmp_path / "model.aero")(x), fast(x))
