"""Which candidates of a layer are timed and which one is kept.

Each layer's candidates are timed beside dense in the same rounds; `assign` then decides over the whole graph, the best two of each
layer are timed again in the running network, and the whole model has the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from types import MappingProxyType
from typing import Any

import numpy as np

from aerogel.candidate import Config, Idle, Stats
from aerogel.errors import AerogelError
from aerogel.graph import Graph, Node
from aerogel.layout import Array
from aerogel.methods import METHODS, method
from aerogel.plan import Choice, Timing
from aerogel.problem import Conv
from aerogel.runtime.program import NATIVE
from aerogel.runtime.stays import problem
from aerogel.target import Gpu, Target
from aerogel.tune.activity import Seen, break_even
from aerogel.tune.measure import ROUND_US, Clock, host_clock, interleaved
from aerogel.tune.trial import candidate

DENSE = 4
"""Configurations of dense that are timed: all of them."""
FIRST, NEAR, FAR = 3, 1.5, 4.0
"""After FIRST rounds candidates at NEAR times their method's best are given up, and methods at FAR times the best."""
SKIPPING = ("actsparse",)
"""Methods whose time depends on what x holds."""
KEEP = 1.02
"""A candidate is kept where the lower quartile of its paired ratios to the baseline is above this."""


@dataclass(frozen=True)
class Effort:
    """How much is tried: configurations of a sparse method, rounds of timing, and seconds where time is what counts."""

    configs: int
    rounds: int
    seconds: float | None = None


@dataclass(frozen=True)
class Bench:
    """Where layers are timed: its methods (dense is the first of them), one by its name, a configuration as a call, and a clock."""

    methods: tuple[str, ...]
    method: Callable[[str], Any]
    candidate: Callable[..., Callable[[], object]]
    clock: Clock

    def interleaved(self, calls: Sequence[Callable[[], object]], rounds: int, warm: int = 2) -> list[list[float]]:
        return interleaved(calls, rounds, warm, self.clock)


HOST = Bench(METHODS, method, candidate, host_clock)
EFFORTS = {"fast": Effort(3, 9), "full": Effort(16, 25)}


def effort(tune: object) -> Effort | None:
    """What `tune` asks for: None for "off"; a number is a budget in seconds."""
    if tune == "off":
        return None
    if isinstance(tune, str) and tune in EFFORTS:
        return EFFORTS[tune]
    if isinstance(tune, int | float) and not isinstance(tune, bool) and 0 < tune < float("inf"):
        return Effort(200, 9, float(tune))
    raise AerogelError(f"tune is 'off', 'fast', 'full' or seconds, not {tune!r}")


def keep(timing: Timing) -> bool:
    """The promise in one line: faster than the baseline in three rounds of four, by more than noise."""
    return timing.ratio_p25 > KEEP


def time_layer(
    conv: Conv,
    weight: Array,
    target: Target | Gpu,
    names: Iterable[str],
    effort: Effort,
    known: Sequence[Config] = (),
    seen: Seen | None = None,
    bench: Bench = HOST,
) -> Choice:
    """Every method's likely configurations of one layer, beside the dense ones, in the same rounds.

    `known` are configurations of a similar layer, the fastest first: they come before the cost model's own, and fewer are needed.
    `seen` is what real inputs give the layer: it is then timed on them. `bench` is where it is timed.
    """
    stats, rng = Stats.of(weight, None if seen is None else seen.idle), np.random.default_rng(0)
    x = rng.standard_normal(conv.x_shape).astype(np.float32) if seen is None else seen.fitted(conv.x_shape)
    bias = rng.standard_normal(conv.k).astype(np.float32)
    configs, calls, refused = list[Config](), list[Callable[[], object]](), list[tuple[str, str]]()
    for name in bench.methods:
        module = bench.method(name)
        why = module.refuse(conv, target, stats) if name in (*names, "dense") else "not among the methods asked for"
        if why is not None:
            refused.append((name, why))
            continue
        earlier = [c for c in known if c.method == name]
        most = effort.configs if name != "dense" else DENSE
        most = max(1, most // 2) if earlier else most
        spent = 0.0
        for config in islice(dict.fromkeys(chain(earlier, module.configs(conv, target, stats))), most):
            if effort.seconds is not None and name != "dense" and configs[-1:] and spent * effort.rounds > effort.seconds:
                break
            configs.append(config)
            calls.append(bench.candidate(conv, config, weight, x, bias, target))
            spent += max(ROUND_US, bench.interleaved(calls[-1:], 1)[0][0]) / 1e6 if effort.seconds is not None else 0.0
    times = bench.interleaved(calls, min(FIRST, effort.rounds))
    left = worth([c.method for c in configs], [min(t) for t in times])
    for i, more in zip(left, bench.interleaved([calls[i] for i in left], effort.rounds - len(times[0]), 1), strict=True):
        times[i] += more
    middle = [float(np.median(t)) for t in times]
    dense = min((i for i in left if configs[i].method == "dense"), key=lambda i: middle[i])
    timings = [Timing.of(t, times[dense][: len(t)]) for t in times]
    best = min(left, key=lambda i: middle[i] if keep(timings[i]) or i == dense else np.inf)
    order = sorted(range(len(configs)), key=lambda i: (i not in left, middle[i]))
    tried = tuple((configs[i], timings[i]) for i in order)
    limit: float | None = None
    if configs[best].method in SKIPPING and isinstance(target, Target):
        other = next(c for c, _ in tried if c.method not in SKIPPING)
        limit = break_even(conv, configs[best], other, weight, x, bias, target, effort.rounds)
    return Choice("", "", conv, configs[best], stats.sparsity, "", tried, tuple(refused), None, stats.idle, limit)


def medians(pairs: Sequence[tuple[Array, Config]], conv: Conv, target: Target, rounds: int) -> list[float]:
    """Microseconds of one problem with several weights, each in a configuration of its own, in the same rounds."""
    rng = np.random.default_rng(0)
    x, bias = rng.standard_normal(conv.x_shape).astype(np.float32), rng.standard_normal(conv.k).astype(np.float32)
    calls = [candidate(conv, config, weight, x, bias, target) for weight, config in pairs]
    return [float(np.median(t)) for t in interleaved(calls, rounds)]


def worth(methods: Sequence[str], us: Sequence[float]) -> list[int]:
    """Which candidates, by their methods and first times, are timed on: those near the best of their method, and of a method that
    is far behind only its best, so that explain has a time for it."""
    best = {name: min(t for n, t in zip(methods, us, strict=True) if n == name) for name in methods}
    near = {name: 1.0 if best[name] > FAR * min(us) else NEAR for name in best}
    return [i for i, (name, t) in enumerate(zip(methods, us, strict=True)) if t <= near[name] * best[name]]


def group_layers(
    graph: Graph,
    shapes: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, Array],
    idle: Mapping[str, Idle] = MappingProxyType({}),
) -> list[list[tuple[Node, Conv]]]:
    """Layers with the same problem and, to a percent, the same sparsity are timed once; apart are those pruned tile-wise, and those
    whose inputs have other shares of zeros."""
    groups: dict[tuple[str, float, float, int | None], list[tuple[Node, Conv]]] = {}
    for node in graph.nodes:
        if node.conv is not None:
            conv = problem(node, shapes)
            stats = Stats.of(weights[node.conv_inputs()[1]])
            tiled = stats.shared / max(1, stats.nonzeros)
            zeros = idle[node.name].vectors // 10 if node.name in idle else None
            groups.setdefault((str(conv), round(1 - stats.sparsity, 2), round(tiled, 1), zeros), []).append((node, conv))
    return list(groups.values())


def with_config(choice: Choice, name: str) -> Choice:
    """The choice moved to its fastest candidate of a method."""
    config = next(c for c, _ in choice.tried if c.method == name)
    return replace(choice, config=config)


def refined(choice: Choice, second: Config, times: list[list[float]]) -> Choice:
    """`times` are microseconds in the running network under the chosen configuration and under the second."""
    if not times[0]:
        return choice
    timings = [Timing.of(t, times[0]) for t in times]
    if keep(timings[1]):
        reason = "faster in the running network than the configuration that was faster alone"
        return replace(choice, config=second, reason=reason, in_network=timings[1])
    return replace(choice, in_network=timings[0])


def joined(choice: Choice, pool: str, times: Sequence[Mapping[str, Sequence[float]]]) -> Choice:
    """`times` are microseconds of all nodes with convolution and pooling apart [0] and in one kernel [1], which goes by the pool's
    name; by its own, where the program did not join them."""
    apart, together = (under.get(choice.node, []) for under in times)
    if together or pool not in times[0] or pool not in times[1]:
        return choice
    timing = Timing.of(times[1][pool], [a + b for a, b in zip(apart, times[0][pool], strict=True)])
    return replace(choice, pooled=True, in_network=timing) if keep(timing) else choice


def runner_up(choice: Choice) -> Config:
    """The next configuration of the chosen method, or the chosen one where there is no other."""
    return next((c for c, _ in _native(choice) if c != choice.config and _aligned(c) == _aligned(choice.config)), choice.config)


def narrow(choice: Choice) -> Config:
    """The fastest configuration that asks for no rows of whole vectors: those cost every layer of that image size."""
    return next((c for c, _ in _native(choice) if not _aligned(c)), choice.config)


def _native(choice: Choice) -> tuple[tuple[Config, Timing], ...]:
    """What was tried of the chosen method, the fastest first; nothing where torch runs the layer."""
    return tuple(t for t in choice.tried if t[0].method == choice.config.method) if choice.config.method in NATIVE else ()


def _aligned(config: Config) -> int:
    return dict(config.options).get("aligned", 0)


def pitched(choices: list[Choice], times: list[dict[str, list[float]]]) -> list[Choice]:
    """For each image size rows of whole vectors or not, by microseconds of all its layers in the network under both: [0] with, [1]
    without."""
    spent: dict[tuple[int, int], list[float]] = {}
    for c in choices:
        sums = spent.setdefault(c.conv.out, [0.0, 0.0])
        for i, under in enumerate(times):
            sums[i] += float(np.median(under.get(c.node, [0.0])))
    reason = "rows of whole vectors make this layer faster and the others of its image size slower by more"
    return [
        replace(c, config=narrow(c), reason=reason) if _aligned(c.config) and spent[c.conv.out][1] < spent[c.conv.out][0] else c
        for c in choices
    ]


BY_RULE = ("tilewise", "direct", "stridepack")
"""Whom the rule asks first."""
RULE = 0.7
"""Without timing, a sparse method takes a layer from this share of zeros on: below it dense usually wins."""


def rule(conv: Conv, weight: Array, target: Target | Gpu, names: Iterable[str], bench: Bench = HOST) -> Choice:
    """A choice by rule of thumb, for tune="off": no timing, and explain says so."""
    stats = Stats.of(weight)
    for name in BY_RULE:
        module = bench.method(name) if name in bench.methods else None
        if module is not None and name in names and stats.sparsity >= RULE and module.refuse(conv, target, stats) is None:
            return Choice("", "", conv, next(module.configs(conv, target, stats)), stats.sparsity, "by rule, not timed")
    return Choice("", "", conv, next(bench.method("dense").configs(conv, target, stats)), stats.sparsity, "by rule, not timed")
