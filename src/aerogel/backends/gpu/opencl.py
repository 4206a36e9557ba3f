"""Launches in OpenCL buffers: Intel's and AMD's GPUs, and the CPU by PoCL, where every kernel is executed in
the tests.

Needs pyopencl (`pip install "aerogel[opencl]"`) and a driver.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from aerogel.backends.gpu.device import FORMAT, Queue
from aerogel.codegen.gpu.launch import AnyLaunch, Code, Launch
from aerogel.errors import AerogelError
from aerogel.ir import Array, Gpu
from aerogel.optional import import_optional


class OpenCL:
    """One device, a queue on it, and the programs built for it."""

    def __init__(self, device: Any = None) -> None:
        pyopencl = import_optional("pyopencl", "opencl", "The OpenCL backend")
        self.cl = pyopencl
        self.device = device or _first(pyopencl)
        self.context = pyopencl.Context([self.device])
        self.queue = pyopencl.CommandQueue(self.context)
        self.built: dict[Code, Any] = {}
        name = re.sub(r"\W+", "_", self.device.name).strip("_").lower()
        self.target = Gpu("opencl", name, self.device.max_compute_units, self.device.local_mem_size)

    def kernel(self, code: Code) -> Any:
        """A program's kernel; built once. pyopencl keeps the driver's binaries by digest on disk."""
        if code not in self.built:
            program = self.cl.Program(self.context, code.text()).build(["-cl-std=CL1.2"])
            self.built[code] = getattr(program, code.entry)
        return self.built[code]

    def buffer(self, array: Array) -> Any:
        """An array's content on the device; an empty one still has an address."""
        flags = self.cl.mem_flags.READ_WRITE | self.cl.mem_flags.COPY_HOST_PTR
        return self.cl.Buffer(self.context, flags, hostbuf=array if array.size else np.zeros(1, np.float32))

    def prepared(self, launches: Sequence[AnyLaunch]) -> Queue:
        bytes_ = max((launch.scratch_bytes for launch in launches), default=0)
        scratch = self.cl.Buffer(self.context, self.cl.mem_flags.READ_WRITE, max(4, bytes_))
        steps = []
        for launch in launches:
            assert isinstance(launch, Launch), "methods in Triton and of torch refuse OpenCL devices"
            kernel = self.cl.Kernel(self.kernel(launch.code).program, launch.code.entry)
            own = [self.buffer(a) if isinstance(a, np.ndarray) else a for a in launch.arguments]
            block = (*launch.code.block, 1)
            steps.append((kernel, tuple(n * b for n, b in zip(launch.grid, block, strict=True)), block, own))

        def queue(buffers: Mapping[str, Any]) -> None:
            known = {**buffers, "scratch": scratch}
            for kernel, size, block, own in steps:
                kernel.set_args(*(known.get(a, known["y"]) if isinstance(a, str) else a for a in own))
                self.cl.enqueue_nd_range_kernel(self.queue, kernel, size, block)

        return queue

    def resident(self, tensor: torch.Tensor, layout: str) -> Any:
        laid = tensor.contiguous(memory_format=FORMAT[layout]) if tensor.dim() == 4 else tensor.contiguous()
        return self.buffer(
            laid.permute(0, 2, 3, 1).numpy()
            if tensor.dim() == 4 and layout == "channels_last"
            else laid.numpy()
        )

    def fresh(
        self, shape: tuple[int, ...], layout: str, dtype: torch.dtype = torch.float32
    ) -> tuple[Any, Callable[[], torch.Tensor]]:
        y = torch.empty(shape, dtype=dtype, memory_format=FORMAT[layout])
        memory = y.permute(0, 2, 3, 1).numpy() if layout == "channels_last" else y.numpy()
        buffer = self.cl.Buffer(self.context, self.cl.mem_flags.READ_WRITE, max(4, memory.nbytes))

        def read() -> torch.Tensor:
            if memory.size:
                self.cl.enqueue_copy(self.queue, memory, buffer)
            return y

        return buffer, read

    def clock(self, run: Callable[[], object], repeats: int) -> float:
        """By the host's clock, until the queue is empty: dense runs on the host."""
        began = time.perf_counter_ns()
        for _ in range(repeats):
            run()
        self.queue.finish()
        return (time.perf_counter_ns() - began) / 1000 / repeats

    def captured(self, run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
        return run

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _first(pyopencl: Any) -> Any:
    """A GPU if there is one, else whatever there is."""
    try:
        devices = [d for platform in pyopencl.get_platforms() for d in platform.get_devices()]
    except pyopencl.Error as why:
        raise AerogelError(
            f"no OpenCL driver was found ({why}); on a CPU: pip install pocl-binary-distribution"
        ) from None
    if not devices:
        raise AerogelError("no OpenCL device was found; on a CPU: pip install pocl-binary-distribution")
    return min(devices, key=lambda d: d.type != pyopencl.device_type.GPU)
