"""Which candidates of a layer are timed and which one is kept.

Each layer's candidates are timed beside dense in the same rounds; `assign` then decides over the whole graph,
the running network chooses among several configurations of each layer, and the whole model has the last
word.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from types import MappingProxyType

import numpy as np

from aerogel.backends import FAILED, Backend, CandidateFailed, Trial
from aerogel.capture.network import Network
from aerogel.capture.nodes import Shapes, problem
from aerogel.errors import AerogelError, InvalidArgument
from aerogel.ir import (
    ALONE,
    INT8,
    Array,
    Choice,
    Config,
    Conv,
    Idle,
    Node,
    Place,
    Plan,
    Refusal,
    Stats,
    Timing,
    Tried,
    Weight,
)
from aerogel.methods import BASELINE, METHODS, method, ranked
from aerogel.tune.activity import Seen, break_even
from aerogel.tune.measure import ROUND_US, interleaved

BASELINES = 4
"""Configurations of the baseline that are timed: all of them."""
FIRST, NEAR, FAR = 3, 1.5, 4.0
"""After FIRST rounds candidates at NEAR times their method's best are given up, and methods at FAR times the
best."""
NOT_ASKED = "not among the methods asked for"
"""A refusal of the tuner's own, not a method's."""
KEEP = 1.02
"""A candidate is kept where the lower quartile of its paired ratios to the baseline is above this."""


@dataclass(frozen=True)
class Effort:
    """How much is tried: configurations of a sparse method, rounds of timing, and configurations of a layer
    in the running network. Where time is what counts: seconds for a layer, and when all must be over."""

    configs: int
    rounds: int
    seconds: float | None = None
    in_network: int = 8
    until: float | None = None

    def left(self) -> float:
        """Seconds until all must be over."""
        return math.inf if self.until is None else self.until - time.monotonic()

    def shared(self, others: int) -> Effort:
        """This effort for one model of as many more: an even part of the time that is left."""
        if self.until is None:
            return self
        return replace(self, until=time.monotonic() + self.left() / (1 + others))

    def for_layer(self, others: int) -> Effort:
        """This effort for one layer of as many more: an even part of what the layers may take."""
        if self.until is None:
            return self
        return replace(self, seconds=LAYERS * max(0.0, self.left()) / (1 + others))


LAYERS = 0.5
"""Share of a budget for timing layers alone; the rest is for the running network and the whole model."""
EFFORTS = {"fast": Effort(3, 9), "full": Effort(16, 25, in_network=16)}


def effort(tune: object) -> Effort | None:
    """What `tune` asks for: None for "off"; a number is a budget in seconds, from now on."""
    if tune == "off":
        return None
    if isinstance(tune, str) and tune in EFFORTS:
        return EFFORTS[tune]
    if isinstance(tune, int | float) and not isinstance(tune, bool) and 0 < tune < float("inf"):
        return Effort(200, 9, until=time.monotonic() + tune)
    raise InvalidArgument(f"tune is 'off', 'fast', 'full' or seconds, not {tune!r}")


def keep(timing: Timing) -> bool:
    """The promise in one line: faster than the baseline in three rounds of four, by more than noise."""
    return timing.ratio_p25 > KEEP


def time_layer(
    backend: Backend,
    conv: Conv,
    weight: Weight,
    names: Iterable[str],
    effort: Effort,
    known: Sequence[Config] = (),
    seen: Seen | None = None,
    place: Place = ALONE,
) -> Choice:
    """Every method's likely configurations of one layer, beside the baseline's, in the same rounds.

    `known` are configurations of a similar layer, the fastest first: they come before the cost model's own,
    and fewer are needed. `seen` is what real inputs give the layer: it is then timed on them. `place` is
    where its maps will stand.
    """
    rng = np.random.default_rng(0)
    stats = replace(weight.stats, idle=None if seen is None else seen.idle, place=place)
    x = rng.standard_normal(conv.x_shape).astype(np.float32) if seen is None else seen.fitted(conv.x_shape)
    bias = rng.standard_normal(conv.k).astype(np.float32)
    configs, calls, refused = list[Config](), list[Trial](), list[Refusal]()
    for name in METHODS:
        form = backend.form(name)
        why = form.refuse(conv, backend.target, stats) if name in (*names, BASELINE) else NOT_ASKED
        if why is not None:
            refused.append(Refusal(name, why))
            continue
        earlier = [c for c in known if c.method == name]
        most = effort.configs if name != BASELINE else BASELINES
        most = max(1, most // 2) if earlier else most
        offers = islice(dict.fromkeys(chain(earlier, form.configs(conv, backend.target, stats))), most)
        built = _built(
            backend, offers, effort, lambda c: backend.candidate(conv, c, weight, x, bias, place), refused
        )
        configs += built
        calls += built.values()
    if all(c.method != BASELINE for c in configs):
        raise AerogelError(f"torch itself fails on {conv}: {dict(refused)[BASELINE]}")
    times = interleaved(calls, min(FIRST, effort.rounds), clock=backend.clock)
    left = worth([c.method for c in configs], [min(t) for t in times])
    rest = interleaved([calls[i] for i in left], effort.rounds - len(times[0]), 1, backend.clock)
    for i, more in zip(left, rest, strict=True):
        times[i] += more
    middle = [float(np.median(t)) for t in times]
    dense = min((i for i in left if configs[i].method == BASELINE), key=lambda i: middle[i])
    timings = [Timing.of(t, times[dense][: len(t)]) for t in times]
    best = min(left, key=lambda i: middle[i] if keep(timings[i]) or i == dense else np.inf)
    order = sorted(range(len(configs)), key=lambda i: (i not in left, middle[i]))
    tried = tuple(Tried(configs[i], timings[i]) for i in order)
    limit: float | None = None
    if method(configs[best].method).SKIPS_INPUT:
        other = next(t.config for t in tried if not method(t.config.method).SKIPS_INPUT)
        try:
            limit = break_even(backend, conv, configs[best], other, weight, x, bias, effort.rounds, place)
        except CandidateFailed as failure:  # nothing can say when to fall back: dense is always right
            refused.append(Refusal(configs[best].method, str(failure)))
            best = dense
    return Choice(
        layer="",
        node="",
        conv=conv,
        config=configs[best],
        sparsity=stats.sparsity,
        tried=tried,
        refused=tuple(refused),
        idle=stats.idle,
        limit=limit,
    )


def _built(
    backend: Backend,
    offers: Iterable[Config],
    effort: Effort,
    make: Callable[[Config], Trial],
    refused: list[Refusal],
) -> dict[Config, Trial]:
    """Build the candidates that one method offers, as far as its share of the time goes. Those that the
    device fails to build or to run are added to `refused`."""
    calls, spent, began = dict[Config, Trial](), 0.0, time.monotonic()
    for number, config in enumerate(offers):
        passed = time.monotonic() - began + spent * effort.rounds
        late = effort.seconds is not None and passed > effort.seconds / len(METHODS)
        if late and config.method != BASELINE and number > 0:
            break
        try:
            calls[config] = make(config)
        except CandidateFailed as failure:
            refused.append(Refusal(config.method, str(failure)))
            continue
        if effort.seconds is not None:
            spent += max(ROUND_US, interleaved([calls[config]], 1, clock=backend.clock)[0][0]) / 1e6
    return calls


def has_failures(choices: Iterable[Choice]) -> bool:
    """Whether the device failed to build or run a candidate. A new driver or compiler may mend that, so such
    choices are not kept in the store."""
    return any(FAILED in why for choice in choices for _, why in choice.refused)


def without_kernels(backend: Backend, network: Network, plan: Plan, failures: Mapping[str, str]) -> Plan:
    """Give the layers of these nodes to torch, with the reason why their kernel failed."""
    nodes = {node.name: node for node in network.convs()}

    def mended(choice: Choice) -> Choice:
        if choice.node not in failures:
            return choice
        stats = network.stats(nodes[choice.node])
        dense = next(backend.form(BASELINE).configs(choice.conv, backend.target, stats))
        refusal = Refusal(choice.config.method, failures[choice.node])
        refused = tuple(dict.fromkeys((*choice.refused, refusal)))
        tried = tuple(t for t in choice.tried if t.config.method != choice.config.method)
        return replace(choice, config=dense, tried=tried, refused=refused, pooled=False, limit=None)

    return replace(plan, choices=tuple(map(mended, plan.choices)))


def medians(
    backend: Backend,
    pairs: Sequence[tuple[Weight, Config]],
    conv: Conv,
    rounds: int,
    place: Place = ALONE,
) -> list[float]:
    """Microseconds of one problem with several weights, each in a configuration of its own, in the same
    rounds."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(conv.x_shape).astype(np.float32)
    bias = rng.standard_normal(conv.k).astype(np.float32)
    calls = [backend.candidate(conv, config, weight, x, bias, place) for weight, config in pairs]
    return [float(np.median(t)) for t in interleaved(calls, rounds, clock=backend.clock)]


def worth(methods: Sequence[str], us: Sequence[float]) -> list[int]:
    """Which candidates, by their methods and first times, are timed on: those near the best of their method,
    and of a method that is far behind only its best, so that explain has a time for it."""
    best = {name: min(t for n, t in zip(methods, us, strict=True) if n == name) for name in methods}
    near = {name: 1.0 if best[name] > FAR * min(us) else NEAR for name in best}
    return [i for i, (name, t) in enumerate(zip(methods, us, strict=True)) if t <= near[name] * best[name]]


def group_layers(
    backend: Backend,
    network: Network,
    shapes: Shapes,
    idle: Mapping[str, Idle] = MappingProxyType({}),
    places: Mapping[str, Place] = MappingProxyType({}),
) -> list[list[tuple[Node, Conv]]]:
    """Layers with the same problem and place and, to a percent, the same sparsity are timed once. Apart are
    those pruned tile-wise, those whose inputs have other shares of zeros, and those that other methods
    take: a layer's record names no method that refuses it."""
    groups: dict[object, list[tuple[Node, Conv]]] = {}
    for node in network.convs():
        conv, zeros = problem(node, shapes), idle.get(node.name)
        stats = replace(network.stats(node), idle=zeros, place=places.get(node.name, ALONE))
        tiled = stats.shared / max(1, stats.nonzeros)
        key = (
            str(conv),
            round(1 - stats.sparsity, 2),
            round(tiled, 1),
            None if zeros is None else zeros.vectors // 10,
            stats.place,
            *(backend.form(name).refuse(conv, backend.target, stats) is None for name in METHODS),
        )
        groups.setdefault(key, []).append((node, conv))
    return list(groups.values())


def with_config(choice: Choice, name: str) -> Choice:
    """The choice moved to its fastest candidate of a method."""
    return replace(choice, config=choice.fastest()[name].config)


BY_RULE = "by rule, not timed"
"""The reason of a choice that nothing was timed for."""
RULE = 0.7
"""Without timing, a sparse method takes a layer from this share of zeros on: below it dense usually wins."""
TOO_FEW = f"too few zeros: without timing a sparse method takes a layer from {RULE:.0%} on"


def unfinished(effort: Effort, choices: Iterable[Choice]) -> bool:
    """Whether a budget ended before every layer was timed."""
    return effort.until is not None and any(c.reason == BY_RULE for c in choices)


def rule(backend: Backend, conv: Conv, weight: Array, names: Iterable[str]) -> Choice:
    """A choice by rule of thumb, for tune="off": no timing, and explain says so."""
    stats, refused = Stats.of(weight), dict[str, str]()
    few = TOO_FEW if stats.sparsity < RULE and conv.dtypes != INT8 else None  # torch has no int8
    for name in METHODS:
        if name == BASELINE:
            continue
        why = NOT_ASKED
        if name in names:
            why = backend.form(name).refuse(conv, backend.target, stats) or few or ""
        if why:
            refused[name] = why
    name = next((name for name in ranked() if name not in refused), BASELINE)
    return Choice(
        layer="",
        node="",
        conv=conv,
        config=next(backend.form(name).configs(conv, backend.target, stats)),
        sparsity=stats.sparsity,
        reason=BY_RULE,
        refused=tuple(Refusal(name, why) for name, why in refused.items()),
    )
