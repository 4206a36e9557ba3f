"""One configuration of one layer as a call that can be timed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from math import prod

import numpy as np
import torch

from aerogel.backends import Trial
from aerogel.backends.cpu.threads import Segment
from aerogel.codegen.cpu.abi import Kernel, LibraryCall, native
from aerogel.ir import (
    ALONE,
    INT8,
    Array,
    Config,
    Conv,
    Layout,
    Place,
    Requantize,
    Target,
    Weight,
    from_float64,
    to_float64,
)
from aerogel.ir.tensors import TORCH, to_torch
from aerogel.methods import cpu_form


def candidate(
    conv: Conv, config: Config, weight: Weight, x: Array, bias: Array, target: Target, place: Place = ALONE
) -> Trial:
    """A call that runs one configuration on buffers that stand as in the network, and rotate through more
    than L2. In int8 the bias is a requantisation of no meaning."""
    if conv.dtypes == INT8:
        bias = Requantize(np.zeros(conv.k, np.int32), np.full(conv.k, 0.01, np.float32)).words
    made = built(conv, config, weight, target, place)
    copies = min(8, 1 + 2 * target.l2_bytes // (4 * (prod(conv.x_shape) + prod(conv.y_shape))))
    if not isinstance(made, LibraryCall):
        return rotating(made, conv, x, bias, copies, target.threads)
    turn = cycle([_tensor(x, made.reads) for _ in range(copies)])
    own = torch.from_numpy(bias) if "bias" in conv.epilogue else None
    zeros = np.zeros(conv.y_shape, np.float32)
    beside = _tensor(zeros, made.writes) if "add" in conv.epilogue else None
    return lambda: made.call(next(turn), own, beside)


def built(
    conv: Conv, config: Config, weight: Weight, target: Target, place: Place = ALONE
) -> list[Kernel] | LibraryCall:
    form = cpu_form(config.method)
    reads, writes = form.layouts(conv, config, target, place)
    return form.build(weight.packed(form.pack, conv, config), conv, config, target, reads, writes)


def rotating(kernels: list[Kernel], conv: Conv, x: Array, bias: Array, copies: int, threads: int) -> Trial:
    """A call that runs the kernels, each time on the next of several buffers."""
    reads, writes = kernels[0].reads, kernels[0].writes
    shared = {"bias": bias, "scratch": _scratch(kernels, threads)}
    if "add" in conv.epilogue:
        shared["residual"] = _placed(np.zeros(conv.y_shape, np.float32), writes)
    own = [{"x": _placed(x, reads), "y": writes.allocate(conv.y_shape)} for _ in range(copies)]
    turn = cycle([(_bound(kernels, threads, buffers | shared), buffers, shared) for buffers in own])
    return lambda: next(turn)[0]()


def _scratch(kernels: list[Kernel], threads: int) -> Array:
    room = np.empty(max(k.scratch_bytes for k in kernels) * threads + 64, np.uint8)
    return room[-room.ctypes.data % 64 :]


def _bound(kernels: list[Kernel], threads: int, buffers: Mapping[str, Array]) -> Segment:
    places = {slot: buffer.ctypes.data for slot, buffer in buffers.items()}
    return Segment([(kernel, kernel.bind(**places)) for kernel in kernels], threads)


def _placed(x: Array, layout: Layout) -> Array:
    buffer = layout.allocate(x.shape)
    layout.write(buffer, from_float64(x, layout.dtype))
    return buffer


def _tensor(x: Array, layout: Layout) -> torch.Tensor:
    return to_torch(layout.view(_placed(x, layout), x.shape), layout.dtype)


def output(
    target: Target,
    conv: Conv,
    config: Config,
    weight: Weight,
    x: Array,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> Array:
    """One run of a configuration on real numbers on this machine; the output in float64."""
    made = built(conv, config, weight, target)
    own = np.zeros(conv.k, np.float32) if bias is None else bias.float().numpy()
    beside: Array = np.zeros(conv.y_shape, np.float32) if residual is None else residual.numpy()
    if isinstance(made, LibraryCall):
        given = to_torch(own, "f32").to(TORCH[conv.dtypes.input])
        y = made.call(_tensor(x, made.reads), given, _tensor(beside, made.writes))
        return np.asarray(y.double().numpy().reshape(conv.y_shape))
    writes = made[0].writes
    buffers = {"x": _placed(x, made[0].reads), "y": writes.allocate(conv.y_shape), "bias": own}
    buffers |= {"residual": _placed(beside, writes), "scratch": _scratch(made, target.threads)}
    _bound(made, target.threads, buffers)()
    return to_float64(writes.read(buffers["y"], conv.y_shape), conv.dtypes.output)


def active(conv: Conv, config: Config, weight: Weight, x: Array, target: Target) -> float:
    """Of the windows that a configuration which skips zeros looks at on these images, the share that is not
    zero."""
    made = native(built(conv, config, weight, target))
    rotating(made, conv, x, np.zeros(conv.k, np.float32), 1, target.threads)()
    counts = [k.counts.reshape(-1, 8).sum(0) for k in made if k.counts is not None]
    return float(sum(c[0] for c in counts) / max(1, sum(c[1] for c in counts)))
