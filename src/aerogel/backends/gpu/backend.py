"""A GPU, as the tuner knows it: layers timed on the device beside torch's, from and to maps in the network's
own layout."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.backends import Backend, CandidateFailed, Trial
from aerogel.backends.gpu import trial
from aerogel.backends.gpu.device import FORMAT, Device
from aerogel.backends.gpu.runner import GpuRunner
from aerogel.capture.network import Network
from aerogel.codegen.gpu.launch import HALVES
from aerogel.ir import ALONE, Array, Config, Conv, Dtypes, Node, Place, Plan, Pool, Weight
from aerogel.methods import GpuForm, gpu_form


class OnGpu(Backend):
    """A device, and the layout in which a network's maps go from layer to layer: that of the first image it
    is given."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._layout = FORMAT["contiguous"]
        self.target = device.target
        self.device = str(device.here(torch.empty(0)).device)

    def form(self, name: str) -> GpuForm:
        return gpu_form(name)

    def clock(self, run: Trial, repeats: int) -> float:
        return self._device.clock(run, repeats)

    def host(self, model: Any, calls: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Models are read on the CPU. The layout of the first image is that of the network's maps."""
        images = [v for v in pytree.tree_leaves(calls[0]) if isinstance(v, torch.Tensor) and v.dim() == 4]
        last = bool(images) and not images[0].is_contiguous()
        last = last and images[0].is_contiguous(memory_format=torch.channels_last)
        self._layout = FORMAT["channels_last" if last else "contiguous"]
        there = [pytree.tree_map_only(torch.Tensor, lambda t: t.cpu(), call) for call in calls]
        return copy.deepcopy(model).cpu() if isinstance(model, torch.nn.Module) else model, there

    def half(self, dtype: str) -> Dtypes:
        return HALVES[1] if dtype == "f16" else Dtypes.of(dtype)

    def candidate(
        self, conv: Conv, config: Config, weight: Weight, x: Array, bias: Array, place: Place = ALONE
    ) -> Trial:
        with _refusing(config):
            call = trial.candidate(self._device, conv, config, weight, x, bias, self._layout)
            self._device.clock(call, 1)  # drivers load and Triton compiles at the first run
        return call

    def output(
        self,
        conv: Conv,
        config: Config,
        weight: Weight,
        x: Array,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> Array:
        with _refusing(config):
            return trial.output(self._device, conv, config, weight, x, bias, residual)

    def runner(self, network: Network, plan: Plan) -> GpuRunner:
        return GpuRunner(network, self._device, plan)

    def active(self, conv: Conv, config: Config, weight: Weight, x: Array) -> float:
        with _refusing(config):
            return trial.active(self._device, conv, config, weight, x)

    def with_pool(
        self, conv: Conv, config: Config, weight: Weight, x: Array, node: Node, pool: Pool
    ) -> tuple[Trial, Trial] | None:
        if not gpu_form(config.method).takes_pool(conv, config, pool):
            return None
        try:
            with _refusing(config):
                calls = trial.with_pool(self._device, conv, config, weight, x, node, pool)
                for call in calls:
                    self._device.clock(call, 1)
        except CandidateFailed:  # the layer alone runs: its pooling stays apart
            return None
        return calls


@contextmanager
def _refusing(config: Config) -> Iterator[None]:
    """Turn any failure within it into the refusal of this configuration: compilers and drivers have their
    own exceptions, and one kernel that they reject must not end compile()."""
    try:
        yield
    except Exception as error:
        raise CandidateFailed.because(config, error) from error


def on_cuda(number: int) -> OnGpu:
    """Return the backend of one GPU."""
    from aerogel.backends.gpu.cuda import Cuda

    return OnGpu(Cuda(number))
