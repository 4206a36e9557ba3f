"""Two of four weights: packing against torch's own conversion, refusals in words, and all around the product,
which needs a GPU and has never run."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.sparse import _semi_structured_conversions as theirs

import aerogel
from aerogel.backends.gpu import twofour
from aerogel.errors import InvalidFile
from aerogel.ir import Array, Config, Conv, Gpu, Packed, Stats, from_float64, host
from aerogel.ir.tensors import plain, to_torch
from aerogel.methods import cpu_form
from aerogel.methods.semistructured import gpu as semistructured
from tests import counts

TARGET = Gpu("cuda", "sm_80", 108, 166912)
CONFIG = Config.make("semistructured")


def _layer(text: str, seed: int = 0) -> tuple[Conv, Array]:
    """At most two of every four, often fewer, in every place."""
    conv, rng = Conv.parse(text), np.random.default_rng(seed)
    fours = rng.integers(1, 5, (conv.k, conv.c // 4, 4)) * rng.choice([-1, 1], (conv.k, conv.c // 4, 4))
    place = rng.random(fours.shape).argsort(2)
    kept = place < rng.integers(0, 3, (*fours.shape[:2], 1))
    weight = (fours * kept).reshape(conv.weight_shape).astype(np.float64)
    return conv, from_float64(weight, conv.dtypes.weight)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_values_and_indices_are_torchs_bit_for_bit(dtype: str) -> None:
    for seed in range(3):
        conv, weight = _layer(f"n1c{64 * (1 + seed)}h3w3k{32 * (1 + seed)}r1s1u1p0:{dtype}", seed)
        packed = semistructured.pack(weight, conv, CONFIG)
        assert np.array_equal(semistructured.unpack(packed, conv), weight)
        launch = semistructured.build(packed, conv, CONFIG)[0]
        dense = to_torch(weight.reshape(conv.k, conv.c), dtype)
        values, metadata = theirs.sparse_semi_structured_from_dense_cutlass(dense)  # type: ignore[no-untyped-call]
        assert torch.equal(to_torch(launch.value, dtype), values)
        assert torch.equal(torch.from_numpy(launch.metadata), metadata)


def _by_conversion(
    pixels: torch.Tensor, value: torch.Tensor, metadata: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """In the product's place: torch's conversion back, which runs on CPUs."""
    weight = theirs.sparse_semi_structured_to_dense_cutlass(value, metadata)  # type: ignore[no-untyped-call]
    return F.linear(pixels.float(), weight.float(), None if bias is None else bias.float()).to(pixels.dtype)


@pytest.mark.parametrize(
    "text",
    [
        "n2c64h3w5k40r1s1u1p0:f16+bias+add+relu",
        "n1c128h4w4k64r1s1u1p0:bf16+silu",
        "n3c64h1w1k10r1s1u1p0:f16.f16.f16.f16+bias",
    ],
)
def test_what_stands_around_the_product(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of filters, any epilogue, any layout of x; small whole numbers, so that sums are exact."""
    monkeypatch.setattr(twofour, "product", _by_conversion)
    (conv, weight), rng = _layer(text), np.random.default_rng(1)
    dtype = torch.float16 if conv.dtypes.input == "f16" else torch.bfloat16
    x, residual = (torch.from_numpy(rng.integers(-2, 3, s)).to(dtype) for s in (conv.x_shape, conv.y_shape))
    bias = torch.from_numpy(rng.integers(-2, 3, conv.k)).float()
    packed = semistructured.pack(weight, conv, CONFIG)
    y = torch.empty(conv.y_shape, dtype=dtype, memory_format=torch.channels_last)
    queue = twofour.prepared(semistructured.build(packed, conv, CONFIG)[0], lambda tensor: tensor)
    queue({"x": x.contiguous(memory_format=torch.channels_last), "y": y, "bias": bias, "residual": residual})
    own = bias if "bias" in conv.steps else None
    wanted = plain(x.float(), to_torch(weight, conv.dtypes.weight).float(), conv, own, residual.float())
    assert torch.allclose(y.float(), wanted, rtol=1e-2, atol=1e-2)
    assert y.abs().sum() > 0


def test_the_product_is_handed_to_torch() -> None:
    """Which has it for GPUs only: here it gets as far as that."""
    conv, weight = _layer("n1c64h3w3k32r1s1u1p0:f16")
    launch = semistructured.build(semistructured.pack(weight, conv, CONFIG), conv, CONFIG)[0]
    pixels = torch.zeros(8, conv.c, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="_sparse_semi_structured"):
        twofour.product(pixels, torch.from_numpy(launch.value), torch.from_numpy(launch.metadata), None)


def test_refusals_say_what_and_how_much() -> None:
    conv, weight = _layer("n1c64h3w3k32r1s1u1p0:f16")
    stats = Stats.of(weight)
    assert semistructured.refuse(conv, TARGET, stats) is None
    weight.reshape(32, 16, 4)[:3, 5] = 1
    crowded = Stats.of(weight)
    assert crowded.crowded == 3
    assert "3 of 512 groups of four" in (semistructured.refuse(conv, TARGET, crowded) or "")
    for other, word in (
        (Conv.parse("n1c64h3w3k32r1s1u1p0"), "not f32"),
        (Conv.parse("n1c64h3w3k32r3s3u1p1:f16"), "1x1"),
        (Conv.parse("n1c64h3w3k32r1s1u2p0:f16"), "stride 1"),
        (Conv.parse("n1c64h3w3k32r1s1u1p0g2:f16"), "groups"),
        (Conv.parse("n1c40h3w3k32r1s1u1p0:f16"), "multiples of 64"),
    ):
        assert word in (semistructured.refuse(other, TARGET, stats) or ""), other
    for target in (replace(TARGET, arch="sm_90"), Gpu("opencl", "pthread", 2, 2**16)):
        assert "8.x" in (semistructured.refuse(conv, target, stats) or "")
    assert "GPUs" in (cpu_form("semistructured").refuse(conv, host(), stats) or "")


def test_a_damaged_weight_is_refused() -> None:
    conv, weight = _layer("n1c64h3w3k32r1s1u1p0:f16")
    packed = semistructured.pack(weight, conv, CONFIG)
    for number in (0b0101, 0b0001, 16):
        broken = {n: a.copy() for n, a in packed.arrays.items()}
        broken["index"][3, 7] = number
        with pytest.raises(InvalidFile):
            semistructured.build(Packed(packed.format, packed.version, broken, packed.meta), conv, CONFIG)
    weight.reshape(-1, 4)[0] = 1
    with pytest.raises(InvalidFile):
        semistructured.pack(weight, conv, CONFIG)


def test_pruned_by_pattern_it_is_taken() -> None:
    """What `prune(pattern="2:4")` leaves is what this method takes; zeros at random are not."""
    torch.manual_seed(counts.seed())
    model = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 1), torch.nn.Conv2d(64, 64, 1)).eval()
    for pattern, taken in (("2:4", True), ("unstructured", False)):
        pruned = aerogel.prune(copy.deepcopy(model), 0.5, pattern=pattern)
        first = pruned.get_submodule("0")
        assert isinstance(first, torch.nn.Conv2d)
        weight = first.weight.detach().half().numpy()
        conv = Conv.parse("n1c64h7w7k64r1s1u1p0:f16")
        assert (semistructured.refuse(conv, TARGET, Stats.of(weight)) is None) == taken
