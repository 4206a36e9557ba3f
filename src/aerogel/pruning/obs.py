"""Optimal Brain Surgeon on matrices: which weights of a row cost least, and the best values of the others.

For a row with the weights w, fitted on the set S of its positions, taking away the weight q alone and fitting
the others again costs exactly w_q^2 / (inverse of gram on S)_qq; taking away a block of them, w_B' (inverse
on B)^-1 w_B. Rounds of that, each on what the last one left, and exact least squares at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from aerogel.pruning.gram import Sums
from aerogel.pruning.masks import as_block, as_few, masks

ROUNDS = ((16, 1e10), (8, 1e11), (4, 1e12), (3, 3e12), (2, 6e12))
"""How many, where they take at most so many operations: more than four bring little, but cost nothing in a
small layer."""
RIDGE = 1e-3
"""How strongly weights are held to the dense ones, as a share of the mean of the gram matrix's diagonal."""


class Problem(NamedTuple):
    """A layer: for each group gram and cross with the ridge in them, and the shape of its filters."""

    gram: Tensor
    cross: Tensor
    shape: torch.Size

    @staticmethod
    def of(sums: Sums, dense: Tensor) -> Problem:
        """`dense` is filters x channels x kernel. The sums are used up: their gram matrix, the largest thing
        here, becomes the problem's."""
        ridge = RIDGE * sums.gram.diagonal(dim1=1, dim2=2).mean(1)[:, None]
        ridge = ridge.clamp_min(1e-30)
        sums.gram.diagonal(dim1=1, dim2=2).add_(ridge)
        cross = sums.cross + ridge[:, :, None] * dense.double().reshape(sums.cross.shape)
        return Problem(sums.gram, cross, dense.shape)

    def within(self, group: int, at: Tensor) -> Tensor:
        """The gram matrix of these positions; of all of them no copy."""
        whole = self.gram[group]
        return whole if len(at) == len(whole) else whole[at[:, None], at]


def fitted(problem: Problem, kept: Tensor) -> Tensor:
    """Least squares of each row on what is kept of it; zero elsewhere. Filters x positions."""
    found = torch.zeros(problem.cross.shape).double()
    for group, rows, at in _sets(problem, kept):
        factor = torch.linalg.cholesky(problem.within(group, at))
        right = problem.cross[group][rows][:, at]
        found[group, rows[:, None], at] = torch.cholesky_solve(right.mT, factor).mT
    return found.reshape(len(kept), -1)


def costs(problem: Problem, kept: Tensor, pattern: str) -> Tensor:
    """What taking each weight away would cost, the others fitted again; zero where it is gone. A block's cost
    is shared by its weights."""
    found = torch.zeros(problem.cross.shape).double()
    block = as_block(pattern)
    together = None if block is None or block[1] == 1 else _together(problem.shape, block[1])
    for group, rows, at in _sets(problem, kept):
        inverse = _inverse(problem.within(group, at))
        weights = problem.cross[group][rows][:, at] @ inverse
        if together is None:
            cost = weights.square() / inverse.diagonal()
        else:
            cost = _block_costs(weights, inverse, at, together)
        found[group, rows[:, None], at] = cost
    return found.reshape(len(kept), -1)


def _inverse(gram: Tensor) -> Tensor:
    """One more such matrix, and not two: it takes the place of its factor."""
    factor = torch.linalg.cholesky(gram)
    return torch.cholesky_inverse(factor, out=factor)


def mask(problem: Problem, pattern: str, share: float, held: Tensor) -> Tensor:
    """What is kept of the filters (filters x channels x kernel), none of it outside `held`: rounds of OBS
    scores on each row's active set."""
    kept = held.flatten(1)
    tiled = as_block(pattern) is None and as_few(pattern) is None
    many = 1 if tiled else _rounds(problem, kept, share)
    for number in range(1, many + 1):
        now = share if number == many else 1 - (1 - share) ** (number / many)
        cost = costs(problem, kept, pattern).masked_fill(~kept, 0.0)
        kept = masks({"": cost.reshape(problem.shape)}, {"": now}, pattern)[""].flatten(1) & kept
    return kept.reshape(problem.shape)


def _rounds(problem: Problem, kept: Tensor, share: float) -> int:
    """As many as are worth their time: the first one has one inverse for all rows, the others one a row."""
    n, rows = problem.gram.shape[1], len(kept)
    for many, work in ROUNDS:
        left = [n * (1 - share) ** (number / many) for number in range(1, many)]
        if rows * sum(one**3 for one in left) <= work:
            return many
    return 1


def _sets(problem: Problem, kept: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Rows of a group that keep the same positions: the group, the rows, the positions."""
    grouped = kept.reshape(len(problem.gram), -1, kept.shape[1])
    for group, own in enumerate(grouped):
        distinct, which = torch.unique(own, dim=0, return_inverse=True)
        for number, positions in enumerate(distinct):
            if positions.any():
                yield group, (which == number).nonzero().flatten(), positions.nonzero().flatten()


def _together(shape: torch.Size, wide: int) -> Tensor:
    """Positions (c, r, s) that go together, a row for each block: `wide` channels at one position of the
    kernel, -1 where the channels end."""
    channels, taps = shape[1], shape[2:].numel()
    at = torch.nn.functional.pad(
        torch.arange(channels * taps).reshape(channels, taps), (0, 0, 0, -channels % wide), value=-1
    )
    return at.reshape(-1, wide, taps).transpose(1, 2).reshape(-1, wide)


def _block_costs(weights: Tensor, inverse: Tensor, at: Tensor, together: Tensor) -> Tensor:
    """The cost of each block that is there, shared by its weights; as `weights`, rows x positions at `at`."""
    where = torch.full((int(together.max()) + 2,), -1, dtype=torch.long)
    where[at] = torch.arange(len(at))
    blocks = where[together]  # the last element stands for -1
    blocks = blocks[(blocks >= 0).any(1)]
    there, safe = blocks >= 0, blocks.clamp_min(0)
    inner = inverse[safe[:, :, None], safe[:, None, :]]
    both = there[:, :, None] & there[:, None, :]
    inner = torch.where(both, inner, torch.eye(blocks.shape[1], dtype=inner.dtype))
    own = torch.where(there, weights[:, safe], 0.0)
    cost = (torch.linalg.solve(inner, own[..., None])[..., 0] * own).sum(2)
    each = (cost / there.sum(1))[:, :, None].expand_as(own)
    found = torch.zeros_like(weights)
    found[:, safe[there]] = each[:, there]
    return found
