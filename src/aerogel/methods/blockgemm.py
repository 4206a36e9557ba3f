"""`blockgemm`: filters that share positions are clustered, their common positions run as dense products, the rest as rows.

Paper: Rumi et al. (PACT'20). W is filters x positions; the authors partition a hypergraph of it, we grow clusters greedily:

    seed      the filter left with most nonzeros
    members   the SIZE filters left that share most positions with the seed, then twice with what most members keep
    block     positions that most members keep (candidate.MOST): a dense column pays where rows would cost more

On random weights nothing is found, and there it is slower than `direct`; it is for weights whose filters are alike, by nature or
after `aerogel.reprune`, which removes what is left over where that costs time. Refuses filters that are not alike, sums in fp16.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aerogel.candidate import Config, Kernel, Packed, Stats, majority
from aerogel.codegen import flat, tiled
from aerogel.layout import Array, Layout
from aerogel.problem import Conv
from aerogel.target import Target

NAME, PAPER = "blockgemm", "Rumi et al., PACT'20"
SUMMARY = "clusters of filters that share positions as dense blocks, what is left over as single nonzeros"
SIZE = 32
"""Filters in a cluster."""
ALIKE = 50
"""Percent of a filter's nonzeros that another one shares, below which no clusters are looked for."""
DENSE = 0.3


def refuse(conv: Conv, target: Target, stats: Stats) -> str | None:
    return tiled.unsupported(conv, target) or unlike(stats)


def unlike(stats: Stats) -> str | None:
    """Why these weights are not for clusters, or None."""
    if stats.alike < ALIKE and stats.nonzeros:
        return f"a filter shares {stats.alike} % of its positions with the one most like it; clusters need {ALIKE} %"
    if stats.sparsity < DENSE and stats.nonzeros:
        return f"{stats.sparsity:.0%} zeros: a dense library has less to look up"
    return None


def configs(conv: Conv, target: Target, stats: Stats) -> Iterator[Config]:
    inside = stats.nonzeros * stats.alike // 100
    return tiled.configs(NAME, conv, target, inside, stats.nonzeros - inside)


def clusters(mask: Array) -> list[Array]:
    """Filters in clusters of up to SIZE that share positions. `mask` is filters x positions."""
    dense = mask.astype(np.float32)
    left = np.flatnonzero(mask.any(1))
    found = []
    while len(left):
        like = dense[left[np.argmax(dense[left].sum(1))]]
        for _ in range(3):
            near = np.argsort(-(dense[left] @ like), kind="stable")[:SIZE]
            like = (majority(mask[left[near]]) > 0).astype(np.float32)
            if not like.any():
                break
        found.append(np.sort(left[near]))
        left = np.delete(left, near)
    return found


def tiles(weight: Array, conv: Conv) -> list[tiled.Tile]:
    """The dense block of each cluster, those with the same positions together; filters that read different channels are apart."""
    mask, per = flat.kept(weight, conv).reshape(conv.k, -1), conv.k // conv.groups
    same: dict[tuple[int, bytes], list[Array]] = {}
    for first in range(0, conv.k, per):
        for own in clusters(mask[first : first + per]):
            same.setdefault((first, (majority(mask[first + own]) > 0).tobytes()), []).append(first + own)
    return [(np.sort(np.concatenate(own)), np.flatnonzero(np.frombuffer(kept, np.bool_))) for (_, kept), own in same.items()]


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    return tiled.pack(NAME, weight, conv, config, tiles(weight, conv))


def unpack(packed: Packed, conv: Conv) -> Array:
    return tiled.unpack(NAME, packed, conv)


layouts = tiled.layouts


def build(
    packed: Packed, conv: Conv, config: Config, target: Target, reads: Layout, writes: Layout, rows: int | None = None
) -> list[Kernel]:
    return tiled.build(NAME, packed, conv, config, target, reads, writes, rows)
