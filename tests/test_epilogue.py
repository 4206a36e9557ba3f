"""Activations and rounding, number by number, through a convolution that changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from aerogel.backends.cpu.threads import run
from aerogel.ir import NUMPY, Array, Config, Conv, Dtypes, Target, from_float64, here_levels, host
from aerogel.methods.direct import cpu as direct
from aerogel.reference import activate

TARGETS = [host().lower(isa) for isa in here_levels()]
ULPS = {"relu": 0, "relu6": 0, "leaky_relu0.1": 0.5, "threshold0.25": 0, "silu": 4, "hardswish": 4}
OF_ITS_ARGUMENT, OF_ONE = {"gelu": 4}, {"sigmoid": 2, "hardsigmoid": 2}
"""Their errors are relative to something else than the answer."""


def _through(x: Array, epilogue: tuple[str, ...], target: Target, output: str = "f32") -> Array:
    """x through a 1x1 convolution with the single weight 1."""
    conv = Conv(1, 1, epilogue=epilogue, dtypes=Dtypes("f32", "f32", "f32", output), n=1, h=1, w=len(x))
    config = Config.make("direct", vectors=4, channels=1, groups=1, ahead=0, aligned=0)
    reads, writes = direct.layouts(conv, config, target)
    kernels = direct.build(
        direct.pack(np.ones((1, 1, 1, 1), np.float32), conv, config), conv, config, target, reads, writes
    )
    xb = np.zeros(reads.elements(conv.x_shape), np.float32)
    yb = np.zeros(writes.elements(conv.y_shape), NUMPY[output])
    reads.write(xb, x.reshape(conv.x_shape))
    run(kernels, xb, yb)
    return writes.read(yb, conv.y_shape).ravel()


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.isa)
@pytest.mark.parametrize("name", [*ULPS, *OF_ITS_ARGUMENT, *OF_ONE])
def test_activations_to_the_last_bits(name: str, target: Target) -> None:
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(-149, 127, 20_000)) * rng.choice([-1, 1], 20_000)
    x = np.concatenate([np.linspace(-115, 115, 60_001), np.linspace(-4, 7, 20_001), spread]).astype(
        np.float32
    )
    conv = Conv(1, 1, epilogue=(name,))
    wanted = activate(x.astype(np.float64), conv)
    wanted = np.where(np.isnan(wanted), 0.0, wanted)  # the reference's own exp overflows; the limit is 0
    got = _through(x, (name,), target).astype(np.float64)
    scale = x if name in OF_ITS_ARGUMENT else np.ones_like(x) if name in OF_ONE else wanted.astype(np.float32)
    ulp = np.maximum(np.spacing(np.abs(scale)).astype(np.float64), 2.0**-149)
    worst = np.abs(got - wanted) / ulp
    assert worst.max() <= (ULPS | OF_ITS_ARGUMENT | OF_ONE)[name], (
        f"x = {x[worst.argmax()]!r}: {worst.max():.2f} ulp"
    )


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.isa)
def test_stores_round_to_nearest_even(target: Target) -> None:
    rng = np.random.default_rng(0)
    halfway = (rng.integers(0x3F00, 0x4100, 5_000).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    near = np.nextafter(halfway, rng.choice([-9, 9], 5_000).astype(np.float32))
    x = np.concatenate([halfway, near, rng.standard_normal(5_000).astype(np.float32)])
    assert np.array_equal(_through(x, (), target, "bf16"), from_float64(x.astype(np.float64), "bf16"))
    if target.isa != "generic":
        assert np.array_equal(_through(x, (), target, "f16"), x.astype(np.float16))
    nan = _through(np.array([np.nan, np.inf, -np.inf], np.float32), (), target, "bf16")
    assert (nan[0] & 0x7FFF) > 0x7F80, "NaN stays NaN"
    assert nan[1:].tolist() == [0x7F80, 0xFF80]
