"""`baked` on CPUs with AVX-512."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from math import log2

import numpy as np

from aerogel.codegen.cpu import llvm, machine, strips
from aerogel.codegen.cpu.abi import Kernel
from aerogel.codegen.cpu.rows import RowsCode
from aerogel.errors import InvalidFile, ShapeError
from aerogel.formats import flat
from aerogel.ir import (
    ALONE,
    F32,
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
)
from aerogel.methods.baked import NAME

VERSION = 1
LANES, VECTOR = 16, 64
MOST = 2**19
"""Nonzeros whose code may be held in memory, about ten bytes each: every process has its own."""
CODE = 12 << 10
"""Bytes of a body's code that stay in the first cache of instructions beside what calls it."""
STRIPS, USUAL = (4, 8, 16, 32, 64), 16
"""Vectors of pixels that run through a body before the next one."""
PAGE, PAGES = 4096, 48
"""Bytes of a page, and pages of x that a body reads whose addresses the core keeps at hand."""
FEWEST = 8
"""Filters that read the same channels, at least: fewer have too few windows in common."""


def refuse(conv: Conv, target: Target, stats: Stats) -> str | None:
    if target.isa != "avx512":
        return f"its code is written for AVX-512, not for {target.isa}"
    if conv.dtypes != F32:
        return f"its code is written for f32, not for {conv.dtypes}"
    if conv.k // conv.groups < FEWEST:
        return f"{conv.k // conv.groups} filters share a window of x; {FEWEST} are the fewest that pay"
    if stats.nonzeros > MOST:
        return f"{stats.nonzeros:,} nonzeros would be {stats.nonzeros * 10 / 1e6:.0f} MB of code"
    if conv.r * conv.s > 2**13:
        return f"a kernel of {conv.r} x {conv.s}: a packed position has two bytes"
    if conv.n is not None and (bytes_ := flat.image_bytes(conv)) >= 2**31:
        return f"one image takes {bytes_ / 2**30:.1f} GiB; offsets in this format reach 2 GiB"
    return None


def configs(conv: Conv, target: Target, stats: Stats) -> Iterator[Config]:
    """Strips of pixels and blocks of channels, those first whose code and windows stay near the core. What
    is offered does not depend on the place."""
    own, live = conv.c // conv.groups, flat.live_vectors(conv, LANES, ALONE)
    sizes = sorted({min(own, 1 << i) for i in range(11)})
    lengths = [strip for strip in STRIPS if strip < 2 * live or strip == STRIPS[0]]
    near = max(size for size in sizes if size <= _near(conv, stats))
    usual = min(lengths[-1], USUAL)

    def distance(point: tuple[int, int]) -> float:
        return abs(log2(point[0] / usual)) + 1.5 * abs(log2(point[1] / near))

    for strip, channels in sorted(product(lengths, sizes), key=distance):
        units = flat.filter_groups(conv, ceil_div(live, strip), target)
        held = ceil_div(conv.k // conv.groups * strip * VECTOR, target.l2_bytes // 4)
        yield Config.make(NAME, vectors=strip, channels=channels, groups=max(units, held))


def _near(conv: Conv, stats: Stats) -> int:
    """Channels whose code and whose pages of x stay near the core."""
    reads, _ = flat.layouts(conv, LANES, 1, False, stats.place)
    column = 10 + 7 * machine.MOST_SUMS * stats.nonzeros / max(1, stats.weights)  # bytes of code
    span = (conv.r - 1) * conv.dilation[0] * reads.pitch * 4 + USUAL * VECTOR
    pages = min(reads.plane(*conv.size) * 4, span + PAGE) / PAGE
    return max(1, int(min(CODE / (conv.r * conv.s * column), PAGES / pages)))


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    k, c, r, s = conv.weight_shape
    if weight.shape != (k, c, r, s):
        raise ShapeError(f"weight of shape {weight.shape} for {conv.layer()}, which takes {(k, c, r, s)}")
    stage = max(1, min(config["channels"], c, 2**16 // (r * s)))
    stages = ceil_div(c, stage)
    edges = _edges(conv, config["groups"])
    set_edges, first = _sets(edges)
    of_filter = np.searchsorted(first, np.arange(k), side="right") - 1  # the set of each filter
    group = np.searchsorted(edges, np.arange(k), side="right") - 1
    low = set_edges[group]
    sets = set_edges[group + 1] - low
    at = np.flatnonzero(nonzero(weight, conv.dtypes.weight))
    filters, position = np.divmod(at, c * r * s)
    step, position = np.divmod(position, stage * r * s)
    body = (low * stages)[filters] + step * sets[filters] + (of_filter - low)[filters]
    register = (np.arange(k) - first[of_filter])[filters]
    order = np.argsort((body * (stage * r * s) + position) * machine.REGISTERS + register)
    counts = np.bincount(body, minlength=len(first) * stages)
    return Packed(
        NAME,
        VERSION,
        {
            "group": edges.astype(np.int32),
            "start": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            "register": register[order].astype(np.uint8),
            "position": position[order].astype(np.uint16),
            "value": weight.reshape(-1)[at[order]],
        },
        {"stage": stage},
    )


def _edges(conv: Conv, groups: int) -> Array:
    """Groups of filters of about equal size that read the same channels."""
    per = conv.k // conv.groups
    inside = np.arange(min(groups, per)) * per // min(groups, per)
    return np.append(np.add.outer(np.arange(conv.groups) * per, inside).reshape(-1), conv.k)


def _sets(edges: Array) -> tuple[Array, Array]:
    """Where the sets of each group begin, and the first filter of each set: as few sets as registers allow,
    of about equal size."""
    edges = edges.astype(np.int64)
    counts = -(-np.diff(edges) // machine.MOST_SUMS)
    first = [
        low + np.arange(n) * (high - low) // n for (low, high), n in zip(pairwise(edges), counts, strict=True)
    ]
    return np.concatenate([[0], np.cumsum(counts)]), np.concatenate(first)


def unpack(packed: Packed, conv: Conv) -> Array:
    check(packed, conv)
    _, c, r, s = conv.weight_shape
    a, stage = packed.arrays, packed.meta["stage"]
    filters, step = _bodies(a["group"], ceil_div(c, stage))
    counts = np.diff(a["start"])
    weight = np.zeros((conv.k, c * r * s), np.float32)
    position = np.repeat(step, counts) * (stage * r * s) + a["position"]
    weight[np.repeat(filters, counts) + a["register"], position] = a["value"]
    return weight.reshape(conv.weight_shape)


def _bodies(edges: Array, stages: int) -> tuple[Array, Array]:
    """The first filter and the stage of each body."""
    set_edges, first = _sets(edges)
    own = [first[low:high] for low, high in pairwise(set_edges)]
    steps = [np.repeat(np.arange(stages), len(f)) for f in own]
    return np.concatenate([np.tile(f, stages) for f in own]), np.concatenate(steps)


def check(packed: Packed, conv: Conv) -> None:
    """The invariants the code relies on; a Packed from a file goes through here before it is used."""
    k, c, r, s = conv.weight_shape
    a, stage = packed.arrays, packed.meta.get("stage", 0)
    kinds: dict[str, type] = {
        "group": np.int32,
        "start": np.int32,
        "register": np.uint8,
        "position": np.uint16,
    }
    kinds |= {"value": np.float32}
    if (packed.format, packed.version) != (NAME, VERSION) or set(a) != set(kinds):
        raise InvalidFile(f"not a {NAME} version {VERSION} weight")
    if any(a[n].dtype != kind or a[n].ndim != 1 for n, kind in kinds.items()):
        raise InvalidFile(f"{NAME}: an array has the wrong element type")
    if not 1 <= stage <= c or stage * r * s > 2**16:
        raise InvalidFile(f"{NAME}: stages of {stage} channels do not fit {conv.layer()}")
    group, start, per = a["group"], a["start"], k // conv.groups
    if len(group) < 2 or group[0] != 0 or group[-1] != k or (np.diff(group) <= 0).any():
        raise InvalidFile(f"{NAME}: filter groups do not cover the {k} filters")
    if (group[:-1] // per != (group[1:] - 1) // per).any():
        raise InvalidFile(f"{NAME}: a group of filters reads different channels")
    filters, step = _bodies(group, ceil_div(c, stage))
    nonzeros = len(a["position"])
    if (
        len(start) != len(filters) + 1
        or start[0] != 0
        or (np.diff(start) < 0).any()
        or start[-1] != nonzeros
        or nonzeros != len(a["value"])
        or nonzeros != len(a["register"])
    ):
        raise InvalidFile(f"{NAME}: nonzeros do not begin and end where the layer's sets do")
    counts = np.diff(start)
    _, first = _sets(group)
    sizes = np.diff(np.append(first, k))
    size = np.repeat(sizes[np.searchsorted(first, filters)], counts)
    inside = np.repeat(np.minimum(stage, c - step * stage) * r * s, counts)
    if (a["register"] >= size).any() or (a["position"] >= inside).any():
        raise InvalidFile(f"{NAME}: a nonzero is outside the {c} x {r} x {s} filters of its set")
    key = a["position"].astype(np.int64) * machine.REGISTERS + a["register"]
    key += np.repeat(np.arange(len(filters)), counts) << 32
    if (np.diff(key) <= 0).any():
        raise InvalidFile(f"{NAME}: nonzeros are not in ascending order")


def layouts(conv: Conv, config: Config, target: Target, place: Place = ALONE) -> tuple[Layout, Layout]:
    return flat.layouts(conv, LANES, 1, False, place)


def pixels(conv: Conv, config: Config, target: Target, pitch: int, rows: int) -> int:
    return round_up((rows - 1) * pitch + conv.out[1], LANES)


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
    flat.compatible(NAME, conv, LANES, 1, False, reads, writes)
    a, (p, q), stage = packed.arrays, (rows or conv.out[0], conv.out[1]), packed.meta["stage"]
    live, _, inside = flat.cover(p, q, writes.pitch, 1, LANES)
    strip = min(config["vectors"], live)
    stages, plane = ceil_div(conv.c // conv.groups, stage), reads.plane(*conv.size)
    set_edges, first = _sets(a["group"])
    code = _code(packed, conv, reads, strip * VECTOR)
    memory = machine.executable(b"".join(code))
    places = np.cumsum([0, *(len(one) for one in code), 0])
    owned = {
        "group": a["group"],
        "x_group": (a["group"][:-1] // (conv.k // conv.groups) * (conv.c // conv.groups)).astype(np.int32),
        "set": set_edges.astype(np.int32),
        "filter": np.append(first, conv.k).astype(np.int32),
        "body": places.astype(np.int64) + memory.ctypes.data,
        "start": a["start"],
        "value": a["value"],
        "live": inside,
        "parameter": np.array([conv.parameter], np.float32),
    }
    owned = {name: np.ascontiguousarray(array) for name, array in owned.items()} | {"code": memory}
    y_plane = writes.plane(p, q)
    sizes = {
        "images": conv.batch,
        "blocks": ceil_div(live, strip),
        "groups": len(a["group"]) - 1,
        "strip": strip,
        "channel_blocks": stages,
        "x_block": stage * plane * 4,
        "x_image": conv.c * plane * 4,
        "x_plane": plane * 4,
        "y_image": conv.k * y_plane * 4,
        "y_plane": y_plane * 4,
        "plane_vectors": y_plane // LANES,
        "live_vectors": live,
        "front_vectors": writes.front // LANES,
        "scratch_thread": int(np.diff(a["group"]).max()) * strip * VECTOR,
    }
    finishing = RowsCode(target.isa, conv.dtypes, 1, conv.steps)
    entry = llvm.function(
        f"{strips.ENTRY} {finishing}", strips.ENTRY, lambda: strips.emit(finishing), target.isa
    )
    return [Kernel.of(f"{NAME} {conv}", (reads, writes), entry, strips.ARGUMENTS, sizes, owned)]


def _code(packed: Packed, conv: Conv, reads: Layout, stride: int) -> list[bytes]:
    """Each body's code. `stride` is the bytes from one filter's sums to the next."""
    a, stage = packed.arrays, packed.meta["stage"]
    filters, step = _bodies(a["group"], ceil_div(conv.c // conv.groups, stage))
    _, first = _sets(a["group"])
    sizes = np.diff(np.append(first, conv.k))[np.searchsorted(first, filters)]
    windows = flat.offsets(np.arange(stage * conv.r * conv.s), np.array(0), conv, reads)
    offset = flat.in_bytes(windows, conv, reads).astype(np.int64)[a["position"]]
    # the first set to read a line of x asks for what follows it
    asked = np.diff(a["position"] // conv.s, prepend=np.uint16(0)) != 0
    asked &= np.repeat(np.isin(filters, a["group"]), np.diff(a["start"]))
    register, start = a["register"].astype(np.int64), a["start"].astype(np.int64)
    return machine.bodies(register, offset, asked, start, sizes, step > 0, stride)
