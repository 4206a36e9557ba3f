"""Choices for a network on a GPU: the same search as on the CPU, timed on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from aerogel.codegen.gpu.launch import HALVES
from aerogel.graph import Node
from aerogel.layout import Array
from aerogel.methods.dense import KINDS
from aerogel.methods.gpu import METHODS, actsparse, method
from aerogel.plan import Choice, Timing
from aerogel.problem import Dtypes
from aerogel.runtime import pooling
from aerogel.runtime.fused import pairs
from aerogel.runtime.gpu import Device
from aerogel.runtime.gpu.trial import once, share_active, trial, with_pool
from aerogel.runtime.module import Network
from aerogel.tune import search
from aerogel.tune.activity import Seen, seen
from aerogel.tune.choose import Advance, Asked, halved


def tuned(
    network: Network, inputs: list[Any], asked: Asked, device: Device, advance: Advance
) -> tuple[Network, list[Choice], tuple[str, ...]]:
    """The network in the precision asked for, a Choice for each convolution, and what is to be said of it."""
    network.shapes(inputs)
    real = seen(network, asked.samples)
    if asked.dtype is None:
        return network, _layers(network, inputs, asked, device, real, advance), ()
    kind = KINDS[asked.dtype]
    dtypes = HALVES[1] if kind == "f16" else Dtypes.of(kind)

    def layers(half: Network) -> list[Choice]:
        return _layers(half, inputs, asked, device, real, advance)

    return halved(network, inputs, asked, dtypes, layers, partial(once, device), advance)


def _layers(
    network: Network, inputs: list[Any], asked: Asked, device: Device, real: Mapping[str, Seen], advance: Advance
) -> list[Choice]:
    """One Choice for each convolution; layers alike share their timings. By rule where nothing is to be timed."""
    shapes, found = network.shapes(inputs), dict[str, Choice]()
    bench = search.Bench(METHODS, method, trial(device, inputs), device.clock)
    nodes = {node.name: node for node in network.graph.nodes}
    after = {name: nodes[pool] for name, pool in pairs(network.graph).items()}
    for group in search.group_layers(network.graph, shapes, network.arrays, {n: s.idle for n, s in real.items()}):
        (node, conv), weight = group[0], network.arrays[group[0][0].conv_inputs()[1]]
        advance(f"{node.layer or node.name} {conv}")
        if asked.effort is None:
            timed = search.rule(conv, weight, device.target, asked.names, bench)
        else:
            own = real.get(node.name)
            timed = search.time_layer(conv, weight, device.target, asked.names, asked.effort, seen=own, bench=bench)
            if timed.config.method in search.SKIPPING and own is not None:
                pool = after.get(node.name)
                timed = _skipping(timed, weight, own.fitted(conv.x_shape), device, bench, asked.effort.rounds, pool)
        for other, alike in group:
            named = replace(timed, layer=other.layer or other.name, node=other.name, conv=alike)
            pooled = timed.pooled and other.name in after and pooling.read(after[other.name]) == pooling.read(after[node.name])
            found[other.name] = replace(named, sparsity=network.stats(other).sparsity, pooled=pooled)
    return [found[node.name] for node in network.convs()]


def _skipping(
    choice: Choice, weight: Array, x: Array, device: Device, bench: search.Bench, rounds: int, pool: Node | None
) -> Choice:
    """The choice with the share of active positions up to which it pays, and joined with the pooling after it where that is faster.
    Both are measured: on `x`, on an input without zeros, and on the fastest method that skips nothing."""
    conv, config = choice.conv, choice.config
    other = next(c for c, _ in choice.tried if c.method not in search.SKIPPING)
    bias, full = np.zeros(conv.k, np.float32), np.where(x == 0, np.float32(1), x)
    calls = [bench.candidate(conv, c, weight, given, bias, None) for c, given in ((config, x), (config, full), (other, x))]
    sparse, dense, others = (float(np.median(t)) for t in bench.interleaved(calls, rounds))
    most = 1.0
    if dense > others and dense > sparse:
        active = share_active(device, conv, config, weight, x)
        most = float(np.clip(active + (others - sparse) / (dense - sparse) * (1 - active), 0.0, 1.0))
    choice = replace(choice, most=most)
    own = None if pool is None else pooling.read(pool)
    if pool is None or own is None or not actsparse.takes(conv, config, own):
        return choice
    apart, together = bench.interleaved(with_pool(device, conv, config, weight, x, pool, own), rounds)
    timing = Timing.of(together, apart)
    return replace(choice, pooled=True, in_network=timing) if search.keep(timing) else choice
