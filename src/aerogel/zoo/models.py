"""Architectures in plain torch, seeded, no hub and no torchvision: for benchmarks and `aerogel bench --zoo`.

Weights are random but scaled so that activations stay of order one; batch-norm statistics are made up and
seeded. They are good for timing, not for answers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aerogel.zoo.blocks import conv_bn
from aerogel.zoo.detectors import (
    DenseNet121,
    Detector,
    Inception,
    SqueezeNet,
    UNet,
    YoloV3,
    YoloV3Spp,
    YoloV8s,
)
from aerogel.zoo.odd import Mapping, Signal, Volume

Call = tuple[tuple[Tensor, ...], dict[str, Tensor]]


class Bottleneck(nn.Module):
    """ResNet's and RegNet's block: 1x1, 3x3 (strided, grouped), 1x1, and a shortcut."""

    def __init__(self, c: int, width: int, k: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv1 = conv_bn(c, width, 1, act=nn.ReLU(inplace=True))
        self.conv2 = conv_bn(width, width, 3, stride, groups, nn.ReLU(inplace=True))
        self.conv3 = conv_bn(width, k, 1)
        self.shortcut = conv_bn(c, k, 1, stride) if stride > 1 or c != k else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv3(self.conv2(self.conv1(x)))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """Stem, four stages of bottlenecks, global average, classifier."""

    def __init__(
        self,
        depths: tuple[int, ...],
        widths: tuple[int, ...],
        outs: tuple[int, ...],
        group_width: int = 0,
        stem: int = 64,
    ) -> None:
        super().__init__()
        pool: list[nn.Module] = [nn.MaxPool2d(3, 2, 1)] if stem == 64 else []
        self.stem = nn.Sequential(
            conv_bn(3, stem, 7 if stem == 64 else 3, 2, act=nn.ReLU(inplace=True)), *pool
        )
        blocks, c = [], stem
        for i, (depth, width, k) in enumerate(zip(depths, widths, outs, strict=True)):
            for j in range(depth):
                stride = 2 if j == 0 and (i > 0 or stem != 64) else 1
                blocks.append(Bottleneck(c, width, k, stride, width // group_width if group_width else 1))
                c = k
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(c, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))  # type: ignore[no-any-return]


class ResNeXt(ResNet):
    """ResNet-50 32x4d: grouped 3x3."""

    def __init__(self) -> None:
        super().__init__((3, 4, 6, 3), (128, 256, 512, 1024), (256, 512, 1024, 2048))
        for block in self.blocks:
            assert isinstance(block, Bottleneck)
            old = block.conv2[0]
            assert isinstance(old, nn.Conv2d)
            stride = old.stride[0]
            block.conv2[0] = nn.Conv2d(old.in_channels, old.in_channels, 3, stride, 1, groups=32, bias=False)


class Vgg19(nn.Module):
    """Sixteen 3x3 convolutions with batch norm, five max-pools, global average, one Linear. `part` divides
    the channels."""

    def __init__(self, part: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        c = 3
        for k, times in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
            for _ in range(times):
                layers.append(conv_bn(c, k // part, act=nn.ReLU(inplace=True)))
                c = k // part
            layers.append(nn.MaxPool2d(2, ceil_mode=part > 1))  # small ones see small images
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(c, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(self.features(x), 1), 1))  # type: ignore[no-any-return]


class MobileNetV1(nn.Module):
    """Depthwise-separable convolutions."""

    def __init__(self) -> None:
        super().__init__()
        plan = [
            (64, 1),
            (128, 2),
            (128, 1),
            (256, 2),
            (256, 1),
            (512, 2),
            *[(512, 1)] * 5,
            (1024, 2),
            (1024, 1),
        ]
        layers, c = [conv_bn(3, 32, 3, 2, act=nn.ReLU(inplace=True))], 32
        for k, stride in plan:
            layers += [
                conv_bn(c, c, 3, stride, c, nn.ReLU(inplace=True)),
                conv_bn(c, k, 1, act=nn.ReLU(inplace=True)),
            ]
            c = k
        self.features, self.classifier = nn.Sequential(*layers), nn.Linear(c, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(self.features(x), 1), 1))  # type: ignore[no-any-return]


def resnet50(part: int = 1) -> nn.Module:
    """`part` divides the channels of all but the stem."""
    return ResNet((3, 4, 6, 3), _parts(64, 128, 256, 512, part=part), _parts(256, 512, 1024, 2048, part=part))


def regnetx(part: int = 1) -> nn.Module:
    """RegNetX-800MF: group width 16. `part` (1, 2 or 4) divides the channels of all but the stem."""
    widths = _parts(64, 128, 288, 672, part=part)
    return ResNet((1, 3, 7, 5), widths, widths, 16 if part == 1 else 8, stem=32)


def _parts(*widths: int, part: int) -> tuple[int, ...]:
    return tuple(width // part for width in widths)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet50": (resnet50, 224),
    "resnext50": (ResNeXt, 224),
    "vgg19": (Vgg19, 224),
    "mobilenetv1": (MobileNetV1, 224),
    "regnetx": (regnetx, 224),
    "densenet121": (DenseNet121, 224),
    "yolov3": (YoloV3, 640),
    "yolov3spp": (YoloV3Spp, 640),
    "yolov8s": (YoloV8s, 640),
    "detector": (Detector, 320),
    "unet": (UNet, 512),
    "squeezenet": (SqueezeNet, 224),
    "inception": (Inception, 224),
    "signal": (Signal, 2048),
    "volume": (Volume, 24),
    "mapping": (Mapping, 64),
}
"""Each model with its usual image size."""

CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d


def make(name: str, seed: int = 0) -> nn.Module:
    """A model ready to run: seeded weights and statistics, in eval mode."""
    torch.manual_seed(seed)
    model = MODELS[name][0]()
    for module in model.modules():
        if isinstance(module, CONVOLUTIONS | nn.Linear | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.8, 1.2)
            nn.init.normal_(module.bias, 0, 0.1)
            module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.8, 1.2)  # type: ignore[union-attr]
    return model.eval()


def example(name: str, batch: int = 1, size: int | None = None) -> Call:
    """A seeded call of the model: positional and keyword arguments."""
    side, seed = size or MODELS[name][1], torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=seed)

    if name == "signal":
        return (made(8, side),), {}
    if name == "volume":
        return (made(1, side, side, side),), {}
    if name == "mapping":
        return (made(3, side, side), made(32, side, side)), {"scale": made(1, 1, 1)}
    return (made(3, side, side),), {}


def prune(model: nn.Module, sparsity: float) -> nn.Module:
    """Magnitude pruning of every convolution but depthwise ones, layer by layer."""
    for module in model.modules():
        if isinstance(module, CONVOLUTIONS) and (
            module.groups < module.in_channels or module.in_channels == 1
        ):
            weight = module.weight.data
            edge = weight.abs().flatten().kthvalue(max(1, int(sparsity * weight.numel()))).values
            weight *= weight.abs() > edge
    return model
