"""One Choice for each convolution: timed or by rule, in half precision if asked.

time each layer's candidates beside dense -> in half precision, leave out those that round too much, and layers of which none is
left -> assign layers to kernels with the copies between them counted -> let the running network decide between the best two
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aerogel.candidate import Config
from aerogel.capture.half import Half
from aerogel.methods.dense import KINDS
from aerogel.plan import Choice, Plan
from aerogel.problem import Dtypes
from aerogel.runtime.eager import Call
from aerogel.runtime.features import FEW
from aerogel.runtime.fused import pairs
from aerogel.runtime.module import Network, Timings
from aerogel.runtime.once import Run, once
from aerogel.runtime.program import NATIVE
from aerogel.runtime.stays import staying
from aerogel.tune import search
from aerogel.tune.activity import seen
from aerogel.tune.assign import assigned
from aerogel.tune.error import accurate
from aerogel.tune.store import Store

Advance = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What the user asked of the tuner, and where its records are."""

    tune: str | float
    effort: search.Effort | None
    names: tuple[str, ...]
    store: Store
    dtype: Any
    samples: list[Call]

    @property
    def dtypes(self) -> Dtypes:
        """Element types of a convolution in half precision: sums in fp16 where the machine has its arithmetic."""
        kind = KINDS[self.dtype]
        able = kind == "f16" and {"avx512fp16", "fp16"} & set(self.store.target.extras)
        return Dtypes(kind, kind, "f16" if able else "f32", kind)

    @property
    def within(self) -> float:
        """How far from torch's an answer may be before it is called different."""
        return 1e-2 if self.dtype is None else 1e-1


def tuned(network: Network, call: Call, asked: Asked, advance: Advance) -> tuple[Network, Plan, tuple[str, ...]]:
    """The network in the precision asked for, its plan, and what is to be said of it. By rule where nothing is to be timed."""
    target, inputs = asked.store.target, network.flat(*call)
    shapes, notes = network.shapes(inputs), tuple[str, ...]()
    if asked.dtype is None:
        choices = _layers(network, shapes, asked, advance)
    else:

        def layers(half: Network) -> list[Choice]:
            return _layers(half, half.shapes(inputs), asked, advance)

        network, choices, notes = halved(network, inputs, asked, asked.dtypes, layers, partial(once, target), advance)
        shapes = network.shapes(inputs)
    if asked.effort is not None:
        advance("choosing layouts")
        choices = assigned(network.graph, shapes, choices, target)
        advance("timing the best two of each layer in the running network")
        choices = _refined(network, shapes, choices, inputs, asked.effort.rounds)
        choices = _joined(network, shapes, choices, inputs, asked.effort.rounds)
    return network, Plan(target, tuple(_heads(network, shapes, choices))), notes


def _heads(network: Network, shapes: Any, choices: list[Choice]) -> list[Choice]:
    """Say of a dense head that a kernel of ours runs it where its features are ours."""
    ours = {c.node for c in choices if c.config.method in NATIVE}
    inside = staying(network.graph, shapes, network.kinds, ours, {c.node for c in choices})
    reason = f"as dense as torch's, but for up to {FEW} images by a kernel of ours (dot): the call stays one segment"
    return [replace(c, reason=reason) if c.node in inside else c for c in choices]


def halved(
    network: Network,
    inputs: list[Any],
    asked: Asked,
    dtypes: Dtypes,
    layers: Callable[[Network], Sequence[Choice]],
    run: Run,
    advance: Advance,
) -> tuple[Network, list[Choice], tuple[str, ...]]:
    """The network in half precision with its choices, and the layers that stay as they were because they would lose too much.
    `layers` chooses, `run` runs a configuration."""
    samples = [network.values(i) for i in (inputs, *(network.flat(*sample) for sample in asked.samples))]
    before = {node.name: node for node in network.convs()}
    stay: frozenset[str] = frozenset()
    while True:
        half = network.halved(Half(dtypes, network.kinds, stay))
        choices, lost = list[Choice](), set[str]()
        weights = {node.name: half.arrays[node.conv_inputs()[1]] for node in half.convs()}
        for choice in layers(half):
            advance(f"{choice.layer}: what half precision costs")
            kept: Choice | None = choice
            if choice.layer not in stay:
                kept = accurate(choice, before[choice.node], weights[choice.node], samples, run)
            lost |= {choice.layer} if kept is None else set()
            choices.append(kept or choice)
        if not lost:
            return half, choices, tuple(f"{layer}: stays f32, it would lose more than dense bf16 does" for layer in sorted(stay))
        stay |= lost


def as_planned(network: Network, plan: Plan, call: Call, asked: Asked) -> Network:
    """The network in the precision of a plan's choices."""
    if asked.dtype is None:
        return network
    network.shapes(network.flat(*call))
    stay = frozenset(c.layer for c in plan.choices if c.conv.dtypes == Dtypes())
    return network.halved(Half(asked.dtypes, network.kinds, stay))


def _refined(network: Network, shapes: Any, choices: list[Choice], inputs: list[Any], rounds: int) -> list[Choice]:
    """What only the running network can say: the pitch of each image size, then the better of each layer's best two."""

    def both(plans: list[dict[str, Config]]) -> Timings | None:
        return network.in_place(shapes, plans, inputs, rounds) if plans[0] != plans[1] else None

    times = both([{c.node: c.config for c in choices}, {c.node: search.narrow(c) for c in choices}])
    choices = choices if times is None else search.pitched(choices, times)
    second = {c.node: search.runner_up(c) for c in choices}
    times = both([{c.node: c.config for c in choices}, second])
    if times is None:
        return choices
    return [search.refined(c, second[c.node], [t.get(c.node, []) for t in times]) for c in choices]


def _joined(network: Network, shapes: Any, choices: list[Choice], inputs: list[Any], rounds: int) -> list[Choice]:
    """Convolutions that do the pooling after them too, where the running network is faster for it."""
    known = pairs(network.graph)
    after = {c.node: known[c.node] for c in choices if c.config.method in NATIVE and c.node in known}
    if not after:
        return choices
    plan = {c.node: c.config for c in choices}
    times = network.in_place(shapes, [plan, plan], inputs, rounds, [(), after])
    return [search.joined(c, after[c.node], times) if c.node in after else c for c in choices]


def _layers(network: Network, shapes: Any, asked: Asked, advance: Advance) -> list[Choice]:
    """One Choice for each convolution; layers alike share their timings."""
    choices = []
    real = seen(network, asked.samples)
    groups = search.group_layers(network.graph, shapes, network.arrays, {name: own.idle for name, own in real.items()})
    effort, store = asked.effort, asked.store
    if effort is not None and effort.seconds is not None:
        effort = replace(effort, seconds=effort.seconds / len(groups))
    for group in groups:
        (node, conv), weight = group[0], network.arrays[group[0][0].conv_inputs()[1]]
        advance(f"{node.layer or node.name} {conv}")
        if effort is None:
            timed = search.rule(conv, weight, store.target, asked.names)
        else:
            own = real.get(node.name)
            kind = f"{asked.tune} {asked.names}" + ("" if own is None else f" {own.idle}")
            found = store.layer(conv, weight, kind)
            near = () if found else store.near(conv, weight, kind)
            timed = found or search.time_layer(conv, weight, store.target, asked.names, effort, near, own)
            if found is None:
                store.put_layer(weight, timed, kind)
        for other, alike in group:
            sparsity, idle = network.stats(other).sparsity, real[other.name].idle if other.name in real else None
            named = replace(timed, layer=other.layer or other.name, node=other.name, conv=alike, sparsity=sparsity, idle=idle)
            choices.append(named)
    order = {node.name: i for i, node in enumerate(network.graph.nodes)}
    return sorted(choices, key=lambda c: order[c.node])
