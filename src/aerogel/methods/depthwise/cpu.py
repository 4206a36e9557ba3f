"""`depthwise` on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from aerogel.codegen.cpu import llvm, weaving
from aerogel.codegen.cpu.abi import Kernel
from aerogel.codegen.cpu.products import SHIFT, form_of
from aerogel.errors import InvalidFile, ShapeError
from aerogel.formats import flat, fours
from aerogel.ir import (
    ALONE,
    INT8,
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
    round_up,
)
from aerogel.methods.depthwise import NAME

VERSION = 1
_VECTORS = {"avx512": (2, 4, 1, 3), "avx2": (1, 2), "generic": (1, 2), "neon": (2, 4, 1, 3)}
"""Of pixels; each has four vectors of sums in registers."""


def refuse(conv: Conv, target: Target, stats: Stats) -> str | None:
    if conv.dtypes == INT8 and not conv.groups == conv.c == conv.k:
        return f"a filter reads {conv.c // conv.groups} channels, {conv.k // conv.groups} filters read each"
    return fours.refused(conv)


def _folded(conv: Conv) -> Conv:
    folded = fours.folded(conv)
    return replace(folded, groups=folded.c)


def configs(conv: Conv, target: Target, stats: Stats) -> Iterator[Config]:
    """Register blocks: what wastes fewest pixels first, larger ones among equals."""
    live = flat.live_vectors(_folded(conv), fours.lanes(target), stats.place)
    order = sorted(_VECTORS[target.isa], key=lambda v: (round_up(live, v) * (1 + 0.1 / v), -v))
    return (Config.make(NAME, vectors=vectors) for vectors in order)


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    """All taps, in fours."""
    if weight.shape != conv.weight_shape:
        raise ShapeError(
            f"weight of shape {weight.shape} for {conv.layer()}, which takes {conv.weight_shape}"
        )
    planes, fours = ceil_div(conv.c, QUAD), ceil_div(conv.r * conv.s, QUAD)
    whole = np.zeros((planes * QUAD, fours * QUAD), np.int8)
    whole[: conv.c, : conv.r * conv.s] = weight.reshape(conv.c, -1)
    value = whole.reshape(planes, QUAD, fours, QUAD).transpose(0, 2, 1, 3)
    return Packed(NAME, VERSION, {"value": np.ascontiguousarray(value)}, {})


def unpack(packed: Packed, conv: Conv) -> Array:
    check(packed, conv)
    value = packed.arrays["value"]
    whole = value.transpose(0, 2, 1, 3).reshape(value.shape[0] * QUAD, -1)
    return np.ascontiguousarray(whole[: conv.c, : conv.r * conv.s].reshape(conv.weight_shape))


def check(packed: Packed, conv: Conv) -> None:
    """The invariants the kernel relies on; a Packed from a file goes through here before it is used."""
    if (packed.format, packed.version, set(packed.arrays)) != (NAME, VERSION, {"value"}):
        raise InvalidFile(f"not a {NAME} version {VERSION} weight")
    value = packed.arrays["value"]
    shape = ceil_div(conv.c, QUAD), ceil_div(conv.r * conv.s, QUAD), QUAD, QUAD
    if not conv.groups == conv.c == conv.k or value.dtype != np.int8 or value.shape != shape:
        raise InvalidFile(f"{NAME}: arrays do not fit {conv.layer()}")


def layouts(conv: Conv, config: Config, target: Target, place: Place = ALONE) -> tuple[Layout, Layout]:
    return flat.layouts(_folded(conv), fours.lanes(target), config["vectors"], False, place)


def pixels(conv: Conv, config: Config, target: Target, pitch: int, rows: int) -> int:
    return flat.pixels(_folded(conv), config, target, pitch, rows)


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
    folded, lanes, vectors = _folded(conv), fours.lanes(target), config["vectors"]
    flat.compatible(NAME, folded, lanes, vectors, False, reads, writes)
    value = packed.arrays["value"]
    narrow = not fours.wide(value).any()
    code = weaving.WeavingCode(target.isa, form_of(target), vectors, narrow, conv.steps)
    entry = llvm.function(str(code), weaving.ENTRY, lambda: weaving.emit(code), target.isa, code.extra)
    p, q = rows or conv.out[0], conv.out[1]
    live_vectors, blocks, live = flat.cover(p, q, writes.pitch, vectors, lanes)
    taps = conv.r * conv.s
    windows = flat.offsets(np.minimum(np.arange(round_up(taps, QUAD)), taps - 1), np.array(0), folded, reads)
    owned = {
        "offset": flat.in_bytes(windows, folded, reads),
        "value": value,
        "live": live,
        "parameter": np.array([conv.parameter], np.float32),
        "shift": (SHIFT * value.sum((1, 3), dtype=np.int64)).astype(np.int32),
    }
    owned = {name: np.ascontiguousarray(array) for name, array in owned.items()}
    y_plane = writes.plane(p, q)
    sizes = {
        "images": conv.batch,
        "planes": folded.c,
        "fours": value.shape[1],
        "blocks": blocks,
        "x_plane": reads.plane(*conv.size) * reads.item_bytes,
        "y_plane": y_plane * writes.item_bytes,
        "plane_vectors": y_plane // lanes,
        "live_vectors": live_vectors,
        "front_vectors": writes.front // lanes,
    }
    return [Kernel.of(f"{NAME} {conv}", (reads, writes), entry, weaving.ARGUMENTS, sizes, owned)]
