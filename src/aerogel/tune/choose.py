"""One Choice for each convolution: timed or by rule, in half precision if asked, on any backend.

time each layer's candidates beside dense -> in half precision, leave out those that round too much, and
layers of which none is left -> assign layers to kernels with the copies between them counted -> let the
running network decide between several configurations of each
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from aerogel.backends import Backend
from aerogel.capture.half import Half
from aerogel.capture.network import Network
from aerogel.capture.nodes import Shapes, pairs, pooling_of
from aerogel.formats.values import count_values
from aerogel.ir import ALONE, F32, Choice, Config, Plan, Timing
from aerogel.ir.tensors import DTYPE_NAMES
from aerogel.methods import BASELINE
from aerogel.progress import Progress
from aerogel.runtime.eager import Call
from aerogel.tune import inside, search
from aerogel.tune.activity import Seen, seen
from aerogel.tune.assign import assigned
from aerogel.tune.error import accurate
from aerogel.tune.measure import interleaved
from aerogel.tune.store import Store

MODELLED = 64
"""Configurations that a cost model may add to those timed alone."""


@dataclass(frozen=True)
class Asked:
    """What the user asked of the tuner, where layers run, and where its records are."""

    tune: str | float
    effort: search.Effort | None
    names: tuple[str, ...]
    backend: Backend
    store: Store
    dtype: Any
    samples: list[Call]
    ranges: str = "mean-square"
    lost: Mapping[str, float] = field(default_factory=dict)
    """What int8 costs each layer, by its node."""

    @property
    def within(self) -> float | None:
        """How far from torch's an answer may be before it is called different; None leaves it to its element
        type."""
        return None if self.dtype is None else 1e-1


def tuned(
    network: Network, call: Call, asked: Asked, progress: Progress
) -> tuple[Network, Plan, tuple[str, ...]]:
    """The network in the precision asked for, its plan, and what is to be said of it. By rule where nothing
    is to be timed."""
    backend = asked.backend
    inputs = network.captured.flat(*call)
    network.shapes(inputs)
    real, notes = seen(network, asked.samples), tuple[str, ...]()
    if asked.dtype is None:
        choices = _layers(network, inputs, asked, real, progress)
    else:
        network, choices, notes = _halved(network, inputs, asked, real, progress)
    shapes = network.shapes(inputs)
    if asked.effort is not None and not search.unfinished(asked.effort, choices):
        progress.begin("choosing layouts")
        choices = assigned(backend, network.graph, shapes, choices)
        choices = _refined(backend, network, shapes, choices, inputs, asked.effort, progress)
        choices = _joined(backend, network, shapes, choices, inputs, asked.effort, real, progress)
    elif asked.effort is not None:
        notes = (*notes, f"tune={asked.tune:g} was over before every layer was timed; the others go by rule")
    said = backend.remarks(network, shapes, choices)
    choices = [replace(c, reason=said[c.node]) if c.node in said else c for c in choices]
    plan = Plan(backend.target, tuple(choices))
    network.keep(plan)
    return network, replace(plan, choices=_with_work(backend, network, choices)), notes


def _with_work(backend: Backend, network: Network, choices: list[Choice]) -> tuple[Choice, ...]:
    """The choices with the work of their kernels: each value that is stored is multiplied once for every
    pixel, those that only fill up a tile too."""
    nodes = {node.name: node for node in network.convs()}
    counted = []
    for choice in choices:
        if choice.config.method != BASELINE:
            weight, form = network.weight(nodes[choice.node]), backend.form(choice.config.method)
            packed = weight.packed(form.pack, choice.conv, choice.config)
            work = count_values(packed) / max(1, math.prod(choice.conv.weight_shape))
            choice = replace(choice, work=work)
        counted.append(choice)
    return tuple(counted)


def _halved(
    network: Network, inputs: list[Any], asked: Asked, real: Mapping[str, Seen], progress: Progress
) -> tuple[Network, list[Choice], tuple[str, ...]]:
    """The network in half precision with its choices, and the layers that stay as they were because they
    would lose too much."""
    samples = [
        network.values(i) for i in (inputs, *(network.captured.flat(*sample) for sample in asked.samples))
    ]
    before = {node.name: node for node in network.convs()}
    dtypes = asked.backend.half(DTYPE_NAMES[asked.dtype])
    stay: frozenset[str] = frozenset()
    while True:
        half = network.halved(Half(dtypes, network.stored, stay))
        choices, lost = list[Choice](), set[str]()
        weights = {node.name: half.weight(node) for node in half.convs()}
        for choice in _layers(half, inputs, asked, real, progress):
            kept: Choice | None = choice
            if choice.layer not in stay:
                kept = accurate(asked.backend, choice, before[choice.node], weights[choice.node], samples)
            lost |= {choice.layer} if kept is None else set()
            choices.append(kept or choice)
        if not lost:
            said = (f"{layer}: stays f32, it would lose more than dense bf16 does" for layer in sorted(stay))
            return half, choices, tuple(said)
        stay |= lost


def as_planned(network: Network, plan: Plan, call: Call, asked: Asked) -> Network:
    """The network in the precision of a plan's choices."""
    if asked.dtype is None:
        return network
    network.shapes(network.captured.flat(*call))
    stay = frozenset(c.layer for c in plan.choices if c.conv.dtypes == F32)
    return network.halved(Half(asked.backend.half(DTYPE_NAMES[asked.dtype]), network.stored, stay))


def _in_place(
    backend: Backend,
    network: Network,
    shapes: Shapes,
    plans: list[dict[str, Choice]],
    inputs: list[Any],
    effort: search.Effort,
    progress: Progress,
) -> list[dict[str, list[float]]] | None:
    """Microseconds of each node in the running network under each plan, index [plan][node][round], plans in
    turn; None where the backend cannot tell. A budget may end before all plans are built: then of the first
    ones."""
    began, left = time.monotonic(), effort.left()
    runs: list[Callable[[list[Any]], dict[str, float]]] = []
    steps = len(plans) + effort.rounds + 1
    for number, plan in enumerate(plans, 1):
        progress.step("timing in the running network: step", number, steps)
        if runs and time.monotonic() - began > left / 4:
            break
        made = backend.in_network(network, shapes, [plan])
        if made is None:
            return None
        runs += made
    times: list[dict[str, list[float]]] = [{} for _ in runs]
    for i in range(effort.rounds + 1):
        if i > 1 and time.monotonic() - began > left / 2:
            break
        progress.step("timing in the running network: step", len(plans) + i + 1, steps)
        for run, spent in zip(runs, times, strict=True):
            for node, us in run(inputs).items():
                if i > 0:  # the first round warms up
                    spent.setdefault(node, []).append(us)
    return times


def _refined(
    backend: Backend,
    network: Network,
    shapes: Shapes,
    choices: list[Choice],
    inputs: list[Any],
    effort: search.Effort,
    progress: Progress,
) -> list[Choice]:
    """What only the running network can say: what layers may demand of an image size, then which of each
    layer's contenders is fastest there. Layers alike decide together."""
    asking = list(dict.fromkeys(zip(*map(inside.by_demand, choices), strict=True)))
    if len(asking) > 1:
        named = [{c.node: c for c in own} for own in asking]
        progress.begin("timing in the running network", 0.1)
        times = _in_place(backend, network, shapes, named, inputs, effort, progress)
        choices = choices if times is None else inside.pitched(asking[: len(times)], times)
    options = _contenders(backend, network, shapes, choices, effort)
    plans = [
        {
            c.node: replace(c, config=own[min(i, len(own) - 1)])
            for c, own in zip(choices, options, strict=True)
        }
        for i in range(max(map(len, options), default=0))
    ]
    if len(plans) < 2:
        return choices
    progress.begin("timing in the running network", 0.2)
    times = _in_place(backend, network, shapes, plans, inputs, effort, progress)
    if times is None:
        return choices
    options = [own[: len(times)] for own in options]
    alike: dict[object, list[str]] = {}
    for c, own in zip(choices, options, strict=True):
        alike.setdefault((c.conv, *own), []).append(c.node)
    found = []
    for c, own in zip(choices, options, strict=True):
        nodes = dict.fromkeys([c.node, *alike[c.conv, *own]])
        spent = [[under.get(node, []) for under in times[: len(own)]] for node in nodes]
        found.append(inside.refined(c, own, [t for t in spent if t[0]] or spent))
    return found


def _contenders(
    backend: Backend, network: Network, shapes: Shapes, choices: list[Choice], effort: search.Effort
) -> list[list[Config]]:
    """Of each choice, at the place that its maps have under these choices."""
    places = backend.places(network, shapes, {c.node: c.config for c in choices})
    nodes = {node.name: node for node in network.convs()}
    found, known = [], dict[object, list[Config]]()
    for c in choices:
        place = places.get(c.node, ALONE)
        key = c.conv, c.config, c.tried, place
        if key not in known:
            stats = replace(network.stats(nodes[c.node]), idle=c.idle, place=place)
            offered = backend.form(c.config.method).configs(c.conv, backend.target, stats)
            known[key] = inside.contenders(c, islice(offered, MODELLED), effort.in_network)
        found.append(known[key])
    return found


def _joined(
    backend: Backend,
    network: Network,
    shapes: Shapes,
    choices: list[Choice],
    inputs: list[Any],
    effort: search.Effort,
    real: Mapping[str, Seen],
    progress: Progress,
) -> list[Choice]:
    """Convolutions that do the pooling after them too, where that is faster: in the running network, or where
    the backend cannot look there, alone."""
    known = pairs(network.graph)
    after = {c.node: known[c.node] for c in choices if c.config.method != BASELINE and c.node in known}
    if not after:
        return choices
    plan = {c.node: c for c in choices}
    options = {node: inside.poolable(plan[node]) for node in after}
    plans = [plan]
    for i in range(max(map(len, options.values()))):
        own = {node: options[node][min(i, len(options[node]) - 1)] for node in after}
        plans.append(plan | {node: replace(plan[node], config=own[node], pooled=True) for node in after})
    progress.begin("timing in the running network", 0.05)
    times = _in_place(backend, network, shapes, plans, inputs, effort, progress)
    if times is not None and len(times) < 2:
        return choices
    if times is not None:
        return [
            inside.joined(c, after[c.node], options[c.node], times) if c.node in after else c for c in choices
        ]
    nodes = {node.name: node for node in network.graph.nodes}
    found = []
    for choice in choices:
        pool = pooling_of(nodes[after[choice.node]]) if choice.node in after else None
        calls = None
        if pool is not None:
            weight = network.weight(nodes[choice.node])
            x = _images(choice, real)
            calls = backend.with_pool(choice.conv, choice.config, weight, x, nodes[after[choice.node]], pool)
        if calls is not None:
            apart, together = interleaved(calls, effort.rounds, clock=backend.clock)
            timing = Timing.of(together, apart)
            if search.keep(timing):
                choice = replace(choice, pooled=True, in_network=timing)
        found.append(choice)
    return found


def _images(choice: Choice, real: Mapping[str, Seen]) -> Any:
    """Real ones where there are some."""
    if choice.node in real:
        return real[choice.node].fitted(choice.conv.x_shape)
    return np.random.default_rng(0).standard_normal(choice.conv.x_shape).astype(np.float32)


def _layers(
    network: Network, inputs: list[Any], asked: Asked, real: Mapping[str, Seen], progress: Progress
) -> list[Choice]:
    """One Choice for each convolution; layers alike share their timings."""
    choices = []
    shapes = network.shapes(inputs)
    idle = {name: own.idle for name, own in real.items()}
    places = asked.backend.places(network, shapes)
    groups = search.group_layers(asked.backend, network, shapes, idle, places)
    effort, store, backend = asked.effort, asked.store, asked.backend
    progress.begin("timing layers", 0.5)
    for number, group in enumerate(groups, 1):
        node, conv = group[0]
        held = network.weight(node)
        weight = held.array
        progress.step("layer", number, len(groups), node.layer or node.name)
        if effort is None or effort.left() <= 0:
            timed = search.rule(backend, conv, weight, asked.names)
        else:
            own, place = real.get(node.name), places.get(node.name, ALONE)
            asked_for = f"{asked.tune} {asked.names} {place}" + ("" if own is None else f" {own.idle}")
            found = store.layer(conv, weight, asked_for)
            near = () if found else store.near(conv, weight, asked_for)
            timed = found or search.time_layer(
                backend, conv, held, asked.names, effort.for_layer(len(groups) - number), near, own, place
            )
            if found is None:
                if not search.has_failures([timed]):
                    store.put_layer(weight, timed, asked_for)
                held.keep([tried.config for tried in timed.fastest().values()])
        for other, alike in group:
            named = replace(timed, layer=other.layer or other.name, node=other.name, conv=alike)
            sparsity = network.stats(other).sparsity
            choices.append(replace(named, sparsity=sparsity, idle=idle.get(other.name)))
    order = {node.name: i for i, node in enumerate(network.graph.nodes)}
    return sorted(choices, key=lambda c: order[c.node])
