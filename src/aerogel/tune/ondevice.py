"""Choices for a network on a GPU: the same search as on the CPU, timed on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aerogel.methods.gpu import METHODS, method
from aerogel.plan import Choice
from aerogel.runtime.gpu import Device
from aerogel.runtime.gpu.trial import trial
from aerogel.runtime.module import Network
from aerogel.tune import search
from aerogel.tune.choose import Advance, Asked


def tuned(network: Network, inputs: list[Any], asked: Asked, device: Device, advance: Advance) -> tuple[Choice, ...]:
    """One Choice for each convolution; layers alike share their timings. By rule where nothing is to be timed."""
    shapes, found = network.shapes(inputs), dict[str, Choice]()
    bench = search.Bench(METHODS, method, trial(device, inputs), device.clock)
    for group in search.group_layers(network.graph, shapes, network.arrays):
        (node, conv), weight = group[0], network.arrays[group[0][0].conv_inputs()[1]]
        advance(f"{node.layer or node.name} {conv}")
        if asked.effort is None:
            timed = search.rule(conv, weight, device.target, asked.names, bench)
        else:
            timed = search.time_layer(conv, weight, device.target, asked.names, asked.effort, bench=bench)
        for other, alike in group:
            sparsity = network.stats(other).sparsity
            found[other.name] = replace(timed, layer=other.layer or other.name, node=other.name, conv=alike, sparsity=sparsity)
    return tuple(found[node.name] for node in network.convs())
