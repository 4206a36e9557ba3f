"""`stridepack` for GPUs: its slots and their padding, and its form with the weights in the code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from aerogel.backends.gpu.layer import Layer
from aerogel.backends.gpu.opencl import OpenCL
from aerogel.ir import Conv, Stats, Weight
from aerogel.methods.stridepack import gpu as stridepack
from aerogel.methods.stridepack import spf
from tests.test_gpu_cost import TARGET, random_layer


@pytest.mark.parametrize(
    ("channels", "filters", "groups"), [(12, 36, 1), (10, 33, 1), (24, 20, 2), (8, 6, 2)]
)
def test_weights_in_the_code_by_vectors_and_one_by_one(channels: int, filters: int, groups: int) -> None:
    """Any number of channels and filters; small whole numbers, so that sums are exact."""
    conv, rng = Conv.parse(f"n2c{channels}h7w9k{filters}r3s3u1p1g{groups}+bias+add"), np.random.default_rng(0)
    weight = rng.integers(-3, 4, conv.weight_shape) * (rng.random(conv.weight_shape) < 0.3)
    x, bias, residual = (
        torch.from_numpy(rng.integers(-4, 5, shape).astype(np.float32))
        for shape in (conv.x_shape, (conv.k,), conv.y_shape)
    )
    offered = stridepack.configs(conv, TARGET, Stats.of(weight.astype(np.float32)))
    config = next(c for c in offered if c["baked"])
    assert config["wide"] == (4 if channels // groups % 4 == 0 else 1)
    y = Layer(OpenCL(), conv, config, Weight(weight.astype(np.float32)))(x, bias, residual)
    wanted = torch.conv2d(x, torch.from_numpy(weight).float(), bias, 1, 1, 1, groups) + residual
    assert torch.equal(y, wanted)


@pytest.mark.parametrize(("filters", "groups", "deep"), [(150, 1, 2), (200, 2, 4), (40, 1, 2)])
def test_a_block_takes_several_groups_of_filters(filters: int, groups: int, deep: int) -> None:
    """Where the last block has fewer, and where the convolution has groups of its own; sums are exact."""
    conv, rng = Conv.parse(f"n2c24h7w9k{filters}r3s3u1p1g{groups}+bias+add"), np.random.default_rng(0)
    weight = rng.integers(-3, 4, conv.weight_shape) * (rng.random(conv.weight_shape) < 0.3)
    x, bias, residual = (
        torch.from_numpy(rng.integers(-4, 5, shape).astype(np.float32))
        for shape in (conv.x_shape, (conv.k,), conv.y_shape)
    )
    offered = stridepack.configs(conv, TARGET, Stats.of(weight.astype(np.float32)))
    config = next(c for c in offered if c["deep"] == deep)
    y = Layer(OpenCL(), conv, config, Weight(weight.astype(np.float32)))(x, bias, residual)
    assert torch.equal(y, torch.conv2d(x, torch.from_numpy(weight).float(), bias, 1, 1, 1, groups) + residual)


def test_code_is_no_larger_than_the_instruction_cache() -> None:
    conv, weight = random_layer("n1c64h56w56k64r3s3u1p1")
    for arch, wanted in (("sm_80", True), ("sm_75", False)):
        offered = stridepack.configs(conv, replace(TARGET, arch=arch), Stats.of(weight))
        assert any(c["baked"] for c in offered) == wanted


def test_reorganized_slots_take_each_nonzero_once_and_no_bank_twice() -> None:
    conv, weight = random_layer("c96k70r3s3u1p1", 0.2)
    offered = [c for c in stridepack.configs(conv, TARGET, Stats.of(weight)) if c["reorganized"]]
    config = next(c for c in offered if c["channels"] == 32)
    places, counts, _ = stridepack.units(dict(stridepack.pack(weight, conv, config).arrays), conv, config)
    slots = spf.reorganized(places, counts)
    for own, order, count in zip(places, slots, counts, strict=True):
        for lane in range(spf.LANES):
            taken = order[:, lane][order[:, lane] >= 0]
            assert sorted(taken.tolist()) == list(range(count[lane]))
        longest = max(
            int(count.max()), int(np.bincount(np.unique(own[order.max(0) >= 0]) % 32).max(initial=0))
        )
        assert len(order) <= 1.25 * longest + 2, "far from what Koenig's theorem allows"
    assert spf.wavefronts(places, slots) == sum(len(s) for s in slots), "some slot has two words of a bank"
    assert spf.wavefronts(places, spf.in_order(counts)) > 1.5 * sum(len(s) for s in slots), (
        "nothing was gained"
    )


def test_padding_reads_zeros_of_a_free_bank() -> None:
    conv, weight = random_layer("c64k70r3s3u1p1", 0.2)
    offered = [c for c in stridepack.configs(conv, TARGET, Stats.of(weight)) if c["reorganized"]]
    packed = stridepack.pack(weight, conv, offered[0])
    launch = stridepack.build(packed, conv.at(1, 8, 8), offered[0])[0]
    value, place = (np.asarray(a).transpose(0, 2, 1).reshape(-1, 32) for a in launch.arguments[6:8])
    waits = (value == 0).any(1)
    assert waits.any()
    for read in np.sort(place[waits].astype(np.int64), axis=1):
        assert np.bincount(np.unique(read) % 32).max() == 1, "a bank serves two words"
