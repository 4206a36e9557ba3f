"""slim(): from a dense model to a fast one in one call. Times are measured on this machine, errors on the
inputs given; layers are pruned where that gains most for least, repaired, healed, compiled and judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from aerogel.arguments import dtype_of
from aerogel.backends import backend_of
from aerogel.errors import InvalidArgument
from aerogel.progress import shown
from aerogel.pruning.advise import IN_INT8, PATTERNS
from aerogel.pruning.asked import chosen
from aerogel.pruning.gram import check_first, inference
from aerogel.pruning.judge import agreement, answers, with_floats
from aerogel.pruning.masks import as_block
from aerogel.pruning.mistakes import a_module, a_number, a_score, a_share, a_speedup, real, several
from aerogel.pruning.repair import calls_of, there
from aerogel.pruning.slimmed import Slimmed, Try
from aerogel.pruning.stages import Stages, digest, finite
from aerogel.pruning.steps import Score, Steps, Train
from aerogel.runtime.eager import Call
from aerogel.runtime.module import Compiled
from aerogel.runtime.private import copied
from aerogel.runtime.weights import as_weights, flush

AUTO = PATTERNS
"""Patterns that each layer may have, where the user leaves it to us; the first where only zeros count."""
TRIES = 6
CLOSE = 1.08
"""Between the fastest that is good and the slowest that is not: near enough to stop."""
NEAR = 0.97
"""Of the speedup or the zeros asked for: that is it."""


def slim(
    model: nn.Module,
    inputs: Iterable[Any],
    *,
    speedup: float | None = None,
    sparsity: float | None = None,
    max_drop: float = 0.005,
    evaluate: Callable[[nn.Module], Any] | None = None,
    pattern: str = "auto",
    dtype: Any = None,
    budget_minutes: float = 30.0,
    train: Train | None = None,
    exclude: Iterable[str] = (),
    state: str | Path | None = None,
    progress: bool | None = None,
) -> Slimmed:
    """Make a dense model fast: as fast as asked, or as fast as its answers allow. The model given stays as it
    is.

    Every layer is timed on this machine and its error looked at on `inputs`; the layers are pruned where that
    saves most time for the least error, and what stays is repaired (`prune(score="obs")`) and healed without
    labels (`heal`). If the score drops by more than `max_drop`, less is tried, and less again.

    Example:
        >>> slimmed = aerogel.slim(model, [x], speedup=1.5, max_drop=0.9, budget_minutes=0.5)
        >>> fast = slimmed.fast

    Args:
        model: A trained module, or an `OnnxModel`.
        inputs: Calls on real inputs, some hundred images in batches: a list of tensors, of tuples of
            arguments or of dicts of them, or one tensor of images, which is split into calls of 32. No
            labels. The first one's first image is what is timed; where the
            model takes no image alone, all of the first.
        speedup: How many times as fast as torch, measured; 3 if neither this nor `sparsity` is given.
        sparsity: In its place: the share of zeros in all layers that run together.
        max_drop: How much of the score may go.
        evaluate: A function of the model that gives a number, higher when better. Without one the score is
            how often the largest answer is the dense model's, or how near answers are, on a quarter of
            `inputs` that is kept for it.
        pattern: One pattern of `prune`, or "auto": each layer's is chosen by time and error; with `sparsity`
            there are no times to choose by, and all are "unstructured".
        dtype: As for `compile`. In "int8", `inputs` are its calibration, the patterns of "auto" are
            "unstructured" and "1x4", and the score is that of the compiled model.
        budget_minutes: When no further step is begun, and what healing fits into.
        train: Your own training in place of repair and healing: `train(model, schedule)` trains the model;
            `schedule(steps=1000)` makes the `Schedule` whose `step()` it calls. The model is in train mode
            then, and in eval mode again when it is judged.
        exclude: Layers to leave alone.
        state: A folder to keep what is done in. A call that was killed goes on from there, given the same
            arguments.
        progress: False shows no progress, True also where nobody seems to look.
    """
    goal = _goal(speedup, sparsity)
    in_int8 = dtype_of(dtype) == torch.int8
    auto = (IN_INT8 if sparsity is None else IN_INT8[1:]) if in_int8 else AUTO
    kinds = auto[: None if sparsity is None else 1] if pattern == "auto" else (pattern,)
    for kind in kinds:
        as_block(kind)
    minutes = real(budget_minutes)
    if not 0 < minutes < math.inf:
        raise InvalidArgument(f"budget_minutes is a number of minutes such as 30, not {budget_minutes!r}")
    most_lost = a_share(max_drop, "max_drop", zero=True)
    a_score(evaluate)
    if train is not None and not callable(train):
        raise InvalidArgument("train is a function of the model and a maker of its Schedule")
    left_out = several(exclude, "exclude", "exclude=['head']")
    share = 0.0 if sparsity is None else goal
    layers = chosen(a_module(model, "slim"), share, kinds[0], "uniform", "magnitude", left_out)
    stages = Stages(state)
    calls = there(model, calls_of(inputs, "slim()"))
    dense = flush(as_weights(copied(model))).eval()
    check_first(dense, calls[0])  # what does not run is said before any work
    if train is None:
        with inference(dense):
            with_floats(answers(dense, calls[:1]))
    if state is not None:
        asked = [goal, sparsity is None, most_lost, pattern, str(dtype_of(dtype)), left_out]
        said = {"goal": asked, "evaluate": _named(evaluate), "train": _named(train)}
        machine = {} if sparsity is not None else {"machine": str(backend_of(calls[0]).target)}
        stages.begin({**digest(dense, calls), **said, **machine})
    with shown(progress) as line:
        score = a_judge(evaluate, dense, calls)
        steps = Steps(dense, list(layers), calls, kinds, dtype, stages, minutes * 60, train, score, line)
        return _search(steps, goal, sparsity is not None, most_lost)


def _goal(speedup: Any, sparsity: Any) -> float:
    if speedup is not None and sparsity is not None:
        raise InvalidArgument("give speedup or sparsity, not both")
    if sparsity is not None:
        return a_share(sparsity, "sparsity")
    goal = a_speedup(3.0 if speedup is None else speedup)
    assert goal is not None
    if goal <= 1:
        raise InvalidArgument(
            f"speedup is how many times as fast the model shall be, more than 1; not {goal}"
        )
    return goal


def _named(function: Any) -> str | None:
    """What a function is called in its source: all that a later run can compare."""
    return None if function is None else str(getattr(function, "__qualname__", type(function).__qualname__))


def a_judge(evaluate: Callable[[nn.Module], Any] | None, dense: nn.Module, calls: Sequence[Call]) -> Score:
    """The score of a model: the user's, or how often it answers as the dense one does on the last quarter of
    the calls."""
    seen = list(calls[-max(1, len(calls) // 4) :])
    with inference(dense):
        wanted = answers(dense, seen)

    def score(model: nn.Module) -> float:
        with inference(model):
            if evaluate is not None:
                return a_number(evaluate(model))
            return agreement(wanted, answers(model, seen))

    return score


def _search(steps: Steps, goal: float, by_zeros: bool, max_drop: float) -> Slimmed:
    """Steps until the goal is reached or nothing is left to try."""
    before = steps.stages.once("score", lambda: steps.score(steps.dense), finite)
    advice = None if by_zeros else steps.advice()
    known = steps.curves()
    tries, low, high = list[Try](), 0.0 if by_zeros else 1.0, math.inf
    best: tuple[int, nn.Module, Compiled] | None = None
    asked, why, correction = goal, "", 1.0
    far = attrgetter("zeros" if by_zeros else "speedup")
    while not why:
        one, model, fast = steps.step(len(tries) + 1, asked, advice, known, correction)
        tries.append(one)
        if one.predicted:
            correction *= max(0.5, min(2.0, one.predicted / one.speedup))
        good = before - one.score <= max_drop
        low, high = (asked, high) if good else (low, min(high, asked))
        if good and (best is None or far(one) > far(tries[best[0]])):
            best = len(tries) - 1, model, fast
        steps.stages.write("spent", steps.spent())
        why = _enough(steps, tries, goal, low, high, by_zeros)
        asked = goal if high == math.inf else _between(low, high, by_zeros)
    dense_us = float(np.median([one.us * one.speedup for one in tries]))
    if best is None:
        why += " No step kept the score: the model is dense."
        fast = steps.unpruned()
        return Slimmed(steps.dense, fast, tuple(tries), None, before, dense_us, max_drop, why)
    return Slimmed(best[1], best[2], tuple(tries), best[0], before, dense_us, max_drop, why)


def _enough(steps: Steps, tries: Sequence[Try], goal: float, low: float, high: float, by_zeros: bool) -> str:
    """Why it ends here; "" where it goes on."""
    last = tries[-1]
    if high == math.inf:
        if (last.zeros if by_zeros else last.speedup) >= NEAR * goal:
            return "The goal was reached."
        if by_zeros:
            return f"The layers have {last.zeros:.1%} zeros, less than the {goal:.1%} asked for."
        if len(tries) > 1 and last.recipe == tries[-2].recipe:
            return "The layers do not offer more speed."
    elif ((1 - low) / (1 - high) if by_zeros else high / low) < CLOSE:
        return "More zeros cost more of the score than may go."
    if len(tries) == TRIES:
        return f"{TRIES} steps were tried."
    if not steps.judged(len(tries) + 1) and steps.spent() + max(one.seconds for one in tries) > steps.seconds:
        return "There was no time for another step."
    return ""


def _between(low: float, high: float, by_zeros: bool) -> float:
    """Halfway, in the measure that counts: times as fast, or weights kept."""
    if by_zeros:
        return 1 - math.sqrt((1 - low) * (1 - high))
    return math.sqrt(low * high)
