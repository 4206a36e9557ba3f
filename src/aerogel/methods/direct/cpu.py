"""`direct` on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from aerogel.codegen.cpu import llvm
from aerogel.codegen.cpu import rows as rows_
from aerogel.codegen.cpu.abi import Kernel
from aerogel.codegen.cpu.sums import half, summed_channels, unsupported
from aerogel.errors import InvalidFile
from aerogel.formats import flat
from aerogel.ir import ALONE, ITEM_BYTES, Array, Config, Conv, Layout, Packed, Place, Stats, Target, ceil_div
from aerogel.methods.direct import NAME

VERSION = 1

_MOST_RUNS = 6
"""Alignments of a row's windows beyond which runs get too short to pay."""
_REGISTER_BLOCK = {"avx512": 14, "avx2": 12, "generic": 12, "neon": 14}
"""Most vectors of sums kept in registers: 16 or 32 of them, some needed for the weight and the window."""
COST = {
    "avx512": {
        "straddle": 3.5,  # loads more, of a vector that straddles a line
        "near": 0.9,  # of the nearest cache that windows have
        "miss": 1.2,  # of a load beyond it
        "row": 25.0,
        "sum": 1.2,  # of a row, for each vector of sums
        "run": 8.0,
        "run_vector": 2.0,
        "partial": 2.5,  # of a vector of sums that is put away and fetched
        "far": 20.0,  # of a plane beyond the second cache, and for each vector of it
        "far_vector": 27.0,
    }
}
COST["avx2"] = COST["avx512"] | {"straddle": 0.35}  # a vector is half a line: fewer straddle one
"""Cycles by ISA; one that is not here goes by AVX-512's. Fitted by benchmarks/experiments/fit.py on one
server core to 46 layers (AVX-512: ResNet-50 at 80, 90 and 95 %; AVX2: at 80 and 90 %). There the first choice
costs 4 % over the best of a full search, with AVX2 15 % over the best of 32 timed, where AVX-512's numbers
cost 25 %; the other numbers, fitted for AVX2, were no better on fresh timings."""


def refuse(conv: Conv, target: Target, stats: Stats) -> str | None:
    if (why := unsupported(conv.dtypes, target)) is not None:
        return why
    if conv.n is not None and (bytes_ := flat.image_bytes(conv)) >= 2**31:
        return f"one image takes {bytes_ / 2**30:.1f} GiB; offsets in this format reach 2 GiB"
    return None


def configs(conv: Conv, target: Target, stats: Stats) -> Iterator[Config]:
    """Register blocks and blocks of channels, ordered by a cost model; measurement decides among the first of
    them. What is offered does not depend on the place: a file or a record is looked at without one."""
    own = conv.c // conv.groups
    sizes = summed_channels(own, 8, conv, stats.nonzeros)
    cost: dict[tuple[int, int, int], float] = {}
    kinds = (0, 1) if conv.r * conv.s > 1 else (0,)
    alone = {aligned: _Shape.of(conv, target, aligned, ALONE) for aligned in kinds}
    for aligned in kinds:
        shape = _Shape.of(conv, target, aligned, stats.place)
        registers = _REGISTER_BLOCK[target.isa] // (1 + aligned * (target.isa in ("avx2", "generic")))
        most = min(flat.most_vectors(conv, _lanes(conv, target)), registers)
        if len(alone[aligned].shifts) <= _MOST_RUNS:
            points = [(v, b) for v in range(1, most + 1) for b in sizes]
            vectors, channels = np.array(points).T
            modelled = _cycles(conv, target, stats, shape, vectors, channels)
            cost |= {(*point, aligned): own for point, own in zip(points, modelled.tolist(), strict=True)}
    ordered = sorted(cost, key=lambda point: cost[point])
    first = [
        next(point for point in ordered if point[2] == kind)
        for kind in dict.fromkeys(point[2] for point in ordered)
    ]
    tried = dict.fromkeys(first + ordered)  # the best of each kind is always timed

    def both(v: int, b: int, aligned: int) -> tuple[Config, Config]:
        groups = flat.filter_groups(conv, ceil_div(alone[aligned].live, v), target)
        by_length = Config.make(NAME, vectors=v, channels=b, groups=groups, ahead=4, aligned=aligned)
        return by_length, Config.make(NAME, in_order=1, **dict(by_length.options))

    return (config for point in tried for config in both(*point))


@dataclass(frozen=True)
class _Shape:
    """What the cost model knows of a layer's planes: pitch, vectors that hold pixels, runs, bytes of x and of
    y."""

    pitch: int
    live: int
    shifts: tuple[int, ...]
    far: tuple[int, int]

    @staticmethod
    def of(conv: Conv, target: Target, aligned: int, place: Place) -> _Shape:
        lanes, (p, q) = _lanes(conv, target), conv.out
        reads, writes = flat.layouts(conv, lanes, 1, bool(aligned), place)
        every = flat.offsets(np.arange(conv.r * conv.s), np.array(0), conv, reads)
        far = (
            conv.c * reads.plane(*conv.size) * reads.item_bytes,
            conv.k * writes.plane(p, q) * writes.item_bytes,
        )
        return _Shape(
            reads.pitch,
            ceil_div((p - 1) * reads.pitch + q, lanes),
            flat.shifts(every, lanes) if aligned else (),
            far,
        )


def _cycles(
    conv: Conv, target: Target, stats: Stats, shape: _Shape, vectors: Array, channels: Array
) -> Array:
    """Modelled cycles of one image, by points: it orders candidates and is never shown as a time.

    A nonzero costs its loads, two a cycle, more for the share of its window that the nearest cache cannot
    hold and where a vector straddles a line; a row costs its start, its end, its runs and its partial sums;
    images beyond the second cache cost time at each touch.
    """
    cost = COST.get(target.isa, COST["avx512"])
    width = target.vector_bytes
    passes = -(-(conv.c // conv.groups) // channels)
    span = np.minimum(
        conv.r * vectors * width,
        vectors * width + (conv.r - 1) * (shape.pitch + 1) * ITEM_BYTES[conv.dtypes.input],
    )
    runs = len(shape.shifts)
    loads = vectors + (1 - 1 / runs) if runs else vectors * (1 + cost["straddle"] * (1 - 1 / conv.s))
    missing = np.maximum(0.0, 1 - cost["near"] * target.l1_bytes / (channels * span))
    nonzero = (loads + 2) / 2 + cost["miss"] * loads * missing
    kept = vectors * 4 // ITEM_BYTES[conv.dtypes.accumulator]  # partial sums are f32
    turns = max(0, runs - 1) * (cost["run"] + cost["run_vector"] * vectors)
    rows = conv.k * (
        passes * (cost["row"] + cost["sum"] * kept + turns) + (passes - 1) * cost["partial"] * kept
    )
    moved: Any = sum(
        count * (cost["far"] + cost["far_vector"] * vectors)
        for count, size in zip((conv.c, conv.k), shape.far, strict=True)
        if size > target.l2_bytes // 2
    )
    blocks = -(-shape.live // vectors)
    return np.asarray(blocks * (stats.nonzeros * nonzero + rows + moved))


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    arrays, blocks = flat.pack(
        weight, conv, config["channels"], config["groups"], in_order=bool(config.get("in_order", 0))
    )
    return Packed(NAME, VERSION, arrays, {"channel_blocks": blocks})


def unpack(packed: Packed, conv: Conv) -> Array:
    check(packed, conv)
    return flat.unpack(packed.arrays, conv)


def check(packed: Packed, conv: Conv) -> None:
    """The invariants the kernel relies on; a Packed from a file goes through here before it is used."""
    if (packed.format, packed.version) != (NAME, VERSION) or set(packed.arrays) != set(flat.ARRAYS):
        raise InvalidFile(f"not a {NAME} version {VERSION} weight")
    flat.check(NAME, packed.arrays, packed.meta.get("channel_blocks", 0), conv)


def layouts(
    conv: Conv,
    config: Config,
    target: Target,
    place: Place = ALONE,
) -> tuple[Layout, Layout]:
    return flat.layouts(conv, _lanes(conv, target), config["vectors"], bool(config["aligned"]), place)


def _lanes(conv: Conv, target: Target) -> int:
    return target.vector_bytes // ITEM_BYTES[conv.dtypes.accumulator]


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
    flat.compatible(
        NAME, conv, _lanes(conv, target), config["vectors"], bool(config["aligned"]), reads, writes
    )
    d = conv.dtypes
    taps = flat.offsets(np.arange(conv.r * conv.s), np.array(0), conv, reads)
    shifts = flat.shifts(taps, _lanes(conv, target)) if config["aligned"] else ()
    code = rows_.RowsCode(target.isa, d, config["vectors"], conv.steps, shifts)
    entry = llvm.function(str(code), rows_.ENTRY, lambda: rows_.emit(code), target.isa, half(d, target))
    owned, sizes = flat.arguments(
        packed.arrays, packed.meta["channel_blocks"], conv, code, reads, writes, config["ahead"], rows
    )
    widest = int(np.diff(packed.arrays["group"]).max())
    sizes["scratch_thread"] = (
        widest * code.vectors * code.lanes * 4 if packed.meta["channel_blocks"] > 1 else 0
    )
    return [Kernel.of(f"{NAME} {conv}", (reads, writes), entry, rows_.ARGUMENTS, sizes, owned)]
