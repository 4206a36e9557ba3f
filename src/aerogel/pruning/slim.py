"""slim(): from a dense model to a fast one in one call. Times are measured on this machine, errors on the
inputs given; layers are pruned where that gains most for least, repaired, healed, compiled and judged."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aerogel.arguments import dtype_of
from aerogel.compiler import compile as compiled
from aerogel.errors import InvalidArgument
from aerogel.progress import Progress, shown
from aerogel.pruning.advice import Advice, Point
from aerogel.pruning.advise import ROUNDS, advise
from aerogel.pruning.asked import chosen
from aerogel.pruning.curves import curves
from aerogel.pruning.gram import inference, order
from aerogel.pruning.heal import heal
from aerogel.pruning.held import finalize
from aerogel.pruning.judge import agreement, answers
from aerogel.pruning.layers import prunable
from aerogel.pruning.masks import as_block, most
from aerogel.pruning.mistakes import a_module, a_number, a_score, a_share, a_speedup, real, several
from aerogel.pruning.offers import MOST, recipe_for
from aerogel.pruning.repair import calls_of, repair, settle, there
from aerogel.pruning.schedule import Schedule
from aerogel.pruning.shares import Curve, even
from aerogel.pruning.slimmed import Slimmed, Try
from aerogel.pruning.stages import Stages, digest
from aerogel.runtime.eager import Call, first_image, runner
from aerogel.runtime.module import Compiled
from aerogel.runtime.weights import as_weights
from aerogel.tune.measure import interleaved

SHARES = (0.5, 0.7, 0.8, 0.9, 0.95, MOST)
"""Of zeros, at which layers are timed."""
AUTO = ("unstructured", "tilewise")
"""Patterns that each layer may have, where the user leaves it to us."""
TRIES = 6
CLOSE = 1.08
"""Between the fastest that is good and the slowest that is not: near enough to stop."""
STEPS = 250
"""Of healing, at most."""
HEALING = 0.5
"""Of the time left, at most."""
FEWEST, COST = 10, 8
"""Steps of healing that are worth beginning, and what one costs in calls of the model."""
NEAR = 0.97
"""Of the speedup asked for: that is it."""
Train = Callable[[nn.Module, Callable[..., Schedule]], object]
Score = Callable[[nn.Module], float]
Curves = Mapping[str, Mapping[str, Curve]]


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
            arguments or of dicts of them. No labels. The first one's first image is what is timed.
        speedup: How many times as fast as torch, measured; 3 if neither this nor `sparsity` is given.
        sparsity: In its place: the share of zeros in all layers together.
        max_drop: How much of the score may go.
        evaluate: A function of the model that gives a number, higher when better. Without one the score is
            how often the largest answer is the dense model's, or how near answers are, on a quarter of
            `inputs` that is kept for it.
        pattern: One pattern of `prune`, or "auto": each layer's is chosen by time and error.
        dtype: As for `compile`.
        budget_minutes: When no further step is begun, and what healing fits into.
        train: Your own training in place of repair and healing: `train(model, schedule)` trains the model;
            `schedule(steps=1000)` makes the `Schedule` whose `step()` it calls.
        exclude: Layers to leave alone.
        state: A folder to keep what is done in. A call that was killed goes on from there, given the same
            arguments.
        progress: False shows no progress, True also where nobody seems to look.
    """
    goal = _goal(speedup, sparsity)
    kinds = AUTO if pattern == "auto" else (pattern,)
    for kind in kinds:
        as_block(kind)
    minutes = real(budget_minutes)
    if not 0 < minutes < math.inf:
        raise InvalidArgument(f"budget_minutes is a number of minutes such as 30, not {budget_minutes!r}")
    a_share(max_drop, "max_drop", zero=True)
    a_score(evaluate)
    if train is not None and not callable(train):
        raise InvalidArgument("train is a function of the model and a maker of its Schedule")
    left_out = several(exclude, "exclude", "exclude=['head']")
    layers = chosen(a_module(model, "slim"), 0.0, kinds[0], "uniform", "magnitude", left_out)
    calls = there(model, calls_of(inputs, "slim()"))
    stages = Stages(state)
    stages.begin(
        {
            **digest(model, calls),
            "goal": [speedup, sparsity, pattern, str(dtype_of(dtype)), left_out, train is not None],
        }
    )
    dense = as_weights(copy.deepcopy(model)).eval()
    with shown(progress) as line:
        work = _Work(dense, list(layers), calls, kinds, dtype, stages, minutes * 60, train, line)
        score = a_judge(evaluate, dense, calls)
        return work.run(goal, sparsity is not None, max_drop, score)


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


@dataclass
class _Work:
    """One call of slim()."""

    dense: nn.Module
    layers: list[str]
    calls: list[Call]
    patterns: Sequence[str]
    dtype: Any
    stages: Stages
    seconds: float
    train: Train | None
    line: Progress

    def run(self, goal: float, by_zeros: bool, max_drop: float, score: Score) -> Slimmed:
        """Steps until the goal is reached or nothing is left to try."""
        self._began = time.monotonic() - float(self.stages.read("spent") or 0.0)
        self._seen = self.calls[: -(len(self.calls) // 4)] if len(self.calls) > 3 else self.calls
        before = float(self.stages.once("score", lambda: score(self.dense)))
        advice = None if by_zeros else self._advice()
        known = self._curves()
        tries, low, high = list[Try](), 0.0 if by_zeros else 1.0, math.inf
        best: tuple[int, nn.Module, Compiled] | None = None
        asked, why, correction = goal, "", 1.0
        far = attrgetter("zeros" if by_zeros else "speedup")
        while not why:
            one, model, fast = self._step(len(tries) + 1, asked, advice, known, score, correction)
            tries.append(one)
            if one.predicted:
                correction *= max(0.5, min(2.0, one.predicted / one.speedup))
            good = before - one.score <= max_drop
            low, high = (asked, high) if good else (low, min(high, asked))
            if good and (best is None or far(one) > far(tries[best[0]])):
                best = len(tries) - 1, model, fast
            self.stages.write("spent", time.monotonic() - self._began)
            why = self._enough(tries, goal, low, high, by_zeros)
            asked = goal if high == math.inf else _between(low, high, by_zeros)
        dense_us = float(np.median([one.us * one.speedup for one in tries]))
        if best is None:
            why += " No step kept the score: the model is dense."
            fast = self._compiled(self.dense)
            return Slimmed(self.dense, fast, tuple(tries), None, before, dense_us, max_drop, why)
        return Slimmed(best[1], best[2], tuple(tries), best[0], before, dense_us, max_drop, why)

    def _enough(self, tries: Sequence[Try], goal: float, low: float, high: float, by_zeros: bool) -> str:
        """Why it ends here; "" where it goes on."""
        last = tries[-1]
        if high == math.inf:
            if by_zeros or last.speedup >= NEAR * goal:
                return "The goal was reached."
            if len(tries) > 1 and last.recipe == tries[-2].recipe:
                return "The layers do not offer more speed."
        elif ((1 - low) / (1 - high) if by_zeros else high / low) < CLOSE:
            return "More zeros cost more of the score than may go."
        if len(tries) == TRIES:
            return f"{TRIES} steps were tried."
        if time.monotonic() - self._began + max(one.seconds for one in tries) > self.seconds:
            return "There was no time for another step."
        return ""

    def _advice(self) -> Advice:
        self.line.begin("timing layers on this machine", 0.2)
        args, kwargs = first_image(self.calls[0])
        shares = [s for s in SHARES if s <= max(map(most, self.patterns))]

        def make() -> Any:
            found = advise(
                self.dense,
                args,
                kwargs,
                sparsities=shares,
                patterns=self.patterns,
                dtype=self.dtype,
                progress=False,
            )
            return found.to_dict()

        return Advice.from_dict(self.stages.once("advice", make))

    def _curves(self) -> Curves:
        """What pruning each layer alone does to the answers."""
        self.line.begin("looking at the layers", 0.2)

        def make() -> Any:
            modules = {n: m for n, m in prunable(self.dense) if n in self.layers}
            runs = order(self.dense, modules, self._seen[0])
            some = {n: modules[n] for n in runs}
            found = curves(self.dense, some, self.patterns, self._seen, self.line)
            return {n: {p: sorted(curve.items()) for p, curve in own.items()} for n, own in found.items()}

        said = self.stages.once("curves", make)
        return {n: {p: {float(s): float(e) for s, e in c} for p, c in own.items()} for n, own in said.items()}

    def _step(
        self,
        number: int,
        goal: float,
        advice: Advice | None,
        known: Curves,
        score: Score,
        correction: float,
    ) -> tuple[Try, nn.Module, Compiled]:
        """A recipe, repair, healing, compiling, judging; or what is left of that."""
        began, name = time.monotonic(), f"step-{number}"

        def plan() -> Any:
            if advice is None:
                return [self._even(goal, known), None]
            recipe, predicted = recipe_for(advice, known, goal * correction)
            return [recipe, predicted / correction]

        said, predicted = self.stages.once(f"{name}-recipe", plan)
        recipe = {layer: (str(p), float(s)) for layer, (p, s) in said.items()}
        model = copy.deepcopy(self.dense)
        if recipe:
            self.line.begin(f"step {number}: pruning", 0.15)
            pruned = self.stages.weights(f"{name}-pruned", lambda: self._pruned(recipe))
            self.line.begin(f"step {number}: healing", 0.3)
            healed = self.stages.weights(f"{name}-healed", lambda: self._healed(pruned))
            model.load_state_dict(healed)
        self.line.begin(f"step {number}: compiling", 0.1)
        fast = self._compiled(model)

        def judged() -> Any:
            found = [w for n, m in prunable(model) if n in self.layers for w in [torch.as_tensor(m.weight)]]
            total = sum(w.numel() for w in found)
            zeros = 1 - sum(int(w.count_nonzero()) for w in found) / total
            us, speedup = self._timed(fast)
            seconds = time.monotonic() - began
            return asdict(Try(goal, predicted, zeros, score(model), speedup, us, seconds, recipe))

        return Try.of(self.stages.once(f"{name}-judged", judged)), model, fast

    def _even(self, goal: float, known: Curves) -> dict[str, Point]:
        """For a share of zeros: each layer's by its error."""
        kind = self.patterns[0]
        sizes = {n: torch.as_tensor(m.weight).numel() for n, m in prunable(self.dense)}
        shares = even({n: own[kind] for n, own in known.items()}, sizes, goal, min(0.99, most(kind)))
        return {name: (kind, share) for name, share in shares.items() if share > 0}

    def _pruned(self, recipe: Mapping[str, Point]) -> Mapping[str, Tensor]:
        """The model's state, pruned: by the user's own training, or repaired."""
        model = copy.deepcopy(self.dense)
        if self.train is not None:
            self.train(model, partial(Schedule, model, recipe))
            return finalize(model.eval()).state_dict()
        asked = chosen(model, recipe, "unstructured", "uniform", "obs", ())
        modules = dict(prunable(self.dense))
        with torch.no_grad():
            runs = {
                name: modules[name] for name in order(self.dense, modules, self._seen[0]) if name in asked
            }
            repair(model, self.dense, asked, runs, self._seen, self.line)
            settle(model, self.dense, self._seen)
        return finalize(model).state_dict()

    def _healed(self, pruned: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The state after healing, as long as there is time for it."""
        if self.train is not None:
            return pruned
        model = copy.deepcopy(self.dense)
        model.load_state_dict(pruned)
        began = time.monotonic()
        with inference(model):
            model(*self._seen[0][0], **self._seen[0][1])
        each = COST * (time.monotonic() - began)
        left = HEALING * (self.seconds - (began - self._began))
        steps = min(STEPS, int(left / each))
        if steps < FEWEST:
            return pruned
        samples = [kwargs or args for args, kwargs in self._seen]
        heal(model, samples, teacher=self.dense, steps=steps, progress=False)
        return finalize(model).state_dict()

    def _compiled(self, model: nn.Module) -> Compiled:
        args, kwargs = first_image(self.calls[0])
        return compiled(model, args, kwargs, dtype=self.dtype, progress=False)

    def _timed(self, fast: Compiled) -> tuple[float, float]:
        """Microseconds and speedup over torch, as compile measured them."""
        if fast.plan.model is not None and fast.speedup is not None:
            return fast.plan.model.p50_us, fast.speedup
        call = first_image(self.calls[0])
        ours, dense = interleaved([runner(fast, call), runner(self.dense, call)], ROUNDS)
        return float(np.median(ours)), float(np.median(np.divide(dense, ours)))


def _between(low: float, high: float, by_zeros: bool) -> float:
    """Halfway, in the measure that counts: times as fast, or weights kept."""
    if by_zeros:
        return 1 - math.sqrt((1 - low) * (1 - high))
    return math.sqrt(low * high)
