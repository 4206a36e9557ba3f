"""One configuration of one layer as a call that can be timed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from math import prod
from typing import Any

import numpy as np
import torch

from aerogel.backends.cpu.threads import Segment
from aerogel.codegen.cpu.abi import Kernel
from aerogel.ir.config import Config
from aerogel.ir.conv import Conv
from aerogel.ir.layout import Array, Layout
from aerogel.ir.target import Target
from aerogel.ir.tensors import TORCH, to_torch
from aerogel.methods import cpu_form
from aerogel.reference import from_float64, to_float64


def candidate(
    conv: Conv, config: Config, weight: Array, x: Array, bias: Array, target: Target
) -> Callable[[], object]:
    """A call that runs one configuration on buffers that rotate through more than L2."""
    kernels, reads, writes = built(conv, config, weight, target)
    copies = min(8, 1 + 2 * target.l2_bytes // (4 * (prod(conv.x_shape) + prod(conv.y_shape))))
    first = kernels[0].call
    if first is not None:
        return _library(first, conv, reads, writes, x, bias, copies)
    return rotating(kernels, conv, reads, writes, x, bias, copies, target.threads)


def built(conv: Conv, config: Config, weight: Array, target: Target) -> tuple[list[Kernel], Layout, Layout]:
    module = cpu_form(config.method)
    reads, writes = module.layouts(conv, config, target, conv.pad if conv.stride == (1, 1) else (0, 0, 0, 0))
    return module.build(module.pack(weight, conv, config), conv, config, target, reads, writes), reads, writes


def _library(
    call: Callable[[Any, Any, Any], Any],
    conv: Conv,
    reads: Layout,
    writes: Layout,
    x: Array,
    bias: Array,
    copies: int,
) -> Callable[[], object]:
    d = conv.dtypes
    turn = cycle([to_torch(_laid(x, reads), d.input) for _ in range(copies)])
    own = to_torch(bias, "f32") if "bias" in conv.epilogue else None
    beside = (
        to_torch(_laid(np.zeros(conv.y_shape, np.float32), writes), d.output)
        if "add" in conv.epilogue
        else None
    )
    return lambda: call(next(turn), own, beside)


def _laid(x: Array, layout: Layout) -> Array:
    buffer = layout.allocate(x.shape)
    layout.write(buffer, from_float64(x, layout.dtype))
    return layout.view(buffer, x.shape)


def rotating(
    kernels: list[Kernel],
    conv: Conv,
    reads: Layout,
    writes: Layout,
    x: Array,
    bias: Array,
    copies: int,
    threads: int,
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
        segments.append(Segment([(k, k.bind(**addresses)) for k in kernels], threads))
    turn = cycle(segments)

    def run(_kept: object = kept) -> None:
        next(turn)()

    return run


def output(
    target: Target,
    conv: Conv,
    config: Config,
    weight: Array,
    x: Array,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> Array:
    """One run of a configuration on real numbers on this machine; the output in float64."""
    module, d = cpu_form(config.method), conv.dtypes
    reads, writes = module.layouts(conv, config, target, (0, 0, 0, 0))
    kernels = module.build(module.pack(weight, conv, config), conv, config, target, reads, writes)
    own = np.zeros(conv.k, np.float32) if bias is None else bias.float().numpy()
    beside: Array = np.zeros(conv.y_shape, np.float32) if residual is None else residual.numpy()
    if kernels[0].call is not None:
        given = (to_torch(from_float64(v, d.input), d.input) for v in (x, beside))
        image, other = (
            t.to(memory_format=torch.channels_last) if reads.kind == "channels_last" else t for t in given
        )
        y = kernels[0].call(image, to_torch(own, "f32").to(TORCH[d.input]), other)
        return np.asarray(y.double().numpy().reshape(conv.y_shape))
    xb, rb = _placed(x, reads, d.input), _placed(beside, writes, d.output)
    yb = writes.allocate(conv.y_shape)
    scratch = np.empty(max(k.scratch_bytes for k in kernels) * target.threads + 64, np.uint8)
    at = scratch.ctypes.data + -scratch.ctypes.data % 64
    places = {
        "x": xb.ctypes.data,
        "y": yb.ctypes.data,
        "bias": own.ctypes.data,
        "residual": rb.ctypes.data,
        "scratch": at,
    }
    Segment([(k, k.bind(**places)) for k in kernels], target.threads)()
    return to_float64(writes.read(yb, conv.y_shape), d.output)


def _placed(x: Array, layout: Layout, kind: str) -> Array:
    buffer = layout.allocate(x.shape)
    layout.write(buffer, from_float64(x, kind))
    return buffer


def active(conv: Conv, config: Config, weight: Array, x: Array, target: Target) -> float:
    """Of the windows that a configuration which skips zeros looks at on these images, the share that is not
    zero."""
    kernels, reads, writes = built(conv, config, weight, target)
    bias = np.zeros(conv.k, np.float32)
    rotating(kernels, conv, reads, writes, x, bias, 1, target.threads)()
    counts = [k.counts.reshape(-1, 8).sum(0) for k in kernels if k.counts is not None]
    return float(sum(c[0] for c in counts) / max(1, sum(c[1] for c in counts)))
