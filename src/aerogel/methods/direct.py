"""`direct`: each nonzero weight is one broadcast times a shifted window of x. No lowering, no im2col.

Paper: Escort (Chen, arXiv 1802.10280), whose filters in CSR over flattened (c, r, s) are "stretched" when a kernel is built for
one image size: the position becomes the offset of its window in the padded input. What is packed stays (c, r, s).

    group   [0, 4, 8]                filters 0-3 and 4-7 are the units of work that threads share
    row     [2, 0, 3, 1, | 1, 3, ...    for each group and block of channels: filters, the longest row first
    start   [0, 5, 9, 11, 12, | ...     where the nonzeros of that row begin
    position [...]                   (c * R + r) * S + s within the filter's own channels
    value   [...]

With `aligned`, a row's nonzeros are sorted by the lane at which their windows start when a kernel is built (see codegen/rows.py).

Wins for unstructured weights from about two thirds zeros; a row of equal lengths lets the branch predictor learn the loop's
end, hence the order. Refuses: half precision the CPU lacks, and images too large for 32-bit offsets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from aerogel.candidate import POINTERS, Config, Kernel, Packed, Stats
from aerogel.codegen import llvm, rows
from aerogel.codegen.sums import lane_bits, spread, summed_channels, unsupported
from aerogel.errors import InvalidFile, PlanMismatch, ShapeError
from aerogel.layout import NUMPY, Array, Layout
from aerogel.problem import ITEM_BYTES, Conv
from aerogel.target import Target

NAME, PAPER = "direct", "Escort, arXiv 1802.10280"
SUMMARY = "one broadcast and one shifted window of the input for each nonzero weight; unstructured sparsity"
VERSION = 1

_MOST_RUNS = 6
"""Alignments of a row's windows beyond which runs get too short to pay."""
_REGISTER_BLOCK = {"avx512": 14, "avx2": 12, "generic": 12, "neon": 14}
"""Most vectors of sums kept in registers: 16 or 32 of them, some needed for the weight and the window."""


def refuse(conv: Conv, target: Target, stats: Stats) -> str | None:
    if (why := unsupported(conv.dtypes, target)) is not None:
        return why
    if conv.n is not None and (bytes_ := _image_bytes(conv)) >= 2**31:
        return f"one image takes {bytes_ / 2**30:.1f} GiB; offsets in this format reach 2 GiB"
    return None


def configs(conv: Conv, target: Target, stats: Stats) -> Iterator[Config]:
    """Register blocks and blocks of channels, ordered by a cost model; measurement decides among the first of them."""
    own = conv.c // conv.groups
    sizes = summed_channels(own, 8, conv, stats.nonzeros)
    cost: dict[tuple[int, int, int], float] = {}
    shapes = {aligned: _Shape.of(conv, target, aligned) for aligned in ((0, 1) if conv.r * conv.s > 1 else (0,))}
    for aligned, shape in shapes.items():
        most = min(shape.live, _REGISTER_BLOCK[target.isa] // (1 + aligned * (target.isa in ("avx2", "generic"))))
        if len(shape.shifts) <= _MOST_RUNS:
            cost |= {(v, b, aligned): _cycles(conv, target, stats, shape, v, b) for v in range(1, most + 1) for b in sizes}
    ordered = sorted(cost, key=lambda point: cost[point])
    first = [next(point for point in ordered if point[2] == kind) for kind in dict.fromkeys(point[2] for point in ordered)]
    for v, b, aligned in dict.fromkeys(first + ordered):  # the best of each kind is always timed
        groups = _filter_groups(conv, shapes[aligned].live, v, target)
        yield Config.make(NAME, vectors=v, channels=b, groups=groups, ahead=4, aligned=aligned)


@dataclass(frozen=True)
class _Shape:
    """What the cost model knows of a layer's planes: pitch, vectors that hold pixels, runs, bytes of x and of y."""

    pitch: int
    live: int
    shifts: tuple[int, ...]
    far: tuple[int, int]

    @staticmethod
    def of(conv: Conv, target: Target, aligned: int) -> _Shape:
        lanes, (p, q) = _lanes(conv, target), conv.out
        reads, writes = layouts(conv, Config.make(NAME, vectors=1, aligned=aligned), target, (0, 0, 0, 0))
        every = _offsets(np.arange(conv.r * conv.s), np.array(0), conv, reads)
        far = (conv.c * reads.plane(*conv.size) * reads.item_bytes, conv.k * writes.plane(p, q) * writes.item_bytes)
        return _Shape(reads.pitch, -(-((p - 1) * reads.pitch + q) // lanes), _shifts(every, lanes) if aligned else (), far)


def _cycles(conv: Conv, target: Target, stats: Stats, shape: _Shape, vectors: int, channels: int) -> float:
    """Modelled cycles of one image: it orders candidates and is never shown as a time.

    Fitted to 46 layers (ResNet-50 at 80, 90 and 95 %) on one AVX-512 server core, where its first choice costs 4 % over the best
    of a full search. A nonzero costs its loads, two a cycle, more for the share of its window that the nearest cache cannot
    hold and where a vector straddles a line; a row costs its start, its end, its runs and its partial sums; images beyond the
    second cache cost time at each touch.
    """
    width = target.vector_bytes
    passes = -(-(conv.c // conv.groups) // channels)
    span = min(conv.r * vectors * width, vectors * width + (conv.r - 1) * (shape.pitch + 1) * ITEM_BYTES[conv.dtypes.input])
    runs = len(shape.shifts)
    loads = vectors + (1 - 1 / runs) if runs else vectors * (1 + 3.5 * (1 - 1 / conv.s))
    missing = max(0.0, 1 - 0.9 * target.l1_bytes / (channels * span))
    nonzero = (loads + 2) / 2 + 1.2 * loads * missing
    kept = vectors * 4 // ITEM_BYTES[conv.dtypes.accumulator]  # partial sums are f32
    rows = conv.k * (passes * (25 + 1.2 * kept + max(0, runs - 1) * (8 + 2 * vectors)) + (passes - 1) * 2.5 * kept)
    moved = sum(
        count * (20 + 27 * vectors) for count, size in zip((conv.c, conv.k), shape.far, strict=True) if size > target.l2_bytes // 2
    )
    return -(-shape.live // vectors) * (stats.nonzeros * nonzero + rows + moved)


def _filter_groups(conv: Conv, live: int, vectors: int, target: Target) -> int:
    """Enough units of work that threads finish together."""
    units = max(1, conv.batch * -(-live // vectors))
    return min(conv.k, 1 if target.threads == 1 else max(1, -(-4 * target.threads // units)))


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    k, c, r, s = conv.weight_shape
    if weight.shape != (k, c, r, s):
        raise ShapeError(f"weight of shape {weight.shape} for {conv.layer()}, which takes {(k, c, r, s)}")
    if c * r * s >= 2**31 or weight.size >= 2**31:
        raise ShapeError(f"{conv.layer()}: more than 2^31 weights")
    block = config["channels"]
    blocks = -(-c // block)
    kept = (weight.reshape(k, -1) & 0x7FFF) != 0 if conv.dtypes.weight == "bf16" else weight.reshape(k, -1) != 0
    filters, position = np.nonzero(kept)
    counts = np.zeros((k, blocks), np.int64)
    at_block = position // (block * r * s)
    np.add.at(counts, (filters, at_block), 1)
    edges = _edges(counts.sum(1), config["groups"])
    group_of = np.searchsorted(edges, np.arange(k), side="right") - 1
    pair_k, pair_b = (a.ravel() for a in np.meshgrid(np.arange(k), np.arange(blocks), indexing="ij"))
    order = np.lexsort((pair_k, -counts.ravel(), pair_b, group_of[pair_k]))
    rank = np.empty(k * blocks, np.int64)
    rank[order] = np.arange(k * blocks)
    nonzeros = np.argsort(rank[filters * blocks + at_block], kind="stable")
    return Packed(
        NAME,
        VERSION,
        {
            "group": edges.astype(np.int32),
            "row": pair_k[order].astype(np.int32),
            "start": np.concatenate([[0], np.cumsum(counts.ravel()[order])]).astype(np.int32),
            "position": position[nonzeros].astype(np.int32),
            "value": weight.reshape(k, -1)[filters[nonzeros], position[nonzeros]],
        },
        {"channel_blocks": blocks},
    )


def _edges(lengths: Array, groups: int) -> Array:
    """Cut filters into `groups` runs of about equal work; a filter costs its nonzeros and a little more."""
    work = np.concatenate([[0], np.cumsum(lengths + 4)])
    cuts = np.searchsorted(work, work[-1] * np.arange(1, groups) / groups)
    return np.concatenate([[0], np.clip(cuts, 0, len(lengths)), [len(lengths)]])


def unpack(packed: Packed, conv: Conv) -> Array:
    check(packed, conv)
    a = packed.arrays
    k = conv.weight_shape[0]
    weight = np.zeros((k, int(np.prod(conv.weight_shape[1:]))), NUMPY[conv.dtypes.weight])
    weight[np.repeat(a["row"], np.diff(a["start"])), a["position"]] = a["value"]
    return weight.reshape(conv.weight_shape)


def check(packed: Packed, conv: Conv) -> None:
    """The invariants the kernel relies on; a Packed from a file goes through here before it is used."""
    k, c, r, s = conv.weight_shape
    a = packed.arrays
    if (packed.format, packed.version) != (NAME, VERSION) or set(a) != {"group", "row", "start", "position", "value"}:
        raise InvalidFile(f"not a {NAME} version {VERSION} weight")
    blocks = packed.meta.get("channel_blocks", 0)
    integers = ("group", "row", "start", "position")
    if any(a[n].dtype != np.int32 or a[n].ndim != 1 for n in integers) or a["value"].dtype != NUMPY[conv.dtypes.weight]:
        raise InvalidFile(f"{NAME}: an array has the wrong element type")
    group, row, start = a["group"], a["row"], a["start"]
    if not 1 <= blocks <= c or len(row) != k * blocks or len(start) != k * blocks + 1 or len(group) < 2:
        raise InvalidFile(f"{NAME}: arrays do not fit {conv.layer()}")
    if start[0] != 0 or (np.diff(start) < 0).any() or start[-1] != len(a["position"]) or len(a["position"]) != len(a["value"]):
        raise InvalidFile(f"{NAME}: row starts are not monotone or do not end at the number of nonzeros")
    if group[0] != 0 or group[-1] != k or (np.diff(group) < 0).any():
        raise InvalidFile(f"{NAME}: filter groups do not cover the {k} filters")
    if len(a["position"]) and (a["position"].min() < 0 or a["position"].max() >= c * r * s):
        raise InvalidFile(f"{NAME}: a position is outside the {c} x {r} x {s} filter")
    for low, high in pairwise(group.tolist()):
        part = np.sort(row[low * blocks : high * blocks].reshape(blocks, high - low), axis=1)
        if (part != np.arange(low, high)).any():
            raise InvalidFile(f"{NAME}: a filter is missing from its group or stands there twice")


def layouts(
    conv: Conv, config: Config, target: Target, border: tuple[int, int, int, int], pitch: int = 0, x_pitch: int = 0
) -> tuple[Layout, Layout]:
    """Planes of one pitch on both sides; phases when there is a stride.

    Few runs need rows that start where a vector or half of one does.
    """
    (_, w), (_, q), (_, left, _, right) = conv.size, conv.out, conv.pad
    d, lanes = conv.dtypes, _lanes(conv, target)
    pitch = max(pitch, q + max(border[1], border[3]))
    wide = max(x_pitch, w + max(left, right)) if conv.stride == (1, 1) else -(-(w + left + right) // conv.stride[1])
    pitch = max(pitch, wide)
    if config["aligned"]:
        pitch = lanes // 2 if pitch <= lanes // 2 else -(-pitch // lanes) * lanes
    if conv.stride == (1, 1):
        reads = Layout("planar", pitch, conv.pad, dtype=d.input)
    else:
        (u, v), (dh, dw) = conv.stride, conv.dilation
        kept = (1 + max(i * dh % u for i in range(conv.r)), 1 + max(j * dw % v for j in range(conv.s)))
        reads = Layout("phases", pitch, conv.pad, 0, d.input, conv.stride, kept)
    writes = Layout("planar", reads.pitch, border, dtype=d.output)
    x_slack, y_slack = _slacks(conv, config, target, reads, writes)
    reads = Layout(reads.kind, reads.pitch, reads.border, x_slack, d.input, reads.stride, reads.kept)
    return reads, Layout("planar", reads.pitch, border, y_slack, d.output)


def _slacks(conv: Conv, config: Config, target: Target, reads: Layout, writes: Layout) -> tuple[int, int]:
    """Elements that the last block of the last plane reads past the end of x, and of a residual."""
    (p, q), lanes = conv.out, _lanes(conv, target)
    step = config["vectors"] * lanes
    reach = -(-((p - 1) * reads.pitch + q) // step) * step
    offsets = _offsets(np.arange(conv.r * conv.s), np.array(conv.c - 1), conv, reads)
    if config["aligned"]:
        offsets = offsets + -offsets % lanes  # a run reads whole vectors
    return max(0, int(offsets.max()) + reach - conv.c * reads.plane(*conv.size)), max(0, reach - writes.plane(p, q))


def _lanes(conv: Conv, target: Target) -> int:
    return target.vector_bytes // ITEM_BYTES[conv.dtypes.accumulator]


def _shifts(offsets: Array, lanes: int) -> tuple[int, ...]:
    """The lanes at which windows start, 0 among them: a run of each."""
    return tuple(int(v) for v in np.unique(np.append(offsets % lanes, 0)))


def _offsets(position: Array, first_channel: Array, conv: Conv, reads: Layout) -> Array:
    """Stretch: elements from output pixel 0 to the window of each position. 64-bit; the caller checks the range."""
    c, tap = np.divmod(position.astype(np.int64), conv.r * conv.s)
    i, j = np.divmod(tap, conv.s)
    (top, left, _, _), (border_top, border_left, _, _) = conv.pad, reads.border
    row, column = i * conv.dilation[0] - top, j * conv.dilation[1] - left
    channel = (first_channel + c) * reads.plane(*conv.size)
    if reads.kind == "planar":
        return np.asarray(channel + row * reads.pitch + column)
    row, column = row + border_top, column + border_left
    (u, v), phase_plane = reads.stride, reads.phase_plane(*conv.size)
    phase = (row % u) * reads.kept[1] + column % v
    return np.asarray(channel + phase * phase_plane + row // u * reads.pitch + column // v)


def _image_bytes(conv: Conv) -> int:
    """An upper estimate of one padded image, before anything is allocated."""
    (h, w), (top, left, bottom, right) = conv.size, conv.pad
    return conv.c * (h + top + bottom + conv.stride[0]) * (w + left + right + conv.stride[1] + 16) * 4


def build(packed: Packed, conv: Conv, config: Config, target: Target, reads: Layout, writes: Layout) -> list[Kernel]:
    check(packed, conv)
    _compatible(conv, config, target, reads, writes)
    d, a, (p, q) = conv.dtypes, packed.arrays, conv.out
    steps = tuple(e if not e.startswith("leaky") else "leaky" for e in conv.epilogue)
    taps = _offsets(np.arange(conv.r * conv.s), np.array(0), conv, reads)
    shifts = _shifts(taps, _lanes(conv, target)) if config["aligned"] else ()
    code = rows.RowsCode(target.isa, d, config["vectors"], steps, shifts)
    entry = llvm.function(str(code), rows.ENTRY, lambda: rows.emit(code), target.isa, half=d.accumulator == "f16")
    filters = np.repeat(a["row"], np.diff(a["start"])).astype(np.int64)
    first_channel = filters // (conv.k // conv.groups) * (conv.c // conv.groups)
    offset, start, value = _offsets(a["position"], first_channel, conv, reads), a["start"], a["value"]
    if shifts:
        offset, start, value = _in_runs(offset, start, value, shifts, code.lanes)
    offset = offset * reads.item_bytes
    if offset.size and (offset.max() >= 2**31 or offset.min() < -(2**31)):
        raise ShapeError(f"{conv}: one image is larger than the 2 GiB that 32-bit offsets reach")
    flat = (p - 1) * writes.pitch + q
    live_vectors = -(-flat // code.lanes)
    blocks = -(-live_vectors // code.vectors)
    pixels = np.arange(blocks * code.vectors * code.lanes)
    live = (pixels < flat) & (pixels % writes.pitch < q)
    owned = {
        "group": a["group"],
        "start": start,
        "row": np.concatenate([a["row"], np.repeat(a["row"][-1:], config["ahead"])]),
        "offset": offset.astype(np.int32),
        "value": spread(value, d.accumulator),
        "live": lane_bits(code.lanes, live.reshape(-1, code.lanes)),
        "slope": np.array([conv.slope], np.float32),
    }
    owned = {name: np.ascontiguousarray(array) for name, array in owned.items()}
    x_plane, y_plane = reads.plane(*conv.size), writes.plane(p, q)
    channel_blocks = packed.meta["channel_blocks"]
    widest = int(np.diff(a["group"]).max())
    scratch = widest * code.vectors * code.lanes * 4 if channel_blocks > 1 else 0
    sizes = {
        "images": conv.batch,
        "blocks": blocks,
        "groups": len(a["group"]) - 1,
        "channel_blocks": channel_blocks,
        "x_image": conv.c * x_plane * reads.item_bytes,
        "y_image": conv.k * y_plane * writes.item_bytes,
        "y_plane": y_plane * writes.item_bytes,
        "plane_vectors": y_plane // code.lanes,
        "live_vectors": live_vectors,
        "front_vectors": writes.front // code.lanes,
        "scratch_thread": scratch,
        "ahead": config["ahead"],
    }
    own = {name: array.ctypes.data for name, array in owned.items()} | sizes
    arguments = np.array([0] * len(POINTERS) + [own[n] for n in rows.ARGUMENTS[len(POINTERS) :]], np.int64)
    return [Kernel(f"{NAME} {conv}", reads, writes, entry, arguments, scratch, tuple(owned.values()))]


def _in_runs(offset: Array, start: Array, value: Array, shifts: tuple[int, ...], lanes: int) -> tuple[Array, Array, Array]:
    """Each row's nonzeros in runs of one shift, windows moved back to the vector they start in; `start` has each run's begin."""
    run = np.searchsorted(shifts, offset % lanes) + np.repeat(np.arange(len(start) - 1), np.diff(start)) * len(shifts)
    order = np.argsort(run, kind="stable")
    counts = np.bincount(run, minlength=(len(start) - 1) * len(shifts))
    return (offset - offset % lanes)[order], np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), value[order]


def _compatible(conv: Conv, config: Config, target: Target, reads: Layout, writes: Layout) -> None:
    """Raise unless these layouts give what the flat numbering of pixels needs."""
    wanted, _ = layouts(conv, config, target, writes.border)
    x_slack, y_slack = _slacks(conv, config, target, reads, writes)
    held = all(have >= need for have, need in zip(reads.border, conv.pad, strict=True))
    held = held if reads.kind == "planar" else reads.border == conv.pad
    fits = (reads.kind, reads.dtype, reads.stride) == (wanted.kind, wanted.dtype, wanted.stride)
    fits = fits and held and all(have >= need for have, need in zip(reads.kept, wanted.kept, strict=True))
    fits = fits and writes.kind == "planar" and writes.dtype == conv.dtypes.output and reads.pitch == writes.pitch
    if not fits or reads.pitch < wanted.pitch or reads.slack < x_slack or writes.slack < y_slack:
        raise PlanMismatch(f"direct cannot read {reads} and write {writes} for {conv}; it reads {wanted} or wider")
