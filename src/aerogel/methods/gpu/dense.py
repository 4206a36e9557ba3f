"""`dense` on GPUs: torch's own convolution, cuDNN on CUDA; both layouts, its epilogue as torch's calls. The baseline."""

from __future__ import annotations

from collections.abc import Iterator

from aerogel.candidate import Config, Stats
from aerogel.problem import Conv
from aerogel.target import Gpu

NAME, PAPER = "dense", "torch and cuDNN"
SUMMARY = "torch's own convolution, in both layouts"


def refuse(conv: Conv, target: Gpu, stats: Stats) -> str | None:
    return "an empty batch has nothing to time" if conv.n == 0 else None


def configs(conv: Conv, target: Gpu, stats: Stats) -> Iterator[Config]:
    for layout in (1, 0):
        yield Config.make(NAME, channels_last=layout)
