"""One convolution on a device under one configuration of ours: a function of tensors, whatever their
layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from aerogel.backends.gpu.device import Device, Queue
from aerogel.ir import Config, Conv, Pool, Weight
from aerogel.ir.tensors import TORCH
from aerogel.methods import gpu_form


class Layer:
    """With `pool`, which the configuration takes, it gives the pooled map. Inputs of another element type are
    converted: the kernel would read their bytes as its own type."""

    def __init__(
        self, device: Device, conv: Conv, config: Config, weight: Weight, pool: Pool | None = None
    ) -> None:
        own = gpu_form(config.method)
        packed = weight.packed(own.pack, conv, config)
        launches = own.build(packed, conv, config) if pool is None else own.build(packed, conv, config, pool)
        self.device, self.conv, self.layout, self.pool = device, conv, own.layout(config), pool
        self.shape = conv.y_shape if pool is None else (*conv.y_shape[:2], *pool.out(*conv.out))
        self.queue: Queue = device.prepared(launches)
        self.held, self.most = dict[str, Any](), 0
        if launches and any(isinstance(a, str) and a == "counts" for a in launches[0].arguments):
            blocks = int(np.prod(launches[0].grid))
            self.held["counts"], self.counts = device.fresh((blocks,), "contiguous", torch.int32)
            self.most = len(packed.arrays["position"]) * blocks // launches[0].grid[1]

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        y, found = self.device.fresh(self.shape, self.layout, TORCH[self.conv.dtypes.output])
        dtype = TORCH[self.conv.dtypes.input]
        given = {"x": x.to(dtype), "bias": None if bias is None else bias.float()}
        given["residual"] = None if residual is None else residual.to(TORCH[self.conv.dtypes.output])
        resident = {name: self.device.resident(t, self.layout) for name, t in given.items() if t is not None}
        self.queue({"y": y, **self.held, **resident})
        return found()

    def active(self) -> float:
        """The share of positions that the last call could not skip, as the first warp of each block saw
        it."""
        return float(self.counts().sum()) / max(1, self.most)
