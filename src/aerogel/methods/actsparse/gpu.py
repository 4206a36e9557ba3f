"""`actsparse` on GPUs: skips the zeros of the feature map instead of the weights'; needs no pruning.

Paper: TACO'23 (doi 10.1145/3600092, arXiv 1909.09927). A warp computes a patch of outputs for 32 lanes of
filters; what it reads of x is the same for all lanes, so each warp lists the positions where its patch sees
anything but zeros (ECR) and goes through the list (codegen/gpu/actsparse.cu): a weight is used for the whole
patch, and what is zero for a part of it is not skipped. With `lists` every zero is: each pixel of the staged
tile gets one list of its values for all warps, filters and taps, and a weight is used once. With the pooling
that follows in the same kernel (PECR) the convolution's output is never stored.

    first      [units + 1]            where each unit, (group of filters, stage of channels), begins
    position   [positions]            (c, r, s) flattened: those at which any filter of the group has a weight
                                      (both sparse); with lists all positions, for values say where
    value      [positions, filters]   the group's weights there; zeros past the last filter

Only real inputs can tell whether it wins: without `compile(calibration=...)` it refuses. Refuses too where
few values are zero, half precision and tiles that do not fit. A zero of x hides a weight that is infinite or
no number.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aerogel.codegen.gpu import cost, staging
from aerogel.codegen.gpu.launch import MOST_BLOCKS, Code, Launch, Number
from aerogel.codegen.gpu.staging import LANES, STATIC_BYTES
from aerogel.errors import InvalidFile
from aerogel.ir import Array, Config, Conv, Dtypes, Gpu, Idle, Packed, Pool, Stats, ceil_div, round_up
from aerogel.methods.actsparse import NAME

VERSION = 2
_META = ("channels", "filters", "lists")
"""What a weight is packed for."""
FEW = 20
"""Percent of x's elements that must be zero before anything can be gained."""
PATCHES = ((2, 2, 2, 4), (1, 2, 4, 2), (1, 1, 2, 4), (4, 2, 2, 2), (2, 4, 2, 2))
"""Outputs of a warp, rows and columns, and warps of a block, likewise."""


def refuse(conv: Conv, target: Gpu, stats: Stats) -> str | None:
    if conv.dtypes != Dtypes():
        return f"computes in f32, not {conv.dtypes}"
    if stats.idle is None:
        return "how many zeros its input has is not known: give real inputs as compile(calibration=...)"
    if stats.idle.elements < FEW:
        return f"{stats.idle.elements} % of its input is zero on the calibration inputs: too little to gain"
    if next(_points(conv, target), None) is None:
        return (
            f"a tile of {conv.r}x{conv.s} taps, stride {conv.stride}, dilation {conv.dilation}, takes "
            "too much shared memory"
        )
    if conv.n is not None and (most := staging.elements(conv)) >= staging.MOST_ELEMENTS:
        return f"an image has {most} elements; offsets in this kernel reach 2^30"
    if conv.n is not None and max(conv.n, conv.k) > MOST_BLOCKS:
        return f"{conv.n} images and {conv.k} filters; a grid has {MOST_BLOCKS} blocks"
    return None


def configs(conv: Conv, target: Gpu, stats: Stats) -> Iterator[Config]:
    """By modelled time: small patches where zeros are single, large ones where they come together."""
    found, conv, on = (
        [Config.make(NAME, **point) for point in _points(conv, target)],
        cost.sized(conv),
        cost.machine(target),
    )
    yield from sorted(found, key=lambda config: cost.microseconds(work(conv, config, stats), on))


def loop(config: Config) -> cost.Loop:
    """Instructions for one active position, as counted in the code for sm_80
    (benchmarks/experiments/sass.py; a test compares)."""
    outputs, filters = config["tile_p"] * config["tile_q"], config["filters"]
    loads = 1 if filters == 4 else filters
    if config["lists"]:  # for one value
        return cost.Loop(mac=filters, shared=0.75, loads=loads, other=2.1)
    return cost.Loop(mac=outputs * filters, shared=outputs + 1, loads=loads + 1, other=8)


def active(stats: Stats, outputs: int) -> float:
    """The share of positions that are active for a patch of so many outputs: between the zeros of elements
    and those of tiles."""
    idle = stats.idle or Idle(0, 0, 0)
    tiles, single = idle.tiles / 100, max(0, idle.elements - idle.tiles) / 100
    return 1 - tiles - single * (single / max(1e-9, 1 - tiles)) ** (outputs - 1)


def work(conv: Conv, config: Config, stats: Stats) -> cost.Work:
    """Positions at which a group of filters has weights: all of them, unless the filters have the same."""
    point, one, outputs = dict(config.options), loop(config), config["tile_p"] * config["tile_q"]
    warps, (h, w), lanes = (
        point["warps_p"] * point["warps_q"],
        _tile(conv, point, None),
        LANES * point["filters"],
    )
    down, across = point["tile_p"] * point["warps_p"], point["tile_q"] * point["warps_q"]
    tiles, groups = (
        ceil_div(conv.out[0], down) * ceil_div(conv.out[1], across) * conv.batch,
        ceil_div(conv.k // conv.groups, lanes),
    )
    kept = 1 - stats.sparsity if 2 * stats.shared > stats.nonzeros else 1 - stats.sparsity**lanes
    own, taps = conv.c // conv.groups, conv.r * conv.s
    blocks, stages = tiles * groups * conv.groups, ceil_div(own, point["channels"])
    staged = blocks * 4.0 * h * w * own
    if point["lists"]:
        turns = active(stats, 1) * own * taps * outputs * blocks * warps
        begun, listed = 14.0 * taps * outputs * stages * blocks * warps, staged / 4 / LANES
        return cost.Work(
            blocks,
            warps,
            turns * one.all + begun + 22 * listed,
            f32=turns * one.mac,
            wavefronts=turns * (1 + point["filters"]) + 3 * listed,
            l2_bytes=staged + 4.0 * own * taps * lanes * blocks,
            dram_bytes=cost.maps_bytes(conv) + 4.0 * own * taps * conv.k,
            registers=72,
            shared_bytes=_shared(conv, point, None),
            trips=stages * taps,
            stages=stages,
            copies=stages * ceil_div(h * w, 4 * warps),
        )
    positions = kept * own * taps
    turns, tested = active(stats, outputs) * positions * blocks * warps, positions * blocks * warps / LANES
    copied = staged / (4 * point["wide"]) / LANES
    return cost.Work(
        blocks,
        warps,
        turns * one.all + tested * (25 + 3 * outputs) + cost.STAGING * copied,
        f32=turns * one.mac,
        wavefronts=turns * (one.shared + point["filters"] + 1) + tested * outputs + staged / 128,
        l2_bytes=staged + turns / warps * lanes * 4,
        dram_bytes=cost.maps_bytes(conv) + positions * conv.k * 4,
        registers=72,
        shared_bytes=_shared(conv, point, None),
        stages=stages,
        copies=copied / max(1, blocks) / warps,
    )


def _points(conv: Conv, target: Gpu) -> Iterator[dict[str, int]]:
    own, per, room = conv.c // conv.groups, conv.k // conv.groups, min(STATIC_BYTES, target.shared_bytes // 2)
    filters = 4 if per > 2 * LANES else 2 if per > LANES else 1
    for tile_p, tile_q, warps_p, warps_q in PATCHES:
        for channels in (32, 64, 16, 8):
            half_empty = channels > 8 and channels // 2 >= own
            # a list's weights serve one output, so a larger patch saves nothing; 32 lanes list 32 channels
            lists = channels % LANES == 0 and tile_p * tile_q <= 4 and (channels == LANES or not half_empty)
            wide = 4 if own % 4 == 0 else 1
            point = {
                "channels": channels,
                "tile_p": tile_p,
                "tile_q": tile_q,
                "warps_p": warps_p,
                "warps_q": warps_q,
                "filters": filters,
                "wide": wide,
            }
            for form in (0,) * (not half_empty and staging.fits(point)) + (1,) * lists:
                if _shared(conv, point | {"lists": form}, None) <= room:
                    yield point | {"lists": form}


def _patch(point: dict[str, int], pool: Pool | None) -> tuple[tuple[int, int], tuple[int, int]]:
    """Outputs of the convolution that a warp computes, and how far warps are apart. With a pooling as many of
    its outputs as the patch has room for, at least one."""
    if pool is None:
        return (point["tile_p"], point["tile_q"]), (point["tile_p"], point["tile_q"])
    pooled = _pooled(point, pool)
    patch = [
        (n - 1) * step + window for n, step, window in zip(pooled, pool.stride, pool.window, strict=True)
    ]
    return (patch[0], patch[1]), (pooled[0] * pool.stride[0], pooled[1] * pool.stride[1])


def _pooled(point: dict[str, int], pool: Pool) -> tuple[int, int]:
    """Outputs of the pooling that a warp owns."""
    room = zip((point["tile_p"], point["tile_q"]), pool.window, pool.stride, strict=True)
    down, across = (max(1, (have - window) // step + 1) for have, window, step in room)
    return down, across


def _tile(conv: Conv, point: dict[str, int], pool: Pool | None) -> tuple[int, int]:
    """Rows and columns of the staged tile."""
    (patch, step), warps = _patch(point, pool), (point["warps_p"], point["warps_q"])
    down, across = ((w - 1) * s + p for w, s, p in zip(warps, step, patch, strict=True))
    return staging.reach((down, across), conv)


def _most(conv: Conv, point: dict[str, int]) -> int:
    """Positions of a stage."""
    return point["channels"] * conv.r * conv.s


def _shared(conv: Conv, point: dict[str, int], pool: Pool | None) -> int:
    down, across = _tile(conv, point, pool)
    warps = point["warps_p"] * point["warps_q"]
    if point["lists"]:
        return down * across * (8 * point["channels"] + 4)
    return 4 * down * across * staging.pitch(point) + warps * (2 * _most(conv, point) + 4 * LANES)


def layout(config: Config) -> str:
    return "channels_last"


def takes_pool(conv: Conv, config: Config, pool: Pool) -> bool:
    """Whether the pooling can go into the convolution's kernel: its tile grows."""
    point = dict(config.options)
    (p, q), _ = _patch(point, pool)
    fits = _shared(conv, point, pool) <= STATIC_BYTES and p * q * point["filters"] <= 64
    return fits and pool.dilation == (1, 1) and "add" not in conv.steps


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    lanes, size = LANES * config["filters"], config["channels"] * conv.r * conv.s
    per, own = conv.k // conv.groups, int(np.prod(conv.weight_shape[1:]))
    flat, first, positions, values = weight.reshape(conv.groups, per, own), [0], list[Array](), list[Array]()
    for group in flat:
        for low in range(0, per, lanes):
            part = np.zeros((lanes, own), np.float32)
            part[: min(lanes, per - low)] = group[low : low + lanes]
            kept = np.asarray(part.any(0)) | bool(config["lists"])
            for begin in range(0, own, size):
                mine = begin + np.flatnonzero(kept[begin : begin + size])
                first.append(first[-1] + len(mine))
                positions.append(mine)
                values.append(part[:, mine].T)
    arrays = {
        "first": np.array(first, np.int32),
        "position": np.concatenate(positions).astype(np.int32),
        "value": np.concatenate(values).astype(np.float32),
    }
    return Packed(f"gpu-{NAME}", VERSION, arrays, {n: config[n] for n in _META})


def unpack(packed: Packed, conv: Conv) -> Array:
    check(packed, conv)
    a, lanes, per = packed.arrays, LANES * packed.meta["filters"], conv.k // conv.groups
    stages = ceil_div(conv.c // conv.groups, packed.meta["channels"])
    found = np.zeros((conv.groups, round_up(per, lanes), int(np.prod(conv.weight_shape[1:]))), np.float32)
    group = np.repeat(np.arange(len(a["first"]) - 1), np.diff(a["first"])) // stages
    found.reshape(-1, lanes, found.shape[2])[group, :, a["position"]] = a["value"]
    return found[:, :per].reshape(conv.weight_shape)


def check(packed: Packed, conv: Conv) -> None:
    """The invariants the kernel relies on: a unit's positions are those of its stage, each once."""
    a, meta = packed.arrays, packed.meta
    if (packed.format, packed.version) != (f"gpu-{NAME}", VERSION) or set(a) != {
        "first",
        "position",
        "value",
    }:
        raise InvalidFile(f"not an {NAME} weight for GPUs")
    if set(meta) != set(_META) or meta["filters"] not in (1, 2, 4) or meta["channels"] < 1:
        raise InvalidFile(f"an {NAME} weight that does not say its channels and filters")
    own, size, lanes = (
        int(np.prod(conv.weight_shape[1:])),
        meta["channels"] * conv.r * conv.s,
        LANES * meta["filters"],
    )
    stages, lengths = ceil_div(own, size), np.diff(a["first"])
    units = conv.groups * ceil_div(conv.k // conv.groups, lanes) * stages
    good = (
        len(lengths) == units
        and a["first"][0] == 0
        and bool((lengths >= 0).all())
        and a["first"][-1] == len(a["position"])
    )
    good = good and a["value"].shape == (len(a["position"]), lanes)
    if good:
        unit, position = np.repeat(np.arange(units), lengths), a["position"].astype(np.int64)
        good = bool(((position >= 0) & (position < own) & (position // size == unit % stages)).all())
        good = good and bool((np.diff(unit * own + position) > 0).all())
        good = good and not (meta["lists"] and len(position) != units // stages * own)
    if not good:
        raise InvalidFile(f"an {NAME} weight with positions that {conv} has not")


def build(packed: Packed, conv: Conv, config: Config, pool: Pool | None = None) -> list[Launch]:
    """One launch; with `pool` it writes the pooled map."""
    check(packed, conv)
    if not conv.batch:
        return []
    a, (p, q), point = packed.arrays, conv.out, dict(config.options)
    (tile_h, tile_w), (patch, step) = _tile(conv, point, pool), _patch(point, pool)
    c, r, s = np.unravel_index(a["position"].astype(np.int64), conv.weight_shape[1:])
    if any(packed.meta[n] != point[n] for n in _META):
        raise InvalidFile(f"an {NAME} weight that was packed for another configuration than {config}")
    place = (r * conv.dilation[0] * tile_w + s * conv.dilation[1]) * staging.pitch(point) + c % point[
        "channels"
    ]
    macros = staging.macros(point, conv, (tile_h, tile_w))
    macros |= {
        "TILE_P": patch[0],
        "TILE_Q": patch[1],
        "STEP_P": step[0],
        "STEP_Q": step[1],
        "MOST": _most(conv, point),
    }
    macros |= {"FILTERS": point["filters"], "POOL": 0, "LISTS": point["lists"]}
    macros |= {"TAPS_R": conv.r, "TAPS_S": conv.s}
    macros |= {"DILATION_P": conv.dilation[0], "DILATION_Q": conv.dilation[1]}
    (y_rows, y_columns), pad = (p, q), (0, 0)
    if pool is not None:
        (y_rows, y_columns), pad, (down, across) = pool.out(p, q), pool.pad, _pooled(point, pool)
        macros |= {
            "POOL": 1 if pool.kind == "max" else 2,
            "POOLED_P": down,
            "POOLED_Q": across,
            "POOL_P": pool.stride[0],
        }
        macros |= {"POOL_Q": pool.stride[1], "WINDOW_P": pool.window[0], "WINDOW_Q": pool.window[1]}
    outputs = _pooled(point, pool) if pool is not None else patch
    tiles = [
        ceil_div(n, w * o)
        for n, w, o in zip((y_rows, y_columns), (point["warps_p"], point["warps_q"]), outputs, strict=True)
    ]
    lanes = LANES * point["filters"]
    groups, stages = (
        ceil_div(conv.k // conv.groups, lanes),
        ceil_div(conv.c // conv.groups, point["channels"]),
    )
    sizes = (
        conv.c,
        *conv.size,
        conv.k,
        p,
        q,
        conv.pad[0],
        conv.pad[1],
        tiles[1],
        stages,
        conv.c // conv.groups,
        conv.k // conv.groups,
        groups,
        y_rows,
        y_columns,
        *pad,
        tiles[0] * tiles[1],
        conv.groups * groups,
    )
    numbers: tuple[Number, ...] = (np.float32(conv.parameter), *(np.int32(n) for n in sizes))
    some = (a["first"], _some(place.astype(np.uint16)), _some(np.ascontiguousarray(a["value"])))
    block, files = (LANES, point["warps_p"] * point["warps_q"]), ("element.h", "stage.h", "actsparse.cu")
    grid = (tiles[0] * tiles[1], conv.groups * groups, conv.batch)
    code = Code(NAME, block, tuple(macros.items()), conv.steps, files)
    return [Launch(code, grid, ("x", "y", "bias", "residual", "counts", *some, *numbers))]


def _some(array: Array) -> Array:
    """An empty array has no address."""
    return array if array.size else np.zeros(4, array.dtype)
