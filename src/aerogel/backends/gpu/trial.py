"""One configuration of one layer on a device as a call that can be timed, from and to maps in the network's
own layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from aerogel.backends.gpu.device import FORMAT, Device
from aerogel.backends.gpu.layer import Layer
from aerogel.capture import interpret
from aerogel.ir import Array, Config, Conv, Node, Pool, Weight
from aerogel.ir.tensors import TORCH, plain, to_torch
from aerogel.methods import BASELINE, gpu_form


def candidate(
    device: Device,
    conv: Conv,
    config: Config,
    weight: Weight,
    x: Array,
    bias: Array,
    layout: torch.memory_format,
) -> Callable[[], object]:
    """A call of one configuration in a network whose maps have this layout."""
    given = torch.from_numpy(x)
    added = torch.from_numpy(bias) if "bias" in conv.epilogue else None
    beside = torch.zeros(conv.y_shape) if "add" in conv.epilogue else None
    call = placed(device, conv, config, weight, given, added, beside, layout)
    return lambda: call().contiguous(memory_format=layout)


def placed(
    device: Device,
    conv: Conv,
    config: Config,
    weight: Weight,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    layout: torch.memory_format = torch.contiguous_format,
) -> Callable[[], torch.Tensor]:
    """A call of one configuration on f32 tensors, which are brought to the device in the layer's type and the
    network's layout."""
    dtype = TORCH[conv.dtypes.input]

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return device.here(tensor.to(dtype)).contiguous(memory_format=layout)

    given, beside = there(x), None if residual is None else there(residual)
    if config.method == BASELINE:
        inside, own = (
            FORMAT[gpu_form(config.method).layout(config)],
            None if bias is None else device.here(bias.to(dtype)),
        )
        held = device.here(to_torch(weight.array, conv.dtypes.weight)).contiguous(memory_format=inside)
        return lambda: plain(given.contiguous(memory_format=inside), held, conv, own, beside)
    layer, mine = Layer(device, conv, config, weight), None if bias is None else device.here(bias.float())
    return lambda: layer(given, mine, beside)


def output(
    device: Device,
    conv: Conv,
    config: Config,
    weight: Weight,
    x: Array,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> Array:
    """One run of a configuration on real numbers; the output in float64."""
    y = placed(device, conv, config, weight, torch.from_numpy(x), bias, residual)()
    return np.asarray(y.cpu().double().numpy())


def active(device: Device, conv: Conv, config: Config, weight: Weight, x: Array) -> float:
    """Of the positions of a layer that skips zeros, the share that it cannot skip on these images."""
    layer = Layer(device, replace(conv, epilogue=()), config, weight)
    layer(device.here(torch.from_numpy(x)), None, None)
    return layer.active()


def with_pool(
    device: Device, conv: Conv, config: Config, weight: Weight, x: Array, node: Node, pool: Pool
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A layer and the pooling after it, `node`, as two calls, and as one."""
    apart, together = Layer(device, conv, config, weight), Layer(device, conv, config, weight, pool)
    image, bias = (device.here(torch.from_numpy(a)) for a in (x, np.zeros(conv.k, np.float32)))
    name = node.inputs[0]
    return (
        lambda: interpret.call(node, {name: apart(image, bias, None)}),
        lambda: together(image, bias, None),
    )
