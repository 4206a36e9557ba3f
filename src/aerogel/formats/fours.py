"""Weights of one byte whose channels stand in fours: what `quads` and `depthwise` have in common.

Four bytes of x meet four weights in one 32-bit lane of sums (codegen/cpu/products.py), so planes, windows and
offsets are those of a problem with a quarter of the channels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from aerogel.formats import flat
from aerogel.ir import INT8, QUAD, Array, Conv, Target, ceil_div
from aerogel.ir.quantized import EXACT

MOST = 2**30 // (255 * 128)
"""Weights of a filter whose sums, a bias of 30 bits with them, always fit 32 bits."""
NARROW = 128
"""What two weights of one sign may add up to: 255 times it fits 16 bits."""


def refused(conv: Conv) -> str | None:
    if conv.dtypes != INT8:
        return 'computes with bytes: compile(dtype="int8") makes them'
    if conv.activation not in (None, *EXACT):
        return f"{conv.activation} is not among its activations: {', '.join(EXACT)}"
    if (own := int(np.prod(conv.weight_shape[1:]))) > MOST:
        return f"a filter has {own} weights; sums of more than {MOST} products may not fit 32 bits"
    if conv.n is not None and (bytes_ := flat.image_bytes(folded(conv))) >= 2**31:
        return f"one image takes {bytes_ / 2**30:.1f} GiB; offsets in this format reach 2 GiB"
    return None


def folded(conv: Conv) -> Conv:
    """The problem as planes of four channels see it."""
    return replace(conv, c=ceil_div(conv.c, QUAD), k=ceil_div(conv.k, QUAD), groups=1)


def lanes(target: Target) -> int:
    return target.vector_bytes // QUAD


def wide(value: Array) -> Array:
    """Of which fours of weights a pair of products may reach past 16 bits."""
    pairs = value.astype(np.int16).reshape(-1, 2, 2)
    largest = np.maximum(np.maximum(pairs, 0).sum(2), np.maximum(-pairs, 0).sum(2))
    return np.asarray(largest.max(1, initial=0) > NARROW)
