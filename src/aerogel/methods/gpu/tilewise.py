"""`tilewise` on GPUs: filters that keep the same positions as one dense product on tensor cores, over gathered pixels of x.

Paper: tile-wise sparsity (Guo et al., SC'20, arXiv 2008.13006). Tiles are found as on the CPU (methods/tilewise.py): filters in
runs of 32, the positions most of a run keep. All tiles of a layer run in one launch (codegen/gpu/gathered.py), in f16, bf16 or tf32
with sums in f32; what stands outside of the tiles (TEW's elements) in a second one.

Wins where tensor cores do: many filters, many pixels. Refuses weights whose filters share few positions, f32 where torch may not
round to tf32, sums in f16, and devices that are not CUDA's.
"""

from __future__ import annotations

from collections.abc import Iterator

from aerogel.candidate import Config, Packed, Stats
from aerogel.codegen.gpu import panels
from aerogel.codegen.gpu.launch import TritonLaunch
from aerogel.layout import Array
from aerogel.methods import tilewise
from aerogel.problem import Conv
from aerogel.target import Gpu

NAME, PAPER = tilewise.NAME, tilewise.PAPER
SUMMARY = "filters that keep the same positions as dense products on tensor cores; tile-wise pruning (TW, TEW)"
LAYOUT = "channels_last"


def refuse(conv: Conv, target: Gpu, stats: Stats) -> str | None:
    return panels.unsupported(conv, target) or tilewise.unlike(stats)


def configs(conv: Conv, target: Gpu, stats: Stats) -> Iterator[Config]:
    return panels.configs(NAME, conv, target, stats.shared, stats.nonzeros - stats.shared)


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    return panels.pack(NAME, weight, conv, config, tilewise.tiles(weight, conv))


def unpack(packed: Packed, conv: Conv) -> Array:
    return panels.unpack(NAME, packed, conv)


def build(packed: Packed, conv: Conv, config: Config) -> list[TritonLaunch]:
    return panels.build(NAME, packed, conv, config)
