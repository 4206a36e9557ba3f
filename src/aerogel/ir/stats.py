"""`Stats`: what is known of a layer before any work is done on it. `Idle`: the zeros of its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from aerogel.ir.dtypes import Array
from aerogel.ir.layout import ALONE, Place

RUN, MOST, FEW = 32, 0.6, 64
"""Filters in a run; the share of them that makes a position theirs; filters that are compared with each
other."""


def runs_of(kept: Array) -> list[Array]:
    """Filters with more than a few nonzeros, RUN after RUN, by the number each keeps: TEW gives dropped
    filters a few back."""
    some = np.flatnonzero(4 * kept > kept.max(initial=0))
    return [some[i : i + RUN] for i in range(0, len(some), RUN)]


def majority(mask: Array) -> Array:
    """How many filters keep each position, where most of them do; else 0. `mask` is filters x positions."""
    counts = mask.view(np.uint8).sum(0, dtype=np.uint16)
    return np.where(counts >= MOST * len(mask), counts, 0)


def _alike(mask: Array, kept: Array) -> int:
    """See Stats.alike; at most FEW filters and 1024 positions are looked at."""
    some = np.flatnonzero(kept)
    some = some[np.linspace(0, len(some) - 1, min(FEW, len(some))).astype(int)] if len(some) > 1 else some[:0]
    seen = mask[some][:, :: max(1, mask.shape[1] // 1024)].astype(np.float32)
    own = seen.sum(1)
    if not own.any():
        return 0
    both = seen @ seen.T
    np.fill_diagonal(both, 0)
    return int(100 * both.max(1)[own > 0].sum() / own.sum())


def _crowded(mask: Array) -> int:
    """See Stats.crowded."""
    per_position = mask.reshape(*mask.shape[:2], -1)
    groups = range(0, mask.shape[1], Stats.FOUR)
    return int((np.add.reduceat(per_position, groups, axis=1, dtype=np.uint8) > 2).sum()) if groups else 0


@dataclass(frozen=True)
class Idle:
    """Percent of a layer's input that is zero on the calibration inputs: of its elements, of its vectors of
    VECTOR pixels (of rows that follow each other), and of its channels within tiles of TILE x TILE pixels."""

    elements: int
    vectors: int
    tiles: int

    VECTOR: ClassVar[int] = 16
    TILE: ClassVar[int] = 8

    @staticmethod
    def of(x: Array) -> Idle:
        """Of images (n, c, h, w)."""
        n, c, h, w = x.shape
        if not x.size:
            return Idle(0, 0, 0)
        zero = x == 0
        flat = zero.reshape(n * c, h * w)
        rows, columns = range(0, h, Idle.TILE), range(0, w, Idle.TILE)
        vectors = np.logical_and.reduceat(flat, range(0, h * w, Idle.VECTOR), axis=1)
        tiles = np.logical_and.reduceat(np.logical_and.reduceat(zero, rows, axis=2), columns, axis=3)
        return Idle(*(round(100 * float(part.mean())) for part in (zero, vectors, tiles)))

    def __str__(self) -> str:
        return (
            f"{self.elements} % of its input's elements, {self.vectors} % of vectors of pixels, "
            f"{self.tiles} % of channels in tiles"
        )


@dataclass(frozen=True)
class Stats:
    """What is known of a layer: of its weights, with calibration inputs of its own input, and where its maps
    stand in the network."""

    weights: int
    nonzeros: int
    empty_filters: int = 0
    longest_filter: int = 0
    shared: int = 0
    """Nonzeros at positions that most of a run of RUN filters keep: what tile-wise pruning leaves."""
    alike: int = 0
    """Percent of a filter's nonzeros that the filter most like it, of FEW looked at, keeps too; the average.
    """
    idle: Idle | None = None
    """Zeros of its input; None without calibration inputs."""
    place: Place = ALONE
    crowded: int = 0
    """Groups of FOUR neighbouring input channels, at one position of the kernel, that keep more than two."""

    FOUR: ClassVar[int] = 4

    @property
    def sparsity(self) -> float:
        """Share of zeros, 0 to 1."""
        return 1 - self.nonzeros / self.weights if self.weights else 0.0

    @staticmethod
    def of(weight: Array, idle: Idle | None = None, place: Place = ALONE) -> Stats:
        mask = weight.reshape(weight.shape[0], -1) != 0
        kept = np.count_nonzero(mask, axis=1)
        runs = [majority(mask[filters]).sum() for filters in runs_of(kept)]
        return Stats(
            weight.size,
            int(kept.sum()),
            int((kept == 0).sum()),
            int(kept.max(initial=0)),
            int(sum(runs)),
            _alike(mask, kept),
            idle,
            place,
            _crowded(weight != 0),
        )
