"""Filters as rows of nonzeros, over planes whose pixels are numbered flat: the format of `direct`, and of
what tiles leave over.

    group   [0, 4, 8]                filters 0-3 and 4-7 are the units of work that threads share
    row     [2, 0, 3, 1, | 1, 3, ...    for each group and block of channels: filters, the longest row first,
                                     or as they are numbered
    start   [0, 5, 9, 11, 12, | ...     where the nonzeros of that row begin
    position [...]                   (c * R + r) * S + s within the filter's own channels, in two bytes where
                                     they hold it
    value   [...]

When a kernel is built a position becomes the offset of its window, which is the same for every pixel: input
and output planes have one pitch (codegen/cpu/rows.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from aerogel.codegen.cpu.rows import RowsCode
from aerogel.codegen.cpu.sums import by_rank, lane_bits, spread
from aerogel.errors import InvalidFile, PlanMismatch, ShapeError
from aerogel.ir import (
    ALONE,
    ITEM_BYTES,
    NUMPY,
    Array,
    Config,
    Conv,
    Layout,
    Place,
    Target,
    ceil_div,
    nonzero,
    round_up,
    widest,
)

ARRAYS = ("group", "row", "start", "position", "value")


def pack(
    weight: Array, conv: Conv, block: int, groups: int, work: Array | None = None, in_order: bool = False
) -> tuple[dict[str, Array], int]:
    """The arrays, and the number of blocks of channels. Groups of filters have about equal `work`, by default
    their nonzeros. With `in_order` filters follow each other as they are numbered, not by length: y is then
    written from front to back."""
    k, c, r, s = conv.weight_shape
    if weight.shape != (k, c, r, s):
        raise ShapeError(f"weight of shape {weight.shape} for {conv.layer()}, which takes {(k, c, r, s)}")
    if c * r * s >= 2**31 or weight.size >= 2**31:
        raise ShapeError(f"{conv.layer()}: more than 2^31 weights")
    blocks = ceil_div(c, block)
    flat, own = np.flatnonzero(nonzero(weight, conv.dtypes.weight)), c * r * s
    filters = np.repeat(np.arange(k), np.diff(np.searchsorted(flat, np.arange(k + 1) * own)))
    position = (flat - filters * own).astype(np.int32)
    pair = filters * blocks + position // np.int32(block * r * s)
    counts = np.bincount(pair, minlength=k * blocks).reshape(k, blocks)
    edges = cut(counts.sum(1) if work is None else work, groups)
    group_of = np.searchsorted(edges, np.arange(k), side="right") - 1
    pair_k, pair_b = (a.ravel() for a in np.meshgrid(np.arange(k), np.arange(blocks), indexing="ij"))
    length = np.zeros(k * blocks, np.int64) if in_order else -counts.ravel()
    order = np.lexsort((pair_k, length, pair_b, group_of[pair_k]))
    rank = np.empty(k * blocks, np.int64)
    rank[order] = np.arange(k * blocks)
    nonzeros = by_rank(rank[pair])
    return {
        "group": edges.astype(np.int32),
        "row": pair_k[order].astype(np.int32),
        "start": np.concatenate([[0], np.cumsum(counts.ravel()[order])]).astype(np.int32),
        "position": position[nonzeros].astype(_position_type(conv)),
        "value": weight.reshape(-1)[flat[nonzeros]],
    }, blocks


def _position_type(conv: Conv) -> Any:
    return np.uint16 if np.prod(conv.weight_shape[1:]) <= 2**16 else np.int32


def cut(lengths: Array, groups: int) -> Array:
    """Cut filters into `groups` runs of about equal work; a filter costs its nonzeros and a little more."""
    work = np.concatenate([[0], np.cumsum(lengths + 4)])
    cuts = np.searchsorted(work, work[-1] * np.arange(1, groups) / groups)
    return np.concatenate([[0], np.clip(cuts, 0, len(lengths)), [len(lengths)]])


def unpack(a: Mapping[str, Array], conv: Conv) -> Array:
    """The weight that these nonzeros make."""
    weight = np.zeros((conv.k, int(np.prod(conv.weight_shape[1:]))), NUMPY[conv.dtypes.weight])
    weight[np.repeat(a["row"], np.diff(a["start"])), a["position"]] = a["value"]
    return weight.reshape(conv.weight_shape)


def check(name: str, a: Mapping[str, Array], blocks: int, conv: Conv) -> None:
    """The invariants a kernel relies on."""
    k, c, r, s = conv.weight_shape
    kinds: dict[str, Any] = dict.fromkeys(("group", "row", "start"), np.int32)
    kinds |= {"position": _position_type(conv), "value": NUMPY[conv.dtypes.weight]}
    if any(a[n].dtype != kind or a[n].ndim != 1 for n, kind in kinds.items()):
        raise InvalidFile(f"{name}: an array has the wrong element type")
    group, row, start = a["group"], a["row"], a["start"]
    if not 1 <= blocks <= c or len(row) != k * blocks or len(start) != k * blocks + 1 or len(group) < 2:
        raise InvalidFile(f"{name}: arrays do not fit {conv.layer()}")
    if (
        start[0] != 0
        or (np.diff(start) < 0).any()
        or start[-1] != len(a["position"])
        or len(a["position"]) != len(a["value"])
    ):
        raise InvalidFile(f"{name}: row starts are not monotone or do not end at the number of nonzeros")
    if group[0] != 0 or group[-1] != k or (np.diff(group) < 0).any():
        raise InvalidFile(f"{name}: filter groups do not cover the {k} filters")
    if len(a["position"]) and (a["position"].min() < 0 or a["position"].max() >= c * r * s):
        raise InvalidFile(f"{name}: a position is outside the {c} x {r} x {s} filter")
    for low, high in pairwise(group.tolist()):
        part = np.sort(row[low * blocks : high * blocks].reshape(blocks, high - low), axis=1)
        if (part != np.arange(low, high)).any():
            raise InvalidFile(f"{name}: a filter is missing from its group or stands there twice")


def layouts(
    conv: Conv,
    lanes: int,
    vectors: int,
    aligned: bool,
    place: Place = ALONE,
) -> tuple[Layout, Layout]:
    """Planes of one pitch on both sides; phases when there is a stride.

    Few runs need rows that start where a vector or half of one does.
    """
    (_, w), (_, q), (_, left, _, right) = conv.size, conv.out, conv.pad
    d = conv.dtypes
    border, x_border = place.border, widest(conv.pad, place.x_border)
    pitch = max(place.pitch, q + max(border[1], border[3]))
    wide = (
        max(place.x_pitch, w + max(left, right, x_border[1], x_border[3]))
        if conv.stride == (1, 1)
        else ceil_div(w + left + right, conv.stride[1])
    )
    pitch = max(pitch, wide)
    if aligned:
        pitch = lanes // 2 if pitch <= lanes // 2 else round_up(pitch, lanes)
    if conv.stride == (1, 1):
        reads = Layout("planar", pitch, x_border, dtype=d.input)
    else:
        (u, v), (dh, dw) = conv.stride, conv.dilation
        kept = (1 + max(i * dh % u for i in range(conv.r)), 1 + max(j * dw % v for j in range(conv.s)))
        reads = Layout("phases", pitch, conv.pad, 0, d.input, conv.stride, kept)
    writes = Layout("planar", reads.pitch, border, dtype=d.output)
    x_slack, y_slack = _slacks(conv, lanes, vectors, aligned, reads, writes)
    reads = Layout(reads.kind, reads.pitch, reads.border, x_slack, d.input, reads.stride, reads.kept)
    return reads, Layout("planar", reads.pitch, border, y_slack, d.output)


def _slacks(
    conv: Conv, lanes: int, vectors: int, aligned: bool, reads: Layout, writes: Layout
) -> tuple[int, int]:
    """Elements that the last block of the last plane may read past the end of x, and of a residual, wherever
    blocks begin."""
    (p, q), step = conv.out, vectors * lanes
    reach = (p - 1) * reads.pitch + q + step - 1
    every = offsets(np.arange(conv.r * conv.s), np.array(conv.c - 1), conv, reads)
    if aligned:
        every = every + -every % lanes  # a run reads whole vectors
    return max(0, int(every.max()) + reach - conv.c * reads.plane(*conv.size)), max(
        0, reach - writes.plane(p, q)
    )


def shifts(starts: Array, lanes: int) -> tuple[int, ...]:
    """The lanes at which windows start, 0 among them: a run of each."""
    return tuple(int(v) for v in np.unique(np.append(starts % lanes, 0)))


def offsets(position: Array, first_channel: Array, conv: Conv, reads: Layout) -> Array:
    """Stretch: elements from output pixel 0 to the window of each position. 64-bit; the caller checks the
    range."""
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


def pixels(conv: Conv, config: Config, target: Target, pitch: int, rows: int) -> int:
    """Pixels that are computed for so many rows of a plane: blocks of vectors end where rows do not."""
    step = config["vectors"] * target.vector_bytes // ITEM_BYTES[conv.dtypes.accumulator]
    return round_up((rows - 1) * pitch + conv.out[1], step)


def most_vectors(conv: Conv, lanes: int) -> int:
    """Vectors that hold the pixels of a plane, at most: rows may stand further apart in a network."""
    return conv.out[0] * (ceil_div(conv.out[1], lanes) + 1)


def live_vectors(conv: Conv, lanes: int, place: Place) -> int:
    """Vectors that hold them at this place."""
    reads, _ = layouts(conv, lanes, 1, False, place)
    return max(1, ceil_div((conv.out[0] - 1) * reads.pitch + conv.out[1], lanes))


def cover(rows: int, columns: int, pitch: int, vectors: int, lanes: int) -> tuple[int, int, Array]:
    """Of a plane of so many pixels: vectors that hold them, blocks of `vectors` vectors, and which lanes of
    each vector of these blocks are pixels, as bits; the others are in the gap between rows or past them."""
    pixels = (rows - 1) * pitch + columns
    live_vectors = ceil_div(pixels, lanes)
    blocks = ceil_div(live_vectors, vectors)
    number = np.arange(blocks * vectors * lanes)
    live = (number < pixels) & (number % pitch < columns)
    return live_vectors, blocks, lane_bits(lanes, live.reshape(-1, lanes))


UNITS = 4
"""Units of work for each thread, at least: threads then finish together."""


def filter_groups(conv: Conv, blocks: int, target: Target) -> int:
    """Groups of filters that make enough units of work, where a plane is so many blocks."""
    units = max(1, conv.batch * blocks)
    return 1 if target.threads == 1 else min(conv.k, max(1, ceil_div(UNITS * target.threads, units)))


def image_bytes(conv: Conv) -> int:
    """An upper estimate of one padded image, before anything is allocated."""
    (h, w), (top, left, bottom, right) = conv.size, conv.pad
    return conv.c * (h + top + bottom + conv.stride[0]) * (w + left + right + conv.stride[1] + 16) * 4


def arguments(
    a: Mapping[str, Array],
    channel_blocks: int,
    conv: Conv,
    code: RowsCode,
    reads: Layout,
    writes: Layout,
    ahead: int,
    rows: int | None = None,
) -> tuple[dict[str, Array], dict[str, int]]:
    """What a kernel with rows needs to know: arrays it owns, and sizes; its scratch is its own affair.
    `rows`: see methods."""
    (p, q), shifts = (rows or conv.out[0], conv.out[1]), code.shifts
    windows = offsets(np.arange(np.prod(conv.weight_shape[1:])), np.array(0), conv, reads)
    group = a["row"].astype(np.int64) // (conv.k // conv.groups)
    first = group * (conv.c // conv.groups) * reads.plane(*conv.size)
    offset, start, value = (
        windows[a["position"]] + np.repeat(first, np.diff(a["start"])),
        a["start"],
        a["value"],
    )
    if shifts:
        offset, start, value = _in_runs(offset, start, value, shifts, code.lanes)
    offset = in_bytes(offset, conv, reads)
    live_vectors, blocks, live = cover(p, q, writes.pitch, code.vectors, code.lanes)
    owned = {
        "group": a["group"],
        "start": start,
        "row": np.concatenate([a["row"], np.repeat(a["row"][-1:], ahead)]),
        "offset": offset,
        "value": spread(value, conv.dtypes.accumulator),
        "live": live,
        "parameter": np.array([conv.parameter], np.float32),
    }
    owned = {name: np.ascontiguousarray(array) for name, array in owned.items()}
    x_plane, y_plane = reads.plane(*conv.size), writes.plane(p, q)
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
        "ahead": ahead,
    }
    return owned, sizes


def in_bytes(offset: Array, conv: Conv, reads: Layout) -> Array:
    """Offsets in bytes, which must fit 32 bits."""
    offset = offset * reads.item_bytes
    if offset.size and (offset.max() >= 2**31 or offset.min() < -(2**31)):
        raise ShapeError(f"{conv}: one image is larger than the 2 GiB that 32-bit offsets reach")
    return offset.astype(np.int32)


def _in_runs(
    offset: Array, start: Array, value: Array, shifts: tuple[int, ...], lanes: int
) -> tuple[Array, Array, Array]:
    """Each row's nonzeros in runs of one shift, windows moved back to the vector they start in; `start` has
    each run's begin."""
    run = np.searchsorted(shifts, offset % lanes) + np.repeat(
        np.arange(len(start) - 1), np.diff(start)
    ) * len(shifts)
    order = by_rank(run)
    counts = np.bincount(run, minlength=(len(start) - 1) * len(shifts))
    return (
        (offset - offset % lanes)[order],
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        value[order],
    )


def compatible(
    name: str, conv: Conv, lanes: int, vectors: int, aligned: bool, reads: Layout, writes: Layout
) -> None:
    """Raise unless these layouts give what the flat numbering of pixels needs."""
    wanted, _ = layouts(conv, lanes, vectors, aligned, Place(writes.border))
    x_slack, y_slack = _slacks(conv, lanes, vectors, aligned, reads, writes)
    held = all(have >= need for have, need in zip(reads.border, conv.pad, strict=True))
    held = held if reads.kind == "planar" else reads.border == conv.pad
    fits = (reads.kind, reads.dtype, reads.stride) == (wanted.kind, wanted.dtype, wanted.stride)
    fits = fits and held and all(have >= need for have, need in zip(reads.kept, wanted.kept, strict=True))
    fits = (
        fits
        and writes.kind == "planar"
        and writes.dtype == conv.dtypes.output
        and reads.pitch == writes.pitch
    )
    if not fits or reads.pitch < wanted.pitch or reads.slack < x_slack or writes.slack < y_slack:
        raise PlanMismatch(
            f"{name} cannot read {reads} and write {writes} for {conv}; it reads {wanted} or wider"
        )
