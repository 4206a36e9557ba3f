"""advise(): what sparsity is worth on this machine, before anything is pruned.

Every distinct layer is pruned by magnitude to each sparsity in each pattern and timed beside the dense
library, in the same rounds; then the whole model, with each layer on what was faster, beside torch.
Everything shown is measured, on these shapes, here; only a recipe's time is predicted, from the layers' own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise, product
from typing import Any

import numpy as np
import torch

from aerogel.arguments import dtype_of, samples_of
from aerogel.backends import Backend, backend_of
from aerogel.capture.network import Network
from aerogel.capture.nodes import problem
from aerogel.compiler import fit
from aerogel.errors import InvalidArgument
from aerogel.ir import (
    ALONE,
    GRAPH,
    INT8,
    Array,
    Choice,
    Config,
    Conv,
    Place,
    Plan,
    Stats,
    Timing,
    Tried,
    Weight,
)
from aerogel.ir.tensors import from_torch
from aerogel.methods import BASELINE, METHODS, ranked
from aerogel.progress import Progress, shown
from aerogel.pruning.advice import Advice, LayerAdvice, Point, line_through, spent
from aerogel.pruning.masks import as_block, masks
from aerogel.pruning.mistakes import a_module, a_share, a_speedup, several
from aerogel.runtime.eager import Call, as_call, bodies, runner
from aerogel.runtime.module import Compiled
from aerogel.runtime.private import private
from aerogel.runtime.reading import network_of
from aerogel.runtime.weights import as_weights
from aerogel.tune import search
from aerogel.tune.assign import assigned
from aerogel.tune.choose import Asked, tuned
from aerogel.tune.measure import interleaved
from aerogel.tune.quantize import quantized
from aerogel.tune.store import Store

ROUNDS, FEW_ROUNDS = 7, 3
PATTERNS, IN_INT8 = ("unstructured", "tilewise"), ("unstructured", "1x4")
"""That are measured, if none are named."""
NONE: Point = ("unstructured", 0.0)
Best = dict[tuple[str, Point], Config]
At = Mapping[str, tuple[Config | None, float, float]]
"""By node: a configuration of ours if it is faster, its microseconds, dense's."""


def advise(
    model: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    sparsities: Sequence[float] = (0.5, 0.7, 0.8, 0.9, 0.95),
    patterns: Sequence[str] | None = None,
    speedup: float | None = None,
    dtype: Any = None,
    calibration: Iterable[Any] | None = None,
    tune: str | float = "fast",
    progress: bool | None = None,
) -> Advice:
    """Measure what pruning would gain on this machine. The model is left as it is; accuracy is not looked at.

    Example:
        >>> advice = aerogel.advise(model, (x,), sparsities=(0.9,), patterns=("unstructured",))
        >>> text = advice.table

    Args:
        model: Any module.
        args: An example call, as for `compile`.
        kwargs: Its keyword arguments.
        sparsities: Shares of zeros to measure.
        patterns: Patterns of `prune` to measure; by default "unstructured" and "tilewise", in int8
            "unstructured" and "1x4".
        speedup: Ask for a recipe: which layers to prune how far, the least weight for the time gained.
            `prune(model, advice)` follows it.
        dtype: As for `compile`. With "int8" layers are timed in int8, beside the fastest of int8 without
            zeros; in half precision only the model is, its layers in its own.
        calibration: Real inputs, as for `compile`: which layers int8 takes. By default the example.
        tune: "fast" tries a few configurations, "full" tunes every layer at every sparsity as `compile` does.
        progress: False shows no progress, True also where nobody seems to look.
    """
    shares = [
        a_share(s, "each of sparsities") for s in several(sparsities, "sparsities", "sparsities=(0.8, 0.9)")
    ]
    dtype = dtype_of(dtype)
    usual = IN_INT8 if dtype == torch.int8 else PATTERNS
    kinds = several(usual if patterns is None else patterns, "patterns", f"patterns={usual}")
    if not shares or not kinds:
        raise InvalidArgument(
            "advise() needs at least one pattern and one sparsity: patterns=('tilewise',), sparsities=(0.9,)"
        )
    for pattern in kinds:
        as_block(pattern)
    a_speedup(speedup)
    search.effort(tune)
    call, samples = as_call(args, kwargs), samples_of(calibration)
    backend = backend_of(call)
    model = as_weights(private(a_module(model, "advise"), call))
    points = list(product(dict.fromkeys(kinds), sorted(set(shares))))
    with shown(progress) as line, torch.no_grad():
        here, (there, *samples) = backend.host(model, [call, *(samples or [])])
        network, _ = network_of(here, there, None, line)
        if not network.convs():
            raise InvalidArgument(
                "the model has no convolution or Linear that kernels of ours take: pruning it gains nothing"
            )
        floats, inputs = network, network.captured.flat(*there)
        if dtype == torch.int8:
            dtype = None
            network, *_ = quantized(network, inputs, fit(network, samples or [there]), backend, line)
        pruned = _Pruned(floats, network)
        shapes = network.shapes(inputs)
        problems = {node.name: problem(node, shapes) for node in network.convs()}
        rows, best, library = _layers(
            backend, pruned, problems, backend.places(network, shapes), points, line
        )
        forms = [runner(m, call, layout) for layout, m in bodies(model, dtype).items()]
        fastest = min(
            zip(forms, interleaved(forms, FEW_ROUNDS, clock=backend.clock), strict=True),
            key=lambda form: float(np.median(form[1])),
        )[0]

        def timed(point: Point) -> tuple[list[float], list[float]]:
            at = {
                name: (best.get((row.conv, point)), row.us.get(point, row.dense_us), library[row.conv])
                for name, row in rows.items()
            }
            ours = _runs(backend, pruned.at(point), model, call, at, dtype, tune)
            both = interleaved([fastest, ours], ROUNDS, clock=backend.clock)
            return both[0], both[1]

        ratios, theirs = dict[Point, float](), list[float]()
        spread: dict[Point, tuple[float, float]] = {}
        line.begin("timing the model", 0.35)
        for number, point in enumerate(points, 1):
            line.step("model", number, len(points), f"{point[1]:.0%} zeros, {point[0]}")
            dense, ours = timed(point)
            ratios[point] = max(1.0, Timing.of(ours, dense).ratio_p50)  # compile() keeps what is faster
            low, high = np.quantile(np.divide(dense, ours), [0.25, 0.75])
            spread[point] = float(low), float(high)
            theirs += dense
        unpruned = None if network is floats else timed(NONE)
    torch_us = float(np.median(theirs))
    model_us = {point: torch_us / ratio for point, ratio in ratios.items()}
    int8_us = None if unpruned is None else torch_us / Timing.of(unpruned[1], unpruned[0]).ratio_p50
    layers = tuple(rows[node.name] for node in network.convs())
    found = Advice(str(backend.target), torch_us, model_us, layers, speedup, {}, None, spread, int8_us)
    if speedup is None:
        return found
    recipe, predicted = _recipe(layers, torch_us, model_us, speedup, found.dense_us)
    return replace(found, recipe=recipe, predicted=predicted)


class _Pruned:
    """Layers pruned by the magnitude of their floats, in the form in which they are timed: that network, or
    the same in int8."""

    def __init__(self, floats: Network, timed: Network) -> None:
        self.timed = timed
        self._floats = {node.name: floats.constants[node.conv_inputs()[1]] for node in floats.convs()}
        self._names = {node.name: node.conv_inputs()[1] for node in timed.convs()}

    def size(self, node: str) -> torch.Tensor:
        return self._floats[node].abs()

    def layer(self, node: str, point: Point) -> torch.Tensor:
        """The weight of a layer."""
        kept = masks({"": self.size(node)}, {"": point[1]}, point[0])[""]
        return self.timed.constants[self._names[node]] * kept

    def at(self, point: Point) -> Network:
        """The network with every layer pruned."""
        cut = {name: self.layer(node, point) for node, name in self._names.items()}
        return Network(self.timed.captured, self.timed.graph, {**self.timed.constants, **cut})


def _ours(backend: Backend, conv: Conv, weight: Array, place: Place) -> list[Config]:
    """Likely configurations of the methods that take most layers; the first one where a method is hardly ever
    the faster."""
    stats, found = Stats.of(weight, place=place), list[Config]()
    for name in ranked():
        form = backend.form(name)
        if form.refuse(conv, backend.target, stats) is None:
            many = 1 if found else search.EFFORTS["fast"].configs
            found += islice(form.configs(conv, backend.target, stats), many)
    return found


def _layers(
    backend: Backend,
    pruned: _Pruned,
    problems: Mapping[str, Conv],
    places: Mapping[str, Place],
    points: Sequence[Point],
    progress: Progress,
) -> tuple[dict[str, LayerAdvice], Best, dict[str, float]]:
    """Each distinct layer alone, dense and at every point; and its best configuration there, if it was faster
    than the dense library; and that library's time. Dense in int8 is a method of ours, where it is faster."""
    found: dict[str, LayerAdvice] = {}
    times: dict[str, tuple[float, dict[Point, float]]] = {}
    library: dict[str, float] = {}
    best: Best = {}
    patterns = dict.fromkeys(p for p, _ in points)
    distinct = len(set(map(str, problems.values())))
    progress.begin("timing layers", 0.6)
    for node in pruned.timed.convs():
        conv, weight = problems[node.name], pruned.layer(node.name, NONE)
        size, cuts = pruned.size(node.name), {point: pruned.layer(node.name, point) for point in points}
        if str(conv) not in times:
            progress.step("layer", len(times) + 1, distinct, node.layer or node.name)
            place = places.get(node.name, ALONE)
            dense = [(NONE, config) for config in _baseline(backend, conv, from_torch(weight))]
            own_cuts = {**({NONE: weight} if conv.dtypes == INT8 else {}), **cuts}
            tried = [
                (p, config)
                for p, cut in own_cuts.items()
                for config in _ours(backend, conv, from_torch(cut), place)
            ]
            held = {p: Weight(from_torch(cut)) for p, cut in {NONE: weight, **cuts}.items()}
            pairs = [(held[p], config) for p, config in dense + tried]
            middle = search.medians(backend, pairs, conv, ROUNDS, place)
            library[str(conv)], own = min(middle[: len(dense)]), dict.fromkeys(own_cuts, float("inf"))
            for (p, config), us in zip(tried, middle[len(dense) :], strict=True):
                if us < min(own[p], library[str(conv)]):
                    best[str(conv), p] = config
                own[p] = min(own[p], us)
            times[str(conv)] = min(library[str(conv)], own.pop(NONE, np.inf)), own
        dense_us, own = times[str(conv)]
        lost = {p: float(1 - size[cut != 0].sum() / size.sum().clamp_min(1e-30)) for p, cut in cuts.items()}
        even = {name: _even([(s, own[p, s]) for p, s in points if p == name], dense_us) for name in patterns}
        found[node.name] = LayerAdvice(node.layer or node.name, str(conv), dense_us, own, lost, even)
    return found, best, library


def _even(curve: Iterable[tuple[float, float]], dense_us: float) -> float | None:
    """The sparsity from which a layer stays faster than dense, between the points measured by a straight
    line."""
    known = list(curve)
    if known[-1][1] >= dense_us:
        return None
    for (low, slower), (high, faster) in reversed(list(pairwise(known))):
        if slower >= dense_us:
            share = (slower - dense_us) / (slower - faster) if np.isfinite(slower) else 1.0
            return low + (high - low) * share
    return known[0][0]


def _baseline(backend: Backend, conv: Conv, weight: Array) -> Iterator[Config]:
    return backend.form(BASELINE).configs(conv, backend.target, Stats.of(weight))


def _runs(
    backend: Backend, network: Network, model: Any, call: Call, at: At, dtype: Any, tune: str | float
) -> Any:
    """A call of the network, each layer on what was faster alone."""
    effort = None if tune == "fast" else search.effort(tune)
    if effort is not None or dtype is not None:
        asked = Asked(tune, effort, METHODS, backend, Store(None, backend), dtype, [])
        network, plan, _ = tuned(network, call, asked, Progress())
        return runner(Compiled(model, network, plan, GRAPH), call)
    shapes, choices = network.shapes(network.captured.flat(*call)), list[Choice]()
    for node in network.convs():
        conv, (config, own, theirs) = problem(node, shapes), at[node.name]
        dense = next(_baseline(backend, conv, network.weight(node).array))
        tried = [Tried(dense, Timing.of([theirs], [theirs]))]
        if config is not None:
            tried.insert(0, Tried(config, Timing.of([own], [theirs])))
        choices.append(Choice(node.layer or "", node.name, conv, tried[0].config, tried=tuple(tried)))
    plan = Plan(backend.target, tuple(assigned(backend, network.graph, shapes, choices)))
    return runner(Compiled(model, network, plan, GRAPH), call)


def _recipe(
    layers: Sequence[LayerAdvice],
    torch_us: float,
    model_us: Mapping[Point, float],
    wanted: float,
    dense_us: float | None = None,
) -> tuple[dict[str, Point], float]:
    """Least weight for the time: layer after layer is pruned further where that saves most for what it takes,
    until the model is as fast as wanted or nothing is left to gain. A line through the points and torch's own
    time says what the layers' times make."""

    now: list[Point | None] = [None] * len(layers)
    dense_us = torch_us if dense_us is None else dense_us
    slope, rest = line_through(layers, dense_us, model_us)

    def predicted() -> float:
        return rest + slope * spent(layers, now) if any(now) else dense_us

    while predicted() > torch_us / wanted:
        best, step = 0.0, None
        for i, one in enumerate(layers):
            at = now[i]
            had, lost = (one.dense_us, 0.0) if at is None else (one.us[at], one.lost[at])
            for point in one.us:
                gain = (had - one.us[point]) / max(1e-6, one.lost[point] - lost)
                if one.us[point] < had and one.lost[point] > lost and gain > best:
                    best, step = gain, (i, point)
        if step is None:
            break
        now[step[0]] = step[1]
    return {one.layer: p for one, p in zip(layers, now, strict=True) if p is not None}, torch_us / predicted()
