"""How far a model's answers are from the dense model's: the only judge where there are no labels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from aerogel.runtime.eager import Call


def answers(model: nn.Module, calls: Iterable[Call]) -> list[list[Tensor]]:
    """The model's answers, call by call: each a list of its tensors of numbers."""
    return [_tensors(model(*args, **kwargs)) for args, kwargs in calls]


def _tensors(answer: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(answer)
    return [t.detach() for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def distance(wanted: list[list[Tensor]], got: list[list[Tensor]]) -> float:
    """Kullback-Leibler divergence where answers are rows of logits, else the squared error as a share of the
    answers' own variance; the mean over calls, the sum over several answers."""
    each = [
        sum(_apart(w, g) for w, g in zip(one, other, strict=True))
        for one, other in zip(wanted, got, strict=True)
    ]
    return sum(each) / max(1, len(each))


def _apart(wanted: Tensor, got: Tensor) -> float:
    wanted, got = wanted.float(), got.float()
    if wanted.dim() == 2 and wanted.shape[1] > 1:
        lost = F.kl_div(got.log_softmax(1), wanted.log_softmax(1), log_target=True, reduction="batchmean")
    else:
        spread = (wanted - wanted.mean()).square().mean().clamp_min(1e-12)
        lost = (got - wanted).square().mean() / spread
    return float(torch.nan_to_num(lost, nan=1e30, posinf=1e30))


def agreement(wanted: list[list[Tensor]], got: list[list[Tensor]]) -> float:
    """1 where the answers are the same: of rows of logits the share whose largest is the same, of other
    answers 1 - |change| / |answers|; the mean over calls, of several answers the least."""
    each = [min(map(_same, one, other), default=1.0) for one, other in zip(wanted, got, strict=True)]
    return sum(each) / max(1, len(each))


def _same(wanted: Tensor, got: Tensor) -> float:
    if wanted.dim() == 2 and wanted.shape[1] > 1:
        return float((wanted.argmax(1) == got.argmax(1)).float().mean())
    return 1 - float((got - wanted).norm() / wanted.norm().clamp_min(1e-30))
