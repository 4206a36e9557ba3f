"""Pairwise cover: few rows that hold every pair of values of every two axes. Most shape bugs need two awkward
things at once."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np


def cover(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Rows of value indices for axes of these sizes; greedy and seeded, so always the same rows."""
    rng = np.random.default_rng(7)
    axes = range(len(sizes))
    left = {(a, b): set(product(range(sizes[a]), range(sizes[b]))) for a, b in combinations(axes, 2)}

    def gain(row: list[int], axis: int) -> int:
        return sum((row[a], row[b]) in left[a, b] for a, b in left if axis in (a, b))

    rows = []
    while any(left.values()):
        (a, b), pairs = max(left.items(), key=lambda item: len(item[1]))
        row = [int(rng.integers(size)) for size in sizes]
        row[a], row[b] = min(pairs)
        for axis in axes:
            if axis not in (a, b):
                tries = [[*row[:axis], int(v), *row[axis + 1 :]] for v in rng.permutation(sizes[axis])[:6]]
                row = max(tries, key=lambda r, axis=axis: gain(r, axis))  # type: ignore[misc]
        for x, y in left:
            left[x, y].discard((row[x], row[y]))
        rows.append(tuple(row))
    return rows
