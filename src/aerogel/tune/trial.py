"""One configuration of one layer as a call that can be timed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from math import prod
from typing import Any

import numpy as np

from aerogel.candidate import Config, Kernel
from aerogel.layout import Array, Layout
from aerogel.methods import method
from aerogel.problem import Conv
from aerogel.reference import from_float64
from aerogel.runtime import pool
from aerogel.target import Target


def candidate(conv: Conv, config: Config, weight: Array, x: Array, bias: Array, target: Target) -> Callable[[], object]:
    """A call that runs one configuration on buffers that rotate through more than L2."""
    kernels, reads, writes = built(conv, config, weight, target)
    copies = min(8, 1 + 2 * target.l2_bytes // (4 * (prod(conv.x_shape) + prod(conv.y_shape))))
    first = kernels[0].call
    if first is not None:
        return _library(first, conv, reads, writes, x, bias, copies)
    return rotating(kernels, conv, reads, writes, x, bias, copies, target.threads)


def built(conv: Conv, config: Config, weight: Array, target: Target) -> tuple[list[Kernel], Layout, Layout]:
    module = method(config.method)
    reads, writes = module.layouts(conv, config, target, conv.pad if conv.stride == (1, 1) else (0, 0, 0, 0))
    return module.build(module.pack(weight, conv, config), conv, config, target, reads, writes), reads, writes


def _library(
    call: Callable[[Any, Any, Any], Any], conv: Conv, reads: Layout, writes: Layout, x: Array, bias: Array, copies: int
) -> Callable[[], object]:
    from aerogel.methods.dense import to_torch

    d = conv.dtypes
    turn = cycle([to_torch(_laid(x, reads), d.input) for _ in range(copies)])
    own = to_torch(bias, "f32") if "bias" in conv.epilogue else None
    beside = to_torch(_laid(np.zeros(conv.y_shape, np.float32), writes), d.output) if "add" in conv.epilogue else None
    return lambda: call(next(turn), own, beside)


def _laid(x: Array, layout: Layout) -> Array:
    buffer = layout.allocate(x.shape)
    layout.write(buffer, from_float64(x, layout.dtype))
    return layout.view(buffer, x.shape)


def rotating(
    kernels: list[Kernel], conv: Conv, reads: Layout, writes: Layout, x: Array, bias: Array, copies: int, threads: int
) -> Callable[[], object]:
    scratch = np.empty(max(k.scratch_bytes for k in kernels) * threads + 64, np.uint8)
    start = scratch.ctypes.data + -scratch.ctypes.data % 64
    beside = writes.allocate(conv.y_shape)
    beside[:] = 0
    kept: list[object] = [scratch, bias, beside]
    segments = []
    for _ in range(copies):
        xb, yb = reads.allocate(conv.x_shape), writes.allocate(conv.y_shape)
        reads.write(xb, from_float64(x, reads.dtype))
        kept += [xb, yb]
        addresses = {"x": xb.ctypes.data, "y": yb.ctypes.data, "bias": bias.ctypes.data, "scratch": start}
        if "add" in conv.epilogue:
            addresses["residual"] = beside.ctypes.data
        segments.append(pool.Segment([(k, k.bind(**addresses)) for k in kernels], threads))
    turn = cycle(segments)

    def run(_kept: object = kept) -> None:
        next(turn)()

    return run
