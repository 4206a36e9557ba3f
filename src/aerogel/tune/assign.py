"""Where each layer runs: our kernels or dense, with the copies between them counted.

A layer alone misleads: it may win by less than the copies around it cost. So the copies are timed too, and the assignment with the
least total over the graph is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from aerogel.candidate import Config
from aerogel.graph import Graph, Node, references
from aerogel.layout import Layout, Shape
from aerogel.methods import method
from aerogel.plan import Choice
from aerogel.problem import Conv
from aerogel.runtime import pool
from aerogel.runtime.convert import convert
from aerogel.runtime.program import NATIVE
from aerogel.runtime.stays import image_shape, passes
from aerogel.target import Target
from aerogel.tune.measure import interleaved
from aerogel.tune.search import with_config

CLEARLY = 0.93
"""A later method takes a layer from an earlier one where it needs at most this share of its time: near ties must not flip."""


def assigned(graph: Graph, shapes: Mapping[str, tuple[int, ...]], choices: list[Choice], target: Target) -> list[Choice]:
    """Move layers between our kernels and dense until the convolutions and the copies together cost least."""
    native, dense, ours = dict[str, float](), dict[str, float](), dict[str, str]()
    phases: dict[str, float] = {}
    for c in choices:
        best = {config.method: (t.p50_us, config) for config, t in reversed(c.tried)}
        dense[c.node] = best["dense"][0]
        for name in NATIVE:
            if name in best:
                spent, config = best[name]
                key = f"{c.conv} {config}"
                if key not in phases:
                    phases[key] = phase_cost(c.conv, config, target, 5)
                if spent + phases[key] < CLEARLY * native.get(c.node, np.inf):
                    native[c.node], ours[c.node] = spent + phases[key], name
    costs = Costs(native, dense, copy_costs(graph, shapes, native, target, 5))
    chosen = assign(graph, costs)
    out = []
    for c in choices:
        wanted = ours[c.node] if c.node in chosen else "dense"
        moved = c if c.config.method == wanted else with_config(c, wanted)
        reason = ""
        if c.config.method != wanted:
            reason = (
                f"{c.config.method} is faster alone, but the copies around it cost more"
                if wanted == "dense" or c.config.method != "dense"
                else "saves copies around it"
            )
        out.append(replace(moved, reason=reason))
    return out


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

    def total(self, ours: frozenset[str], users: Mapping[str, tuple[str, ...]]) -> float:
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
    best: tuple[float, frozenset[str]] = (costs.total(frozenset(), users), frozenset())
    for start in (frozenset[str](), able, winners):
        current, spent = start, costs.total(start, users)
        while True:
            moves = [(costs.total(current ^ {n}, users), current ^ {n}) for n in able]
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
        if passes(node) or (node.op == "getitem" and node.args[0].name in found):
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
    ours = [node for node in graph.nodes if node.name in set(able)]
    near = {n: node.conv.dtypes.input for node in ours if node.conv for n in (node.name, *_maps(node))}
    names = {s: kind for name, kind in near.items() for s in through.get(name, (name,)) if len(shapes.get(s, ())) in (2, 3, 4)}
    known: dict[tuple[Shape, str], float] = {}
    costs = {}
    for name, kind in names.items():
        shape = image_shape(shapes[name])
        if (shape, kind) not in known:
            plain, bordered = Layout("contiguous", shape[3], dtype=kind), Layout("planar", shape[3] + 1, (1, 1, 1, 1), dtype=kind)
            known[shape, kind] = time_copy(shape, plain, bordered, target, rounds)
        costs[name] = known[shape, kind]
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
