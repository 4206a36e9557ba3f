"""What a layer could take at least on this core (a roofline): its nonzeros at the core's rate of FMAs, or its
bytes at the bandwidth of the nearest cache that holds them, whichever takes longer.

Rates are measured here by small loops (backends/cpu/probe.py); bytes and FMAs are counted: x once, y once
(twice where it is also read, as a residual), values and positions once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from aerogel.backends.cpu import probe
from aerogel.errors import AerogelError
from aerogel.ir import ITEM_BYTES, Conv, Target

Rates = Mapping[str, float]
"""`fma` in floating-point operations a second; `l2` and `l3` in bytes a second. Of one core."""


@dataclass(frozen=True)
class Limit:
    """A layer's least time, by what it is bound ("fma", "l2" or "l3"), and what it does and moves."""

    us: float
    bound: str
    flops: float
    bytes: float


@cache
def rates(target: Target) -> Rates:
    """Measured on this machine, about a second."""
    return probe.limits(target)


def target_here(text: str) -> Target | str:
    """The target that a report names, or why its limits cannot be measured here."""
    try:
        target = Target.parse(text)
    except AerogelError:
        return "limits are measured on CPUs only"
    if not target.runs_here():
        return "it was tuned on another kind of CPU, and limits are measured on the machine itself"
    return target


def limit(conv: Conv, sparsity: float, target: Target, measured: Rates) -> Limit:
    """Of a layer with this share of zeros. Several threads share its work evenly."""
    images = conv.n or 1
    nonzeros = (1 - sparsity) * float(np.prod(conv.weight_shape))
    pixels = images * conv.out[0] * conv.out[1]
    x_bytes = images * conv.c * conv.size[0] * conv.size[1] * ITEM_BYTES[conv.dtypes.input]
    y_bytes = conv.k * pixels * ITEM_BYTES[conv.dtypes.output] * (1 + ("add" in conv.epilogue))
    moved = x_bytes + y_bytes + nonzeros * (ITEM_BYTES[conv.dtypes.weight] + 4)
    level = "l2" if moved <= target.l2_bytes else "l3"
    flops = 2 * nonzeros * pixels
    times = {
        "fma": flops / measured["fma"] / target.threads * 1e6,
        level: moved / measured[level] / target.threads * 1e6,
    }
    bound = max(times, key=lambda name: times[name])
    return Limit(times[bound], bound, flops, moved)
