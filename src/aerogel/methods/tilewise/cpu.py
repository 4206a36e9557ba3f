"""`tilewise` on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from aerogel.formats import flat, tiled
from aerogel.ir import Array, Config, Conv, Packed, Stats, Target, majority, nonzero, runs_of
from aerogel.methods.tilewise import NAME

DENSE = 0.3
"""Zeros below which there is nothing to skip."""
FEW = 512
"""Positions of a filter up to which a layer without zeros is one tile all the same. A dense library is not
made for few, and between layers of ours it costs two copies."""


def refuse(conv: Conv, target: Target, stats: Stats) -> str | None:
    if (why := tiled.unsupported(conv, target)) is not None:
        return why
    return None if _one_tile(conv, stats) else unlike(stats)


def _one_tile(conv: Conv, stats: Stats) -> bool:
    _, c, r, s = conv.weight_shape
    return c * r * s <= FEW and conv.k // conv.groups >= 8 and stats.sparsity < DENSE


def unlike(stats: Stats) -> str | None:
    """Why these weights are not for tiles, or None."""
    if 2 * stats.shared < stats.nonzeros:
        share = stats.shared / stats.nonzeros
        return (
            f"{share:.0%} of its nonzeros stand where neighbouring filters have theirs; prune with "
            "pattern='tilewise' for more"
        )
    if stats.sparsity < DENSE and stats.nonzeros:
        return f"{stats.sparsity:.0%} zeros: a dense library has less to look up"
    return None


def configs(conv: Conv, target: Target, stats: Stats) -> Iterator[Config]:
    return tiled.configs(NAME, conv, target, stats.shared, stats.nonzeros - stats.shared, stats.place)


def tiles(weight: Array, conv: Conv) -> list[tiled.Tile]:
    """Runs of filters and the positions most of them keep; neighbours with the same positions are one."""
    mask = nonzero(weight, conv.dtypes.weight).reshape(conv.k, -1)
    found: list[tiled.Tile] = []
    for filters in runs_of(mask.sum(1)):
        positions = np.flatnonzero(majority(mask[filters]))
        if found and np.array_equal(found[-1][1], positions):
            found[-1] = np.concatenate([found[-1][0], filters]), positions
        else:
            found.append((filters, positions))
    return found


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    return tiled.pack(NAME, weight, conv, config, tiles(weight, conv))


check = partial(tiled.check, NAME)
unpack = partial(tiled.unpack, NAME)
build = partial(tiled.build, NAME)
layouts = tiled.layouts
pixels = flat.pixels
