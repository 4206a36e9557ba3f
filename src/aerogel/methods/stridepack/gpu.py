"""`stridepack` on GPUs: a lane is a filter, x is staged in shared memory by stages of channels, sums stay in
registers.

Paper: Tetris (PPoPP'24). Stride packed filters: for each group of 32 filters and stage of `channels` channels
the nonzeros of each lane, with filter group reorder and bank-sensing reorganization
(methods/stridepack/spf.py).

    filter   [groups of 32 x 32]   which filter a lane is, -1 where there is none
    order    [slots, 32]           which nonzero of its filter a lane takes in each slot of each unit,
                                   -1 where it waits
    first    [units + 1]           where the slots of each unit, (group, stage), begin
    start, position, value         the filters in CSR, lane by lane: positions (c, r, s) flattened,
                                   in rising order

Positions become places in the tile [row][column][channel] when the kernel is built; the tile's pitch depends
on the configuration alone. Small layers have another form, `baked`: the weights are in the code
(methods/stridepack/baked.py), slots are not needed. Wins where weights are used often: maps larger than a
tile, many images. Of f16 two pixels go into a word, half of a block's rows apart, and every instruction works
on both (codegen/gpu/element.h). Refuses bf16 and tiles that do not fit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aerogel.codegen.gpu import cost, staging
from aerogel.codegen.gpu.launch import HALVES, MOST_BLOCKS, Code, Launch, Number, twice
from aerogel.codegen.gpu.staging import STATIC_BYTES
from aerogel.errors import InvalidFile
from aerogel.formats import csr
from aerogel.ir import NUMPY, Array, Config, Conv, Dtypes, Gpu, Packed, Pool, Stats, ceil_div
from aerogel.methods.stridepack import NAME, baked, spf
from aerogel.methods.stridepack.spf import LANES, Ints

VERSION = 1
DEEP = (2, 4, 8)
"""Groups of filters that a block takes in turn where all channels are one stage."""
TILES = ((4, 2, 2, 4), (2, 4, 2, 2), (4, 4, 2, 2), (2, 2, 2, 2), (1, 1, 2, 2))
"""Outputs of a thread, rows and columns, and warps of a block, likewise."""


def refuse(conv: Conv, target: Gpu, stats: Stats) -> str | None:
    if conv.dtypes not in (Dtypes(), *HALVES):
        return f"computes in f32 or f16, not {conv.dtypes}"
    if next(points(conv, target), None) is None:
        return (
            f"a tile of {conv.r}x{conv.s} taps, stride {conv.stride}, dilation {conv.dilation}, takes "
            "too much shared memory"
        )
    if conv.n is not None and (most := staging.elements(conv)) >= staging.MOST_ELEMENTS:
        return f"an image has {most} elements; offsets in this kernel reach 2^30"
    if conv.n is not None and max(conv.n, _groups(conv)) > MOST_BLOCKS:
        return f"{conv.n} images and {conv.k} filters; a grid has {MOST_BLOCKS} blocks"
    return None


def configs(conv: Conv, target: Gpu, stats: Stats) -> Iterator[Config]:
    """All forms, reorganized and as they come, by modelled time. Measurement decides."""
    conv, on = cost.sized(conv), cost.machine(target)
    found = [*_in_code(conv, target, stats)]
    found += [
        Config.make(NAME, **point, reorganized=form) for form in (1, 0) for point in points(conv, target)
    ]
    yield from sorted(found, key=lambda config: cost.microseconds(work(conv, config, stats), on))


def _in_code(conv: Conv, target: Gpu, stats: Stats) -> Iterator[Config]:
    """The baked form, where its code finds room in the instruction cache; more takes compilers minutes."""
    point = {
        "channels": baked.CHANNELS,
        "tile_p": 1,
        "tile_q": 1,
        "warps_p": 2,
        "warps_q": 2,
        "wide": 4 if conv.c // conv.groups % 4 == 0 else 1,
        "buffers": 1,
        "deep": 1,
        "baked": 1,
    }
    small = baked.code_bytes(conv, point["wide"], stats) <= cost.machine(target).code_bytes
    if conv.dtypes == Dtypes() and small and _tile(conv, point)[2] * 4 <= STATIC_BYTES:
        yield Config.make(NAME, **point, reorganized=0)


def loop(config: Config, conv: Conv) -> cost.Loop:
    """Instructions for one slot, as counted in the code for sm_80 (benchmarks/experiments/sass.py; a test
    compares)."""
    outputs = config["tile_p"] * config["tile_q"]
    if conv.dtypes == HALVES[0]:  # two f32 sums for each word, which is taken apart first
        return cost.Loop(mac=2 * outputs, shared=outputs, loads=0.5, other=5.6 + 2 * outputs)
    return cost.Loop(mac=outputs, shared=outputs, loads=0.5, other=5.6)


def work(
    conv: Conv, config: Config, stats: Stats, slots: float | None = None, waves: float | None = None
) -> cost.Work:
    """`slots` and `waves`: padded slots and wavefronts for each nonzero, as `counted` finds them; if left
    out, what is usual."""
    point, one, groups = dict(config.options), loop(config, conv), _groups(conv)
    slots = slots or usual(conv, config, stats)
    waves = waves or (slots if config["reorganized"] else 2 * slots)
    stages = ceil_div(conv.c // conv.groups, point["channels"])
    warps, (down, across), (h, w, words) = (
        point["warps_p"] * point["warps_q"],
        _outputs(point),
        _tile(conv, point),
    )
    down *= 2 if conv.dtypes in HALVES else 1
    tiles = ceil_div(conv.out[0], down) * ceil_div(conv.out[1], across) * conv.batch
    blocks = tiles * _blocks_deep(conv, point["deep"])
    turns = slots * stats.nonzeros / LANES * tiles * warps
    staged, macs = blocks * 4.0 * h * w * (conv.c // conv.groups), turns * one.mac
    copied = staged / (4 * point["wide"]) / LANES
    if point["baked"]:
        return baked.work(conv, point["wide"], stats, blocks, warps, 4 * words)
    outputs = conv.batch * conv.k * conv.out[0] * conv.out[1]
    # the next four slots are on their way while these are used
    late = max(0.0, 1 - 4 * one.all / cost.ALONE / cost.LATENCY)
    trips = point["deep"] * (late * slots * stats.nonzeros / LANES / groups / 4 + 1)
    return cost.Work(
        blocks,
        warps,
        turns * one.all + cost.STAGING * copied + cost.EPILOGUE * outputs / LANES,
        f32=0 if conv.dtypes == HALVES[1] else macs,
        halves=macs if conv.dtypes == HALVES[1] else 0,
        wavefronts=waves * stats.nonzeros / LANES * tiles * warps * one.shared + staged / 128 + turns * 1.5,
        l2_bytes=staged + slots * stats.nonzeros * 6 * tiles,
        dram_bytes=cost.maps_bytes(conv) + slots * stats.nonzeros * 6,
        registers=64 + 5 * point["tile_p"] * point["tile_q"] // 2,  # about (gpu_facts)
        shared_bytes=4 * words * point["buffers"],
        trips=trips,
        stages=1 if point["buffers"] == 2 else stages,  # the next is on its way while one is used
        copies=copied / max(1, blocks) / warps,
    )


def usual(conv: Conv, config: Config, stats: Stats) -> float:
    """Slots for each nonzero, estimated: groups wait for their longest filter, and within a stage for the
    lane that happens to have most. Half of the layers of the real patterns have within 3 % of it, nine of ten
    within 12 %."""
    groups, stages = _groups(conv), ceil_div(conv.c // conv.groups, config["channels"])
    mean = max(1, stats.nonzeros) / conv.k
    uneven = max(0.0, stats.longest_filter / mean - 1)
    if not config["reorganized"]:
        return 1.2 + 0.9 * uneven
    chance = 0.15 + 1.4 / (mean / stages) ** 0.5 if stages > 1 else 0.0
    return (1 + uneven / groups + chance) * LANES * groups / conv.k


def counted(weight: Array, conv: Conv, config: Config) -> tuple[float, float]:
    """Exactly: slots and wavefronts for each nonzero of this weight, from packing it."""
    arrays = dict(pack(weight, conv, config).arrays)
    places = units(arrays, conv, config)[0]
    slots, nonzeros = np.split(arrays["order"].astype(np.int64), arrays["first"][1:-1]), len(arrays["value"])
    each = LANES / max(1, nonzeros)
    return each * len(arrays["order"]), each * spf.wavefronts(places, slots)


def points(conv: Conv, target: Gpu) -> Iterator[dict[str, int]]:
    """All forms but the baked one, of which two blocks find room on a multiprocessor."""
    own, room = conv.c // conv.groups, min(STATIC_BYTES, target.shared_bytes // 2)
    wide = 4 if own % 4 == 0 else 1
    for channels in (256, 128, 64, 32, 16, 8):
        if channels > 8 and channels // 2 >= own:
            continue
        for tile_p, tile_q, warps_p, warps_q in TILES:
            point = {
                "channels": channels,
                "tile_p": tile_p,
                "tile_q": tile_q,
                "warps_p": warps_p,
                "warps_q": warps_q,
                "wide": wide,
                "baked": 0,
            }
            for buffers in (2, 1):
                if staging.fits(point) and buffers * _tile(conv, point)[2] * 4 <= room:
                    yield point | {"buffers": buffers, "deep": 1}
            if channels >= own and staging.fits(point) and _tile(conv, point)[2] * 4 <= room:
                per = ceil_div(conv.k // conv.groups, LANES)
                yield from (point | {"buffers": 1, "deep": deep} for deep in DEEP if deep < 2 * per)


def _tile(conv: Conv, point: dict[str, int]) -> tuple[int, int, int]:
    """Rows and columns of the staged tile, and its floats."""
    down, across = staging.reach(_outputs(point), conv)
    return down, across, down * across * staging.pitch(point)


def _between(conv: Conv, point: dict[str, int]) -> Ints:
    """Words under a window that the kernel keeps 0: those after each pixel's channels."""
    pitch, across = staging.pitch(point), _tile(conv, point)[1]
    r, s, spare = np.ix_(np.arange(conv.r), np.arange(conv.s), np.arange(point["channels"], pitch))
    words = (r * conv.dilation[0] * across + s * conv.dilation[1]) * pitch + spare
    return words.reshape(-1).astype(np.int64)


def _outputs(point: dict[str, int]) -> tuple[int, int]:
    """Rows and columns of y that a block computes."""
    down, across = (baked.DOWN, baked.ACROSS) if point["baked"] else (1, 1)
    return point["warps_p"] * point["tile_p"] * down, point["warps_q"] * point["tile_q"] * across


def _blocks_deep(conv: Conv, deep: int) -> int:
    """Blocks that share a tile's pixels, each with `deep` groups of filters."""
    return conv.groups * ceil_div(_groups(conv) // conv.groups, deep)


def _groups(conv: Conv) -> int:
    return conv.groups * ceil_div(conv.k // conv.groups, LANES)


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    flat = weight.reshape(conv.k, -1)
    own, size = conv.k // conv.groups, config["channels"] * conv.r * conv.s
    stages = ceil_div(flat.shape[1], size)
    lengths = np.add.reduceat(flat != 0, np.arange(0, flat.shape[1], size), axis=1).astype(np.int64)
    lanes = np.full((_groups(conv), LANES), -1, np.int64)
    for g in range(conv.groups):
        part = lengths[g * own : (g + 1) * own]
        groups = (
            spf.grouped(part)
            if config["reorganized"]
            else np.array_split(np.arange(own), range(LANES, own, LANES))
        )
        for i, members in enumerate(groups):
            lanes[g * ceil_div(own, LANES) + i, : len(members)] = members + g * own
    filters = lanes.reshape(-1)
    rows, position = np.nonzero(np.where(filters[:, None] >= 0, flat[filters], 0))
    start = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(filters)))])
    arrays = {
        "filter": filters.astype(np.int32),
        "start": start.astype(np.int32),
        "position": position.astype(np.int32),
    }
    arrays["value"] = flat[filters[rows], position]
    places, counts, _ = units(arrays, conv, config)
    slots = [] if config["baked"] else spf.in_order(counts)
    # shared memory is the limit, so wavefronts are the modelled time: kept where there are fewer
    if config["reorganized"]:
        apart = spf.reorganized(places, counts)
        slots = apart if sum(map(len, apart)) < spf.wavefronts(places, slots) else slots
    arrays["first"] = np.concatenate([[0], np.cumsum([len(s) for s in slots])]).astype(np.int32)
    arrays["order"] = np.concatenate([np.zeros((0, LANES), np.int64), *slots]).astype(np.int32)
    return Packed(f"gpu-{NAME}", VERSION, arrays, {"stages": stages})


def units(a: dict[str, Array], conv: Conv, config: Config) -> tuple[Ints, Ints, Array]:
    """Every unit's places in the tile and values, [unit, lane, nonzero], and how many each lane has."""
    size = config["channels"] * conv.r * conv.s
    stages = ceil_div(int(np.prod(conv.weight_shape[1:])), size)
    c, r, s = np.unravel_index(a["position"].astype(np.int64), conv.weight_shape[1:])
    point = dict(config.options)
    place = (r * conv.dilation[0] * _tile(conv, point)[1] + s * conv.dilation[1]) * staging.pitch(
        point
    ) + c % config["channels"]
    lane, stage = np.repeat(np.arange(len(a["filter"])), np.diff(a["start"])), c // config["channels"]
    unit = lane // LANES * stages + stage
    shape = (len(a["filter"]) // LANES * stages, LANES)
    counts = np.bincount(unit * LANES + lane % LANES, minlength=shape[0] * LANES).reshape(shape)
    begins = np.concatenate(
        [[0], np.cumsum(np.bincount(lane * stages + stage, minlength=len(a["filter"]) * stages))]
    )
    number = np.arange(len(place)) - begins[lane * stages + stage]
    places, values = (
        np.zeros((*shape, int(counts.max(initial=0))), np.int64),
        np.zeros((*shape, int(counts.max(initial=0))), a["value"].dtype),
    )
    places[unit, lane % LANES, number], values[unit, lane % LANES, number] = place, a["value"]
    return places, counts.astype(np.int64), values


def unpack(packed: Packed, conv: Conv) -> Array:
    check(packed, conv)
    return csr.unpack(packed.arrays, conv)


def check(packed: Packed, conv: Conv) -> None:
    """The invariants the kernel relies on."""
    a = packed.arrays
    if (packed.format, packed.version) != (f"gpu-{NAME}", VERSION) or set(a) != _ARRAYS:
        raise InvalidFile(f"not a {NAME} weight for GPUs")
    if a["value"].dtype != NUMPY[conv.dtypes.weight] or not csr.sound(a, conv, _groups(conv) * LANES):
        raise InvalidFile(f"a {NAME} weight with filters or positions that {conv} has not")


_ARRAYS = {"filter", "start", "position", "value", "first", "order"}


def build(packed: Packed, conv: Conv, config: Config) -> list[Launch]:
    check(packed, conv)
    if not conv.batch:
        return []
    a, (p, q), point = dict(packed.arrays), conv.out, dict(config.options)
    (tile_h, tile_w, _), (down, across) = _tile(conv, point), _outputs(point)
    macros = staging.macros(point, conv, (tile_h, tile_w)) | {
        name.upper(): point[name] for name in ("tile_p", "tile_q", "buffers", "deep")
    }
    macros["GROUPED"] = int(conv.groups > 1)
    if macros["HALF"]:
        macros["APART"], down = down * conv.stride[0], 2 * down
    sizes = (
        conv.c,
        *conv.size,
        conv.k,
        p,
        q,
        conv.pad[0],
        conv.pad[1],
        ceil_div(q, across),
        packed.meta["stages"],
        conv.c // conv.groups,
        _groups(conv) // conv.groups,
    )
    numbers: tuple[Number, ...] = (np.float32(conv.parameter), *(np.int32(n) for n in sizes))
    block, grid = (
        (32, point["warps_p"] * point["warps_q"]),
        (ceil_div(q, across) * ceil_div(p, down), _blocks_deep(conv, point["deep"]), conv.batch),
    )
    places, counts, values = units(a, conv, config)
    if point["baked"]:
        own = baked.source(
            (zip(*_of_unit(places[u], values[u], counts[u]), strict=True) for u in range(len(counts))),
            point["wide"],
        )
        code, arrays = (
            Code(
                "baked",
                block,
                tuple((macros | baked.macros(conv)).items()),
                conv.steps,
                ("element.h", "stage.h"),
                own,
            ),
            tuple[Array, ...](),
        )
    else:
        code = Code(NAME, block, tuple(macros.items()), conv.steps, ("element.h", "stage.h", "stridepack.cu"))
        zeros = _between(conv, point)
        arrays = a["filter"], *spf.fours(_slots(a, counts), twice(values), places, zeros)
    return [Launch(code, grid, ("x", "y", "bias", "residual", *arrays, *numbers))]


def _slots(a: dict[str, Array], counts: Ints) -> list[Ints]:
    """Each unit's slots, checked: every nonzero is taken once."""
    slots = np.split(a["order"].astype(np.int64), a["first"][1:-1])
    for own, count in zip(slots, counts, strict=True):
        taken = np.sort(np.where(own >= 0, own, len(own)), axis=0)
        wanted = np.where(np.arange(len(own))[:, None] < count, np.arange(len(own))[:, None], len(own))
        if own.shape[1:] != (LANES,) or (count > len(own)).any() or not np.array_equal(taken, wanted):
            raise InvalidFile(f"a {NAME} weight whose slots do not take each nonzero once")
    return slots


def _of_unit(places: Ints, values: Array, counts: Ints) -> tuple[Ints, Ints, Array]:
    """Places, lanes and values of a unit's nonzeros."""
    lane, number = np.nonzero(np.arange(places.shape[1]) < counts[:, None])
    return places[lane, number], lane, values[lane, number]


def layout(config: Config) -> str:
    return "channels_last"


def takes_pool(conv: Conv, config: Config, pool: Pool) -> bool:
    return False
