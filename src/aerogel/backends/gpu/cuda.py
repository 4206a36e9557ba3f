"""Launches on torch's CUDA tensors, in torch's current stream. Needs cuda-core and NVRTC (`pip install
aerogel[cuda]`).

Executed on a driver shim, never on a GPU: kernels are compiled for real architectures and executed as OpenCL
in the tests; what is in this file and in graphs.py alone (loading, packing of arguments, streams, events,
graphs) ran by hand under torch's CUDA build and cuda.core on a driver that keeps device memory on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from aerogel.backends.gpu import jit, twofour
from aerogel.backends.gpu.device import FORMAT, Queue
from aerogel.backends.gpu.graphs import GraphCalls
from aerogel.codegen.gpu.launch import AnyLaunch, Launch, TorchLaunch, TritonLaunch
from aerogel.codegen.gpu.nvrtc import cubin
from aerogel.ir import Gpu
from aerogel.optional import import_optional


class Cuda:
    """One CUDA device: the one with this number, or torch's current one."""

    def __init__(self, number: int | None = None) -> None:
        import_optional("cuda.core", "cuda", "The CUDA backend")
        import cuda.core

        self.core = cuda.core
        self.number = torch.cuda.current_device() if number is None else number
        self._thread = threading.local()
        self._streams = dict[int, Any]()
        found = torch.cuda.get_device_properties(self.number)
        shared = int(found.shared_memory_per_block_optin)  # type: ignore[attr-defined]
        tf32 = found.major >= 8 and allows_tf32()
        self.target = Gpu("cuda", f"sm_{found.major}{found.minor}", found.multi_processor_count, shared, tf32)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the current device: kernels, events and graphs go to the current one, whatever their
        tensors. The user's is current again afterwards."""
        with torch.cuda.device(self.number):
            if not hasattr(self._thread, "bound"):  # a thread that never used CUDA has no context
                self.core.Device(self.number).set_current()
                self._thread.bound = True
            yield

    def prepared(self, launches: Sequence[AnyLaunch]) -> Queue:
        with self.current():
            return self._prepared(launches)

    def _prepared(self, launches: Sequence[AnyLaunch]) -> Queue:
        steps = list[Queue]()
        scratch = self._empty(max((launch.scratch_bytes for launch in launches), default=0))
        for launch in launches:
            match launch:
                case TritonLaunch():
                    steps.append(jit.prepared(launch, self.here))
                case TorchLaunch():
                    steps.append(twofour.prepared(launch, self.here))
                case Launch():
                    steps.append(self._loaded(launch))

        def queue(buffers: Mapping[str, torch.Tensor]) -> None:
            with self.current():
                for step in steps:
                    step({**buffers, "scratch": scratch})

        return queue

    def _loaded(self, launch: Launch) -> Queue:
        kernel = self.core.ObjectCode.from_cubin(cubin(launch.code, self.target.arch)).get_kernel(
            launch.code.entry
        )
        config = self.core.LaunchConfig(grid=launch.grid, block=(*launch.code.block, 1))
        arguments = [self._uploaded(a) for a in launch.arguments]

        def queue(buffers: Mapping[str, torch.Tensor]) -> None:
            stream = self._stream(torch.cuda.current_stream(self.number).cuda_stream)
            self.core.launch(stream, config, kernel, *(pointer_or_number(a, buffers) for a in arguments))

        return queue

    def _stream(self, handle: int) -> Any:
        """Return torch's stream as cuda.core's, made once: torch keeps its streams for the whole process."""
        if handle not in self._streams:
            self._streams[handle] = self.core.Stream.from_handle(handle)
        return self._streams[handle]

    def _uploaded(self, argument: Any) -> Any:
        if not isinstance(argument, np.ndarray):
            return argument
        held = self._empty(argument.nbytes)
        held[: argument.nbytes].copy_(
            torch.from_numpy(np.ascontiguousarray(argument).reshape(-1).view(np.uint8))
        )
        return held

    def _empty(self, bytes_: int) -> torch.Tensor:
        return torch.empty(max(16, bytes_), dtype=torch.uint8, device=f"cuda:{self.number}")

    def resident(self, tensor: torch.Tensor, layout: str) -> torch.Tensor:
        there = self.here(tensor)
        return there.contiguous(memory_format=FORMAT[layout]) if there.dim() == 4 else there.contiguous()

    def fresh(
        self, shape: tuple[int, ...], layout: str, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        y = torch.empty(shape, dtype=dtype, device=f"cuda:{self.number}", memory_format=FORMAT[layout])
        return y, lambda: y

    def clock(self, run: Callable[[], object], repeats: int) -> float:
        with self.current():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            for _ in range(repeats):
                run()
            ended.record()
            ended.synchronize()
            return float(began.elapsed_time(ended)) * 1000 / repeats

    def captured(self, run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
        """The same function, replayed as one CUDA graph for each set of input shapes."""
        calls = GraphCalls(run, self.number)

        def call(inputs: list[Any]) -> list[Any]:
            with self.current():
                return calls(inputs)

        return call

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(f"cuda:{self.number}")


def allows_tf32() -> bool:
    """Whether torch may round f32 to tf32 in convolutions, as set by either of its two interfaces."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # the older interface cannot be read once the newer one (torch 2.9) was used
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def pointer_or_number(argument: Any, buffers: Mapping[str, torch.Tensor]) -> Any:
    """As cuda-core takes them: an address is a Python int, a number keeps its numpy type."""
    if isinstance(argument, str):
        argument = buffers.get(argument, buffers["y"])
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
