"""A network on a device: its convolutions as the plan says, everything else by torch beside them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from aerogel.backends import CandidateFailed, Runner
from aerogel.backends.gpu.device import FORMAT, Device
from aerogel.backends.gpu.layer import Layer
from aerogel.backends.watch import Watch, without
from aerogel.capture import interpret
from aerogel.capture.network import Network
from aerogel.capture.nodes import pairs, pooling_of
from aerogel.errors import ShapeError
from aerogel.ir import Config, Graph, Idle, Node, Plan, Special
from aerogel.locks import Lock
from aerogel.methods import BASELINE, gpu_form

LOOK = 64
"""One call in so many is asked what it skipped: to ask, the device must have finished."""
Layers = dict[tuple[str, tuple[int, ...], Config], Layer | None]


class GpuRunner(Runner):
    """Layers without a choice, and other than images, are torch's."""

    def __init__(self, network: Network, device: Device, plan: Plan) -> None:
        self.network = network
        self.device = device
        self.plan = plan
        nodes, after = {node.name: node for node in network.graph.nodes}, pairs(network.graph)
        self.pools = {c.node: nodes[after[c.node]] for c in plan.choices if c.pooled}
        self._where = device.here(torch.empty(0)).device
        self.graph = _moved(network.graph) if self._where.type == "cuda" else network.graph
        self._lock = Lock()
        self.constants = {name: device.here(value) for name, value in network.real().items()}
        self.forget()

    def forget(self) -> None:
        tuned = {c.node: c for c in self.plan.choices}
        configs = {node: choice.config for node, choice in tuned.items()}
        others = without(tuned)
        with self._lock:
            self._layers: Layers = {}
            self._watch = Watch(self.plan, LOOK)
            self._configs = {True: configs, False: {**configs, **others}}
            self._always_skips = not others
            self._replay = self.device.captured(self._run)
            self.failures = self._failures = dict[str, str]()

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run one call at a time: layers have one scratch memory each, and a CUDA graph one set of inputs and
        outputs. Values keep the network's element types, whatever autocast is on."""
        with self._lock, torch.no_grad(), self._without_autocast():
            skips = self._watch.skips()
            found = self._replay([skips or self._always_skips, *inputs])
            if skips and self._watch.looks():
                self._watch.look(self._active())
        return found

    def _without_autocast(self) -> AbstractContextManager[object]:
        kind = self._where.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    def _active(self) -> dict[str, float]:
        skipping = {c.node for c in self.plan.choices if c.limit is not None}
        layers = [(name, layer) for (name, *_), layer in self._layers.items() if layer and name in skipping]
        return {name: layer.active() for name, layer in layers if layer.most}

    def _run(self, call: list[Any]) -> list[Any]:
        """Compute the outputs for inputs. The first item of the call says whether layers may skip zeros."""
        skips, *inputs = call
        configs = self._configs[skips]
        values: dict[str, Any] = {**self.constants, **dict(zip(self.graph.inputs, inputs, strict=True))}
        for node in self.graph.nodes:
            if node.name in values:  # a convolution has pooled it
                continue
            if node.conv is None:
                values[node.name] = interpret.call(node, values)
            else:
                name, value = self._conv(node, configs.get(node.name), values)
                values[name] = value
        return self.network.outputs(values)

    def _conv(self, node: Node, config: Config | None, values: Mapping[str, Any]) -> tuple[str, torch.Tensor]:
        """What a convolution gives, or the pooling that is done with it: its name and value."""
        name, _, bias, residual = node.conv_inputs()
        x: torch.Tensor = values[name]
        if config is None or x.dim() not in (2, 4):
            return node.name, interpret.convolve(node, values)
        if x.dim() == 2:  # features are an image of one pixel
            image = {n: values[n][:, :, None, None] for n in (name, residual) if n}
            return node.name, self._conv(node, config, {**values, **image})[1].flatten(1)
        if config.method == BASELINE:
            laid = x.contiguous(memory_format=FORMAT[gpu_form(config.method).layout(config)])
            return node.name, interpret.convolve(node, {**values, name: laid})
        key = node.name, tuple(x.shape), config
        added = values.get(bias or ""), values.get(residual or "")
        if key not in self._layers:
            self._layers[key] = self._tried(node, config, x, *added)
        if (layer := self._layers[key]) is None:
            return node.name, interpret.convolve(node, values)
        y = layer(x, *added)
        return self.pools[node.name].name if layer.pool is not None else node.name, y

    def _tried(
        self,
        node: Node,
        config: Config,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> Layer | None:
        """Build the node for this size of image and run it once, as drivers load and Triton compiles at the
        first run. None where its method refuses the size or the kernel fails: torch then computes it."""
        try:
            layer = self._layer(node, x, config)
            if layer is not None:
                layer(x, bias, residual)
        except (ShapeError, torch.OutOfMemoryError):  # the call's own fault, not the kernel's
            raise
        except Exception as error:  # compilers and drivers have exceptions of their own
            reason = str(CandidateFailed.because(config, error))
            if node.name not in self._failures:
                warnings.warn(f"torch computes layer '{node.layer or node.name}': {reason}", stacklevel=2)
            self._failures[node.name] = reason
            return None
        return layer

    def _layer(self, node: Node, x: torch.Tensor, config: Config) -> Layer | None:
        """The node for this size of image; None where its method refuses it."""
        assert node.conv is not None
        n, _, h, w = x.shape
        conv, stats = node.conv.at(n, h, w), replace(self.network.stats(node), idle=Idle(100, 100, 100))
        form = gpu_form(config.method)
        if form.refuse(conv, self.device.target, stats) is not None:
            return None
        pool = pooling_of(self.pools[node.name]) if node.name in self.pools else None
        if pool is not None and (not form.takes_pool(conv, config, pool) or min(pool.out(*conv.out)) < 1):
            pool = None
        return Layer(self.device, conv, config, self.network.weight(node), pool)


def _moved(graph: Graph) -> Graph:
    """Tensors that the model makes on its device are made on the current GPU, which is the device's own while
    it runs: the model was read on the CPU."""

    def moved(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(moved(item) for item in argument)
        return (
            Special("device", "cuda")
            if isinstance(argument, Special) and argument.kind == "device"
            else argument
        )

    nodes = (
        replace(n, args=moved(n.args), kwargs={k: moved(v) for k, v in n.kwargs.items()}) for n in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))
