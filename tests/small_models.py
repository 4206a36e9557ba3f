"""Small models with the features that break compilers, and the check every answer goes through."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aerogel.backends.cpu.runner import CpuRunner
from aerogel.zoo.blocks import conv_bn
from aerogel.zoo.models import Bottleneck, prune


def sparse(model: nn.Module, sparsity: float = 0.9) -> nn.Module:
    """Seeded, with batch-norm statistics that matter, pruned."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv1d | nn.Linear | nn.ConvTranspose2d | nn.Conv3d):
            nn.init.kaiming_normal_(module.weight)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return prune(model.eval(), sparsity) if sparsity else model.eval()


def runs(fast: Any) -> CpuRunner:
    """What runs a module that was compiled for the CPU."""
    runner = fast.ready()
    assert isinstance(runner, CpuRunner)
    return runner


def right(model: nn.Module, fast: nn.Module, *args: Tensor, **kwargs: Tensor) -> Any:
    """Network error against float64 at most twice eager's own (and a little, where eager is exact). And it is
    ours that answers: not torch, because compile() saw another answer than torch's."""
    assert not [note for note in getattr(fast, "notes", ()) if "please report this" in note], fast.notes
    with torch.no_grad():
        eager = model(*args, **kwargs)
        exact = copy.deepcopy(model).double()(
            *(a.double() for a in args), **{k: v.double() for k, v in kwargs.items()}
        )
        got = fast(*args, **kwargs)
    leaves = [torch.utils._pytree.tree_leaves(v) for v in (eager, exact, got)]
    assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(eager)
    for e, x, g in zip(*leaves, strict=True):
        assert g.shape == e.shape
        assert g.dtype == e.dtype
        allowed = 2 * (e - x).abs().max() + 1e-6 * x.abs().max()
        assert (g - x).abs().max() <= allowed, f"{(g - x).abs().max():.3g}, eager {(e - x).abs().max():.3g}"
    return got


class Small(nn.Module):
    """Stem with pooling, a strided bottleneck, another, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, 16, 7, 2, act=nn.ReLU(inplace=True)), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(Bottleneck(16, 16, 32, 2), Bottleneck(32, 16, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))  # type: ignore[no-any-return]


class Skip(nn.Module):
    """A skip tensor that is later relu_'d: what the add sees is the rectified one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.a(x)
        y = self.b(F.relu_(skip))
        out: Tensor = y + skip
        return out


class Fancy(nn.Module):
    """Two inputs, a keyword, a dict out; concat, chunk, resize, SiLU before add, 1xN kernels, transposed
    convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv_bn(3, 8, (1, 5), act=nn.SiLU()), conv_bn(8, 8, (3, 1), act=nn.SiLU())
        self.c, self.up = conv_bn(16, 8, 3, act=nn.LeakyReLU(0.1)), nn.ConvTranspose2d(8, 4, 3, 2)

    def forward(self, x: Tensor, other: Tensor, *, scale: Tensor) -> dict[str, Any]:
        a = self.a(x) * scale
        b = a + self.b(a)
        c = self.c(torch.cat([b, other], 1))
        left, half = c.chunk(2, 1)
        return {"up": self.up(c), "pair": (F.interpolate(left, scale_factor=2), half), "same": other}


class Looping(nn.Module):
    """A loop on data: torch.export cannot take it whole, but its backbone is fine."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Small().blocks, nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.backbone(x))
        while float(y.abs().max()) > 1e3:
            y = y / 2
        return y  # type: ignore[no-any-return]


class Picks(nn.Module):
    """The rows brighter than the mean: a size that depends on data, between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        rows = torch.nonzero(x[0, 0].mean(1) > x[0, 0].mean())[:, 0]
        return self.b(y.index_select(2, rows))  # type: ignore[no-any-return]
