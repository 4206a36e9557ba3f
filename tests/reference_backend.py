"""A third backend: a "device" that is the float64 reference, with a clock that is told what time it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aerogel.backends import Backend, Runner
from aerogel.capture import interpret
from aerogel.capture.network import Network
from aerogel.ir import ALONE, Array, Config, Conv, Node, Other, Packed, Place, Plan, Stats, Weight
from aerogel.reference import reference

ABLE = ("dense", "direct")


class ReferenceForm:
    """Any method here: the weight as it is, and the reference for a kernel."""

    def __init__(self, name: str) -> None:
        self.NAME = name

    def refuse(self, conv: Conv, target: Any, stats: Stats) -> str | None:
        return None if self.NAME in ABLE else f"the reference has no {self.NAME}"

    def configs(self, conv: Conv, target: Any, stats: Stats) -> Iterator[Config]:
        yield Config.make(self.NAME)

    def pack(self, weight: Array, conv: Conv, config: Config) -> Packed:
        return Packed(self.NAME, 1, {"weight": weight})

    def unpack(self, packed: Packed, conv: Conv) -> Array:
        return packed.arrays["weight"]


class Reference(Backend):
    """`times_us` says what a method takes; whatever else is timed takes OURS if it ran here, else THEIRS."""

    OURS, THEIRS = 10.0, 40.0

    def __init__(self, times_us: Mapping[str, float]) -> None:
        self.target = Other("reference-float64")
        self.times_us = times_us
        self.ran = 0

    def form(self, name: str) -> ReferenceForm:
        return ReferenceForm(name)

    def candidate(
        self, conv: Conv, config: Config, weight: Weight, x: Array, bias: Array, place: Place = ALONE
    ) -> Callable[[], object]:
        return Timed(lambda: self.output(conv, config, weight, x, torch.from_numpy(bias), None), config)

    def output(
        self,
        conv: Conv,
        config: Config,
        weight: Weight,
        x: Array,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Array:
        added = np.zeros(conv.k) if bias is None else bias.double().numpy()
        beside = np.zeros(conv.y_shape) if residual is None else residual.double().numpy()
        return reference(x.astype(float), weight.array.astype(float), conv, added, beside)

    def clock(self, run: Callable[[], object], repeats: int) -> float:
        before = self.ran
        run()
        if isinstance(run, Timed):
            return self.times_us[run.config.method]
        return self.OURS if self.ran > before else self.THEIRS

    def runner(self, network: Network, plan: Plan) -> ReferenceRunner:
        return ReferenceRunner(self, network, plan)


@dataclass
class Timed:
    run: Callable[[], object]
    config: Config

    def __call__(self) -> object:
        return self.run()


class ReferenceRunner(Runner):
    def __init__(self, backend: Reference, network: Network, plan: Plan) -> None:
        self.backend = backend
        self.network = network
        self.configs = {choice.node: choice.config for choice in plan.choices}

    def __call__(self, inputs: list[Any]) -> list[Any]:
        self.backend.ran += 1
        graph = self.network.graph
        values: dict[str, Any] = {**self.network.constants, **dict(zip(graph.inputs, inputs, strict=True))}
        for node in graph.nodes:
            ours = node.conv is not None and node.name in self.configs
            values[node.name] = self._layer(node, values) if ours else interpret.call(node, values)
        return self.network.outputs(values)

    def _layer(self, node: Node, values: Mapping[str, Any]) -> Tensor:
        assert node.conv is not None
        name, _, bias, residual = node.conv_inputs()
        x = values[name]
        shape = (*x.shape, 1, 1)[:4]
        conv = node.conv.at(shape[0], shape[2], shape[3])
        arrays = self.network.weight(node), x.reshape(shape).numpy()
        others = values.get(bias or ""), values.get(residual or "")
        y = self.backend.output(conv, self.configs[node.name], *arrays, *others)
        return torch.from_numpy(y).to(x.dtype).reshape(y.shape[: x.dim()])
