"""`blockgemm` on GPUs: clusters of filters that share positions as dense products on tensor cores, the rest as single nonzeros.

Paper: Rumi et al. (PACT'20). Clusters are found as on the CPU (methods/blockgemm.py) and run as tiles do, all in one launch
(codegen/gpu/gathered.py); what is left over, which `aerogel.reprune` makes less, in a second one.

On random weights nothing is found. Refuses filters that are not alike, f32 where torch may not round to tf32, sums in f16, and
devices that are not CUDA's.
"""

from __future__ import annotations

from collections.abc import Iterator

from aerogel.candidate import Config, Packed, Stats
from aerogel.codegen.gpu import panels
from aerogel.codegen.gpu.launch import TritonLaunch
from aerogel.layout import Array
from aerogel.methods import blockgemm
from aerogel.problem import Conv
from aerogel.target import Gpu

NAME, PAPER = blockgemm.NAME, blockgemm.PAPER
SUMMARY = "clusters of filters that share positions as dense blocks on tensor cores, what is left over as single nonzeros"
LAYOUT = "channels_last"


def refuse(conv: Conv, target: Gpu, stats: Stats) -> str | None:
    return panels.unsupported(conv, target) or blockgemm.unlike(stats)


def configs(conv: Conv, target: Gpu, stats: Stats) -> Iterator[Config]:
    inside = stats.nonzeros * stats.alike // 100
    return panels.configs(NAME, conv, target, inside, stats.nonzeros - inside, blockgemm.SIZE)


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    return panels.pack(NAME, weight, conv, config, blockgemm.tiles(weight, conv))


def unpack(packed: Packed, conv: Conv) -> Array:
    return panels.unpack(NAME, packed, conv)


def build(packed: Packed, conv: Conv, config: Config) -> list[TritonLaunch]:
    return panels.build(NAME, packed, conv, config)
