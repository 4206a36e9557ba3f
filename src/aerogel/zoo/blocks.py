"""Pieces every benchmark architecture is made of."""

from __future__ import annotations

from torch import nn


def conv_bn(
    c: int,
    k: int,
    size: int | tuple[int, int] = 3,
    stride: int = 1,
    groups: int = 1,
    act: nn.Module | None = None,
) -> nn.Sequential:
    """Convolution, batch norm and an activation, padded to keep the size."""
    sides = (size, size) if isinstance(size, int) else size
    conv = nn.Conv2d(c, k, sides, stride, (sides[0] // 2, sides[1] // 2), groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(k), *([] if act is None else [act]))
