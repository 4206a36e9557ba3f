"""Arrays without their zeros: one bit an element, and the nonzeros in order. In files and between
processes."""

from __future__ import annotations

from typing import Any

import numpy as np

from aerogel.ir.dtypes import Array, nonzero

SPARSE = 0.25
"""Share of zeros from which an array is kept so."""


def left_out(flat: Array, dtype: str) -> tuple[Array, Array] | None:
    """Bits (most significant first) and nonzeros; None where there are few zeros. A minus zero, which pruning
    leaves, counts as one and comes back as zero. bf16 is its bits."""
    kept = nonzero(flat, dtype)
    if np.count_nonzero(kept) >= (1 - SPARSE) * flat.size:
        return None
    return np.packbits(kept), flat[kept]


def put_back(bits: Array, kept: Array, count: int) -> Array:
    """The inverse, for so many elements."""
    flat: Array = np.zeros(count, kept.dtype)
    where: Any = np.unpackbits(bits, count=count).view(np.bool_)
    flat[where] = kept
    return flat
