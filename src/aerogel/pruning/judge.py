"""How far a model's answers are from the dense model's: the only judge where there are no labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from aerogel.errors import InvalidArgument
from aerogel.runtime.eager import Call

Answers = list[list[Tensor]]
"""Call by call a model's tensors."""
FAR = 1e30
"""The distance of what cannot be compared."""
ONE, LEAST = 0.02, 1e-8
"""How far from one probabilities may add up to (bf16 rounds so), and what is added before their logarithm."""


@dataclass(frozen=True)
class Classes:
    """Where an answer has its classes, and whether a softmax made probabilities of them already."""

    axis: int
    probabilities: bool

    def logits(self, answer: Tensor) -> Tensor:
        """Rows x classes."""
        rows = answer.float().movedim(self.axis, -1).flatten(0, -2)
        return (rows + LEAST).log() if self.probabilities else rows


def classes(wanted: Tensor) -> Classes | None:
    """The classes of an answer: what is not below zero and adds up to one along its last axis or its second;
    or the columns of a matrix, as logits. None where there are none."""
    if wanted.dim() < 2 or not wanted.numel():
        return None
    if bool((wanted >= 0).all()):
        for axis in (wanted.dim() - 1, 1):
            if wanted.shape[axis] > 1 and bool(((wanted.float().sum(axis) - 1).abs() <= ONE).all()):
                return Classes(axis, True)
    return Classes(1, False) if wanted.dim() == 2 and wanted.shape[1] > 1 else None


def answers(model: nn.Module, calls: Iterable[Call]) -> Answers:
    """The model's answers, call by call: each a list of its tensors."""
    return [_tensors(model(*args, **kwargs)) for args, kwargs in calls]


def _tensors(answer: Any) -> list[Tensor]:
    return [t.detach() for t in pytree.tree_leaves(answer) if isinstance(t, Tensor)]


def with_floats(wanted: Answers) -> Answers:
    """The answers, or the sentence that whole numbers say too little: the largest of many stays the same
    until it jumps."""
    if any(t.is_floating_point() for one in wanted for t in one):
        return wanted
    raise InvalidArgument(
        "the model answers no floats, and only those say how far it is from the dense one: give the model "
        "without its ArgMax, or whatever makes whole numbers of its answers"
    )


def distance(wanted: Answers, got: Answers) -> float:
    """Kullback-Leibler divergence where answers are classes, else the squared error as a share of the
    answers' own variance; the mean over calls, the sum over several answers. Whole numbers count where there
    is nothing else: the share that differs."""
    each = [_far(one, other) for one, other in zip(wanted, got, strict=True)]
    return sum(each) / max(1, len(each))


def _far(wanted: list[Tensor], got: list[Tensor]) -> float:
    """Of one call. Sizes may follow the data (boxes that were found): with others it is infinitely far."""
    if [t.shape for t in wanted] != [t.shape for t in got]:
        return FAR
    pairs = list(zip(wanted, got, strict=True))
    floats = [(w, g) for w, g in pairs if w.is_floating_point()]
    return sum(_apart(w, g) for w, g in floats) if floats else sum(1 - _same(w, g) for w, g in pairs)


def _apart(wanted: Tensor, got: Tensor) -> float:
    wanted, got = wanted.float(), got.float()
    if not wanted.numel():
        return 0.0
    if (found := classes(wanted)) is not None:
        mine, other = (found.logits(t).log_softmax(1) for t in (got, wanted))
        lost = F.kl_div(mine, other, log_target=True, reduction="batchmean")
    else:
        spread = (wanted - wanted.mean()).square().mean().clamp_min(1e-12)
        lost = (got - wanted).square().mean() / spread
    return float(torch.nan_to_num(lost, nan=FAR, posinf=FAR))


def agreement(wanted: Answers, got: Answers) -> float:
    """From 0 to 1, where the answers are the same: of classes the share of rows whose largest is the same, of
    other floats 1 - |change| / |answers|, of whole numbers the share that is the same; the mean over calls,
    of several answers the least."""
    each = [_agree(one, other) for one, other in zip(wanted, got, strict=True)]
    return sum(each) / max(1, len(each))


def _agree(wanted: list[Tensor], got: list[Tensor]) -> float:
    if [t.shape for t in wanted] != [t.shape for t in got]:
        return 0.0
    return min(map(_same, wanted, got), default=1.0)


def _same(wanted: Tensor, got: Tensor) -> float:
    if not wanted.numel():
        return 1.0
    if not wanted.is_floating_point():
        return float((wanted == got).float().mean())
    if (found := classes(wanted)) is not None:
        return float((wanted.argmax(found.axis) == got.argmax(found.axis)).float().mean())
    change = (got.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-30)
    return 1 - float(torch.nan_to_num(change, nan=1.0).clamp(max=1.0))
