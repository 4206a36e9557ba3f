"""Which weights go: scores in, masks out. A pattern says what goes together; the least important goes first,
as much as asked.

    unstructured   single elements
    NxM            blocks of N filters x M input positions
    tw1d, tilewise Tile-wise sparsity (SC'20): in each tile of 128 filters whole rows (c, r, s) go;
                   `tilewise` (TW-2D) drops whole filters first, each dimension by 1 - sqrt(1 - sparsity)
    tew            TW-2D pruned a little further, and the best single elements given back

A layer's scores are a matrix of filters x positions (c, r, s). `shares` says how much goes: one share of all
layers together ("global": the least important anywhere), or one for each layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from aerogel.errors import InvalidArgument
from aerogel.ir import ceil_div

TILE = 128
"""Filters in a tile: the paper's, and four registers of a matrix engine."""
GIVEN_BACK = 0.02
"""The share of a layer's elements that TEW gives back."""

Shares = float | Mapping[str, float]


def masks(scores: Mapping[str, Tensor], shares: Shares, pattern: str) -> dict[str, Tensor]:
    """For each layer what is kept, in the shape of its scores."""
    block = as_block(pattern)
    flat = {name: score.detach().reshape(score.shape[0], -1).double() for name, score in scores.items()}
    if block is not None:
        kept = blocks(flat, shares, *block)
    elif pattern == "tew":
        kept = elements_back(flat, shares)
    else:
        kept = tiles(flat, shares, both=pattern == "tilewise")
    return {name: mask.reshape(scores[name].shape) for name, mask in kept.items()}


def as_block(pattern: object) -> tuple[int, int] | None:
    """The block that goes together, filters x positions; None for tiles. What is no pattern is an
    AerogelError."""
    if pattern in ("tilewise", "tw1d", "tew"):
        return None
    found = re.fullmatch(
        r"([1-9]\d{0,3})x([1-9]\d{0,3})", "1x1" if pattern == "unstructured" else str(pattern)
    )
    if found is None or not isinstance(pattern, str):
        raise InvalidArgument(
            f"pattern is unstructured, NxM (such as 4x1), tilewise, tw1d or tew, not '{pattern}'"
        )
    return int(found[1]), int(found[2])


def least(units: Mapping[str, tuple[Tensor, Tensor]], shares: Shares) -> dict[str, Tensor]:
    """What is kept of each layer's units, given as (score for each element, number of elements): the least
    important go, and never more elements than their share."""
    if isinstance(shares, Mapping):
        return {name: _least(*unit, shares[name]) for name, unit in units.items()}
    scores, sizes = (torch.cat([unit[i].reshape(-1) for unit in units.values()]) for i in (0, 1))
    parts = torch.split(_least(scores, sizes, shares), [score.numel() for score, _ in units.values()])
    return {name: part.reshape(units[name][0].shape) for name, part in zip(units, parts, strict=True)}


def _least(score: Tensor, size: Tensor, share: float) -> Tensor:
    if (size == 1).all():
        return _smallest(score, int(share * size.numel() + 1e-6))
    order = torch.argsort(score.reshape(-1), stable=True)
    gone = torch.cumsum(size.reshape(-1)[order], 0) <= share * float(size.sum()) + 1e-6
    kept = torch.ones(score.numel(), dtype=torch.bool)
    kept[order[gone]] = False
    return kept.reshape(score.shape)


def _smallest(score: Tensor, count: int) -> Tensor:
    """What is left without the `count` smallest, of equal ones the first: as sorting would give it, in linear
    time."""
    flat = score.reshape(-1)
    kept = torch.ones(flat.numel(), dtype=torch.bool)
    if count:
        edge = flat.kthvalue(count).values
        kept = flat >= edge
        kept[(flat == edge).nonzero().flatten()[: count - int((~kept).sum())]] = False
    return kept.reshape(score.shape)


def blocks(flat: Mapping[str, Tensor], shares: Shares, n: int, m: int) -> dict[str, Tensor]:
    """Blocks of n x m go whole; those at the edge are smaller."""
    sizes = {name: _sums(torch.ones_like(score), n, m) for name, score in flat.items()}
    kept = least(
        {name: (_sums(score, n, m) / sizes[name], sizes[name]) for name, score in flat.items()}, shares
    )
    return {
        name: mask.repeat_interleave(n, 0).repeat_interleave(m, 1)[
            : flat[name].shape[0], : flat[name].shape[1]
        ]
        for name, mask in kept.items()
    }


def _sums(score: Tensor, n: int, m: int) -> Tensor:
    k, c = score.shape
    padded = torch.nn.functional.pad(score, (0, -c % m, 0, -k % n))
    return padded.reshape(ceil_div(k, n), n, ceil_div(c, m), m).sum((1, 3))


def tiles(flat: Mapping[str, Tensor], shares: Shares, *, both: bool) -> dict[str, Tensor]:
    """Tile-wise: `both` dimensions, or rows only."""
    rates = shares if not both else _each(shares, lambda t: 1 - math.sqrt(1 - t))
    if both:
        filters = {
            name: (score.mean(1), torch.full((score.shape[0],), float(score.shape[1])))
            for name, score in flat.items()
        }
        columns = least(filters, rates)
    else:
        columns = {name: torch.ones(score.shape[0], dtype=torch.bool) for name, score in flat.items()}
    groups = {name: torch.split(columns[name].nonzero().flatten(), TILE) for name in flat}
    rows = {
        name: (
            torch.stack([flat[name][group].mean(0) for group in groups[name]]),
            torch.stack([torch.full((flat[name].shape[1],), float(len(group))) for group in groups[name]]),
        )
        for name in flat
        if len(groups[name][0])
    }
    kept = least(rows, rates)
    found = {name: torch.zeros(score.shape, dtype=torch.bool) for name, score in flat.items()}
    for name, mask in kept.items():
        for group, row in zip(groups[name], mask, strict=True):
            found[name][group] = row
    return found


def elements_back(flat: Mapping[str, Tensor], shares: Shares) -> dict[str, Tensor]:
    """TEW: TW-2D further than asked, then the best single elements of what went come back, up to what was
    asked."""
    further = tiles(flat, _each(shares, lambda t: min(1.0, t + GIVEN_BACK) if t else 0.0), both=True)
    # what tiles hold never goes
    held = {name: score.masked_fill(further[name], math.inf) for name, score in flat.items()}
    return least({name: (score, torch.ones_like(score)) for name, score in held.items()}, shares)


def _each(shares: Shares, change: Callable[[float], float]) -> Shares:
    return {name: change(t) for name, t in shares.items()} if isinstance(shares, Mapping) else change(shares)
