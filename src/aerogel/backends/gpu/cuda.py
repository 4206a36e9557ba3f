"""Launches on torch's CUDA tensors, in torch's current stream. Needs cuda-core and NVRTC (`pip install
aerogel[cuda]`).

Never run on a physical GPU yet: compiled for real architectures and executed as OpenCL in the tests; what is
in this file alone (loading, packing of arguments, streams, events, graphs) is checked only as far as that
goes without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from aerogel.backends.gpu import jit, twofour
from aerogel.backends.gpu.device import FORMAT, Queue
from aerogel.codegen.gpu.launch import AnyLaunch, Launch, TorchLaunch, TritonLaunch
from aerogel.codegen.gpu.nvrtc import cubin
from aerogel.ir import Gpu
from aerogel.optional import import_optional


class Cuda:
    """The CUDA device that is torch's current one."""

    def __init__(self) -> None:
        import_optional("cuda.core", "cuda", "The CUDA backend")
        import cuda.core

        self.core = cuda.core
        self.number = torch.cuda.current_device()
        cuda.core.Device(self.number).set_current()
        found = torch.cuda.get_device_properties(self.number)
        shared = int(found.shared_memory_per_block_optin)  # type: ignore[attr-defined]
        tf32 = found.major >= 8 and torch.backends.cudnn.allow_tf32
        self.target = Gpu("cuda", f"sm_{found.major}{found.minor}", found.multi_processor_count, shared, tf32)

    def prepared(self, launches: Sequence[AnyLaunch]) -> Queue:
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
            stream = _Stream(torch.cuda.current_stream(self.number))
            self.core.launch(stream, config, kernel, *(pointer_or_number(a, buffers) for a in arguments))

        return queue

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
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        for _ in range(repeats):
            run()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) * 1000 / repeats

    def captured(self, run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
        """One CUDA graph for each set of input shapes; other values than tensors are part of the shape. What
        cannot be captured, such as sizes that depend on data, runs launch by launch."""
        graphs: dict[Any, tuple[Any, list[Any], list[Any]] | None] = {}

        def again(inputs: list[Any]) -> list[Any]:
            key = tuple((tuple(v.shape), v.stride()) if isinstance(v, torch.Tensor) else v for v in inputs)
            if key not in graphs:
                held = [v.clone() if isinstance(v, torch.Tensor) else v for v in inputs]
                with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                    run(held)  # uploads and allocations happen here, not in the graph
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                try:
                    with torch.cuda.graph(graph):
                        graphs[key] = graph, held, run(held)
                except RuntimeError:
                    graphs[key] = None
            if (known := graphs[key]) is None:
                return run(inputs)
            graph, held, found = known
            for into, value in zip(held, inputs, strict=True):
                if isinstance(value, torch.Tensor):
                    into.copy_(value)
            graph.replay()
            return [v.clone() if isinstance(v, torch.Tensor) else v for v in found]

        return again

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(f"cuda:{self.number}")


def pointer_or_number(argument: Any, buffers: Mapping[str, torch.Tensor]) -> Any:
    """As cuda-core takes them: an address is a Python int, a number keeps its numpy type."""
    if isinstance(argument, str):
        argument = buffers.get(argument, buffers["y"])
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


class _Stream:
    """torch's stream as cuda-core takes it."""

    def __init__(self, stream: Any) -> None:
        self.handle = int(stream.cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle
