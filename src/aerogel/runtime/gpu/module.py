"""A network on a device: its convolutions as the plan says, everything else by torch beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.candidate import Config, Idle
from aerogel.capture import interpret
from aerogel.graph import Graph, Node, Special
from aerogel.methods.gpu import actsparse, method
from aerogel.plan import Choice
from aerogel.runtime import pooling
from aerogel.runtime.fused import pairs
from aerogel.runtime.gpu import FORMAT, Device
from aerogel.runtime.gpu.layer import Layer, layout_of
from aerogel.runtime.module import Network

LOOK = 64
"""Calls after which it is looked whether layers that skip zeros of x still find them."""


class OnDevice(torch.nn.Module):
    """Runs `network` with these choices; layers without one, and other than images, are torch's."""

    def __init__(self, network: Network, device: Device, choices: Sequence[Choice]) -> None:
        super().__init__()
        self.network, self.device, self.choices = network, device, {c.node: c.config for c in choices}
        nodes, after = {node.name: node for node in network.graph.nodes}, pairs(network.graph)
        self.pools = {c.node: nodes[after[c.node]] for c in choices if c.pooled}
        self.limits = {c.node: c.most for c in choices if c.most is not None}
        self.calls = 0
        self.where = device.here(torch.empty(0)).device.type
        self.graph = _moved(network.graph) if self.where == "cuda" else network.graph
        self.constants = {name: device.here(value) for name, value in network.constants.items()}
        self.layers: dict[tuple[str, tuple[int, ...]], Layer | None] = {}
        self.run = device.captured(self._run)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self.network.flat(args, kwargs)
        self.network.check(inputs, self.where)
        with torch.no_grad():
            found = self.run(inputs)
        self.calls += 1
        if self.limits and self.calls % LOOK == 1:
            self._look()
        return pytree.tree_unflatten(found, self.network.captured.out_spec)

    def _look(self) -> None:
        """Layers whose input has too few zeros left are torch's from now on."""
        full = {n for (n, _), layer in self.layers.items() if layer and n in self.limits and layer.active() > self.limits[n]}
        if full:
            self.choices = {n: c for n, c in self.choices.items() if n not in full}
            self.limits = {n: limit for n, limit in self.limits.items() if n not in full}
            self.run = self.device.captured(self._run)

    def _run(self, inputs: list[Any]) -> list[Any]:
        values: dict[str, Any] = {**self.constants, **dict(zip(self.graph.inputs, inputs, strict=True))}
        for node in self.graph.nodes:
            if node.name not in values:
                name, value = (node.name, interpret.call(node, values)) if node.conv is None else self._conv(node, values)
                values[name] = value
        return self.network.outputs(values)

    def _conv(self, node: Node, values: Mapping[str, Any]) -> tuple[str, torch.Tensor]:
        """What a convolution gives, or the pooling that is done with it: its name and value."""
        name, _, bias, residual = node.conv_inputs()
        x: torch.Tensor = values[name]
        config = self.choices.get(node.name)
        if config is None or config.method == "dense" or x.dim() != 4:
            chosen = x if config is None or x.dim() != 4 else x.contiguous(memory_format=FORMAT[layout_of(config)])
            return node.name, interpret.convolve(node, {**values, name: chosen})
        key = node.name, tuple(x.shape)
        if key not in self.layers:
            self.layers[key] = self._layer(node, x, config)
        if (layer := self.layers[key]) is None:
            return node.name, interpret.convolve(node, values)
        y = layer(x, values.get(bias or ""), values.get(residual or ""))
        return self.pools[node.name].name if layer.pool is not None else node.name, y

    def _layer(self, node: Node, x: torch.Tensor, config: Config) -> Layer | None:
        """The node for this size of image; None where its method refuses it."""
        assert node.conv is not None
        n, _, h, w = x.shape
        conv, stats = node.conv.at(n, h, w), replace(self.network.stats(node), idle=Idle(100, 100, 100))
        if method(config.method).refuse(conv, self.device.target, stats) is not None:
            return None
        pool = pooling.read(self.pools[node.name]) if node.name in self.pools else None
        if pool is not None and (not actsparse.takes(conv, config, pool) or min(pool.out(*conv.out)) < 1):
            pool = None
        return Layer(self.device, conv, config, self.network.arrays[node.conv_inputs()[1]], pool)


def _moved(graph: Graph) -> Graph:
    """Tensors that the model makes on its device are made on the GPU: it was read on the CPU."""

    def moved(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(moved(item) for item in argument)
        return Special("device", "cuda") if isinstance(argument, Special) and argument.kind == "device" else argument

    nodes = (replace(n, args=moved(n.args), kwargs={k: moved(v) for k, v in n.kwargs.items()}) for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))
