"""`tilewise` on GPUs: filters that keep the same positions as one dense product on tensor cores, over
gathered pixels of x.

Paper: tile-wise sparsity (Guo et al., SC'20, arXiv 2008.13006). Tiles are found as on the CPU
(methods/tilewise/cpu.py): filters in runs of 32, the positions most of a run keep. All tiles of a layer run
in one launch (codegen/gpu/gathered.py), in f16, bf16 or tf32 with sums in f32; what stands outside of the
tiles (TEW's elements) in a second one.

Wins where tensor cores do: many filters, many pixels. Refuses weights whose filters share few positions, f32
where torch may not round to tf32, sums in f16, and devices that are not CUDA's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aerogel.formats import panels
from aerogel.ir import Array, Config, Conv, Gpu, Packed, Pool, Stats
from aerogel.methods.tilewise import NAME
from aerogel.methods.tilewise import cpu as tilewise


def refuse(conv: Conv, target: Gpu, stats: Stats) -> str | None:
    return panels.unsupported(conv, target) or tilewise.unlike(stats)


def configs(conv: Conv, target: Gpu, stats: Stats) -> Iterator[Config]:
    return panels.configs(NAME, conv, target, stats.shared, stats.nonzeros - stats.shared)


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    return panels.pack(NAME, weight, conv, config, tilewise.tiles(weight, conv))


unpack = partial(panels.unpack, NAME)
build = partial(panels.build, NAME)


def layout(config: Config) -> str:
    return "channels_last"


def takes_pool(conv: Conv, config: Config, pool: Pool) -> bool:
    return False
