"""Pruning masks in files: one .npz for each network, `__layers__` lists its convolutions, every other key is
a layer's packed mask.

    python -m benchmarks.zoo.patterns resnet50 --sparsity 0.9 -o resnet50-90.npz

writes the masks of magnitude pruning on seeded weights, for commands that take `--pattern`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from aerogel.ir import Conv
from aerogel.zoo.models import MODELS, Call, example, make, prune


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


def save(model: nn.Module, call: Call, path: Path) -> None:
    """Write the zeros of a model's convolutions, in network order, with the sizes they meet in a call.

    Depthwise convolutions are left out, as in every pattern file.
    """
    convs: dict[nn.Module, str] = {
        m: n for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.groups < m.in_channels
    }
    sizes: dict[str, tuple[int, int]] = {}

    def note_size(conv: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        height, width = args[0].shape[-2:]
        sizes[convs[conv]] = int(height), int(width)

    hooks = [conv.register_forward_pre_hook(note_size) for conv in convs]
    with torch.no_grad():
        model(*call[0], **call[1])
    for hook in hooks:
        hook.remove()
    rows, masks = [], {}
    for conv, name in convs.items():
        assert isinstance(conv, nn.Conv2d)
        (kernel, other), (stride, _), padding = conv.kernel_size, conv.stride, conv.padding[0]
        if kernel != other or name not in sizes or not isinstance(padding, int):
            raise SystemExit(
                f"{name}: a pattern file takes square kernels that the call runs, padded by numbers"
            )
        mask = conv.weight.detach().numpy() != 0
        masks[name] = np.packbits(mask)
        rows.append(
            {"name": name, "height": sizes[name][0], "width": sizes[name][1], "in_channels": conv.in_channels,
             "out_channels": conv.out_channels, "kernel": kernel, "padding": padding, "stride": stride,
             "groups": conv.groups, "nnz": int(mask.sum())}
        )  # fmt: skip
    layers: Any = {"__layers__": np.frombuffer(json.dumps(rows).encode(), np.uint8), **masks}
    with path.open("wb") as file:
        np.savez_compressed(file, **layers)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("-o", "--output", type=Path, required=True, help="the .npz to write")
    options = parser.parse_args()
    save(prune(make(options.model), options.sparsity), example(options.model), options.output)


if __name__ == "__main__":
    main()
