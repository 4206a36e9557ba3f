"""The oracle itself: equal to torch in float64, and its bound is tight enough to see one wrong tap."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from aerogel.ir import Conv, from_float64, to_float64
from aerogel.reference import activate, bound, convolve, reference
from tests.suite.cases import case

ACTIVATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "threshold0.3": lambda v: F.threshold(v, float(np.float32(0.3)), 0.0),
    "leaky_relu0.1": lambda v: F.leaky_relu(v, float(np.float32(0.1))),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
}


@pytest.mark.parametrize("seed", range(150))
def test_reference_is_torch_in_float64(seed: int) -> None:
    conv = case("real", seed).conv
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal(conv.x_shape), rng.standard_normal(conv.weight_shape)
    top, left, bottom, right = conv.pad
    padded = F.pad(torch.from_numpy(x), (left, right, top, bottom))
    wanted = F.conv2d(
        padded, torch.from_numpy(weight), None, conv.stride, 0, conv.dilation, conv.groups
    ).numpy()
    assert np.abs(convolve(x, weight, conv) - wanted).max() < 1e-12 * max(1.0, np.abs(wanted).max()) * 100


@pytest.mark.parametrize("name", ACTIVATE)
def test_activations_are_torchs(name: str) -> None:
    conv = Conv.parse(f"c1k1r1s1u1p0+{name}")
    v = np.concatenate([np.linspace(-12, 12, 999), [np.nan, np.inf, -np.inf, 0.0]])
    wanted = ACTIVATE[name](torch.from_numpy(v)).numpy()
    assert np.allclose(activate(v, conv), wanted, rtol=1e-13, atol=1e-15, equal_nan=True)


@pytest.mark.parametrize("order", ["bias+add+relu", "bias+relu+add", "bias+silu+add", "add", "bias"])
def test_epilogue_keeps_its_order(order: str) -> None:
    conv = Conv.parse(f"n2c3h5w4k2r1s1u1p0+{order}")
    rng = np.random.default_rng(0)
    x, weight, bias, residual = (
        rng.standard_normal(s) for s in (conv.x_shape, conv.weight_shape, (2,), conv.y_shape)
    )
    y = np.einsum("nchw,kc->nkhw", x, weight[:, :, 0, 0])
    for step in order.split("+"):
        match step:
            case "bias":
                y = y + bias[:, None, None]
            case "add":
                y = y + residual
            case "relu":
                y = np.maximum(y, 0)
            case "silu":
                y = y / (1 + np.exp(-y))
    assert np.allclose(reference(x, weight, conv, bias, residual), y, rtol=1e-13, atol=1e-14)


def test_bound_is_the_papers_formula() -> None:
    """By hand: four kept weights, a bias and a residual: six roundings of the sum of sizes, and four
    underflows."""
    conv = Conv.parse("n1c4h1w1k1r1s1u1p0+bias+add")
    x, weight = np.array([1.0, -2.0, 3.0, 4.0]).reshape(conv.x_shape), np.full(conv.weight_shape, 0.5)
    got = bound(x, weight, conv, np.array([-1.0]), np.full(conv.y_shape, 2.0)).item()
    u = 2.0**-24
    assert got == pytest.approx(6 * u / (1 - 6 * u) * (5.0 + 1.0 + 2.0) + 4 * 2.0**-149, rel=1e-12)


def test_bound_holds_for_torch_and_sees_one_missing_tap() -> None:
    missed = 0
    for seed in range(100):
        one = case("real", seed)
        x, weight, bias, residual = one.numbers()
        kept = np.argwhere(weight)
        if not len(kept):
            continue
        y, slack = reference(x, weight, one.conv, bias, residual), bound(x, weight, one.conv, bias, residual)
        weight[tuple(kept[len(kept) // 2])] = 0
        missed += bool((np.abs(reference(x, weight, one.conv, bias, residual) - y) <= slack).all())
    assert missed < 20, "a tap may be invisible where ReLU or padding hides it, but not often"


def test_bound_of_fp16_sums_is_by_block() -> None:
    """Blocks summed in fp16 one product after the other, as kernels do, then in f32: inside the bound, and
    not far inside."""
    conv, rng = Conv.parse("n1c512h1w1k1r1s1u1p0:f16.f16.f16.f32"), np.random.default_rng(0)
    largest = dict.fromkeys((8, 64, 512), 0.0)
    for _ in range(200):
        x, weight = (
            to_float64(from_float64(rng.random(s), "f16"), "f16") for s in (conv.x_shape, conv.weight_shape)
        )
        products = weight.ravel() * x.ravel()
        exact, slack = products.sum(), {c: bound(x, weight, conv, channels=c).item() for c in largest}
        assert slack[512] == bound(x, weight, conv).item()
        assert slack[64] < slack[512] / 5
        assert slack[8] < slack[64] / 6
        for channels in largest:
            total = np.float32(0)
            for block in products.reshape(-1, channels):
                inside = np.float16(0)
                for product in block:
                    inside = np.float16(inside + product)  # one rounding: an FMA
                total = np.float32(total + inside)
            largest[channels] = max(largest[channels], abs(total - exact) / slack[channels])
    assert all(0.003 < share <= 1 for share in largest.values()), largest


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_stored_types_round_to_nearest_even(dtype: str) -> None:
    v = np.random.default_rng(0).standard_normal(10_000)
    kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    wanted = torch.from_numpy(v.astype(np.float32)).to(kinds[dtype]).double().numpy()
    if dtype == "f16":
        wanted = v.astype(np.float16).astype(np.float64)  # torch rounds twice, by way of f32
    assert np.array_equal(to_float64(from_float64(v, dtype), dtype), wanted)
