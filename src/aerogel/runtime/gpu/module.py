"""A network on a device: its convolutions as the plan says, everything else by torch beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.candidate import Config
from aerogel.capture import interpret
from aerogel.graph import Graph, Node, Special
from aerogel.methods.gpu import method
from aerogel.problem import Conv
from aerogel.runtime.gpu import FORMAT, Device, Queue
from aerogel.runtime.module import Network


class OnDevice(torch.nn.Module):
    """Runs `network` with these configurations; layers without one, and other than images, are torch's."""

    def __init__(self, network: Network, device: Device, choices: Mapping[str, Config]) -> None:
        super().__init__()
        self.network, self.device, self.choices = network, device, choices
        self.graph = _moved(network.graph) if device.target.kind == "cuda" else network.graph
        self.constants = {name: device.here(value) for name, value in network.constants.items()}
        self.layers: dict[tuple[str, tuple[int, ...]], Layer | None] = {}
        self.run = device.captured(self._run)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self.network.flat(args, kwargs)
        self.network.check(inputs, "cuda" if self.device.target.kind == "cuda" else "cpu")
        with torch.no_grad():
            return pytree.tree_unflatten(self.run(inputs), self.network.captured.out_spec)

    def _run(self, inputs: list[Any]) -> list[Any]:
        values: dict[str, Any] = {**self.constants, **dict(zip(self.graph.inputs, inputs, strict=True))}
        for node in self.graph.nodes:
            values[node.name] = self._conv(node, values) if node.conv is not None else interpret.call(node, values)
        return self.network.outputs(values)

    def _conv(self, node: Node, values: Mapping[str, Any]) -> torch.Tensor:
        name, _, bias, residual = node.conv_inputs()
        x: torch.Tensor = values[name]
        config = self.choices.get(node.name)
        if config is None or config.method == "dense" or x.dim() != 4:
            chosen = x if config is None or x.dim() != 4 else x.contiguous(memory_format=FORMAT[layout_of(config)])
            return interpret.convolve(node, {**values, name: chosen})
        key = node.name, tuple(x.shape)
        if key not in self.layers:
            self.layers[key] = self._layer(node, x, config)
        layer = self.layers[key]
        return interpret.convolve(node, values) if layer is None else layer(x, values.get(bias or ""), values.get(residual or ""))

    def _layer(self, node: Node, x: torch.Tensor, config: Config) -> Layer | None:
        """The node for this size of image; None where its method refuses it."""
        assert node.conv is not None
        n, _, h, w = x.shape
        conv, stats = node.conv.at(n, h, w), self.network.stats(node)
        if method(config.method).refuse(conv, self.device.target, stats) is not None:
            return None
        return Layer(self.device, conv, config, self.network.arrays[node.conv_inputs()[1]])


class Layer:
    """One convolution under one configuration of ours: a function of tensors, whatever their layout."""

    def __init__(self, device: Device, conv: Conv, config: Config, weight: Any) -> None:
        own = method(config.method)
        self.device, self.conv, self.layout = device, conv, own.LAYOUT
        self.queue: Queue = device.prepared(own.build(own.pack(weight, conv, config), conv, config))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        y, found = self.device.fresh(self.conv.y_shape, self.layout)
        given = {"x": x, "bias": bias, "residual": residual}
        self.queue({"y": y} | {name: self.device.resident(t, self.layout) for name, t in given.items() if t is not None})
        return found()


def layout_of(config: Config) -> str:
    """The layout in which a configuration of dense runs."""
    return "channels_last" if config["channels_last"] else "contiguous"


def _moved(graph: Graph) -> Graph:
    """Tensors that the model makes on its device are made on the GPU: it was read on the CPU."""

    def moved(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(moved(item) for item in argument)
        return Special("device", "cuda") if isinstance(argument, Special) and argument.kind == "device" else argument

    nodes = (replace(n, args=moved(n.args), kwargs={k: moved(v) for k, v in n.kwargs.items()}) for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))
