"""Which weights go: scores in, masks out. A pattern says what goes together; the least important goes first,
as much as asked.

    unstructured   single elements
    NxM            blocks of N filters x M input channels, at one position of the kernel
    N:M            of M input channels in a row, at one position of the kernel, N stay
    tw1d, tilewise Tile-wise sparsity (SC'20): in each tile of 128 filters whole rows (c, r, s) go;
                   `tilewise` (TW-2D) drops whole filters first, each dimension by 1 - sqrt(1 - sparsity)
    tew            TW-2D pruned a little further, and the best single elements given back

A layer's scores are filters x channels x kernel, or a matrix of filters x positions (c, r, s). `shares` says
how much goes: one share of all layers together ("global": the least important anywhere), or one for each
layer.
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
    block, of = as_block(pattern), as_few(pattern)
    if block is not None or of is not None:
        taps = {name: _taps_first(score.detach().double()) for name, score in scores.items()}
        kept = few(taps, shares, *of) if of is not None else blocks(taps, shares, *(block or (1, 1)))
        kept = {name: mask.transpose(1, 2) for name, mask in kept.items()}
    else:
        flat = {name: score.detach().flatten(1).double() for name, score in scores.items()}
        kept = (
            elements_back(flat, shares)
            if pattern == "tew"
            else tiles(flat, shares, both=pattern == "tilewise")
        )
    return {name: mask.reshape(scores[name].shape) for name, mask in kept.items()}


def _taps_first(score: Tensor) -> Tensor:
    """Filters x positions of the kernel x channels: channels that are neighbours lie side by side."""
    return score.reshape(*score.shape[:2], -1).transpose(1, 2)


def as_block(pattern: object) -> tuple[int, int] | None:
    """The block that goes together, filters x channels; None for tiles and N:M. What is no pattern is an
    AerogelError."""
    if pattern in ("tilewise", "tw1d", "tew") or as_few(pattern) is not None:
        return None
    found = re.fullmatch(
        r"([1-9]\d{0,3})x([1-9]\d{0,3})", "1x1" if pattern == "unstructured" else str(pattern)
    )
    if found is None or not isinstance(pattern, str):
        raise InvalidArgument(
            f"pattern is unstructured, NxM (such as 4x1), N:M (such as 2:4), tilewise, tw1d or tew, not "
            f"'{pattern}'"
        )
    return int(found[1]), int(found[2])


def as_few(pattern: object) -> tuple[int, int] | None:
    """N and M of N:M; None for other patterns."""
    found = re.fullmatch(r"([1-9]\d?):([1-9]\d?)", pattern) if isinstance(pattern, str) else None
    if found is None or int(found[1]) >= int(found[2]):
        return None
    return int(found[1]), int(found[2])


def most(pattern: str) -> float:
    """The largest share of zeros that a pattern has."""
    of = as_few(pattern)
    return 1.0 if of is None else 1 - of[0] / of[1]


def least(units: Mapping[str, tuple[Tensor, Tensor]], shares: Shares) -> dict[str, Tensor]:
    """What is kept of each layer's units, given as (score for each element, number of elements): the least
    important go, and never more elements than their share."""
    if isinstance(shares, Mapping):
        return {name: _least(*unit, shares[name]) for name, unit in units.items()}
    scores, sizes = (torch.cat([unit[i].reshape(-1) for unit in units.values()]) for i in (0, 1))
    parts = torch.split(_least(scores, sizes, shares), [score.numel() for score, _ in units.values()])
    return {name: part.reshape(units[name][0].shape) for name, part in zip(units, parts, strict=True)}


def _least(score: Tensor, size: Tensor, share: float) -> Tensor:
    if size.numel() == 0:
        return torch.ones(score.shape, dtype=torch.bool)
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
    flat = score.reshape(-1).nan_to_num(nan=math.inf, posinf=math.inf)
    kept = torch.ones(flat.numel(), dtype=torch.bool)
    if count:
        edge = flat.kthvalue(count).values
        kept = flat >= edge
        kept[(flat == edge).nonzero().flatten()[: count - int((~kept).sum())]] = False
    return kept.reshape(score.shape)


def blocks(taps: Mapping[str, Tensor], shares: Shares, n: int, m: int) -> dict[str, Tensor]:
    """Blocks of n x m go whole; those at the edge are smaller."""
    sizes = {name: _sums(torch.ones_like(score), n, m) for name, score in taps.items()}
    kept = least(
        {name: (_sums(score, n, m) / sizes[name], sizes[name]) for name, score in taps.items()}, shares
    )
    found = {}
    for name, mask in kept.items():
        k, _, c = taps[name].shape
        found[name] = mask.repeat_interleave(min(n, k), 0).repeat_interleave(min(m, c), 2)[:k, :, :c]
    return found


def _sums(score: Tensor, n: int, m: int) -> Tensor:
    k, t, c = score.shape
    n, m = max(1, min(n, k)), max(1, min(m, c))
    padded = torch.nn.functional.pad(score, (0, -c % m, 0, 0, 0, -k % n))
    return padded.reshape(ceil_div(k, n), n, t, ceil_div(c, m), m).sum((1, 4))


def few(taps: Mapping[str, Tensor], shares: Shares, n: int, m: int) -> dict[str, Tensor]:
    """Of each m channels the n best stay; where less than that is asked for, the groups that lose least are
    first. A rest of fewer than m channels stays whole."""
    groups = {
        name: score[..., : score.shape[2] // m * m].reshape(*score.shape[:2], -1, m)
        for name, score in taps.items()
    }
    order = {name: torch.argsort(group, dim=3, stable=True) for name, group in groups.items()}
    lost = {name: torch.gather(group, 3, order[name][..., : m - n]).mean(3) for name, group in groups.items()}
    sizes = {name: torch.full_like(score, float(m - n)) for name, score in lost.items()}
    if isinstance(shares, Mapping):
        asked: Shares = {
            name: min(1.0, shares[name] * taps[name].numel() / max(1.0, float(size.sum())))
            for name, size in sizes.items()
        }
    else:
        can_go = max(1.0, sum(float(size.sum()) for size in sizes.values()))
        asked = min(1.0, shares * sum(score.numel() for score in taps.values()) / can_go)
    whole = least({name: (lost[name], sizes[name]) for name in taps}, asked)
    found = {name: torch.ones(score.shape, dtype=torch.bool) for name, score in taps.items()}
    for name, stays in whole.items():
        mask = torch.ones(groups[name].shape, dtype=torch.bool)
        mask.scatter_(3, order[name][..., : m - n], stays[..., None].expand(*stays.shape, m - n))
        found[name][..., : mask.shape[2] * m] = mask.flatten(2)
    return found


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
