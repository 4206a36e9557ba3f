"""One run of a layer on real numbers, and what it loses to half precision: its kernel's answer beside the model's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from aerogel.candidate import Config
from aerogel.graph import Node
from aerogel.layout import Array, Layout
from aerogel.methods import method
from aerogel.methods.dense import TORCH, plain, to_torch
from aerogel.problem import Conv, Dtypes
from aerogel.reference import from_float64, to_float64
from aerogel.runtime import pool
from aerogel.runtime.stays import image_shape
from aerogel.target import Target

Values = Mapping[str, torch.Tensor]
"""All values of a model for one input, by name."""


Run = Callable[[Conv, Config, Array, Array, torch.Tensor | None, torch.Tensor | None], Array]
"""A configuration's output in float64 for a weight, images, a bias and a residual."""


def losses(conv: Conv, config: Config, node: Node, weight: Array, values: Values, run: Run) -> tuple[float, float]:
    """What a configuration loses of a layer's output, and what dense bf16 does (what is bf16 itself may lose anything finite).

    `node` is the layer in the model's own precision, `weight` what it becomes, `run` where it runs.
    """
    x, own, bias, residual = (None if name is None else values[name] for name in node.conv_inputs())
    assert x is not None
    assert own is not None
    n, _, h, w = image_shape(tuple(x.shape))
    conv = conv.at(n, h, w)
    wanted = values[node.name].double().numpy().reshape(conv.y_shape)
    beside = None if residual is None else residual.float().reshape(conv.y_shape)
    image = x.float().reshape(conv.x_shape)
    allowed = _loss(_in_bf16(image, own, conv, bias, beside), wanted) if conv.dtypes.output != "bf16" else np.finfo(float).max
    return _loss(run(conv, config, weight, image.numpy(), bias, beside), wanted), allowed


def _loss(y: Array, wanted: Array) -> float:
    """Root mean square of the difference over that of the output."""
    scale = float(np.sqrt(np.mean(wanted**2)))
    with np.errstate(all="ignore"):
        lost = float(np.sqrt(np.mean((y - wanted) ** 2)))
    return lost / scale if scale else lost


def _in_bf16(x: torch.Tensor, weight: torch.Tensor, conv: Conv, bias: torch.Tensor | None, residual: torch.Tensor | None) -> Array:
    """The layer with x, weight and output rounded to bf16, computed in f32."""
    rounded = [None if t is None else t.to(torch.bfloat16).float() for t in (x, weight, residual)]
    assert rounded[0] is not None
    assert rounded[1] is not None
    y = plain(rounded[0], rounded[1], replace(conv, dtypes=Dtypes()), bias, rounded[2])
    return np.asarray(y.to(torch.bfloat16).double().numpy())


def once(
    target: Target, conv: Conv, config: Config, weight: Array, x: Array, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> Array:
    """One run of a configuration on real numbers on this machine; the output in float64."""
    module, d = method(config.method), conv.dtypes
    reads, writes = module.layouts(conv, config, target, (0, 0, 0, 0))
    kernels = module.build(module.pack(weight, conv, config), conv, config, target, reads, writes)
    own = np.zeros(conv.k, np.float32) if bias is None else bias.float().numpy()
    beside: Array = np.zeros(conv.y_shape, np.float32) if residual is None else residual.numpy()
    if kernels[0].call is not None:
        given = (to_torch(from_float64(v, d.input), d.input) for v in (x, beside))
        image, other = (t.to(memory_format=torch.channels_last) if config["channels_last"] else t for t in given)
        y = kernels[0].call(image, to_torch(own, "f32").to(TORCH[d.input]), other)
        return np.asarray(y.double().numpy().reshape(conv.y_shape))
    xb, rb = _placed(x, reads, d.input), _placed(beside, writes, d.output)
    yb = writes.allocate(conv.y_shape)
    scratch = np.empty(max(k.scratch_bytes for k in kernels) * target.threads + 64, np.uint8)
    at = scratch.ctypes.data + -scratch.ctypes.data % 64
    places = {"x": xb.ctypes.data, "y": yb.ctypes.data, "bias": own.ctypes.data, "residual": rb.ctypes.data, "scratch": at}
    pool.Segment([(k, k.bind(**places)) for k in kernels], target.threads)()
    return to_float64(writes.read(yb, conv.y_shape), d.output)


def _placed(x: Array, layout: Layout, kind: str) -> Array:
    buffer = layout.allocate(x.shape)
    layout.write(buffer, from_float64(x, kind))
    return buffer
