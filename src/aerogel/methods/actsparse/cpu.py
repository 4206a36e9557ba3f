"""`actsparse` on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product

import numpy as np

from aerogel.codegen.cpu import lists, llvm
from aerogel.codegen.cpu.abi import Kernel
from aerogel.formats import flat, tiled
from aerogel.ir import ALONE, Array, Config, Conv, Layout, Packed, Stats, Target, ceil_div, nonzero
from aerogel.methods.actsparse import NAME

FEW = 20
"""Percent of x's vectors that must be zero before anything can be gained."""

CHUNK = 256
"""Positions whose values stay in L1, and whose products are summed in one chain."""
_SUMS = {"avx512": 28, "avx2": 12, "generic": 12, "neon": 24}
"""Vectors of sums kept in registers, at most."""
_FILTERS = (4, 8, 11, 12, 13, 14, 22, 24, 26, 28)
"""Filters of a panel: few numbers, so that layers share code."""
COST = {
    "avx512": {
        "test": 4.0,  # of a vector, whether it is zero
        "load": 0.5,  # of a weight or of half a vector
        "step": 2.0,  # of an active position
        "lists": 0.3,  # share of the time that one list for all vectors costs
    }
}
"""Cycles by ISA; one that is not here goes by AVX-512's (benchmarks/experiments/fit.py)."""


def refuse(conv: Conv, target: Target, stats: Stats) -> str | None:
    if (why := tiled.unsupported(conv, target)) is not None:
        return why
    if stats.idle is None:
        return "how many zeros its input has is not known: give real inputs as compile(calibration=...)"
    if stats.idle.vectors < FEW:
        return (
            f"{stats.idle.vectors} % of its input's vectors of pixels are zero on the calibration "
            "inputs: too few to gain"
        )
    return None


def configs(conv: Conv, target: Target, stats: Stats) -> Iterator[Config]:
    """Panels and blocks of pixels, ordered by a cost model."""
    lanes, own = target.vector_bytes // 4, conv.c // conv.groups
    live, alone = flat.live_vectors(conv, lanes, stats.place), flat.live_vectors(conv, lanes, ALONE)
    possible = flat.most_vectors(conv, lanes)
    cost = {}
    for width, parts in product((2, 1), (7, 6, 5, 4, 3, 2, 1)):
        for filters in _FILTERS:
            if width * (parts - 1) < possible and filters * width <= _SUMS[target.isa]:
                cost[filters, width, width * parts] = _cycles(
                    conv, target, stats, live, filters, width, parts
                )

    def config(filters: int, width: int, vectors: int) -> Config:
        groups = flat.filter_groups(conv, ceil_div(alone, vectors), target)
        return Config.make(
            NAME, filters=filters, width=width, vectors=vectors, chunk=CHUNK, channels=own, groups=groups
        )

    points = sorted(cost, key=lambda point: cost[point])
    return (config(*point) for point in points)


def _cycles(
    conv: Conv, target: Target, stats: Stats, live: int, filters: int, width: int, parts: int
) -> float:
    """Modelled, to order candidates: a position costs its test, and where it is active its FMAs and loads in
    each panel."""
    cost = COST.get(target.isa, COST["avx512"])
    idle = 0.0 if stats.idle is None else stats.idle.vectors / 100
    kept = 1 - stats.sparsity if 2 * stats.shared > stats.nonzeros else 1 - stats.sparsity**filters
    panel = filters * width / 2 + cost["load"] * (filters + 2 * width) + cost["step"]
    position = cost["test"] * width + (1 - idle ** (0.5 + 0.5 * width)) * ceil_div(conv.k, filters) * panel
    return float(kept * position * ceil_div(live, width * parts) * parts * (1 + cost["lists"] / parts))


def tiles(weight: Array, conv: Conv, filters: int) -> list[tiled.Tile]:
    """Neighbouring filters with the same positions; where hardly any have, panels of neighbours and all
    positions of theirs."""
    mask = nonzero(weight, conv.dtypes.weight).reshape(conv.k, -1)
    edges = [0, *(np.flatnonzero((mask[1:] != mask[:-1]).any(1)) + 1).tolist(), conv.k]
    if len(edges) - 1 > 2 * ceil_div(conv.k, filters):
        edges = [*range(0, conv.k, filters), conv.k]
    mask[~mask.any(1), 0] = True  # a filter without nonzeros still has a bias to write
    return [(np.arange(low, high), np.flatnonzero(mask[low:high].any(0))) for low, high in pairwise(edges)]


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    return tiled.pack(NAME, weight, conv, config, tiles(weight, conv, config["filters"]))


check = partial(tiled.check, NAME)
unpack = partial(tiled.unpack, NAME)


layouts = tiled.layouts


pixels = flat.pixels


def build(
    packed: Packed,
    conv: Conv,
    config: Config,
    target: Target,
    reads: Layout,
    writes: Layout,
    rows: int | None = None,
) -> list[Kernel]:
    check(packed, conv)
    lanes, a = target.vector_bytes // 4, packed.arrays
    flat.compatible(NAME, conv, lanes, config["vectors"], False, reads, writes)
    code = lists.ListsCode(
        target.isa,
        conv.dtypes,
        config["vectors"],
        conv.steps,
        width=config["width"],
        filters=packed.meta["filters"],
    )
    entry = llvm.function(str(code), lists.ENTRY, lambda: lists.emit(code), target.isa)
    owned, sizes = flat.arguments(a, packed.meta["channel_blocks"], conv, code, reads, writes, 0, rows)
    offset, starts = tiled.windows(a, conv, code.filters, reads), a["tile_row"].astype(np.int64)
    row = (np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))) * code.filters * 4
    owned |= {n: np.ascontiguousarray(a[n]) for n in ("tile", "tile_row", "tile_panel", "member")}
    owned |= {
        "tile_value": tiled.first_values(a),
        "entry": offset.astype(np.int64) & 0xFFFFFFFF | row << 32,
        "panel": tiled.panel_values(a, code.filters, conv.dtypes.weight),
        "counts": np.zeros(8 * lists.COUNTERS, np.int64),
    }
    longest, chunk, parts = (
        int(np.diff(starts).max(initial=0)),
        config["chunk"],
        config["vectors"] // config["width"],
    )
    sizes |= {"chunk": chunk, "list_first": 8 * (longest // chunk + 3)}
    sizes["list_bytes"] = sizes["list_first"] + 8 * (longest + 1)
    sizes["sums_first"] = -(-parts * sizes["list_bytes"] // 64) * 64
    sizes["scratch_thread"] = sizes["sums_first"] + parts * code.filters * code.width * lanes * 4
    return [Kernel.of(f"{NAME} {conv}", (reads, writes), entry, lists.ARGUMENTS, sizes, owned)]
