"""The larger shapes of network: DenseNet, YOLOv3, a YOLOv8-like detector, U-Net, SqueezeNet, an
Inception-like net."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aerogel.zoo.blocks import conv_bn


class DenseLayer(nn.Module):
    """Norm, ReLU, 1x1, norm, ReLU, 3x3, and the result laid beside the input."""

    def __init__(self, c: int, growth: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.Conv2d(c, 4 * growth, 1, bias=False)
        )
        self.second = nn.Sequential(
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.second(self.first(x))], 1)


class DenseNet121(nn.Module):
    """`part` divides the growth, 32 channels a layer."""

    def __init__(self, part: int = 1) -> None:
        super().__init__()
        growth = 32 // part
        c = 2 * growth
        layers: list[nn.Module] = [conv_bn(3, c, 7, 2, act=nn.ReLU(inplace=True)), nn.MaxPool2d(3, 2, 1)]
        for i, depth in enumerate((6, 12, 24, 16)):
            for _ in range(depth):
                layers.append(DenseLayer(c, growth))
                c += growth
            if i < 3:
                layers += [nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.Conv2d(c, c // 2, 1, bias=False)]
                layers += [nn.AvgPool2d(2, ceil_mode=part > 1)]  # small ones see small images
                c //= 2
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(c), nn.ReLU(inplace=True))
        self.classifier = nn.Linear(c, 1000)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(torch.flatten(F.adaptive_avg_pool2d(self.features(x), 1), 1))
        return out


class Residual(nn.Module):
    """Darknet's block."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv_bn(c, c // 2, 1, act=nn.LeakyReLU(0.1)), conv_bn(c // 2, c, 3, act=nn.LeakyReLU(0.1))
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


class YoloV3(nn.Module):
    """Darknet-53, three scales, raw heads of 255 channels."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.LeakyReLU(0.1)
        stages, c = [], 32
        for k, depth in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
            stages.append(nn.Sequential(conv_bn(c, k, 3, 2, act=act), *(Residual(k) for _ in range(depth))))
            c = k
        self.stem, self.stages = conv_bn(3, 32, 3, act=act), nn.ModuleList(stages)
        self.necks, self.heads, self.reduce = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for c, k in ((1024, 512), (768, 256), (384, 128)):
            layers = [conv_bn(c, k, 1, act=act)]
            for _ in range(2):
                layers += [conv_bn(k, 2 * k, 3, act=act), conv_bn(2 * k, k, 1, act=act)]
            self.necks.append(nn.Sequential(*layers))
            self.heads.append(nn.Sequential(conv_bn(k, 2 * k, 3, act=act), nn.Conv2d(2 * k, 255, 1)))
            if k > 128:
                self.reduce.append(conv_bn(k, k // 2, 1, act=act))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, maps = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        outputs = []
        for i in range(3):
            x = self.necks[i](x)
            outputs.append(self.heads[i](x))
            if i < 2:
                x = torch.cat([F.interpolate(self.reduce[i](x), scale_factor=2), maps[3 - i]], 1)
        return outputs


class YoloV3Spp(nn.Module):
    """YOLOv3 with spatial pyramid pooling, its convolutions in the order of the real pruning pattern."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.LeakyReLU(0.1)

        def pair(c: int, k: int) -> nn.Sequential:
            return nn.Sequential(conv_bn(c, k // 2, 1, act=act), conv_bn(k // 2, k, 3, act=act))

        self.body = YoloV3()
        del self.body.necks, self.body.heads, self.body.reduce
        self.deep, self.enter, self.leave = (
            pair(1024, 1024),
            conv_bn(1024, 512, 1, act=act),
            conv_bn(2048, 512, 1, act=act),
        )
        self.large = nn.ModuleList(
            [conv_bn(512, 1024, 3, act=act), conv_bn(1024, 512, 1, act=act), conv_bn(512, 1024, 3, act=act)]
        )
        self.to_middle, self.middle = (
            conv_bn(512, 256, 1, act=act),
            nn.Sequential(pair(768, 512), pair(512, 512)),
        )
        self.narrow, self.middle_out = conv_bn(512, 256, 1, act=act), conv_bn(256, 512, 3, act=act)
        self.to_small, self.small = (
            conv_bn(256, 128, 1, act=act),
            nn.Sequential(pair(384, 256), pair(256, 256), pair(256, 256)),
        )
        self.heads = nn.ModuleList([nn.Conv2d(c, 255, 1) for c in (256, 512, 1024)])

    def forward(self, x: Tensor) -> list[Tensor]:
        x, maps = self.body.stem(x), []
        for stage in self.body.stages:
            x = stage(x)
            maps.append(x)
        x = self.enter(self.deep(x))
        x = self.leave(torch.cat([x, *(F.max_pool2d(x, k, 1, k // 2) for k in (5, 9, 13))], 1))
        x = self.large[1](self.large[0](x))
        large = self.large[2](x)
        x = self.middle(torch.cat([F.interpolate(self.to_middle(x), scale_factor=2), maps[3]], 1))
        x = self.narrow(x)
        middle = self.middle_out(x)
        small = self.small(torch.cat([F.interpolate(self.to_small(x), scale_factor=2), maps[2]], 1))
        return [head(m) for head, m in zip(self.heads, (small, middle, large), strict=True)]


class C2f(nn.Module):
    """YOLOv8's block: split, a chain of bottlenecks, all of it joined."""

    def __init__(self, c: int, k: int, depth: int, shortcut: bool) -> None:
        super().__init__()
        half = k // 2
        self.enter, self.leave = (
            conv_bn(c, k, 1, act=nn.SiLU()),
            conv_bn((2 + depth) * half, k, 1, act=nn.SiLU()),
        )
        pair = [
            nn.Sequential(conv_bn(half, half, 3, act=nn.SiLU()), conv_bn(half, half, 3, act=nn.SiLU()))
            for _ in range(depth)
        ]
        self.chain, self.shortcut = nn.ModuleList(pair), shortcut

    def forward(self, x: Tensor) -> Tensor:
        maps = list(self.enter(x).chunk(2, 1))
        for link in self.chain:
            y = link(maps[-1])
            maps.append(maps[-1] + y if self.shortcut else y)
        out: Tensor = self.leave(torch.cat(maps, 1))
        return out


class Sppf(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.enter, self.leave = conv_bn(c, c // 2, 1, act=nn.SiLU()), conv_bn(2 * c, c, 1, act=nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.enter(x)]
        for _ in range(3):
            maps.append(F.max_pool2d(maps[-1], 5, 1, 2))
        out: Tensor = self.leave(torch.cat(maps, 1))
        return out


class YoloV8s(nn.Module):
    """Like YOLOv8s: C2f backbone, SPPF, two-way neck, three heads of boxes and classes."""

    def __init__(self) -> None:
        super().__init__()
        s = nn.SiLU()
        self.down = nn.ModuleList(
            [conv_bn(c, k, 3, 2, act=s) for c, k in ((3, 32), (32, 64), (64, 128), (128, 256), (256, 512))]
        )
        self.mix = nn.ModuleList(
            [C2f(64, 64, 1, True), C2f(128, 128, 2, True), C2f(256, 256, 2, True), C2f(512, 512, 1, True)]
        )
        self.spp = Sppf(512)
        self.up = nn.ModuleList([C2f(768, 256, 1, False), C2f(384, 128, 1, False)])
        self.again = nn.ModuleList([conv_bn(128, 128, 3, 2, act=s), conv_bn(256, 256, 3, 2, act=s)])
        self.join = nn.ModuleList([C2f(384, 256, 1, False), C2f(768, 512, 1, False)])
        heads = []
        for c in (128, 256, 512):
            boxes = nn.Sequential(conv_bn(c, 64, 3, act=s), conv_bn(64, 64, 3, act=s), nn.Conv2d(64, 64, 1))
            classes = nn.Sequential(
                conv_bn(c, 128, 3, act=s), conv_bn(128, 128, 3, act=s), nn.Conv2d(128, 80, 1)
            )
            heads.append(nn.ModuleList([boxes, classes]))
        self.heads = nn.ModuleList(heads)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.mix[0](self.down[1](self.down[0](x)))
        p3 = self.mix[1](self.down[2](x))
        p4 = self.mix[2](self.down[3](p3))
        p5 = self.spp(self.mix[3](self.down[4](p4)))
        n4 = self.up[0](torch.cat([F.interpolate(p5, scale_factor=2), p4], 1))
        n3 = self.up[1](torch.cat([F.interpolate(n4, scale_factor=2), p3], 1))
        m4 = self.join[0](torch.cat([self.again[0](n3), n4], 1))
        m5 = self.join[1](torch.cat([self.again[1](m4), p5], 1))
        return [torch.cat([h[0](m), h[1](m)], 1) for h, m in zip(self.heads, (n3, m4, m5), strict=True)]  # type: ignore[index]


class Detector(nn.Module):
    """The YOLOv8-like net with boxes decoded and a greedy non-maximum suppression in forward, as people
    deploy it."""

    def __init__(self, keep: int = 50) -> None:
        super().__init__()
        self.net, self.keep = YoloV8s(), keep

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.cat([y.flatten(2) for y in self.net(x)], 2)[0]
        scores, middle = flat[64:].sigmoid().amax(0), flat[:2].T
        boxes = torch.cat([middle - 1, middle + 1], 1)
        order: list[int] = scores.argsort(descending=True)[:300].tolist()
        kept: list[int] = []
        while order and len(kept) < self.keep:
            best = order.pop(0)
            kept.append(best)
            low, high = (
                torch.maximum(boxes[best, :2], boxes[order, :2]),
                torch.minimum(boxes[best, 2:], boxes[order, 2:]),
            )
            shared = (high - low).clamp(0).prod(1)
            order = [o for o, s in zip(order, (shared / (8 - shared)).tolist(), strict=True) if s < 0.5]
        return torch.cat([boxes[kept], scores[kept, None]], 1)


class UNet(nn.Module):
    """Four levels down by max-pooling, four up by transposed convolution."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [width << i for i in range(5)]

        def two(c: int, k: int) -> nn.Module:
            return nn.Sequential(
                conv_bn(c, k, 3, act=nn.ReLU(inplace=True)), conv_bn(k, k, 3, act=nn.ReLU(inplace=True))
            )

        self.down = nn.ModuleList([two(c, k) for c, k in zip([3, *sizes[:-1]], sizes, strict=True)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(k, c, 2, 2) for c, k in pairwise(sizes)])
        self.join = nn.ModuleList([two(2 * c, c) for c in sizes[:-1]])
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = []
        for i, level in enumerate(self.down):
            x = level(x if i == 0 else F.max_pool2d(x, 2))
            maps.append(x)
        for i in reversed(range(4)):
            x = self.join[i](torch.cat([self.up[i](x), maps[i]], 1))
        out: Tensor = self.last(x)
        return out


class Fire(nn.Module):
    def __init__(self, c: int, squeeze: int, k: int) -> None:
        super().__init__()
        self.squeeze, self.one = nn.Conv2d(c, squeeze, 1), nn.Conv2d(squeeze, k, 1)
        self.three = nn.Conv2d(squeeze, k, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


class SqueezeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pool = nn.MaxPool2d(3, 2)
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, 2), nn.ReLU(), pool, Fire(64, 16, 64), Fire(128, 16, 64), pool, Fire(128, 32,
            128), Fire(256, 32, 128), pool, Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256),
            Fire(512, 64, 256), nn.Conv2d(512, 1000, 1), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x).mean((2, 3))  # type: ignore[no-any-return]


class Inception(nn.Module):
    """A stem and blocks with 1xN and Nx1 kernels and average pooling beside them."""

    def __init__(self) -> None:
        super().__init__()
        r = nn.ReLU(inplace=True)
        self.stem = nn.Sequential(
            conv_bn(3, 64, 3, 2, act=r), conv_bn(64, 192, 3, act=r), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks, c = nn.ModuleList(), 192
        for _ in range(4):
            wide = nn.Sequential(
                conv_bn(c, 96, 1, act=r), conv_bn(96, 96, (1, 7), act=r), conv_bn(96, 128, (7, 1), act=r)
            )
            block = nn.ModuleList(
                [
                    conv_bn(c, 128, 1, act=r),
                    wide,
                    nn.Sequential(nn.AvgPool2d(3, 1, 1), conv_bn(c, 64, 1, act=r)),
                ]
            )
            self.blocks.append(block)
            c = 320
        self.classifier = nn.Linear(c, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleList)
            x = torch.cat([branch(x) for branch in block], 1)
        out: Tensor = self.classifier(x.mean((2, 3)))
        return out
