"""What pruning a layer alone does to the answers, measured on calibration data: a curve for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from aerogel.progress import Progress
from aerogel.pruning.gram import inference, own, parts
from aerogel.pruning.judge import answers, distance, with_floats
from aerogel.pruning.layers import as_weight, filters_first
from aerogel.pruning.masks import masks, most
from aerogel.pruning.obs import Problem, costs
from aerogel.pruning.recall import Recall
from aerogel.pruning.shares import Curve
from aerogel.runtime.eager import Call, images

LEVELS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
"""Shares of zeros that are looked at; where a network takes long, every second or third of them, and between
them the error is read off its curve. The last one always: beyond what was seen an error is only guessed."""
IMAGES = 512
"""That are looked at, at most."""
WORK = 5e12
"""Multiplications and additions for all layers at all levels, some minutes of a core: where it would take
more, fewer levels are looked at, then fewer images: of a text reader's layers 3 levels on 12 images told the
errors within a factor of 3, 9 levels on 4 images within 7. Counted and not timed, so that masks do not depend
on the machine."""
STEPS = 8
"""Of conjugate gradients: close enough to least squares for a curve, and one product of matrices each."""


def curves(
    dense: nn.Module,
    modules: Mapping[str, nn.Module],
    patterns: Sequence[str],
    calls: Sequence[Call],
    progress: Progress,
    whole: bool = False,
) -> dict[str, dict[str, Curve]]:
    """For each layer of the dense network and each pattern the error of the answers, that layer alone pruned
    and repaired. The network is left as it was. With `whole`, answers may be whole numbers alone."""
    found: dict[str, dict[str, Curve]] = {}
    number = 0
    with inference(dense):
        seen, levels = _seen(dense, calls, len(modules) * len(patterns))
        recall = Recall(dense, seen)
        if not whole:
            with_floats(recall.wanted)
        for part in parts(modules):
            sums = own(dense, part, calls)
            for name, module in part.items():
                number += 1
                progress.step("what layer", number, len(modules), name)
                problem = Problem.of(sums.pop(name), filters_first(module, _weight(module)).cpu())
                found[name] = {
                    pattern: _curve(recall, module, problem, pattern, levels) for pattern in patterns
                }
    return found


def _seen(dense: nn.Module, calls: Sequence[Call], count: int) -> tuple[list[Call], Sequence[float]]:
    """The calls and the levels that are looked at for so many curves: as many as the work allows."""
    with FlopCounterMode(display=False) as counted:
        answers(dense, calls[:1])
    each = max(1, counted.get_total_flops() * count)
    many = max(1, min(len(calls), IMAGES // max(1, images(calls[0]))))
    sets = (LEVELS, LEVELS[::2], LEVELS[2::3])
    levels = next((some for some in sets if each * many * len(some) <= WORK), sets[-1])
    many = max(1, min(many, int(WORK / each / len(levels))))
    return [calls[i * len(calls) // many] for i in range(many)], levels


def _curve(
    recall: Recall, module: nn.Module, problem: Problem, pattern: str, levels: Sequence[float]
) -> Curve:
    held: Any = module.weight
    weight = _weight(module)
    filters = filters_first(module, weight)
    whole = torch.ones(filters.shape, dtype=torch.bool)
    cost = costs(problem, whole.flatten(1), pattern).reshape(filters.shape)
    curve: dict[float, float] = {}
    for level in [level for level in levels if level < most(pattern)] + [most(pattern)] * (most(pattern) < 1):
        kept = masks({"": cost}, {"": level}, pattern)[""]
        held.data.copy_(as_weight(module, roughly(problem, kept.flatten(1), filters.cpu()), weight.shape))
        curve[level] = distance(recall.wanted, recall.answers(module))
    held.data.copy_(weight)
    return curve


def _weight(module: nn.Module) -> Tensor:
    held: Any = module.weight
    found: Tensor = held.detach().clone()
    return found


def roughly(problem: Problem, kept: Tensor, start: Tensor) -> Tensor:
    """Least squares of all rows at once by a few steps of conjugate gradients, from the weights that there
    are."""
    gram, cross = problem.gram.float(), problem.cross.float()
    some = kept.reshape(cross.shape)
    at = start.float().reshape(cross.shape) * some
    scale = gram.diagonal(dim1=1, dim2=2)[:, None].clamp_min(1e-30)
    left = (cross - at @ gram) * some
    better = left / scale
    way, size = better, (left * better).sum(2, keepdim=True)
    for _ in range(STEPS):
        pushed = (way @ gram) * some
        length = size / (way * pushed).sum(2, keepdim=True).clamp_min(1e-30)
        at, left = at + length * way, left - length * pushed
        better = left / scale
        size, before = (left * better).sum(2, keepdim=True), size
        way = better + size / before.clamp_min(1e-30) * way
    return at.reshape(kept.shape)
