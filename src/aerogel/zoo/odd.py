"""What a library for images is also given: a signal, a volume, and a model with two inputs, a keyword and a
dict of outputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aerogel.zoo.blocks import conv_bn


class Signal(nn.Module):
    """One dimension: a label for every eighth sample, as of an ECG. (Ten outputs are too few to compare
    rounding on.)"""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for c, k, stride in ((8, 64, 2), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)):
            layers += [nn.Conv1d(c, k, 7, stride, 3), nn.ReLU(inplace=True)]
        self.features, self.head = nn.Sequential(*layers), nn.Conv1d(256, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


class Volume(nn.Module):
    """Three dimensions: no sparse kernel, torch runs it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((1, 16), (16, 32), (32, 32))
        self.features = nn.Sequential(
            *(m for c, k in sizes for m in (nn.Conv3d(c, k, 3, padding=1), nn.ReLU()))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)  # type: ignore[no-any-return]


class Mapping(nn.Module):
    """An image and its features in, scaled by a keyword; a dict with a tuple inside out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = conv_bn(3, 64, 3, act=nn.SiLU()), conv_bn(64, 64, (1, 7), act=nn.SiLU())
        self.join, self.up = conv_bn(96, 128, 3, act=nn.LeakyReLU(0.1)), nn.ConvTranspose2d(128, 16, 2, 2)

    def forward(self, x: Tensor, other: Tensor, *, scale: Tensor) -> dict[str, Any]:
        a = self.stem(x) * scale
        c = self.join(torch.cat([a + self.deep(a), other], 1))
        left, right = c.chunk(2, 1)
        return {"up": self.up(c), "pair": (F.interpolate(left, scale_factor=2), right)}
