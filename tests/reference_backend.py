"""Backends with a clock of the test's own, so that no verdict depends on how busy the machine is: a third
backend, a "device" that is the float64 reference; and the CPU with its own kernels and methods.

    with using(ClockedCpu(by_nonzeros)):
        fast = aerogel.compile(model, x)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aerogel.backends import Backend, Runner
from aerogel.backends.cpu.backend import Cpu
from aerogel.backends.cpu.runner import CpuRunner
from aerogel.backends.meter import Sample
from aerogel.capture import interpret
from aerogel.capture.network import Network
from aerogel.ir import ALONE, Array, Config, Conv, Node, Other, Packed, Place, Plan, Stats, Weight
from aerogel.methods import BASELINE, method
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


class Clock:
    """A trial says itself what it takes; whatever else is timed takes OURS if it ran here, else THEIRS."""

    OURS, THEIRS = 10.0, 40.0
    ran = 0

    def clock(self, run: Callable[[], object], repeats: int) -> float:
        before = self.ran
        run()
        if isinstance(run, Timed):
            return run.us
        return self.OURS if self.ran > before else self.THEIRS


class Reference(Clock, Backend):
    """`times_us` says what a method takes."""

    def __init__(self, times_us: Mapping[str, float]) -> None:
        self.target = Other("reference-float64")
        self.times_us = times_us

    def form(self, name: str) -> ReferenceForm:
        return ReferenceForm(name)

    def candidate(
        self, conv: Conv, config: Config, weight: Weight, x: Array, bias: Array, place: Place = ALONE
    ) -> Callable[[], object]:
        us = self.times_us[config.method]
        return Timed(lambda: self.output(conv, config, weight, x, torch.from_numpy(bias), None), us)

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

    def runner(self, network: Network, plan: Plan) -> ReferenceRunner:
        return ReferenceRunner(self, network, plan)


@dataclass
class Timed:
    run: Callable[[], object]
    us: float

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


Cost = Callable[[Conv, Config, Weight, float], float]
"""Microseconds of a configuration of a layer, of whose input a share is active."""


def by_nonzeros(conv: Conv, config: Config, weight: Weight, active: float) -> float:
    """Return one microsecond for ten thousand products: all of them where a method is dense."""
    share = 1.0 if config.method == BASELINE else (1 - weight.stats.sparsity) * active
    return 1.0 + share * float(np.prod(conv.weight_shape)) * float(np.prod(conv.y_shape)) / conv.k / 1e4


class ClockedCpu(Clock, Cpu):
    """This machine's kernels, each taking what `cost` says; nothing else on the way costs time."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self.cost = cost

    def candidate(
        self, conv: Conv, config: Config, weight: Weight, x: Array, bias: Array, place: Place = ALONE
    ) -> Timed:
        skips = method(config.method).SKIPS_INPUT
        active = self.active(conv, config, weight, x) if skips else 1.0
        return Timed(
            super().candidate(conv, config, weight, x, bias, place), self.cost(conv, config, weight, active)
        )

    def meter(self, run: Callable[[], object], repeats: int) -> Sample:
        return Sample(self.clock(run, repeats))

    def runner(self, network: Network, plan: Plan) -> CpuRunner:
        return CountedRunner(self, network, plan)

    def in_network(self, *_: object, **__: object) -> Any:
        return None

    def crossings(self, *_: object, **__: object) -> Any:
        return None

    def entry(self, *_: object, **__: object) -> Any:
        return None


class CountedRunner(CpuRunner):
    """Says to the clock that kernels of ours ran."""

    def __init__(self, backend: ClockedCpu, network: Network, plan: Plan) -> None:
        super().__init__(network, plan, backend.target)
        self.backend = backend

    def __call__(self, inputs: list[Any]) -> list[Any]:
        self.backend.ran += 1
        return super().__call__(inputs)
