"""heal(): a pruned model learns from the network it was pruned from, without labels.

Distillation (Hinton et al., arXiv 1503.02531) with the zeros held by masks. loss.py says what is learned;
here is how: AdamW, one call a step. A few calls are held out and looked at ten times; the state that is best
there stays, and the one before the first step counts too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aerogel.errors import InvalidArgument
from aerogel.ir import ceil_div
from aerogel.progress import Progress, shown
from aerogel.pruning.gram import inference
from aerogel.pruning.held import attached
from aerogel.pruning.loss import Loss, with_zeros
from aerogel.pruning.mistakes import a_count, a_module, real, walkable
from aerogel.pruning.norms import estimate
from aerogel.runtime.eager import images, seed

LOOKS, PATIENCE = 10, 3
"""How often held out calls are looked at, and after how many looks without gain it is enough."""
AWAY, SLOWER, TIMES = 1.2, 10, 4
"""A model that is so many times farther from its teacher at the first look begins again, at a rate divided by
this, at most so often: networks without batch norm may want a thousandth of what others do."""
ENOUGH, ROWS = 8, 256
"""Calls from which on some are held out; rows (images) that are, in at most a quarter of the calls."""
KEPT = 256 << 20
"""Bytes of calls that are kept for later walks."""
SETTLED = 1024
"""Rows over which statistics of batch norm are taken."""


def heal(
    model: nn.Module,
    inputs: Iterable[Any],
    *,
    teacher: nn.Module,
    steps: int = 250,
    rate: float = 3e-3,
    dtype: torch.dtype | None = None,
    progress: bool | None = None,
) -> nn.Module:
    """Train a pruned model, in place, to answer as the network it was pruned from; the model is returned.

    Needs inputs, no labels. Every zero stays zero: layers that have any are masked, as `prune` would;
    `finalize` takes masks off. A few calls are held out, and of all states seen the one nearest to the
    teacher on those is kept, the first among them: the model never gets worse by that measure. The same
    inputs give the same weights. Calls are kept for later walks, so that a loader that shuffles does not give
    what is held out; from 256 MB on it is walked anew.

    Example:
        >>> import copy
        >>> teacher = copy.deepcopy(model)
        >>> pruned = aerogel.prune(model, 0.8)
        >>> healed = aerogel.heal(pruned, [x], teacher=teacher, steps=20)

    Args:
        model: What was pruned, by any tool. Parameters that require no gradient stay as they are.
        inputs: Calls, that is batches, that can be walked again: a list, or a DataLoader. Each is a tensor, a
            tuple of arguments or a dict of arguments by name. From a loader of pairs take the images only:
            `[x for x, _ in loader]`, or lazily a `collate_fn` that leaves labels out.
        teacher: The network before pruning (`copy.deepcopy(model)`), or another with the same answers.
        steps: Optimizer steps at most, one call each.
        rate: The highest learning rate (AdamW, cosine). Where it leads away from the teacher, a tenth of it
            is tried, and so on.
        dtype: `torch.bfloat16` computes in bf16 where torch's autocast does; weights keep their type.
        progress: True, False, or None: where somebody seems to look.
    """
    steps = a_count(steps, "steps")
    _checked(model, teacher, rate, dtype)
    device = next(model.parameters()).device
    random = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with random, shown(progress) as line, inference(model), inference(teacher):
        seed(next(model.parameters()))
        given = walkable(inputs, "inputs", "heal(model, [x1, x2, ...], teacher=teacher)")
        held, calls, count = _parted(given)
        loss = Loss(model, teacher, dtype)
        try:
            before = loss.mean(held)  # what does not fit is found before anything changes
            for layer in with_zeros(model).values():
                mask = attached(layer)
                mask.mask &= torch.as_tensor(layer.weight) != 0
            best = _Best(model, loss, held, before)
            some = islice(calls, min(count, ceil_div(SETTLED, max(1, images(held[0])))))
            estimate(model, [loss.call(sample) for sample in some])
            best.look()
            best.restore()  # statistics only where they bring it nearer
            _train(best, loss, calls, steps, rate, line)
        finally:
            loss.close()
    return model


class _Best:
    """The state of a model that was nearest to its teacher on the calls held out."""

    def __init__(self, model: nn.Module, loss: Loss, held: list[Any], before: float) -> None:
        self.model, self._loss, self._held = model, loss, held
        self._tensors = [*model.parameters(), *model.buffers()]
        self.before = self.least = before
        self._keep()

    def look(self) -> float:
        """How far the model is now; if nearer than ever, that is kept."""
        now = self._loss.mean(self._held)
        if now < self.least:
            self.least = now
            self._keep()
        return now

    def _keep(self) -> None:
        self._state = [t.detach().clone() for t in self._tensors]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._state, strict=True):
                tensor.copy_(value)


def _train(best: _Best, loss: Loss, calls: Iterator[Any], steps: int, rate: float, line: Progress) -> None:
    """At most so many steps; then the model is as it was when it was best."""
    trained = [p for p in best.model.parameters() if _trained(p)]
    theirs = [p.grad for p in trained]
    optimizer, began, again = torch.optim.AdamW(trained, rate), 0, 0
    nearest, idle = math.inf, 0  # of the steps: they may lead away at first
    each = max(1, steps // LOOKS)
    line.begin("healing", 1.0)
    try:
        for step in range(1, steps + 1):
            line.step("healing, step", step, steps, f"loss {best.before:.3g} -> {best.least:.3g}")
            for group in optimizer.param_groups:
                group["lr"] = rate * _cosine(step - began, steps - began)
            optimizer.zero_grad()
            loss.learn(_next(calls, step))
            optimizer.step()
            if step % each == 0 or step == steps:
                now = best.look()
                if step - began <= each and not now <= AWAY * best.before and again < TIMES:
                    best.restore()
                    rate, began, again = rate / SLOWER, step, again + 1
                    optimizer = torch.optim.AdamW(trained, rate)
                    continue
                idle = 0 if now < nearest else idle + 1
                nearest = min(now, nearest)
            if idle == PATIENCE:
                break
    finally:  # an interrupt too
        for parameter, gradient in zip(trained, theirs, strict=True):
            parameter.grad = gradient
        best.restore()


def _cosine(step: int, steps: int) -> float:
    """Share of the highest rate: up within the first tenth of the steps, down along a cosine."""
    return min(step / max(1, steps // 10), 0.5 + 0.5 * math.cos(math.pi * (step - 1) / steps))


def _trained(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.is_floating_point()


def _parted(inputs: Iterable[Any]) -> tuple[list[Any], Iterator[Any], int]:
    """Calls to look at; calls to learn from, others where there are enough; and how many there are."""
    source = iter(inputs)
    ahead = list(islice(source, ENOUGH))
    if not ahead:
        raise InvalidArgument("inputs has no call: heal(model, [x1, x2, ...], teacher=teacher)")
    count = max(len(ahead), length_hint(inputs, 0))
    first: Iterator[Any] = chain(ahead, source)
    held = list(islice(first, 1))
    while len(held) < count // 4 and sum(map(images, held)) < ROWS:
        more = next(first, None)
        if more is None:  # there are fewer than its length says
            count = len(held)
            held, first = held[: count // 4 or 1], iter(held[count // 4 or 1 :])
            break
        held.append(more)
    apart = count >= ENOUGH
    rest = _endless(first if apart else chain(held, first), inputs, len(held) if apart else 0)
    return held, rest, count


def _endless(first: Iterator[Any], inputs: Iterable[Any], skipped: int) -> Iterator[Any]:
    """The rest of the first walk, then that again and again: a loader that shuffles would give what is held
    out. More than can be kept is walked anew."""
    kept, size = list[Any](), 0
    for call in first:
        size += sum(t.nbytes for t in pytree.tree_leaves(call) if isinstance(t, Tensor))
        if size <= KEPT:
            kept.append(call)
        else:
            kept.clear()
        yield call
    while kept:
        yield from kept
    walk: Iterator[Any] = islice(iter(inputs), skipped, None)
    while (call := next(walk, None)) is not None:
        yield call
        yield from walk
        walk = islice(iter(inputs), skipped, None)


def _next(calls: Iterator[Any], step: int) -> Any:
    found = next(calls, None)
    if found is None:
        raise InvalidArgument(
            f"inputs ended before step {step} and cannot be walked again: give a list or a DataLoader, "
            "not a generator; or fewer steps"
        )
    return found


def _checked(model: nn.Module, teacher: nn.Module, rate: float, dtype: torch.dtype | None) -> None:
    a_module(model, "heal")
    if not isinstance(teacher, nn.Module):
        raise InvalidArgument(
            f"teacher is the network before pruning, a torch.nn.Module, not a {type(teacher).__name__}"
        )
    own = {id(p) for p in model.parameters()}
    if any(id(p) in own for p in teacher.parameters()):
        raise InvalidArgument(
            "the teacher has the model's own weights, and there is nothing to learn from those: keep "
            "teacher = copy.deepcopy(model) before pruning"
        )
    if not any(map(_trained, model.parameters())):
        raise InvalidArgument(
            "no parameter of the model can be trained: model.requires_grad_(True) lets all of them"
        )
    devices = [
        next(one.parameters()).device for one in (model, teacher) if any(True for _ in one.parameters())
    ]
    if len(set(devices)) > 1:
        raise InvalidArgument(
            f"the model is on {devices[0]}, the teacher on {devices[1]}: move one to the other"
        )
    if not 0 < real(rate) < 1:
        raise InvalidArgument(f"rate is a learning rate, such as 0.003, not {rate!r}")
    if dtype not in (None, torch.bfloat16):
        raise InvalidArgument(f"dtype is None or torch.bfloat16, not {dtype}")
