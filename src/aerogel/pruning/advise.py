"""advise(): what sparsity is worth on this machine, before anything is pruned.

Every distinct layer is pruned by magnitude to each sparsity in each pattern and timed beside the dense
library, in the same rounds; then the whole model, with each layer on what was faster, beside torch.
Everything shown is measured, on these shapes, here; only a recipe's time is predicted, from the layers' own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise, product
from typing import Any

import numpy as np
import torch

from aerogel.arguments import dtype_of
from aerogel.backends import Backend, backend_of
from aerogel.capture.network import Network
from aerogel.capture.nodes import problem
from aerogel.errors import InvalidArgument
from aerogel.ir import ALONE, GRAPH, Array, Choice, Config, Conv, Place, Plan, Stats, Timing, Tried, Weight
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
from aerogel.tune.store import Store

ROUNDS, FEW_ROUNDS = 7, 3
Best = dict[tuple[str, Point], Config]
At = Mapping[str, tuple[Config | None, float, float]]
"""By node: a configuration of ours if it is faster, its microseconds, dense's."""


def advise(
    model: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    sparsities: Sequence[float] = (0.5, 0.7, 0.8, 0.9, 0.95),
    patterns: Sequence[str] = ("unstructured", "tilewise"),
    speedup: float | None = None,
    dtype: Any = None,
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
        patterns: Patterns of `prune` to measure.
        speedup: Ask for a recipe: which layers to prune how far, the least weight for the time gained.
            `prune(model, advice)` follows it.
        dtype: As for `compile`, for the model; layers are timed in its own precision.
        tune: "fast" tries a few configurations, "full" tunes every layer at every sparsity as `compile` does.
        progress: False shows no progress, True also where nobody seems to look.
    """
    shares = [
        a_share(s, "each of sparsities") for s in several(sparsities, "sparsities", "sparsities=(0.8, 0.9)")
    ]
    kinds = several(patterns, "patterns", "patterns=('unstructured', 'tilewise')")
    if not shares or not kinds:
        raise InvalidArgument(
            "advise() needs at least one pattern and one sparsity: patterns=('tilewise',), sparsities=(0.9,)"
        )
    for pattern in kinds:
        as_block(pattern)
    a_speedup(speedup)
    search.effort(tune)
    dtype = dtype_of(dtype)
    call = as_call(args, kwargs)
    backend = backend_of(call)
    model = as_weights(private(a_module(model, "advise"), call))
    points = list(product(dict.fromkeys(kinds), sorted(set(shares))))
    with shown(progress) as line, torch.no_grad():
        network, _ = network_of(model, call, None, line)
        if not network.convs():
            raise InvalidArgument(
                "the model has no convolution or Linear that kernels of ours take: pruning it gains nothing"
            )
        shapes = network.shapes(network.captured.flat(*call))
        problems = {node.name: problem(node, shapes) for node in network.convs()}
        rows, best = _layers(backend, network, problems, backend.places(network, shapes), points, line)
        forms = [runner(m, call, layout) for layout, m in bodies(model, dtype).items()]
        fastest = min(
            zip(forms, interleaved(forms, FEW_ROUNDS), strict=True),
            key=lambda form: float(np.median(form[1])),
        )[0]
        ratios, theirs = dict[Point, float](), list[float]()
        spread: dict[Point, tuple[float, float]] = {}
        line.begin("timing the model", 0.35)
        for number, point in enumerate(points, 1):
            line.step("model", number, len(points), f"{point[1]:.0%} zeros, {point[0]}")
            at = {
                name: (best.get((row.conv, point)), row.us[point], row.dense_us) for name, row in rows.items()
            }
            pruned = _runs(backend, _masked(network, point), model, call, at, dtype, tune)
            dense, ours = interleaved([fastest, pruned], ROUNDS)
            ratios[point] = max(1.0, Timing.of(ours, dense).ratio_p50)  # compile() keeps what is faster
            low, high = np.quantile(np.divide(dense, ours), [0.25, 0.75])
            spread[point] = float(low), float(high)
            theirs += dense
    torch_us = float(np.median(theirs))
    model_us = {point: torch_us / ratio for point, ratio in ratios.items()}
    layers = tuple(rows[node.name] for node in network.convs())
    recipe, predicted = ({}, None) if speedup is None else _recipe(layers, torch_us, model_us, speedup)
    return Advice(str(backend.target), torch_us, model_us, layers, speedup, recipe, predicted, spread)


def _masked(network: Network, point: Point) -> Network:
    """The network with every layer pruned by magnitude."""
    names = {node.conv_inputs()[1] for node in network.convs()}
    kept = masks({n: network.constants[n].abs() for n in names}, dict.fromkeys(names, point[1]), point[0])
    return Network(
        network.captured,
        network.graph,
        {n: v * kept[n] if n in names else v for n, v in network.constants.items()},
    )


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
    network: Network,
    problems: Mapping[str, Conv],
    places: Mapping[str, Place],
    points: Sequence[Point],
    progress: Progress,
) -> tuple[dict[str, LayerAdvice], Best]:
    """Each distinct layer alone, dense and at every point; and its best configuration there, if it was faster
    than dense."""
    found: dict[str, LayerAdvice] = {}
    times: dict[str, tuple[float, dict[Point, float]]] = {}
    best: Best = {}
    patterns = dict.fromkeys(p for p, _ in points)
    distinct = len(set(map(str, problems.values())))
    progress.begin("timing layers", 0.6)
    for node in network.convs():
        conv, weight = problems[node.name], network.constants[node.conv_inputs()[1]]
        size = weight.abs()
        cuts = {point: weight * masks({"": size}, {"": point[1]}, point[0])[""] for point in points}
        if str(conv) not in times:
            progress.step("layer", len(times) + 1, distinct, node.layer or node.name)
            place = places.get(node.name, ALONE)
            dense = list(_baseline(backend, conv, from_torch(weight)))
            tried = [
                (p, config)
                for p, cut in cuts.items()
                for config in _ours(backend, conv, from_torch(cut), place)
            ]
            whole, held = Weight(from_torch(weight)), {p: Weight(from_torch(cut)) for p, cut in cuts.items()}
            pairs = [(whole, config) for config in dense] + [(held[p], config) for p, config in tried]
            middle = search.medians(backend, pairs, conv, ROUNDS, place)
            dense_us, own = min(middle[: len(dense)]), dict.fromkeys(points, float("inf"))
            for (p, config), us in zip(tried, middle[len(dense) :], strict=True):
                if us < min(own[p], dense_us):
                    best[str(conv), p] = config
                own[p] = min(own[p], us)
            times[str(conv)] = dense_us, own
        dense_us, own = times[str(conv)]
        lost = {p: float(1 - cut.abs().sum() / size.sum().clamp_min(1e-30)) for p, cut in cuts.items()}
        even = {name: _even([(s, own[p, s]) for p, s in points if p == name], dense_us) for name in patterns}
        found[node.name] = LayerAdvice(node.layer or node.name, str(conv), dense_us, own, lost, even)
    return found, best


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
    layers: Sequence[LayerAdvice], torch_us: float, model_us: Mapping[Point, float], wanted: float
) -> tuple[dict[str, Point], float]:
    """Least weight for the time: layer after layer is pruned further where that saves most for what it takes,
    until the model is as fast as wanted or nothing is left to gain. A line through the points and torch's own
    time says what the layers' times make."""

    now: list[Point | None] = [None] * len(layers)
    slope, rest = line_through(layers, torch_us, model_us)

    def predicted() -> float:
        return rest + slope * spent(layers, now) if any(now) else torch_us

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
