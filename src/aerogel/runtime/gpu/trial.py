"""One configuration of one layer on a device as a call that can be timed, from and to maps in the network's own layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from aerogel.candidate import Config
from aerogel.capture import interpret
from aerogel.graph import Node
from aerogel.layout import Array
from aerogel.methods.dense import TORCH, plain, to_torch
from aerogel.problem import Conv, Pool
from aerogel.runtime.gpu import FORMAT, Device
from aerogel.runtime.gpu.layer import Layer, layout_of

Trial = Callable[[Conv, Config, Array, Array, Array, Any], Callable[[], object]]


def trial(device: Device, inputs: Sequence[Any]) -> Trial:
    """Candidates for a network that is given these inputs: the first image's layout is the network's."""
    image = next((v for v in inputs if isinstance(v, torch.Tensor) and v.dim() == 4), None)
    last = image is not None and not image.is_contiguous() and image.is_contiguous(memory_format=torch.channels_last)
    layout = FORMAT["channels_last" if last else "contiguous"]

    def candidate(conv: Conv, config: Config, weight: Array, x: Array, bias: Array, _: object) -> Callable[[], object]:
        given, own = torch.from_numpy(x), torch.from_numpy(bias) if "bias" in conv.epilogue else None
        beside = torch.zeros(conv.y_shape) if "add" in conv.epilogue else None
        call = placed(device, conv, config, weight, given, own, beside, layout)
        return lambda: call().contiguous(memory_format=layout)

    return candidate


def placed(
    device: Device,
    conv: Conv,
    config: Config,
    weight: Array,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    layout: torch.memory_format = torch.contiguous_format,
) -> Callable[[], torch.Tensor]:
    """A call of one configuration on f32 tensors, which are brought to the device in the layer's type and the network's layout."""
    kind = TORCH[conv.dtypes.input]

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return device.here(tensor.to(kind)).contiguous(memory_format=layout)

    given, beside = there(x), None if residual is None else there(residual)
    if config.method == "dense":
        inside, own = FORMAT[layout_of(config)], None if bias is None else device.here(bias.to(kind))
        held = device.here(to_torch(weight, conv.dtypes.weight)).contiguous(memory_format=inside)
        return lambda: plain(given.contiguous(memory_format=inside), held, conv, own, beside)
    layer, mine = Layer(device, conv, config, weight), None if bias is None else device.here(bias.float())
    return lambda: layer(given, mine, beside)


def once(
    device: Device, conv: Conv, config: Config, weight: Array, x: Array, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> Array:
    """One run of a configuration on real numbers; the output in float64."""
    y = placed(device, conv, config, weight, torch.from_numpy(x), bias, residual)()
    return np.asarray(y.cpu().double().numpy())


def share_active(device: Device, conv: Conv, config: Config, weight: Array, x: Array) -> float:
    """Of the positions of a layer that skips zeros, the share that it cannot skip on these images."""
    layer = Layer(device, replace(conv, epilogue=()), config, weight)
    layer(device.here(torch.from_numpy(x)), None, None)
    return layer.active()


def with_pool(
    device: Device, conv: Conv, config: Config, weight: Array, x: Array, node: Node, pool: Pool
) -> list[Callable[[], object]]:
    """A layer and the pooling after it, `node`, as two calls, and as one."""
    apart, together = Layer(device, conv, config, weight), Layer(device, conv, config, weight, pool)
    image, bias = (device.here(torch.from_numpy(a)) for a in (x, np.zeros(conv.k, np.float32)))
    name = node.inputs[0]
    return [lambda: interpret.call(node, {name: apart(image, bias, None)}), lambda: together(image, bias, None)]
