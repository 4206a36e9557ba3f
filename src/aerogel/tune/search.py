"""The only policy: which candidates are timed, which are kept, where each layer runs.

A layer alone misleads: it may win by less than the copies around it cost. So each layer's candidates are timed first, then the
layout copies, and the assignment with the least total over the graph is taken. The whole model has the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import prod
from typing import Any

import numpy as np

from aerogel.candidate import Config, Kernel, Stats
from aerogel.graph import Graph, Node, references
from aerogel.layout import NUMPY, Array, Layout, Shape
from aerogel.methods import METHODS, method
from aerogel.plan import Choice, Timing
from aerogel.problem import Conv
from aerogel.runtime import pool
from aerogel.runtime.convert import convert
from aerogel.runtime.program import NATIVE, image_shape, passes, problem
from aerogel.target import Target
from aerogel.tune.measure import interleaved

KEEP = 1.02
"""A candidate is kept where the lower quartile of its paired ratios to the baseline is above this."""


@dataclass(frozen=True)
class Effort:
    """How much is tried: configurations of a sparse method, and rounds of timing."""

    configs: int
    rounds: int


EFFORTS = {"fast": Effort(3, 9), "full": Effort(16, 25)}


def keep(timing: Timing) -> bool:
    """The promise in one line: faster than the baseline in three rounds of four, by more than noise."""
    return timing.ratio_p25 > KEEP


def time_layer(conv: Conv, weight: Array, target: Target, names: Iterable[str], effort: Effort) -> Choice:
    """Every method's likely configurations of one layer, beside the dense ones, in the same rounds."""
    stats, rng = Stats.of(weight), np.random.default_rng(0)
    x = rng.standard_normal(conv.x_shape).astype(np.float32)
    bias = rng.standard_normal(conv.k).astype(np.float32)
    configs, calls, refused = [], [], []
    for name in METHODS:
        module = method(name)
        why = module.refuse(conv, target, stats) if name in (*names, "dense") else "not among the methods asked for"
        if why is not None:
            refused.append((name, why))
            continue
        most = effort.configs if name in NATIVE else 4
        for config in islice(module.configs(conv, target, stats), most):
            configs.append(config)
            calls.append(candidate(conv, config, weight, x, bias, target))
    times = interleaved(calls, effort.rounds)
    middle = [float(np.median(t)) for t in times]
    dense = min((i for i, c in enumerate(configs) if c.method == "dense"), key=lambda i: middle[i])
    timings = [Timing.of(t, times[dense]) for t in times]
    best = min(range(len(configs)), key=lambda i: middle[i] if keep(timings[i]) or i == dense else np.inf)
    order = sorted(range(len(configs)), key=lambda i: middle[i])
    return Choice("", "", conv, configs[best], stats.sparsity, "", tuple((configs[i], timings[i]) for i in order), tuple(refused))


def candidate(conv: Conv, config: Config, weight: Array, x: Array, bias: Array, target: Target) -> Callable[[], object]:
    """A call that runs one configuration on buffers that rotate through more than L2."""
    module = method(config.method)
    reads, writes = module.layouts(conv, config, target, conv.pad if conv.stride == (1, 1) else (0, 0, 0, 0))
    kernels = module.build(module.pack(weight, conv, config), conv, config, target, reads, writes)
    copies = min(8, 1 + 2 * target.l2_bytes // (4 * (prod(conv.x_shape) + prod(conv.y_shape))))
    first = kernels[0].call
    if first is not None:
        return _library(first, conv, reads, writes, x, bias, copies)
    return _rotating(kernels, conv, reads, writes, x, bias, copies, target.threads)


def _library(
    call: Callable[[Any, Any, Any], Any], conv: Conv, reads: Layout, writes: Layout, x: Array, bias: Array, copies: int
) -> Callable[[], object]:
    from aerogel.methods.dense import to_torch

    d = conv.dtypes
    turn = cycle([to_torch(_laid(x, reads), d.input) for _ in range(copies)])
    own = to_torch(bias, "f32") if "bias" in conv.epilogue else None
    beside = to_torch(_laid(np.zeros(conv.y_shape, np.float32), writes), d.output) if "add" in conv.epilogue else None
    return lambda: call(next(turn), own, beside)


def _laid(x: Array, layout: Layout) -> Array:
    buffer = layout.allocate(x.shape)
    layout.write(buffer, x.astype(NUMPY[layout.dtype]))
    return layout.view(buffer, x.shape)


def _rotating(
    kernels: list[Kernel], conv: Conv, reads: Layout, writes: Layout, x: Array, bias: Array, copies: int, threads: int
) -> Callable[[], object]:
    scratch = np.empty(max(k.scratch_bytes for k in kernels) * threads + 64, np.uint8)
    start = scratch.ctypes.data + -scratch.ctypes.data % 64
    beside = writes.allocate(conv.y_shape)
    beside[:] = 0
    kept: list[object] = [scratch, bias, beside]
    segments = []
    for _ in range(copies):
        xb, yb = reads.allocate(conv.x_shape), writes.allocate(conv.y_shape)
        reads.write(xb, x.astype(NUMPY[reads.dtype]))
        kept += [xb, yb]
        addresses = {"x": xb.ctypes.data, "y": yb.ctypes.data, "bias": bias.ctypes.data, "scratch": start}
        if "add" in conv.epilogue:
            addresses["residual"] = beside.ctypes.data
        segments.append(pool.Segment([(k, k.bind(**addresses)) for k in kernels], threads))
    turn = cycle(segments)

    def run(_kept: object = kept) -> None:
        next(turn)()

    return run


def time_copy(shape: Shape, source: Layout, target: Layout, machine: Target, rounds: int) -> float:
    """Median microseconds of one layout copy."""
    kernels = convert(shape, source, target, machine)
    x, y = source.allocate(shape), target.allocate(shape)
    x[:] = 0
    segment = pool.Segment([(k, k.bind(x=x.ctypes.data, y=y.ctypes.data)) for k in kernels], machine.threads)
    return float(np.median(interleaved([segment], rounds)[0]))


@dataclass(frozen=True)
class Costs:
    """Microseconds of each conv node under its best kernel of ours and under dense, and of the copies of each value."""

    native: Mapping[str, float]
    dense: Mapping[str, float]
    copies: Mapping[str, float]

    def total(self, graph: Graph, ours: frozenset[str], users: Mapping[str, tuple[str, ...]]) -> float:
        """Time of the convolutions and of the copies between torch's hands and ours, if `ours` run on our kernels."""
        spent = sum(self.native[n] if n in ours else self.dense[n] for n in self.dense)
        for name, cost in self.copies.items():
            readers = users[name]
            crossing = any(r not in ours for r in readers) if name in ours else any(r in ours for r in readers)
            spent += cost if crossing else 0.0
        return spent


def assign(graph: Graph, costs: Costs) -> frozenset[str]:
    """Which conv nodes run on our kernels: the assignment of least total cost that single changes can reach.

    Starts from nothing, from everything and from each layer's own winner; changes one node at a time while that helps.
    """
    users = readers(graph)
    able = frozenset(costs.native)
    winners = frozenset(n for n in able if costs.native[n] < costs.dense[n])
    best: tuple[float, frozenset[str]] = (costs.total(graph, frozenset(), users), frozenset())
    for start in (frozenset[str](), able, winners):
        current, spent = start, costs.total(graph, start, users)
        while True:
            moves = [(costs.total(graph, current ^ {n}, users), current ^ {n}) for n in able]
            lower = min(moves, key=lambda m: m[0], default=(spent, current))
            if lower[0] >= spent:
                break
            spent, current = lower
        best = min(best, (spent, current), key=lambda m: m[0])
    return best[1]


def sources(graph: Graph) -> dict[str, tuple[str, ...]]:
    """For pooling and concatenation, which go where their maps are: the values they are made of."""
    found: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        if passes(node):
            found[node.name] = tuple(dict.fromkeys(s for name in node.inputs for s in found.get(name, (name,))))
    return found


def readers(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Who reads each value in the end: pooling and concatenation are looked through."""
    through = sources(graph)
    found: dict[str, list[str]] = {name: [] for name in graph.users()}
    for reader, names in [*((n.name, n.inputs) for n in graph.nodes if n.name not in through), ("", _outputs(graph))]:
        for name in names:
            for source in through.get(name, (name,)):
                found[source].append(reader)
    return {name: tuple(dict.fromkeys(r)) for name, r in found.items()}


def _outputs(graph: Graph) -> tuple[str, ...]:
    return tuple(references(graph.outputs))


def copy_costs(
    graph: Graph, shapes: Mapping[str, tuple[int, ...]], able: Iterable[str], target: Target, rounds: int
) -> dict[str, float]:
    """What it costs to bring each value next to a convolution of ours across: measured once for each shape."""
    through = sources(graph)
    near = {n for node in graph.nodes if node.name in set(able) for n in (node.name, *_maps(node))}
    names = {s for name in near for s in through.get(name, (name,)) if len(shapes[s]) in (3, 4)}
    known: dict[Shape, float] = {}
    costs = {}
    for name in names:
        shape = image_shape(shapes[name])
        if shape not in known:
            plain, bordered = Layout("contiguous", shape[3]), Layout("planar", shape[3] + 1, (1, 1, 1, 1))
            known[shape] = time_copy(shape, plain, bordered, target, rounds)
        costs[name] = known[shape]
    return costs


def _maps(node: Node) -> tuple[str, ...]:
    x, _, _, residual = node.conv_inputs()
    return (x,) if residual is None else (x, residual)


def phase_cost(conv: Conv, config: Config, target: Target, rounds: int) -> float:
    """A strided layer of ours reads phases: the copy that cuts them is part of its time."""
    reads, _ = method(config.method).layouts(conv, config, target, (0, 0, 0, 0))
    if reads.kind != "phases":
        return 0.0
    return time_copy(conv.x_shape, Layout("planar", conv.size[1] + 1, (1, 1, 1, 1), dtype=reads.dtype), reads, target, rounds)


def group_layers(
    graph: Graph, shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, Array]
) -> list[list[tuple[Node, Conv]]]:
    """Layers with the same problem and, to a percent, the same sparsity are timed once."""
    groups: dict[tuple[str, float], list[tuple[Node, Conv]]] = {}
    for node in graph.nodes:
        if node.conv is not None:
            conv = problem(node, shapes)
            density = 1 - Stats.of(weights[node.conv_inputs()[1]]).sparsity
            groups.setdefault((str(conv), round(density, 2)), []).append((node, conv))
    return list(groups.values())


def with_config(choice: Choice, name: str) -> Choice:
    """The choice moved to its fastest candidate of a method."""
    config = next(c for c, _ in choice.tried if c.method == name)
    return replace(choice, config=config)


def runner_up(choice: Choice) -> Config:
    """The next configuration of the chosen method, or the chosen one where there is no other."""
    others = [c for c, _ in choice.tried if c.method == choice.config.method and c != choice.config]
    return others[0] if others and choice.config.method in NATIVE else choice.config


RULE = 0.7
"""Without timing, a sparse method takes a layer from this share of zeros on: below it dense usually wins."""


def rule(conv: Conv, weight: Array, target: Target, names: Iterable[str]) -> Choice:
    """A choice by rule of thumb, for tune="off": no timing, and explain says so."""
    stats = Stats.of(weight)
    for name in NATIVE:
        module = method(name)
        if name in names and stats.sparsity >= RULE and module.refuse(conv, target, stats) is None:
            return Choice("", "", conv, next(module.configs(conv, target, stats)), stats.sparsity, "by rule, not timed")
    return Choice("", "", conv, next(method("dense").configs(conv, target, stats)), stats.sparsity, "by rule, not timed")
