r"""Whether images of a batch side by side beat image by image.

    python -m benchmarks.experiments.lanes --pattern resnet50-90.npz --json lanes.jsonl

Maps (n, c, h, w) put as (1, c, h, w * n), the n values of a pixel next to each other, are one image n times
as wide, on which a convolution of stride 1 whose horizontal dilation and padding are n times as large does
what it does to each of the n. Small maps then fill whole vectors and every window begins where one does; but
maps of all images are read and written by one layer before the next begins.

Timed are the blocks of stride 1 of each stage of ResNet-50, compiled both ways, in turns: milliseconds an
image, the fastest round, and what the change of layout costs there and back. Everything here is measured.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import aerogel
from aerogel.tune.measure import interleaved
from aerogel.zoo.models import make
from benchmarks.zoo.patterns import prune_pattern
from tests.nightly import machine

STAGES = {7: (14, 16), 14: (8, 13), 28: (4, 7)}
"""Blocks of stride 1 by the side of their maps."""


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--pattern", type=Path, required=True, help="a .npz of masks of ResNet-50")
    parser.add_argument("--images", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--sides", type=int, nargs="+", choices=STAGES, default=[7, 14])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, help="append the result there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = prune_pattern(make("resnet50"), given.pattern)
    table = Table("maps", "images", "image by image, ms", "side by side", "change of layout")
    rows = []
    for side in given.sides:
        low, high = STAGES[side]
        stage = nn.Sequential(*list(model.blocks)[low:high])  # type: ignore[arg-type]
        for images in given.images:
            rows.append({"side": side, "images": images, **measured(stage, side, images, given.rounds)})
            row = rows[-1]
            table.add_row(
                f"{side} x {side}", str(images), *(f"{row[n]:.2f}" for n in ("apart", "beside", "change"))
            )
    Console().print(table)
    if given.json:
        with given.json.open("a") as file:
            file.write(json.dumps({**machine(), "pruning": given.pattern.stem, "rows": rows}) + "\n")


def measured(stage: nn.Module, side: int, images: int, rounds: int) -> dict[str, float]:
    """Milliseconds an image."""
    channels = next(m.in_channels for m in stage.modules() if isinstance(m, nn.Conv2d))
    x = torch.randn(images, channels, side, side).relu()
    beside = together(x)
    with torch.no_grad():
        one = aerogel.compile(stage.eval(), x[:1], progress=False)
        wide = aerogel.compile(widened(stage, images), beside, progress=False)
        ones = [x[i : i + 1] for i in range(images)]
        wanted, got = torch.cat([one(v) for v in ones]), apart(wide(beside), images)
        assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-5
        runs: list[Callable[[], Any]] = [
            lambda: [one(v) for v in ones],
            lambda: wide(beside),
            lambda: apart(together(x), images),
        ]
        times = interleaved(runs, rounds)
    names = ("apart", "beside", "change")
    return {name: min(us) / 1e3 / images for name, us in zip(names, times, strict=True)}


def together(x: torch.Tensor) -> torch.Tensor:
    """(n, c, h, w) as (1, c, h, w * n)."""
    return x.permute(1, 2, 3, 0).flatten(2)[None]


def apart(x: torch.Tensor, images: int) -> torch.Tensor:
    """The inverse of `together`."""
    _, c, h, w = x.shape
    return x.view(c, h, w // images, images).permute(3, 0, 1, 2).contiguous()


def widened(stage: nn.Module, images: int) -> nn.Module:
    """The stage for images side by side."""
    wide = copy.deepcopy(stage).eval()
    for conv in (m for m in wide.modules() if isinstance(m, nn.Conv2d)):
        assert not isinstance(conv.padding, str)
        conv.padding = conv.padding[0], conv.padding[1] * images
        conv.dilation = conv.dilation[0], conv.dilation[1] * images if conv.kernel_size[1] > 1 else 1
    return wide


if __name__ == "__main__":
    main()
