"""Dense blocks in unstructured weights: clusters of filters that share positions (Rumi et al., PACT'20)."""

from __future__ import annotations

import numpy as np

from aerogel.formats import tiled
from aerogel.ir import Array, Conv, majority, nonzero

SIZE = 32
"""Filters in a cluster."""


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
    """The dense block of each cluster, those with the same positions together; filters that read different
    channels are apart."""
    mask, per = nonzero(weight, conv.dtypes.weight).reshape(conv.k, -1), conv.k // conv.groups
    same: dict[tuple[int, bytes], list[Array]] = {}
    for first in range(0, conv.k, per):
        for own in clusters(mask[first : first + per]):
            same.setdefault((first, (majority(mask[first + own]) > 0).tobytes()), []).append(first + own)
    return [
        (np.sort(np.concatenate(own)), np.flatnonzero(np.frombuffer(kept, np.bool_)))
        for (_, kept), own in same.items()
    ]
