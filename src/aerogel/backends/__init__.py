"""Where a network runs: the CPU of this machine, or a GPU. The tuner knows this page and nothing below it.

A backend must say

    target                  what it is; its text is part of every record and plan
    form(name)              how a method runs here: a Form (methods/__init__.py)
    candidate(...)          one configuration of a layer as a call that can be timed
    output(...)             one run of a configuration on real numbers, the result in float64
    runner(network, plan)   a network under a plan as a function of its inputs

and may say, where it is so,

    device                  where the tensors of a call are, as torch writes it: "cpu", "cuda:1"
    clock(run, repeats)     microseconds of one run, by a clock of its own
    meter(run, repeats)     the same with CPU time beside it, which tells a run that other work held up
    half(dtype)             element types of a convolution in half precision
    host(...)               the model and calls as they are read, where that is elsewhere
    suits(target)           whether a plan made for that target can be replayed here
    image_by_image          whether larger batches may be faster one image after another
    places(...)             where the maps around each layer will stand, so that it is timed there
    active(...)             of a method that skips zeros of its input: the share that it cannot skip
    crossings(...), entry(...)   calls that bring values to and from its kernels, where those cost time
    in_network(...)         runs of the whole network that say what each layer takes
    with_pool(...)          a layer and the pooling after it as two calls, and as one
    remarks(...)            what is to be said of a layer that the plan does not show
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.backends.meter import Sample
from aerogel.capture.network import Network
from aerogel.capture.nodes import Shapes
from aerogel.errors import AerogelError
from aerogel.ir import ALONE, Array, Choice, Config, Conv, Dtypes, Graph, Node, Place, Plan, Pool, Weight
from aerogel.methods import Form

Trial = Callable[[], object]
"""A call that can be timed."""


FAILED = "does not run on this device"
"""Part of every refusal of a configuration that failed to build or to run here."""


class CandidateFailed(AerogelError):
    """A configuration that a device failed to build or to run: its driver or compiler rejects it. The tuner
    refuses that configuration with this message and goes on."""

    @classmethod
    def because(cls, config: Config, error: BaseException) -> CandidateFailed:
        """Describe the failure by the first line of the error."""
        lines = (line.strip() for line in str(error).splitlines())
        cause = next((line for line in lines if line), type(error).__name__)
        return cls(f"{config} {FAILED}: {cause[:200]}")


@dataclass(frozen=True)
class Crossings:
    """What it takes to bring values to and from kernels of ours: for each value a call that copies it (values
    alike share one), and the nodes that read it in the end, "" for the caller."""

    copies: Mapping[str, Trial]
    readers: Mapping[str, tuple[str, ...]]


def host_clock(run: Trial, repeats: int) -> float:
    """Microseconds of one of several repeats, by the host's own clock."""
    began = time.perf_counter_ns()
    for _ in range(repeats):
        run()
    return (time.perf_counter_ns() - began) / 1000 / repeats


class Runner:
    """A network under a plan: outputs for inputs in the order of the graph's, which were looked at."""

    limit: int = 1 << 30
    """Bytes of programs and workspaces kept between calls, beside what the last call used."""
    failures: Mapping[str, str] = MappingProxyType({})
    """Nodes whose kernel failed on this device, and why; torch computes them instead."""

    def __call__(self, inputs: list[Any]) -> list[Any]:
        raise NotImplementedError

    def share_memory(self, other: Runner) -> None:
        """Keep memory within the limit of another runner, where that means anything."""
        return

    def forget(self) -> None:
        """As if never called: memory and code of all sizes are given back, and what was seen of the data."""
        return

    def workspace_bytes(self) -> int:
        """Bytes bound now and not in use."""
        return 0


class Backend:
    """The methods that raise are those that a backend must have; the others hold for the plainest one."""

    target: Any
    device: str = "cpu"
    image_by_image: bool = False

    @property
    def device_type(self) -> str:
        """The kind of `device`, by which torch switches autocast: "cpu" or "cuda"."""
        return self.device.partition(":")[0]

    def form(self, name: str) -> Form:
        raise NotImplementedError

    def candidate(
        self, conv: Conv, config: Config, weight: Weight, x: Array, bias: Array, place: Place = ALONE
    ) -> Trial:
        raise NotImplementedError

    def output(
        self,
        conv: Conv,
        config: Config,
        weight: Weight,
        x: Array,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> Array:
        raise NotImplementedError

    def runner(self, network: Network, plan: Plan) -> Runner:
        raise NotImplementedError

    def suits(self, target: object) -> bool:
        """Whether a plan made for this target can be replayed here."""
        return str(target) == str(self.target)

    def clock(self, run: Trial, repeats: int) -> float:
        return host_clock(run, repeats)

    def meter(self, run: Trial, repeats: int) -> Sample:
        """Measure one of several repeats; without CPU time a run is not judged."""
        return Sample(self.clock(run, repeats))

    def meter_on_host(self, run: Trial, repeats: int) -> Sample:
        """Measure a call that may be another runtime's, by the host's clock."""
        return Sample(host_clock(run, repeats))

    def half(self, dtype: str) -> Dtypes:
        return Dtypes.of(dtype)

    def host(self, model: Any, calls: Sequence[Any]) -> tuple[Any, list[Any]]:
        return model, list(calls)

    def places(
        self, network: Network, shapes: Shapes, configs: Mapping[str, Config] | None = None
    ) -> Mapping[str, Place]:
        """By node, under these configurations or before there are any; a layer that is not there is timed
        alone."""
        return {}

    def active(self, conv: Conv, config: Config, weight: Weight, x: Array) -> float:
        return 1.0

    def crossings(self, graph: Graph, shapes: Shapes, able: Collection[str]) -> Crossings | None:
        """Of the values next to the convolutions `able`; None where nothing is ever copied."""
        return None

    def entry(self, conv: Conv, config: Config) -> Trial | None:
        """The copy that a layer needs of its input, whoever made that; None where it needs none."""
        return None

    def in_network(
        self, network: Network, shapes: Shapes, plans: Sequence[Mapping[str, Choice]]
    ) -> list[Callable[[list[Any]], dict[str, float]]] | None:
        """For each plan a run on inputs that gives microseconds by node; None where they cannot be told."""
        return None

    def with_pool(
        self, conv: Conv, config: Config, weight: Weight, x: Array, node: Node, pool: Pool
    ) -> tuple[Trial, Trial] | None:
        return None

    def remarks(self, network: Network, shapes: Shapes, choices: Sequence[Choice]) -> dict[str, str]:
        return {}


_chosen: ContextVar[Backend | None] = ContextVar("aerogel backend", default=None)


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Within it compile() and load() run models there: on an OpenCL GPU, or PoCL in the tests."""
    token = _chosen.set(backend)
    try:
        yield
    finally:
        _chosen.reset(token)


def cuda_index(call: Any) -> int | None:
    """Return the number of the GPU that holds a call's first CUDA tensor, or None if there is none."""
    tensors = (v for v in pytree.tree_leaves(call) if isinstance(v, torch.Tensor) and v.is_cuda)
    return next((t.device.index for t in tensors), None)


def backend_of(call: Any = ()) -> Backend:
    """Where a call's tensors are: on a CUDA device, where `using` says, or on the CPU."""
    if (number := cuda_index(call)) is not None:
        from aerogel.backends.gpu.backend import on_cuda

        return on_cuda(number)
    if (chosen := _chosen.get()) is not None:
        return chosen
    from aerogel.backends.cpu.backend import Cpu

    return Cpu()
