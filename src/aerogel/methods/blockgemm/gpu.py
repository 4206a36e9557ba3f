"""`blockgemm` on GPUs: clusters of filters that share positions as dense products on tensor cores, the rest
as single nonzeros.

Paper: Rumi et al. (PACT'20). Clusters are found as on the CPU (formats/clusters.py) and run as tiles do,
all in one launch (codegen/gpu/gathered.py); what is left over, which `aerogel.reprune` makes less, in a
second one.

On random weights nothing is found. Refuses filters that are not alike, f32 where torch may not round to tf32,
sums in f16, and devices that are not CUDA's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aerogel.formats import clusters, panels
from aerogel.ir import Array, Config, Conv, Gpu, Packed, Pool, Stats
from aerogel.methods.blockgemm import NAME
from aerogel.methods.blockgemm import cpu as blockgemm


def refuse(conv: Conv, target: Gpu, stats: Stats) -> str | None:
    return panels.unsupported(conv, target) or blockgemm.unlike(stats)


def configs(conv: Conv, target: Gpu, stats: Stats) -> Iterator[Config]:
    inside = stats.nonzeros * stats.alike // 100
    return panels.configs(NAME, conv, target, inside, stats.nonzeros - inside, clusters.SIZE)


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    return panels.pack(NAME, weight, conv, config, clusters.tiles(weight, conv))


unpack = partial(panels.unpack, NAME)
build = partial(panels.build, NAME)


def layout(config: Config) -> str:
    return "channels_last"


def takes_pool(conv: Conv, config: Config, pool: Pool) -> bool:
    return False
