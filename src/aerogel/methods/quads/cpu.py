"""`quads` on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from aerogel.codegen.cpu import bytewise, llvm
from aerogel.codegen.cpu.abi import Kernel
from aerogel.codegen.cpu.products import SHIFT, form_of
from aerogel.errors import InvalidFile, ShapeError
from aerogel.formats import flat, fours
from aerogel.ir import (
    ALONE,
    QUAD,
    Array,
    Config,
    Conv,
    Layout,
    Packed,
    Place,
    Stats,
    Target,
    ceil_div,
)
from aerogel.methods.quads import NAME

VERSION = 1
ARRAYS = ("group", "start", "position", "value")
_MOST_VECTORS = {"avx512": 14, "avx2": 8, "generic": 6, "neon": 8}
"""Of sums in registers."""


def refuse(conv: Conv, target: Target, stats: Stats) -> str | None:
    return fours.refused(conv)


def configs(conv: Conv, target: Target, stats: Stats) -> Iterator[Config]:
    """Register blocks and blocks of channels, ordered by a cost model. What is offered does not depend on the
    place."""
    folded, lanes = fours.folded(conv), fours.lanes(target)
    live, alone = (flat.live_vectors(folded, lanes, place) for place in (stats.place, ALONE))
    most = min(flat.most_vectors(folded, lanes), _MOST_VECTORS[target.isa])
    planes = folded.c
    sizes = sorted({min(planes, 8 << i) for i in range(9)} | {planes})
    points = [(v, size) for v in range(1, most + 1) for size in sizes]
    for vectors, size in sorted(points, key=lambda p: _cycles(folded, target, stats, live, *p)):
        groups = flat.filter_groups(folded, ceil_div(alone, vectors), target)
        yield Config.make(NAME, vectors=vectors, channels=QUAD * size, groups=groups)


def _cycles(conv: Conv, target: Target, stats: Stats, live: int, vectors: int, planes: int) -> float:
    """Modelled cycles of one image: it orders candidates and is never shown as a time. A block costs its
    loads and products for each vector, more where its window is beyond the first cache; a row its start and
    end, more where its sums are put away between blocks of channels."""
    vector = {"pairs": 1.7, "halves": 3.0, "lanes": 6.0}.get(form_of(target), 0.7)
    nonzero = stats.nonzeros / 2  # of blocks: between full ones and ones with a single weight
    window = planes * (vectors * target.vector_bytes + (conv.r - 1) * conv.size[1] * QUAD)
    vector += 0.8 * max(0.0, 1 - target.l1_bytes / window)
    passes = ceil_div(conv.c, planes)
    row = 12.0 + 4.0 * vectors + (passes - 1) * (8.0 + 1.5 * vectors)
    return ceil_div(live, vectors) * (nonzero * (1.5 + vector * vectors) + QUAD * conv.k * row)


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    """Blocks that are not empty, by block of channels, filter, kind and position."""
    k, c, r, s = conv.weight_shape
    if weight.shape != (k, c, r, s):
        raise ShapeError(f"weight of shape {weight.shape} for {conv.layer()}, which takes {(k, c, r, s)}")
    blocks = _blocks(weight, conv)
    filters, position = np.nonzero(blocks.any(2))
    value = blocks[filters, position]
    wide = fours.wide(value)
    channel = position // (r * s) * QUAD // config["channels"]
    passes = ceil_div(conv.c, config["channels"])
    padded = QUAD * ceil_div(k, QUAD)
    row = 2 * (channel * padded + filters) + wide
    order = np.argsort(row, kind="stable")
    counts = np.bincount(row, minlength=2 * passes * padded)
    work = np.bincount(filters // QUAD, minlength=padded // QUAD)
    arrays = {
        "group": flat.cut(work, config["groups"]).astype(np.int32),
        "start": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        "position": position[order].astype(np.int32),
        "value": value[order],
    }
    return Packed(NAME, VERSION, arrays, {"channel_blocks": passes})


def _blocks(weight: Array, conv: Conv) -> Array:
    """A dense weight as filters x positions x 4, over the channels of all groups."""
    k, c, r, s = conv.weight_shape
    whole = np.zeros((k, QUAD * ceil_div(conv.c, QUAD), r * s), np.int8)
    first = np.arange(k) // (k // conv.groups) * c
    whole[np.arange(k)[:, None], first[:, None] + np.arange(c)] = weight.reshape(k, c, r * s)
    return whole.reshape(k, -1, QUAD, r * s).transpose(0, 1, 3, 2).reshape(k, -1, QUAD)


def unpack(packed: Packed, conv: Conv) -> Array:
    check(packed, conv)
    k, c, r, s = conv.weight_shape
    a = packed.arrays
    padded = QUAD * ceil_div(k, QUAD)
    row = np.repeat(np.arange(len(a["start"]) - 1) // 2 % padded, np.diff(a["start"]))
    blocks = np.zeros((k, ceil_div(conv.c, QUAD) * r * s, QUAD), np.int8)
    blocks[row, a["position"]] = a["value"]
    whole = blocks.reshape(k, -1, r * s, QUAD).transpose(0, 1, 3, 2).reshape(k, -1, r, s)
    first = np.arange(k) // (k // conv.groups) * c
    return np.ascontiguousarray(whole[np.arange(k)[:, None], first[:, None] + np.arange(c)])


def check(packed: Packed, conv: Conv) -> None:
    """The invariants the kernel relies on; a Packed from a file goes through here before it is used."""
    if (packed.format, packed.version) != (NAME, VERSION) or set(packed.arrays) != set(ARRAYS):
        raise InvalidFile(f"not a {NAME} version {VERSION} weight")
    a, filters, planes = packed.arrays, ceil_div(conv.k, QUAD), ceil_div(conv.c, QUAD)
    kinds: dict[str, Any] = dict.fromkeys(("group", "start", "position"), np.int32) | {"value": np.int8}
    shapes = {name: a[name].shape for name in kinds}
    count = len(a["position"]) if a["position"].ndim == 1 else -1
    passes = packed.meta.get("channel_blocks", 0)
    if any(a[name].dtype != kind for name, kind in kinds.items()) or shapes["value"] != (count, QUAD):
        raise InvalidFile(f"{NAME}: an array has the wrong element type or shape")
    if not 1 <= passes <= planes or shapes["start"] != (2 * passes * QUAD * filters + 1,):
        raise InvalidFile(f"{NAME}: arrays do not fit {conv.layer()}")
    start, group = a["start"], a["group"]
    if start[0] != 0 or (np.diff(start) < 0).any() or start[-1] != count:
        raise InvalidFile(f"{NAME}: row starts are not monotone or do not end at the number of blocks")
    if len(shapes["group"]) != 1 or len(group) < 2 or group[0] != 0 or group[-1] != filters:
        raise InvalidFile(f"{NAME}: filter groups do not cover the {conv.k} filters")
    if (np.diff(group) < 0).any():
        raise InvalidFile(f"{NAME}: filter groups are not monotone")
    if count and not 0 <= a["position"].min() <= a["position"].max() < planes * conv.r * conv.s:
        raise InvalidFile(f"{NAME}: a position is outside the {conv.c} x {conv.r} x {conv.s} filter")
    counts = np.diff(start)
    if count and (np.repeat(np.arange(len(counts)) % 2, counts) < fours.wide(a["value"])).any():
        raise InvalidFile(f"{NAME}: a block whose sums need 32 bits stands among the others")
    if count and counts.reshape(passes, -1, 2)[:, conv.k :].any():
        raise InvalidFile(f"{NAME}: a filter that is not there has weights")


def _shift(packed: Packed, conv: Conv) -> Array:
    """What a filter's sum lacks where products are of x - SHIFT."""
    a, padded = packed.arrays, QUAD * ceil_div(conv.k, QUAD)
    row = np.repeat(np.arange(len(a["start"]) - 1) // 2 % padded, np.diff(a["start"]))
    summed = np.bincount(row, a["value"].sum(1, dtype=np.int64), padded)
    return (SHIFT * summed).astype(np.int32)


def layouts(
    conv: Conv,
    config: Config,
    target: Target,
    place: Place = ALONE,
) -> tuple[Layout, Layout]:
    return flat.layouts(fours.folded(conv), fours.lanes(target), config["vectors"], False, place)


def pixels(conv: Conv, config: Config, target: Target, pitch: int, rows: int) -> int:
    return flat.pixels(fours.folded(conv), config, target, pitch, rows)


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
    folded, lanes, vectors = fours.folded(conv), fours.lanes(target), config["vectors"]
    flat.compatible(NAME, folded, lanes, vectors, False, reads, writes)
    code = bytewise.BytesCode(target.isa, form_of(target), vectors, conv.steps)
    entry = llvm.function(str(code), bytewise.ENTRY, lambda: bytewise.emit(code), target.isa, code.extra)
    a, (p, q) = packed.arrays, (rows or conv.out[0], conv.out[1])
    live_vectors, blocks, live = flat.cover(p, q, writes.pitch, vectors, lanes)
    windows = flat.offsets(np.arange(folded.c * conv.r * conv.s), np.array(0), folded, reads)
    owned = {
        "group": a["group"],
        "start": a["start"],
        "offset": flat.in_bytes(windows[a["position"]], folded, reads),
        "value": a["value"],
        "live": live,
        "parameter": np.array([conv.parameter], np.float32),
        "shift": _shift(packed, conv),
    }
    owned = {name: np.ascontiguousarray(array) for name, array in owned.items()}
    x_plane, y_plane = reads.plane(*conv.size), writes.plane(p, q)
    sizes = {
        "images": conv.batch,
        "blocks": blocks,
        "groups": len(a["group"]) - 1,
        "channel_blocks": packed.meta["channel_blocks"],
        "planes": folded.k,
        "x_image": folded.c * x_plane * reads.item_bytes,
        "y_image": folded.k * y_plane * writes.item_bytes,
        "y_plane": y_plane * writes.item_bytes,
        "plane_vectors": y_plane // lanes,
        "live_vectors": live_vectors,
        "front_vectors": writes.front // lanes,
        "scratch_thread": int(np.diff(a["group"]).max()) * QUAD * vectors * target.vector_bytes,
    }
    if packed.meta["channel_blocks"] == 1:
        sizes["scratch_thread"] = 0
    return [Kernel.of(f"{NAME} {conv}", (reads, writes), entry, bytewise.ARGUMENTS, sizes, owned)]
