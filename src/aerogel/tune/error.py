"""What half precision costs a layer, measured on real inputs: its kernel's answer beside the model's own.

A configuration is accurate where it loses no more than dense bf16 would lose on the same layer and inputs:
that is what people accept who run half precision today, and needs no number of ours. (What is asked for in
bf16 need only stay finite.) A layer none of whose dense forms is accurate stays f32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from aerogel.backends import Backend, CandidateFailed
from aerogel.capture.nodes import image_shape
from aerogel.ir import F32, Array, Choice, Config, Conv, Node, Refusal, Weight
from aerogel.ir.tensors import plain
from aerogel.methods import BASELINE, rounding
from aerogel.tune.search import keep

Values = Mapping[str, torch.Tensor]
"""All values of a model for one input, by name."""


def accurate(
    backend: Backend, choice: Choice, node: Node, weight: Weight, samples: Sequence[Values]
) -> Choice | None:
    """The choice among the configurations that are accurate on all samples, or None where even dense is not.

    `node` is the layer in the model's own precision, `weight` what it becomes, `samples` all values of the
    model for some inputs.
    """
    known: dict[tuple[str, int], str] = {}

    def why_not(config: Config) -> str:
        key = rounding(config)
        if key not in known:
            known[key] = _worst(backend, choice, config, node, weight, samples)
        return known[key]

    tried = tuple(t for t in choice.tried if not why_not(t.config))
    if not tried and why_not(choice.config):
        return None
    lost = [Refusal(c.method, f"{c}: {why_not(c)}") for c in choice.configs() if why_not(c)]
    refused = tuple(dict.fromkeys((*choice.refused, *lost)))
    chosen = next((c for c, t in tried if c.method == BASELINE or keep(t)), choice.config)
    if tried and all(t.config.method != BASELINE for t in tried):
        return None
    return replace(choice, config=chosen, tried=tried, refused=refused)


def _worst(
    backend: Backend, choice: Choice, config: Config, node: Node, weight: Weight, samples: Sequence[Values]
) -> str:
    """Empty, or by how much the configuration loses more than dense bf16 on one of the samples, or why it
    does not run on the device."""
    for values in samples:
        try:
            lost, allowed = _losses(backend, choice.conv, config, node, weight, values)
        except CandidateFailed as failure:
            return str(failure)
        if not lost <= allowed:
            return f"loses {lost:.1e} of its output, dense bf16 {allowed:.1e}"
    return ""


def _losses(
    backend: Backend, conv: Conv, config: Config, node: Node, weight: Weight, values: Values
) -> tuple[float, float]:
    """What a configuration loses of a layer's output, and what dense bf16 does (what is bf16 itself may lose
    anything finite).

    `node` is the layer in the model's own precision, `weight` what it becomes.
    """
    x, own, bias, residual = (None if name is None else values[name] for name in node.conv_inputs())
    assert x is not None
    assert own is not None
    n, _, h, w = image_shape(tuple(x.shape))
    conv = conv.at(n, h, w)
    wanted = values[node.name].double().numpy().reshape(conv.y_shape)
    beside = None if residual is None else residual.float().reshape(conv.y_shape)
    image = x.float().reshape(conv.x_shape)
    allowed = (
        _loss(_in_bf16(image, own, conv, bias, beside), wanted)
        if conv.dtypes.output != "bf16"
        else np.finfo(float).max
    )
    return _loss(backend.output(conv, config, weight, image.numpy(), bias, beside), wanted), allowed


def _loss(y: Array, wanted: Array) -> float:
    """Root mean square of the difference over that of the output."""
    scale = float(np.sqrt(np.mean(wanted**2)))
    with np.errstate(all="ignore"):
        lost = float(np.sqrt(np.mean((y - wanted) ** 2)))
    return lost / scale if scale else lost


def _in_bf16(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv: Conv,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> Array:
    """The layer with x, weight and output rounded to bf16, computed in f32."""
    rounded = [None if t is None else t.to(torch.bfloat16).float() for t in (x, weight, residual)]
    assert rounded[0] is not None
    assert rounded[1] is not None
    y = plain(rounded[0], rounded[1], replace(conv, dtypes=F32), bias, rounded[2])
    return np.asarray(y.to(torch.bfloat16).double().numpy())
