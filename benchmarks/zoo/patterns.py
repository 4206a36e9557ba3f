"""Real pruning masks: one .npz for each network, `__layers__` lists its convolutions, every other key is a
layer's packed mask."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from aerogel.ir import Conv


@dataclass(frozen=True, eq=False)
class Layer:
    """One convolution of a pruned network: its problem at batch 1 and its mask."""

    name: str
    conv: Conv
    mask: NDArray[np.bool_]

    @property
    def nonzeros(self) -> int:
        return int(self.mask.sum())

    def weight(self, rng: np.random.Generator) -> NDArray[np.float32]:
        """Seeded random weights under the real mask. Magnitudes do not change the speed."""
        return (rng.standard_normal(self.conv.weight_shape) * self.mask).astype(np.float32)


def load(path: Path) -> list[Layer]:
    """The layers of a pattern file in network order, with bias and ReLU after each."""
    layers = []
    with np.load(path, allow_pickle=False) as file:
        rows: list[dict[str, Any]] = json.loads(bytes(file["__layers__"]))
        for row in rows:
            side, pad, stride = int(row["kernel"]), int(row["padding"]), int(row["stride"])
            conv = Conv(
                int(row["in_channels"]), int(row["out_channels"]), side, side, (stride, stride), (pad, pad,
                pad, pad), groups=int(row["groups"]), epilogue=("bias", "relu"), n=1, h=int(row["height"]),
                w=int(row["width"]),
            )  # fmt: skip
            bits = np.unpackbits(file[row["name"]], count=int(np.prod(conv.weight_shape)))
            layers.append(Layer(str(row["name"]), conv, bits.reshape(conv.weight_shape).astype(bool)))
    return layers


def distinct(layers: list[Layer]) -> list[tuple[Layer, int]]:
    """Each problem once, with how often the network has it; the layer with the middle number of nonzeros
    stands for all."""
    same: dict[str, list[Layer]] = {}
    for layer in layers:
        same.setdefault(str(layer.conv), []).append(layer)
    return [
        (sorted(group, key=lambda one: one.nonzeros)[len(group) // 2], len(group)) for group in same.values()
    ]


def prune_pattern(model: nn.Module, path: Path) -> nn.Module:
    """Put a real pattern's masks on a model's convolutions, in network order; depthwise ones are not in the
    file."""
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.groups < m.in_channels]
    layers = load(path)
    if len(convs) != len(layers):
        raise SystemExit(f"{path.name} has {len(layers)} layers, the model {len(convs)} convolutions")
    for conv, layer in zip(convs, layers, strict=True):
        conv.weight.data *= torch.from_numpy(layer.mask.reshape(tuple(conv.weight.shape)))
    return model
