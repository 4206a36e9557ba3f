"""`tilewise`: filters that keep the same positions run as one dense matrix product over gathered windows of x.

Paper: tile-wise sparsity (Guo et al., SC'20, arXiv 2008.13006). Pruning (TW-1D, TW-2D; `aerogel.prune(pattern="tilewise")`) drops
whole filters and, in each tile of 128 filters, whole positions (c, r, s); what is left of a tile is dense, though no two tiles need
be alike. TEW gives single elements back, which run as rows.

No mark says where tiles are: any pruner's zeros are taken as they are. Filters with more than a few nonzeros are looked at in runs
of 32; what most of a run keep are the run's positions, and neighbouring runs with the same are one tile. What stands elsewhere is
rows, so the packing is exact for every weight.

Wins where vectors of x are read often: FMAs are the limit, not loads (codegen/blocks.py). Refuses weights whose filters share few
positions, and sums in fp16.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aerogel.candidate import Config, Kernel, Packed, Stats, majority, runs_of
from aerogel.codegen import flat, tiled
from aerogel.layout import Array, Layout
from aerogel.problem import Conv
from aerogel.target import Target

NAME, PAPER = "tilewise", "Tile-wise sparsity, SC'20, arXiv 2008.13006"
SUMMARY = "filters that keep the same positions as one dense product over gathered input; tile-wise pruning (TW, TEW)"
DENSE = 0.3
"""Zeros below which there is nothing to skip."""


def refuse(conv: Conv, target: Target, stats: Stats) -> str | None:
    return tiled.unsupported(conv, target) or unlike(stats)


def unlike(stats: Stats) -> str | None:
    """Why these weights are not for tiles, or None."""
    if 2 * stats.shared < stats.nonzeros:
        share = stats.shared / stats.nonzeros
        return f"{share:.0%} of its nonzeros stand where neighbouring filters have theirs; prune with pattern='tilewise' for more"
    if stats.sparsity < DENSE and stats.nonzeros:
        return f"{stats.sparsity:.0%} zeros: a dense library has less to look up"
    return None


def configs(conv: Conv, target: Target, stats: Stats) -> Iterator[Config]:
    return tiled.configs(NAME, conv, target, stats.shared, stats.nonzeros - stats.shared)


def tiles(weight: Array, conv: Conv) -> list[tiled.Tile]:
    """Runs of filters and the positions most of them keep; neighbours with the same positions are one."""
    mask = flat.kept(weight, conv).reshape(conv.k, -1)
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


def unpack(packed: Packed, conv: Conv) -> Array:
    return tiled.unpack(NAME, packed, conv)


layouts = tiled.layouts


def build(
    packed: Packed, conv: Conv, config: Config, target: Target, reads: Layout, writes: Layout, rows: int | None = None
) -> list[Kernel]:
    return tiled.build(NAME, packed, conv, config, target, reads, writes, rows)
