"""One configuration of one layer on a device as a call that can be timed, from and to maps in the network's own layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aerogel.candidate import Config
from aerogel.layout import Array
from aerogel.methods.dense import plain
from aerogel.problem import Conv
from aerogel.runtime.gpu import FORMAT, Device
from aerogel.runtime.gpu.module import Layer, layout_of

Trial = Callable[[Conv, Config, Array, Array, Array, Any], Callable[[], object]]


def trial(device: Device, inputs: Sequence[Any]) -> Trial:
    """Candidates for a network that is given these inputs: the first image's layout is the network's."""
    image = next((v for v in inputs if isinstance(v, torch.Tensor) and v.dim() == 4), None)
    last = image is not None and not image.is_contiguous() and image.is_contiguous(memory_format=torch.channels_last)
    layout = FORMAT["channels_last" if last else "contiguous"]

    def candidate(conv: Conv, config: Config, weight: Array, x: Array, bias: Array, _: object) -> Callable[[], object]:
        def there(array: Array) -> torch.Tensor:
            tensor = device.here(torch.from_numpy(array))
            return tensor.contiguous(memory_format=layout) if tensor.dim() == 4 else tensor

        given, own = there(x), there(bias) if "bias" in conv.epilogue else None
        beside = device.here(torch.zeros(conv.y_shape)).contiguous(memory_format=layout) if "add" in conv.epilogue else None
        if config.method == "dense":
            inside = FORMAT[layout_of(config)]
            held = device.here(torch.from_numpy(weight)).contiguous(memory_format=inside)
            return lambda: plain(given.contiguous(memory_format=inside), held, conv, own, beside).contiguous(memory_format=layout)
        layer = Layer(device, conv, config, weight)
        return lambda: layer(given, own, beside).contiguous(memory_format=layout)

    return candidate
