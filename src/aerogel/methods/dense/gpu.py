"""`dense` on GPUs: torch's own convolution, cuDNN on CUDA; both layouts, its epilogue as torch's calls. The
baseline."""

from __future__ import annotations

from collections.abc import Iterator

from aerogel.ir import Config, Conv, Gpu, Pool, Stats
from aerogel.methods.dense import NAME


def refuse(conv: Conv, target: Gpu, stats: Stats) -> str | None:
    return "an empty batch has nothing to time" if conv.n == 0 else None


def configs(conv: Conv, target: Gpu, stats: Stats) -> Iterator[Config]:
    for layout in (1, 0):
        yield Config.make(NAME, channels_last=layout)


def layout(config: Config) -> str:
    return "channels_last" if config["channels_last"] else "contiguous"


def takes_pool(conv: Conv, config: Config, pool: Pool) -> bool:
    return False
