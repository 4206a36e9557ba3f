"""The steps of slim(): what each needs to know of the layers, and one step from a recipe to a judged model.
Whatever is done is kept, so that a call that was killed goes on from there."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aerogel.arguments import dtype_of
from aerogel.backends import backend_of
from aerogel.compiler import compile as compiled
from aerogel.errors import ShapeError, UnsupportedModel
from aerogel.progress import Progress
from aerogel.pruning.advice import Advice, Point
from aerogel.pruning.advise import ROUNDS, advise
from aerogel.pruning.asked import chosen
from aerogel.pruning.curves import curves
from aerogel.pruning.gram import inference, order
from aerogel.pruning.heal import heal
from aerogel.pruning.held import finalize
from aerogel.pruning.judge import FAR, answers, distance
from aerogel.pruning.layers import prunable
from aerogel.pruning.masks import most
from aerogel.pruning.norms import settle
from aerogel.pruning.offers import MOST, recipe_for
from aerogel.pruning.repair import repair
from aerogel.pruning.schedule import Schedule
from aerogel.pruning.shares import Curve, even
from aerogel.pruning.slimmed import Try
from aerogel.pruning.stages import Stages, finite, points
from aerogel.runtime.eager import Call, first_image, runner
from aerogel.runtime.module import Compiled
from aerogel.runtime.private import private
from aerogel.runtime.reading import network_of
from aerogel.tune.measure import interleaved

SHARES = (0.5, 0.7, 0.8, 0.9, 0.95, MOST)
"""Of zeros, at which layers are timed."""
STEPS = 250
"""Of healing, at most."""
HEALING = 0.5
"""Of the time left, at most."""
FEWEST, COST = 10, 8
"""Steps of healing that are worth beginning, and what one costs in calls of the model."""
Train = Callable[[nn.Module, Callable[..., Schedule]], object]
Score = Callable[[nn.Module], float]
Curves = Mapping[str, Mapping[str, Curve]]


@dataclass
class Steps:
    """Of one call of slim(). A quarter of the calls is not looked at, where there are enough."""

    dense: nn.Module
    layers: list[str]
    calls: list[Call]
    patterns: Sequence[str]
    dtype: Any
    stages: Stages
    seconds: float
    train: Train | None
    score: Score
    line: Progress

    def __post_init__(self) -> None:
        self._began = time.monotonic() - (self.stages.read("spent", partial(finite, low=0)) or 0.0)
        self._timed_on = timed_on(self.dense, self.calls[0])
        if self.in_int8 and not _takes(self.dense, self._timed_on, self.calls[0]):
            self._timed_on = self.calls[0]  # compiled for one image it would judge these in floats
        self._seen = self.calls[: -(len(self.calls) // 4)] if len(self.calls) > 3 else self.calls

    @property
    def in_int8(self) -> bool:
        return bool(dtype_of(self.dtype) == torch.int8)

    @property
    def _samples(self) -> list[Any] | None:
        """What int8 is calibrated by."""
        return [kwargs or args for args, kwargs in self._seen] if self.in_int8 else None

    def spent(self) -> float:
        """Seconds, those before a kill among them."""
        return time.monotonic() - self._began

    def advice(self) -> Advice:
        self.line.begin("timing layers on this machine", 0.2)
        args, kwargs = self._timed_on
        shares = [s for s in SHARES if s <= max(map(most, self.patterns))]

        def make() -> Any:
            found = advise(
                self.dense,
                args,
                kwargs,
                sparsities=shares,
                patterns=self.patterns,
                dtype=self.dtype,
                calibration=self._samples,
                progress=False,
            )
            return found.to_dict()

        def parse(said: Any) -> Advice:
            found = Advice.from_dict(said)
            times = [found.torch_us, *found.model_us.values()]
            for layer in found.layers:
                times += [layer.dense_us, *layer.us.values()]
            for us in times:
                finite(us, 0)
            return found

        return self.stages.once("advice", make, parse)

    def curves(self) -> Curves:
        """What pruning each layer alone does to the answers."""
        self.line.begin("looking at the layers", 0.2)

        def make() -> Any:
            modules = {n: m for n, m in prunable(self.dense) if n in self.layers}
            runs = order(self.dense, modules, self._seen[0])
            some = {n: modules[n] for n in runs}
            whole = self.train is not None
            found = curves(self.dense, some, self.patterns, self._seen, self.line, whole=whole)
            return {n: {p: sorted(curve.items()) for p, curve in own.items()} for n, own in found.items()}

        def parse(said: Any) -> Curves:
            found = {
                n: {p: {finite(s, 0, 1): finite(e) for s, e in own[p]} for p in self.patterns}
                for n, own in said.items()
            }
            if not {*found} <= {*self.layers} or not all(all(own.values()) for own in found.values()):
                raise ValueError("curves of other layers")
            return found

        return self.stages.once("curves", make, parse)

    def step(
        self,
        number: int,
        goal: float,
        advice: Advice | None,
        known: Curves,
        correction: float,
    ) -> tuple[Try, nn.Module, Compiled]:
        """A recipe, repair, healing, compiling, judging; or what is left of that."""
        began, name = time.monotonic(), f"step-{number}"

        def plan() -> Any:
            if advice is None:
                return [self._even(goal, known), None]
            recipe, predicted = recipe_for(advice, known, goal * correction)
            return [recipe, predicted / correction]

        def planned(said: Any) -> tuple[dict[str, Point], float | None]:
            recipe, predicted = said
            return points(recipe, known, self.patterns), None if predicted is None else finite(predicted, 0)

        recipe, predicted = self.stages.once(f"{name}-recipe", plan, planned)
        like = self.dense.state_dict()
        model = copy.deepcopy(self.dense)
        if recipe:
            self.line.begin(f"step {number}: pruning", 0.15)
            pruned = self.stages.weights(f"{name}-pruned", lambda: self._pruned(recipe), like)
            self.line.begin(f"step {number}: healing", 0.3)
            healed = self.stages.weights(f"{name}-healed", lambda: self._healed(pruned), like)
            model.load_state_dict({**like, **healed})
        self.line.begin(f"step {number}: compiling", 0.1)
        fast = self.compiled(model)

        def judged() -> Any:
            found = [torch.as_tensor(m.weight) for n, m in prunable(model) if n in known]
            zeros = sum(int((w == 0).sum()) for w in found) / max(1, sum(w.numel() for w in found))
            us, speedup = self._timed(fast)
            seconds = time.monotonic() - began
            return [zeros, self.score(fast if self.in_int8 else model), speedup, us, seconds]

        def tried(said: Any) -> Try:
            zeros, score, speedup, us, seconds = [finite(value) for value in said]
            return Try(goal, predicted, zeros, score, speedup, us, seconds, recipe)

        return self.stages.once(f"{name}-judged", judged, tried), model, fast

    def judged(self, number: int) -> bool:
        """Whether a step was done before a kill: it costs no time again."""
        return self.stages.read(f"step-{number}-judged", list) is not None

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
            self.train(model.train(), partial(Schedule, model, recipe))
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
        model.load_state_dict({**model.state_dict(), **pruned})
        began = time.monotonic()
        with inference(model):
            model(*self._seen[0][0], **self._seen[0][1])
        each = COST * (time.monotonic() - began)
        left = HEALING * (self.seconds - (began - self._began))
        steps = min(STEPS, int(left / each))
        if steps < FEWEST or not self._followed(model) or not self._learns(model):
            return pruned
        samples = [kwargs or args for args, kwargs in self._seen]
        heal(model, samples, teacher=self.dense, steps=steps, progress=False)
        return finalize(model).state_dict()

    def _followed(self, model: nn.Module) -> bool:
        """Whether answers can be compared with the dense model's: their sizes may follow the data."""
        with inference(model), inference(self.dense):
            apart = (distance(answers(self.dense, [one]), answers(model, [one])) for one in self._seen)
            return all(far < FAR for far in apart)

    def _learns(self, model: nn.Module) -> bool:
        """Whether its answers have a gradient: all may be frozen, or forward() takes none."""
        args, kwargs = self._seen[0]
        with inference(model), torch.enable_grad():
            found = pytree.tree_leaves(model(*args, **kwargs))
        return any(isinstance(t, Tensor) and t.requires_grad for t in found)

    def compiled(self, model: nn.Module) -> Compiled:
        args, kwargs = self._timed_on
        more: Any = {"dtype": self.dtype, "calibration": self._samples}
        return compiled(model, args, kwargs, progress=False, **more)

    def unpruned(self) -> Compiled:
        """The dense model; not in int8, which may have been what lost too much."""
        return (replace(self, dtype=None) if self.in_int8 else self).compiled(self.dense)

    def _timed(self, fast: Compiled) -> tuple[float, float]:
        """Microseconds and speedup over torch, as compile measured them."""
        if fast.plan.model is not None and fast.speedup is not None:
            return fast.plan.model.p50_us, fast.speedup
        runs = [runner(m, self._timed_on) for m in (fast, self.dense)]
        ours, dense = interleaved(runs, ROUNDS, clock=backend_of(self._timed_on).clock)
        return float(np.median(ours)), float(np.median(np.divide(dense, ours)))


def _takes(model: nn.Module, one: Call, call: Call) -> bool:
    """Whether what is compiled for one call runs another: a model may do otherwise with a single image."""
    try:
        captured = network_of(private(model, one), one, None)[0].captured
        return captured.misfit(captured.sample(*call)) is None
    except ShapeError:
        return False
    except UnsupportedModel:  # compile() says so
        return True


def timed_on(model: nn.Module, call: Call) -> Call:
    """One image of the call; all of it where the model does not take one alone."""
    alone = first_image(call)
    try:
        with inference(model):
            model(*alone[0], **alone[1])
    except Exception:  # whatever a model raises
        return call
    return alone
