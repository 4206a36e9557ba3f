"""`blockgemm` on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aerogel.formats import flat, tiled
from aerogel.formats.clusters import tiles
from aerogel.ir import Array, Config, Conv, Packed, Stats, Target
from aerogel.methods.blockgemm import NAME

ALIKE = 50
"""Percent of a filter's nonzeros that another one shares, below which no clusters are looked for."""
DENSE = 0.3


def refuse(conv: Conv, target: Target, stats: Stats) -> str | None:
    return tiled.unsupported(conv, target) or unlike(stats)


def unlike(stats: Stats) -> str | None:
    """Why these weights are not for clusters, or None."""
    if stats.alike < ALIKE and stats.nonzeros:
        return (
            f"a filter shares {stats.alike} % of its positions with the one most like it; clusters "
            f"need {ALIKE} %"
        )
    if stats.sparsity < DENSE and stats.nonzeros:
        return f"{stats.sparsity:.0%} zeros: a dense library has less to look up"
    return None


def configs(conv: Conv, target: Target, stats: Stats) -> Iterator[Config]:
    inside = stats.nonzeros * stats.alike // 100
    return tiled.configs(NAME, conv, target, inside, stats.nonzeros - inside, stats.place)


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    return tiled.pack(NAME, weight, conv, config, tiles(weight, conv))


check = partial(tiled.check, NAME)
unpack = partial(tiled.unpack, NAME)
build = partial(tiled.build, NAME)
layouts = tiled.layouts
pixels = flat.pixels
