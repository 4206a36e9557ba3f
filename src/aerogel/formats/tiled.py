"""Weights as dense tiles and rows: the format of `tilewise` and `blockgemm`.

A tile is filters that keep the same positions. Its filters stand in panels of a few, the last one filled up
with nobody (-1):

    tile       [0, 2]            tiles 0 and 1 belong to the first group of filters
    tile_row   [0, 70, 95]       positions of tile 0 stand at 0 .. 70
    tile_position [...]          (c * R + r) * S + s, as in rows
    tile_panel [0, 4, 6]         panels of tile 0 are 0 .. 4
    member     [...]             filters of each panel
    panel      [...]             values: tile by tile, panel by panel, position by position, filter by filter

and the nonzeros outside the tiles are rows (formats/flat.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise, product

import numpy as np

from aerogel.codegen.cpu import amx, blocks, llvm, sums
from aerogel.codegen.cpu.abi import Kernel
from aerogel.errors import InvalidFile, PlanMismatch
from aerogel.formats import flat
from aerogel.ir import (
    ALONE,
    NUMPY,
    Array,
    Config,
    Conv,
    Layout,
    Packed,
    Place,
    Target,
    ceil_div,
    nonzero,
    to_float64,
)

ARRAYS = (*flat.ARRAYS, "tile", "tile_row", "tile_position", "tile_panel", "member", "panel")
VERSION = 1

_REGISTERS = {"avx512": 32, "avx2": 16, "generic": 16, "neon": 32}
_MOST_VECTORS = 12
"""Vectors of pixels of a unit of work, at most: its sums lie in L2."""

COST = {
    "avx512": {
        "load": 0.46,  # of a weight or a vector of the stage
        "step": 0.85,  # of a position
        "near": 0.7,  # of the nearest cache that a stage has
        "miss": 1.5,  # of a load beyond it
        "stage": 61.0,
        "stage_sum": 7.7,  # of a stage, for each vector of sums
        "gather": 180.0,  # of a tile's position, for each vector
        "end": 40.0,  # of a filter's vector of output
        "outside": 0.7,  # of a vector for a nonzero outside the tiles
    }
}
"""Cycles by ISA; one that is not here goes by AVX-512's. Fitted by benchmarks/experiments/fit.py to 14 layers
(ResNet-50 and VGG-19, tile-wise at 75 %) on one server core, where the first choice costs 6 % over the best
of those tried."""

Tile = tuple[Array, Array]
"""Filters and the positions they keep."""


def unsupported(conv: Conv, target: Target) -> str | None:
    """None, or why no kernel of tiles takes this problem."""
    if conv.dtypes.accumulator != "f32":
        return f"tiles are summed in f32, not in {conv.dtypes.accumulator}"
    if conv.n is not None and (bytes_ := flat.image_bytes(conv)) >= 2**31:
        return f"one image takes {bytes_ / 2**30:.1f} GiB; offsets in this format reach 2 GiB"
    return sums.unsupported(conv.dtypes, target)


def on_amx(conv: Conv, target: Target) -> bool:
    """Whether tiles of this problem can go to the matrix engine; a panel then has the engine's number of
    filters."""
    return "amx_bf16" in target.extras and (conv.dtypes.input, conv.dtypes.weight) == ("bf16", "bf16")


def configs(
    name: str, conv: Conv, target: Target, inside: int, outside: int, place: Place
) -> Iterator[Config]:
    """Register blocks, pixels and stages, ordered by a cost model; `inside` and `outside` are nonzeros in
    tiles and in rows."""
    lanes, own = target.vector_bytes // 4, conv.c // conv.groups
    live, alone = flat.live_vectors(conv, lanes, place), flat.live_vectors(conv, lanes, ALONE)
    possible = flat.most_vectors(conv, lanes)

    def config(filters: int, width: int, vectors: int, rows: int) -> Config:
        fits = int(target.l1_bytes // (conv.r * vectors * target.vector_bytes))
        channels = min(own, max(8, 1 << max(0, fits.bit_length() - 1)))
        return Config.make(
            name,
            filters=filters,
            width=width,
            vectors=vectors,
            rows=rows,
            channels=channels,
            groups=flat.filter_groups(conv, ceil_div(alone, vectors), target),
            ahead=4,
        )

    cost, points = {}, list[tuple[int, int, int, int]]()
    if on_amx(conv, target):
        parts_rows = product((3, 2, 4, 1, 6), (1024, 512))
        points = [(amx.FILTERS, amx.WIDTH, amx.WIDTH * parts, rows) for parts, rows in parts_rows]
    for width, parts in product(range(1, min(possible, 7) + 1), (1, 2, 3)):
        most = min(16, (_REGISTERS[target.isa] - 1) // width - 1, conv.k)
        for filters in (1, *range(max(2, most // 2), most + 1)):
            if width * parts <= min(_MOST_VECTORS, possible + width - 1):
                for rows in (64, 128, 256):
                    point = filters, width, width * parts, rows
                    cost[point] = _cycles(conv, target, live, inside, outside, *point)
    points += sorted(cost, key=lambda point: cost[point])
    return (config(*point) for point in points)


def _cycles(
    conv: Conv,
    target: Target,
    live: int,
    inside: int,
    outside: int,
    filters: int,
    width: int,
    vectors: int,
    rows: int,
) -> float:
    """Modelled cycles of one image: it orders candidates and is never shown as a time.

    A panel's position costs its FMAs, two a cycle, its loads, and more where the stage outgrows the near
    cache; a stage the sums its panels add to; a tile its gathering, once for all filters; a filter its start
    and its end.
    """
    cost = COST.get(target.isa, COST["avx512"])
    tile = min(128, conv.k // conv.groups)
    positions = inside * ceil_div(tile, filters) / tile  # of all panels: the last one of a tile is filled up
    beyond = max(0.0, 1 - cost["near"] * target.l1_bytes / (rows * width * target.vector_bytes))
    loads = cost["load"] * (filters + width) + cost["step"] + cost["miss"] * width * beyond
    panel = positions * (filters * width / 2 + loads)
    panel += positions / rows * (cost["stage"] + cost["stage_sum"] * filters * width)
    panel += inside / tile * cost["gather"] * width
    ends = conv.k * cost["end"] * vectors + outside * (vectors + 2) * cost["outside"]
    return ceil_div(live, vectors) * (vectors // width * panel + ends)


def pack(name: str, weight: Array, conv: Conv, config: Config, tiles: Iterable[Tile]) -> Packed:
    """A weight with these tiles; filters in at most one of them."""
    k, own = conv.k, int(np.prod(conv.weight_shape[1:]))
    matrix, rest = weight.reshape(k, own), weight.copy().reshape(k, own)
    tiles = [(filters, positions) for filters, positions in tiles if len(filters) and len(positions)]
    for filters, positions in tiles:
        rest[np.ix_(filters, positions)] = 0
    work = nonzero(weight, conv.dtypes.weight).reshape(k, own).sum(1)
    arrays, channel_blocks = flat.pack(
        rest.reshape(weight.shape), conv, config["channels"], config["groups"], work
    )
    many, per = config["filters"], k // conv.groups
    tile, tile_row, tile_panel, positions_of, members, values = (
        [0],
        [0],
        [0],
        list[Array](),
        list[Array](),
        list[Array](),
    )
    for low, high in pairwise(arrays["group"].tolist()):
        for filters, positions in tiles:
            inside = filters[(filters >= low) & (filters < high)]
            # filters of one group of the convolution read the same channels
            for reads in np.unique(inside // per):
                mine = inside[inside // per == reads]
                panels = ceil_div(len(mine), many)
                member = np.concatenate([mine, np.full(panels * many - len(mine), -1)])
                block = np.where(member[:, None] >= 0, matrix[member][:, positions], weight.dtype.type(0))
                values.append(block.reshape(panels, many, len(positions)).transpose(0, 2, 1).reshape(-1))
                members.append(member)
                positions_of.append(positions)
                tile_row.append(tile_row[-1] + len(positions))
                tile_panel.append(tile_panel[-1] + panels)
        tile.append(len(tile_row) - 1)
    arrays |= {
        n: np.array(a, np.int32)
        for n, a in (("tile", tile), ("tile_row", tile_row), ("tile_panel", tile_panel))
    }
    arrays |= {
        n: np.concatenate([np.zeros(0), *a]).astype(np.int32)
        for n, a in (("tile_position", positions_of), ("member", members))
    }
    arrays["panel"] = np.concatenate([np.zeros(0, weight.dtype), *values])
    return Packed(name, VERSION, arrays, {"channel_blocks": channel_blocks, "filters": many})


def unpack(name: str, packed: Packed, conv: Conv) -> Array:
    check(name, packed, conv)
    a = packed.arrays
    weight = flat.unpack(a, conv).reshape(conv.k, -1)
    for i, (filters, positions, values) in enumerate(_tiles(a, packed.meta["filters"])):
        real = filters >= 0
        if (weight[np.ix_(filters[real], positions)] != 0).any():
            raise InvalidFile(f"{name}: a weight of tile {i} stands among the rows as well")
        weight[np.ix_(filters[real], positions)] = values[real]
    return weight.reshape(conv.weight_shape)


def _tiles(a: Mapping[str, Array], many: int) -> Iterable[tuple[Array, Array, Array]]:
    """Filters (-1: nobody), positions and values (filters x positions) of each tile."""
    first = 0
    for (low, high), (panel, after) in zip(
        pairwise(a["tile_row"].tolist()), pairwise(a["tile_panel"].tolist()), strict=True
    ):
        count = (high - low) * (after - panel) * many
        values = a["panel"][first : first + count].reshape(after - panel, high - low, many).transpose(0, 2, 1)
        yield (
            a["member"][panel * many : after * many],
            a["tile_position"][low:high],
            values.reshape(-1, high - low),
        )
        first += count


def check(name: str, packed: Packed, conv: Conv) -> None:
    """The invariants the kernel relies on."""
    a, many = packed.arrays, packed.meta.get("filters", 0)
    if (packed.format, packed.version) != (name, VERSION) or set(a) != set(ARRAYS) or not 1 <= many <= 64:
        raise InvalidFile(f"not a {name} version {VERSION} weight")
    flat.check(name, a, packed.meta.get("channel_blocks", 0), conv)
    integers = ("tile", "tile_row", "tile_position", "tile_panel", "member")
    if (
        any(a[n].dtype != np.int32 or a[n].ndim != 1 for n in integers)
        or a["panel"].dtype != NUMPY[conv.dtypes.weight]
    ):
        raise InvalidFile(f"{name}: an array has the wrong element type")
    for starts, end in (
        ("tile", len(a["tile_row"]) - 1),
        ("tile_row", len(a["tile_position"])),
        ("tile_panel", len(a["member"]) // many),
    ):
        if not len(a[starts]) or a[starts][0] != 0 or a[starts][-1] != end or (np.diff(a[starts]) < 0).any():
            raise InvalidFile(f"{name}: '{starts}' does not go from 0 to {end}")
    sizes = (
        np.diff(a["tile_row"]).astype(np.int64) * np.diff(a["tile_panel"]) * many
        if len(a["tile_row"]) == len(a["tile_panel"])
        else None
    )
    if (
        sizes is None
        or len(a["tile"]) != len(a["group"])
        or sizes.sum() != a["panel"].size
        or len(a["member"]) % many
    ):
        raise InvalidFile(f"{name}: the tiles' arrays do not fit each other")
    own, per = int(np.prod(conv.weight_shape[1:])), conv.k // conv.groups
    if len(a["tile_position"]) and not 0 <= a["tile_position"].min() <= a["tile_position"].max() < own:
        raise InvalidFile(f"{name}: a tile's position is outside the filter")
    for (low, high), (first, last) in zip(
        pairwise(a["group"].tolist()), pairwise(a["tile"].tolist()), strict=True
    ):
        for t in range(first, last):
            member = a["member"][a["tile_panel"][t] * many : a["tile_panel"][t + 1] * many]
            real = member[member != -1]
            if len(real) and (real.min() < low or real.max() >= high or np.unique(real // per).size > 1):
                raise InvalidFile(f"{name}: a tile has filters of another group")
            if np.unique(real).size != real.size:
                raise InvalidFile(f"{name}: a filter stands twice in a tile")


def layouts(
    conv: Conv,
    config: Config,
    target: Target,
    place: Place = ALONE,
) -> tuple[Layout, Layout]:
    """Flat pixels, as rows have them."""
    return flat.layouts(conv, target.vector_bytes // 4, config["vectors"], False, place)


def build(
    name: str,
    packed: Packed,
    conv: Conv,
    config: Config,
    target: Target,
    reads: Layout,
    writes: Layout,
    rows: int | None = None,
) -> list[Kernel]:
    check(name, packed, conv)
    lanes = target.vector_bytes // 4
    flat.compatible(name, conv, lanes, config["vectors"], False, reads, writes)
    code = blocks.BlocksCode(
        target.isa,
        conv.dtypes,
        config["vectors"],
        conv.steps,
        width=config["width"],
        filters=packed.meta["filters"],
    )
    engine = code.filters == amx.FILTERS
    if engine and not (on_amx(conv, target) and code.width == amx.WIDTH and config["rows"] % amx.PAIRED == 0):
        raise PlanMismatch(
            f"{name}: panels of {amx.FILTERS} filters are for AMX in bf16, {amx.WIDTH} vectors wide"
        )
    entry = (
        amx.function(code)
        if engine
        else llvm.function(str(code), blocks.ENTRY, lambda: blocks.emit(code), target.isa)
    )
    a, channel_blocks = packed.arrays, packed.meta["channel_blocks"]
    owned, sizes = flat.arguments(a, channel_blocks, conv, code, reads, writes, config["ahead"], rows)
    panels = np.diff(a["tile_panel"])
    group = np.repeat(np.arange(len(a["tile"]) - 1), np.diff(a["tile"]))
    widest = int(np.diff(a["group"]).max())
    slot = a["member"] - np.repeat(a["group"][group], panels * code.filters)
    own = {
        "tile": a["tile"],
        "tile_row": a["tile_row"],
        "tile_panel": a["tile_panel"],
        "tile_value": first_values(a, amx.PAIRED if engine else 1),
        "tile_offset": windows(a, conv, code.filters, reads),
        # nobody's sums go past the last filter's
        "member": np.where(a["member"] < 0, widest, slot).astype(np.int32),
        "panel": panel_values(a, code.filters, conv.dtypes.weight, engine),
    }
    owned |= {n: np.ascontiguousarray(array) for n, array in own.items()}
    sizes["stage_first"], sizes["stage_rows"] = (widest + 1) * code.vectors * lanes * 4, config["rows"]
    sizes["scratch_thread"] = sizes["stage_first"] + config["rows"] * code.width * lanes * 4
    return [Kernel.of(f"{name} {conv}", (reads, writes), entry, blocks.ARGUMENTS, sizes, owned)]


def windows(a: Mapping[str, Array], conv: Conv, many: int, reads: Layout) -> Array:
    """Bytes from an output pixel to the window of each tile's positions."""
    filters = a["member"][a["tile_panel"][:-1] * many] if len(a["tile_panel"]) > 1 else np.zeros(0, np.int64)
    group = filters.astype(np.int64) // (conv.k // conv.groups)
    first = group * (conv.c // conv.groups) * reads.plane(*conv.size)
    every = flat.offsets(np.arange(np.prod(conv.weight_shape[1:])), np.array(0), conv, reads)
    return flat.in_bytes(every[a["tile_position"]] + np.repeat(first, np.diff(a["tile_row"])), conv, reads)


def first_values(a: Mapping[str, Array], multiple: int = 1) -> Array:
    """Where each tile's values begin, in rows of a panel; a panel has positions up to a multiple of so
    many."""
    positions = np.diff(a["tile_row"]).astype(np.int64)
    return np.concatenate(
        [[0], np.cumsum((positions + -positions % multiple) * np.diff(a["tile_panel"]))]
    ).astype(np.int32)


def panel_values(a: Mapping[str, Array], many: int, stored: str, engine: bool = False) -> Array:
    """The panels' values as the kernel reads them."""
    if engine:
        blocks_ = [
            values.reshape(-1, many, values.shape[1]).transpose(0, 2, 1) for _, _, values in _tiles(a, many)
        ]
        return np.concatenate([np.zeros(0, a["panel"].dtype), *map(amx.panels, blocks_)])
    return a["panel"] if stored == "f32" else to_float64(a["panel"], stored).astype(np.float32)
