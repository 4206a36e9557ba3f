"""Blocks of four neighbouring input channels, as int8 kernels meet them: emptied where they hold little,
completed where they hold much. A block costs the same whether one of its weights is left or all four."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aerogel.backends import Backend
from aerogel.capture.int8 import in_int8
from aerogel.ir import QUAD, Array, Conv, Stats, Weight, ceil_div
from aerogel.methods import BASELINE, METHODS

PATTERN = f"1x{QUAD}"


def quartets(shape: Sequence[int]) -> Array:
    """Where each block's weights stand in the flattened weight, a row for each block; one place behind the
    end stands for what a block at the edge lacks."""
    k, c, taps = shape[0], shape[1], int(np.prod(shape[2:]))
    at = np.arange(k * c * taps).reshape(k, c, taps)
    at = np.pad(at, ((0, 0), (0, -c % QUAD), (0, 0)), constant_values=at.size)
    return at.reshape(k, -1, QUAD, taps).swapaxes(2, 3).reshape(-1, QUAD)


def _sizes(weight: Array, blocks: Array) -> Array:
    return np.append(np.abs(weight.reshape(-1)).astype(np.float64), 0.0)[blocks]


def there(weight: Array) -> Array:
    """Blocks that are not empty."""
    blocks = quartets(weight.shape)
    return blocks[_sizes(weight, blocks).any(1)]


def lightest(weight: Array, share: float, refilled: bool) -> Array:
    """Blocks that are not empty, the lightest first, until they make this share of the layer's L1 norm; if
    what goes comes back elsewhere, only as many as leave room for it."""
    blocks = there(weight)
    sizes = _sizes(weight, blocks).sum(1)
    order = np.argsort(sizes, kind="stable")
    many = int(np.searchsorted(np.cumsum(sizes[order]), share * sizes.sum(), side="right"))
    room = len(blocks) - ceil_div(int(np.count_nonzero(weight)), QUAD) if refilled else many
    return blocks[order[: min(many, max(0, room))]]


def completed(weight: Array, dense: Array, most: int) -> Array:
    """The weight with holes of its blocks filled from the dense one, at most so many of them: first where a
    hole's weight is largest. Empty blocks stay empty."""
    blocks = there(weight)
    own, given = _sizes(weight, blocks), _sizes(dense, blocks)
    holes = (own == 0) & (given > 0)
    many = holes.sum(1)
    order = np.argsort(-(given * holes).sum(1) / np.maximum(many, 1), kind="stable")
    order = order[np.cumsum(many[order]) <= most]
    found = weight.copy()
    at = blocks[order][holes[order]]
    found.reshape(-1)[at] = dense.reshape(-1)[at]
    return found


def fullness(weight: Array) -> float:
    """The share of nonzeros in blocks that are not empty."""
    blocks = there(weight)
    return float(np.count_nonzero(weight) / max(1, int((blocks < weight.size).sum())))


def as_timed(backend: Backend, weight: Array, conv: Conv) -> tuple[Weight, Conv]:
    """A layer in int8, as `compile(dtype="int8")` makes it; as it is where no kernel of ours takes that."""
    held, stats = in_int8(conv), Stats.of(weight)
    forms = (backend.form(name) for name in METHODS if name != BASELINE)
    if not any(form.refuse(held, backend.target, stats) is None for form in forms):
        return Weight(weight), conv
    largest = np.abs(weight.reshape(len(weight), -1)).max(1).reshape(-1, *[1] * (weight.ndim - 1))
    scaled = np.rint(weight * (127 / np.where(largest > 0, largest, 1)))
    return Weight(scaled.astype(np.int8)), held
