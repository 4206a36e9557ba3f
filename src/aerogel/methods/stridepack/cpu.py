"""`stridepack` on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from aerogel.codegen.cpu import llvm, tiles
from aerogel.codegen.cpu.abi import Kernel
from aerogel.codegen.cpu.sums import by_rank, half, lane_bits, spread, summed_channels, unsupported
from aerogel.errors import InvalidFile, PlanMismatch, ShapeError
from aerogel.ir import (
    ALONE,
    ITEM_BYTES,
    NUMPY,
    Array,
    Config,
    Conv,
    Layout,
    Packed,
    Place,
    Stats,
    Target,
    ceil_div,
    nonzero,
    round_up,
    widest,
)
from aerogel.methods.stridepack import NAME

VERSION = 1

_REGISTER_BLOCK = {"avx512": 14, "avx2": 12, "generic": 12, "neon": 14}
_MOST_STAGED = 1024
"""Channels that ten bits of a position can name."""


COST = {
    "avx512": {
        "staged": 1.5,  # of a vector put into the tile, beside its stride
        "gathered": 20.0,  # of one whose pixels are three or more apart
        "near": 0.9,  # of the nearest cache that the tile has
        "miss": 1.2,  # of a load beyond it
        "row": 25.0,
        "sum": 1.2,  # of a row, for each vector of sums
        "partial": 2.5,  # of a vector of sums that is put away and fetched
        "end": 4.0,  # of a vector of output
    }
}
"""Cycles by ISA; one that is not here goes by AVX-512's (benchmarks/experiments/fit.py)."""


def refuse(conv: Conv, target: Target, stats: Stats) -> str | None:
    if (why := unsupported(conv.dtypes, target)) is not None:
        return why
    if max(conv.r, conv.s) > 7:
        return (
            f"a kernel of {conv.r} x {conv.s}: a packed position has three bits for its row and three "
            "for its column"
        )
    if conv.n is not None and _tile_vectors(conv, 1, 1) >= 2**16:
        return (
            f"one channel under a row of pixels takes {_tile_vectors(conv, 1, 1)} vectors; two "
            "bytes count 65536"
        )
    return None


def configs(conv: Conv, target: Target, stats: Stats) -> Iterator[Config]:
    """Blocks of output vectors and stages of channels, ordered by a cost model; measurement decides among the
    first of them."""
    lanes, own = _lanes(conv, target), conv.c // conv.groups
    across = ceil_div(conv.out[1], lanes)
    most = _REGISTER_BLOCK[target.isa]
    cost = {}
    for columns in range(1, min(across, most) + 1):
        for rows in range(1, min(conv.out[0], most // columns) + 1):
            tile = _tile_vectors(conv, rows, columns)
            for channels in summed_channels(own, 4, conv, stats.nonzeros):
                held = channels * tile * target.vector_bytes
                if channels * tile < 2**16 and (held <= target.l2_bytes // 4 or channels == min(own, 4)):
                    cost[rows, columns, channels] = _cycles(
                        conv, target, stats, across, rows, columns, channels
                    )
    for rows, columns, channels in sorted(cost, key=lambda point: cost[point]):
        units = max(1, conv.batch * ceil_div(conv.out[0], rows) * ceil_div(across, columns))
        groups = min(
            conv.k // conv.groups,
            1 if target.threads == 1 else max(1, -(-4 * target.threads // (units * conv.groups))),
        )
        yield Config.make(NAME, rows=rows, columns=columns, channels=channels, groups=groups, ahead=4)


def _cycles(
    conv: Conv, target: Target, stats: Stats, across: int, rows: int, columns: int, channels: int
) -> float:
    """Modelled cycles of one image: it orders candidates and is never shown as a time.

    A staged vector costs its load and its store; a nonzero its loads, two a cycle, more where the tile
    outgrows the nearest cache; a row its start, its end and its partial sums.
    """
    cost = COST.get(target.isa, COST["avx512"])
    vectors, tile = rows * columns, _tile_vectors(conv, rows, columns)
    stages = ceil_div(conv.c // conv.groups, channels)
    missing = max(0.0, 1 - cost["near"] * target.l1_bytes / (channels * tile * target.vector_bytes))
    staged = conv.c * tile * (cost["staged"] + conv.stride[1] if conv.stride[1] < 3 else cost["gathered"])
    each = (vectors + 2) / 2 + cost["miss"] * vectors * missing
    kept = vectors * 4 // ITEM_BYTES[conv.dtypes.accumulator]  # partial sums are f32
    sums = stages * (cost["row"] + cost["sum"] * kept) + (stages - 1) * cost["partial"] * kept
    filters = conv.k * (sums + cost["end"] * vectors)
    blocks = ceil_div(conv.out[0], rows) * ceil_div(across, columns)
    return blocks * (staged + stats.nonzeros * each + filters)


def _lanes(conv: Conv, target: Target) -> int:
    return target.vector_bytes // ITEM_BYTES[conv.dtypes.accumulator]


def _row_step(conv: Conv) -> int:
    """Rows of the tile between two rows of pixels: a kernel of one row needs none of those between."""
    return conv.stride[0] if conv.r > 1 else 1


def _tile_rows(conv: Conv, rows: int) -> int:
    return (rows - 1) * _row_step(conv) + (conv.r - 1) * conv.dilation[0] + 1


def _tile_vectors(conv: Conv, rows: int, columns: int) -> int:
    """Vectors of the tile that one channel takes."""
    return _tile_rows(conv, rows) * conv.s * columns


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    k, c, r, s = conv.weight_shape
    if weight.shape != (k, c, r, s):
        raise ShapeError(f"weight of shape {weight.shape} for {conv.layer()}, which takes {(k, c, r, s)}")
    if weight.size >= 2**31:
        raise ShapeError(f"{conv.layer()}: more than 2^31 weights")
    stage = min(config["channels"], _MOST_STAGED)
    stages = ceil_div(c, stage)
    kept = nonzero(weight, conv.dtypes.weight)
    filters, channel, i, j = np.nonzero(kept)
    counts = np.zeros((k, stages), np.int64)
    np.add.at(counts, (filters, channel // stage), 1)
    edges, order = _dealt(counts.sum(1), config["groups"], conv.groups)
    place = np.empty(k, np.int64)
    place[order] = np.arange(k)
    group = np.searchsorted(edges, np.arange(k), side="right") - 1
    pair_place, pair_stage = (a.ravel() for a in np.meshgrid(np.arange(k), np.arange(stages), indexing="ij"))
    by_place = counts[order]
    ranked = np.lexsort((pair_place, -by_place.ravel(), pair_stage, group[pair_place]))
    rank = np.empty(k * stages, np.int64)
    rank[ranked] = np.arange(k * stages)
    nonzeros = by_rank(rank[place[filters] * stages + channel // stage])
    position = j | i << 3 | (channel % stage) << 6
    return Packed(
        NAME,
        VERSION,
        {
            "group": edges.astype(np.int32),
            "filter": order.astype(np.int32),
            "row": pair_place[ranked].astype(np.int32),
            "start": np.concatenate([[0], np.cumsum(by_place.ravel()[ranked])]).astype(np.int32),
            "position": position[nonzeros].astype(np.uint16),
            "value": weight[filters, channel, i, j][nonzeros],
        },
        {"stage": stage},
    )


def _dealt(lengths: Array, groups: int, apart: int) -> tuple[Array, Array]:
    """Filter group reorder: the longest filter left goes to the group with least work, so that groups take
    equal time.

    `apart` is the number of runs of filters that read different channels; each is dealt to `groups` groups of
    its own.
    """
    members: list[list[int]] = []
    for own in np.split(np.arange(len(lengths)), apart):
        work, dealt = np.zeros(groups), [list[int]() for _ in range(groups)]
        for k in own[np.argsort(-lengths[own], kind="stable")]:
            least = int(np.argmin(work))
            work[least] += lengths[k] + 4
            dealt[least].append(int(k))
        members += [sorted(group) for group in dealt]
    order = np.array([k for group in members for k in group], np.int64)
    return np.concatenate([[0], np.cumsum([len(group) for group in members])]), order


def unpack(packed: Packed, conv: Conv) -> Array:
    check(packed, conv)
    a, stage = packed.arrays, packed.meta["stage"]
    filters, channel, i, j = _where(packed, ceil_div(conv.c // conv.groups, stage))
    weight = np.zeros(conv.weight_shape, NUMPY[conv.dtypes.weight])
    weight[filters, channel, i, j] = a["value"]
    return weight


def _where(packed: Packed, stages: int) -> tuple[Array, Array, Array, Array]:
    """Filter, channel, row and column of each nonzero."""
    a, stage = packed.arrays, packed.meta["stage"]
    counts = np.diff(a["group"]).astype(np.int64)
    stage_of = np.concatenate([np.repeat(np.arange(stages), n) for n in counts] or [np.zeros(0, np.int64)])
    lengths = np.diff(a["start"])
    position = a["position"].astype(np.int64)
    channel = np.repeat(stage_of, lengths) * stage + (position >> 6)
    return a["filter"][np.repeat(a["row"], lengths)], channel, position >> 3 & 7, position & 7


def check(packed: Packed, conv: Conv) -> None:
    """The invariants the kernel relies on; a Packed from a file goes through here before it is used."""
    k, c, r, s = conv.weight_shape
    a, stage = packed.arrays, packed.meta.get("stage", 0)
    names = {"group", "filter", "row", "start", "position", "value"}
    if (packed.format, packed.version) != (NAME, VERSION) or set(a) != names:
        raise InvalidFile(f"not a {NAME} version {VERSION} weight")
    kinds = {n: np.dtype(np.int32) for n in names} | {
        "position": np.dtype(np.uint16),
        "value": NUMPY[conv.dtypes.weight],
    }
    if any(a[n].dtype != kinds[n] or a[n].ndim != 1 for n in names):
        raise InvalidFile(f"{NAME}: an array has the wrong element type")
    if not 1 <= stage <= min(c, _MOST_STAGED):
        raise InvalidFile(f"{NAME}: stages of {stage} channels do not fit {conv.layer()}")
    stages, group, row, start = ceil_div(c, stage), a["group"], a["row"], a["start"]
    if len(row) != k * stages or len(start) != k * stages + 1 or len(group) < 2 or len(a["filter"]) != k:
        raise InvalidFile(f"{NAME}: arrays do not fit {conv.layer()}")
    if (
        start[0] != 0
        or (np.diff(start) < 0).any()
        or start[-1] != len(a["position"])
        or len(a["position"]) != len(a["value"])
    ):
        raise InvalidFile(f"{NAME}: row starts are not monotone or do not end at the number of nonzeros")
    if (
        group[0] != 0
        or group[-1] != k
        or (np.diff(group) < 0).any()
        or (np.sort(a["filter"]) != np.arange(k)).any()
    ):
        raise InvalidFile(f"{NAME}: filter groups do not cover the {k} filters, each once")
    per = k // conv.groups
    for low, high in pairwise(group.tolist()):
        if high > low and (a["filter"][low:high] // per != a["filter"][low] // per).any():
            raise InvalidFile(f"{NAME}: a group of filters reads different channels")
        part = np.sort(row[low * stages : high * stages].reshape(stages, high - low), axis=1)
        if (part != np.arange(low, high)).any():
            raise InvalidFile(f"{NAME}: a filter is missing from its group or stands there twice")
    _, channel, i, j = _where(packed, stages)
    if len(channel) and (
        channel.max() >= c or i.max() >= r or j.max() >= s or (a["position"] >> 6).max() >= stage
    ):
        raise InvalidFile(f"{NAME}: a position is outside the {c} x {r} x {s} filter")


def layouts(
    conv: Conv,
    config: Config,
    target: Target,
    place: Place = ALONE,
) -> tuple[Layout, Layout]:
    """Plain planes on both sides, each with a pitch of its own."""
    d, border, x_border = conv.dtypes, place.border, widest(conv.pad, place.x_border)
    x_pitch = max(place.x_pitch, conv.size[1] + max(x_border[1], x_border[3]))
    pitch = max(place.pitch, conv.out[1] + max(border[1], border[3]))
    reads = Layout("planar", x_pitch, x_border, dtype=d.input)
    writes = Layout("planar", pitch, border, dtype=d.output)
    x_slack, y_slack = _slacks(conv, config, target, reads, writes)
    return Layout("planar", reads.pitch, reads.border, x_slack, d.input), Layout(
        "planar", writes.pitch, border, y_slack, d.output
    )


def _slacks(conv: Conv, config: Config, target: Target, reads: Layout, writes: Layout) -> tuple[int, int]:
    """Elements that the last block reads past the end of x, and of a residual."""
    (p, q), lanes, (top, left, _, _) = conv.out, _lanes(conv, target), conv.pad
    columns = ceil_div(q, lanes * config["columns"]) * lanes * config["columns"]
    # wherever blocks begin
    last_row = (p + config["rows"] - 2) * conv.stride[0] + (conv.r - 1) * conv.dilation[0] - top
    reach = last_row * reads.pitch + columns * conv.stride[1] + (conv.s - 1) * conv.dilation[1] - left
    over = (p - 1) * writes.pitch + columns - writes.plane(p, q)
    return max(0, reach - reads.plane(*conv.size)), max(0, over)


def pixels(conv: Conv, config: Config, target: Target, pitch: int, rows: int) -> int:
    return round_up(rows, config["rows"]) * pitch


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
    _compatible(conv, config, target, reads, writes)
    d, a, (p, q), stage = conv.dtypes, packed.arrays, (rows or conv.out[0], conv.out[1]), packed.meta["stage"]
    down, columns, steps = (
        config["rows"],
        config["columns"],
        conv.steps,
    )
    code = tiles.TilesCode(
        target.isa,
        d,
        down,
        columns,
        conv.s,
        conv.stride[1],
        conv.dilation[1] if conv.s > 1 else 1,
        _row_step(conv),
        steps,
    )
    entry = llvm.function(str(code), tiles.ENTRY, lambda: tiles.emit(code), target.isa, half(d, target))
    _, channel, i, j = _where(packed, ceil_div(conv.c // conv.groups, stage))
    offset = ((channel % stage * _tile_rows(conv, down) + i * conv.dilation[0]) * conv.s + j) * columns
    if offset.size and offset.max() >= 2**16:
        raise PlanMismatch(f"{config}: the tile of {conv} has more vectors than two bytes count")
    column_blocks = ceil_div(q, columns * code.lanes)
    column = np.arange(column_blocks * columns * code.lanes).reshape(-1, code.lanes)
    owned = {
        "group": a["group"],
        "x_group": a["filter"][np.minimum(a["group"][:-1], conv.k - 1)]
        // (conv.k // conv.groups)
        * (conv.c // conv.groups),
        "filter": a["filter"],
        "start": a["start"],
        "row": np.concatenate([a["row"], np.repeat(a["row"][-1:], config["ahead"])]),
        "offset": offset.astype(np.uint16),
        "value": spread(a["value"], d.accumulator),
        "live": lane_bits(code.lanes, column < q),
        "stored": lane_bits(code.lanes, column < writes.pitch),
        "parameter": np.array([conv.parameter], np.float32),
    }
    owned = {name: np.ascontiguousarray(array) for name, array in owned.items()}
    x_plane, y_plane, item = reads.plane(*conv.size), writes.plane(p, q), reads.item_bytes
    stages, widest = ceil_div(conv.c // conv.groups, stage), int(np.diff(a["group"]).max())
    tile = stage * _tile_vectors(conv, down, columns) * code.lanes * item
    kept = widest * code.vectors * code.lanes * 4 if stages > 1 else 0
    sizes = {
        "images": conv.batch,
        "row_blocks": ceil_div(p, down),
        "column_blocks": column_blocks,
        "groups": len(a["group"]) - 1,
        "stages": stages,
        "channels": conv.c // conv.groups,
        "stage_channels": stage,
        "x_first": -(conv.pad[0] * reads.pitch + conv.pad[1]) * item,
        "x_image": conv.c * x_plane * item,
        "x_plane": x_plane * item,
        "x_block": down * conv.stride[0] * reads.pitch * item,
        "x_row": (conv.stride[0] if conv.r == 1 else 1) * reads.pitch * item,
        "tile_rows": _tile_rows(conv, down),
        "y_image": conv.k * y_plane * writes.item_bytes,
        "y_plane": y_plane * writes.item_bytes,
        "y_row": writes.pitch * writes.item_bytes,
        "pixel_rows": p,
        "covered": min(column.size, writes.pitch),
        "pitch": writes.pitch,
        "plane_elements": y_plane,
        "front_elements": writes.front,
        "tile_bytes": tile,
        "scratch_thread": round_up(tile + kept, 64),
        "ahead": config["ahead"],
    }
    return [Kernel.of(f"{NAME} {conv}", (reads, writes), entry, tiles.ARGUMENTS, sizes, owned)]


def _compatible(conv: Conv, config: Config, target: Target, reads: Layout, writes: Layout) -> None:
    """Raise unless the kernel reads and writes only what these layouts hold."""
    wanted, _ = layouts(conv, config, target, Place(writes.border, writes.pitch))
    x_slack, y_slack = _slacks(conv, config, target, reads, writes)
    held = all(have >= need for have, need in zip(reads.border, conv.pad, strict=True))
    fits = (reads.kind, writes.kind, reads.dtype, writes.dtype) == (
        "planar",
        "planar",
        conv.dtypes.input,
        conv.dtypes.output,
    )
    if not fits or not held or reads.pitch < wanted.pitch or reads.slack < x_slack or writes.slack < y_slack:
        raise PlanMismatch(
            f"{NAME} cannot read {reads} and write {writes} for {conv}; it reads {wanted} or wider"
        )
