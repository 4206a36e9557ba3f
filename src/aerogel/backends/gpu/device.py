"""Launching: the same Launches on torch's CUDA tensors (cuda) or in OpenCL buffers (opencl), and a model on
such a device (module).

A device is

    target                             what it is: a Gpu
    prepared(launches)                 a call on buffers by name that queues them: compiled, arrays uploaded
    resident(tensor, layout)           a tensor's buffer, in a layout of torch's
    fresh(shape, layout, dtype)        a buffer to write, and a function that gives it as a tensor
    clock(run, repeats)                microseconds of one run, on the device's own clock where it has one
    captured(run)                      the same function of tensors, with fewer launches where the device can
                                       (CUDA graphs)
    here(tensor)                       a tensor where torch can use it beside our results
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from aerogel.codegen.gpu.launch import AnyLaunch
from aerogel.ir import Gpu

Queue = Callable[[Mapping[str, Any]], None]


class Device(Protocol):
    """The shape of a device, for the type checker."""

    target: Gpu

    def prepared(self, launches: Sequence[AnyLaunch]) -> Queue: ...
    def resident(self, tensor: torch.Tensor, layout: str) -> Any: ...
    def fresh(
        self, shape: tuple[int, ...], layout: str, dtype: torch.dtype = ...
    ) -> tuple[Any, Callable[[], torch.Tensor]]: ...
    def clock(self, run: Callable[[], object], repeats: int) -> float: ...
    def captured(self, run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]: ...
    def here(self, tensor: torch.Tensor) -> torch.Tensor: ...


FORMAT = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
