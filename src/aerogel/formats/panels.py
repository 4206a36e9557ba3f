"""Weights as panels for tensor cores and leftovers beside them: the format of `tilewise` and `blockgemm` on
GPUs.

    member    [panels, filters]   filters of a panel, which keep the same positions; -1 where there is none
    panel     [panels, 2]         where the panel's positions stand; panels of one tile share theirs
    tile_position                 (c, r, s) flattened, tile by tile
    dense                         values, [position, filters of the panel] panel by panel

and nonzeros outside of the panels in CSR, 32 lanes at a time, the longest filters first (formats/csr.py).
Every filter is a member of one panel, if only of one without positions. Panels with most positions come
first: they take longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec

import numpy as np

from aerogel.codegen.gpu import cost
from aerogel.codegen.gpu.launch import HALVES, Number, TritonCode, TritonLaunch
from aerogel.errors import InvalidFile
from aerogel.formats import csr
from aerogel.ir import (
    ELEMENTS,
    ITEM_BYTES,
    NUMPY,
    Array,
    Config,
    Conv,
    Dtypes,
    Gpu,
    Packed,
    ceil_div,
    nonzero,
    round_up,
)
from aerogel.optional import install

VERSION = 1
LANES = 32
"""Filters of a program of leftovers."""
DEPTH = 32
"""Positions at a time: BLOCK_K."""
MOST_TAPS = 64
"""Bits of the word that says which taps are inside."""
"""Triton's names."""
_ARRAYS = {"member", "panel", "tile_position", "dense", "filter", "start", "position", "value"}

Tile = tuple[Array, Array]
"""Filters and the positions they keep."""


def unsupported(conv: Conv, target: Gpu) -> str | None:
    """None, or why no tensor core takes this problem."""
    if target.kind != "cuda" or find_spec("triton") is None:
        return f"runs by Triton: {install('triton')}, on a CUDA device"
    if conv.dtypes == Dtypes() and not target.tf32:
        return (
            "an f32 layer would be rounded to tf32, which torch may not do either "
            "(torch.backends.cudnn.allow_tf32 is off)"
        )
    if conv.dtypes not in (Dtypes(), Dtypes.of("bf16"), *HALVES):  # where f16 would do for sums, f32 does too
        return f"multiplies f16, bf16 or tf32, not {conv.dtypes}"
    if conv.r * conv.s > MOST_TAPS:
        return (
            f"{conv.r}x{conv.s} taps; the word that says which are inside of the image has {MOST_TAPS} bits"
        )
    if conv.n is not None and (most := max(int(np.prod(conv.x_shape)), int(np.prod(conv.y_shape)))) >= 2**31:
        return f"a map has {most} elements; offsets in this format reach 2^31"
    return None


POINTS = (
    (64, 64, 8),
    (64, 128, 16),
    (32, 64, 4),
    (32, 128, 8),
    (128, 64, 16),
    (64, 32, 8),
    (32, 32, 4),
    (16, 64, 4),
    (16, 32, 2),
)
"""Pixels and filters of a program, and its warps: those that leave a thread few enough registers for a
quarter of all warps."""


def configs(
    name: str, conv: Conv, target: Gpu, inside: int, outside: int, tile: int = 128
) -> Iterator[Config]:
    """Programs no wider than the tiles, by modelled time. `inside` are the nonzeros in tiles, `tile` the most
    filters of one."""
    most = max(32, min(tile, conv.k // conv.groups))
    # from Blackwell on sums are not in registers
    widest = 8 if target.arch in ("sm_100", "sm_103", "sm_120") else 16
    found = [
        Config.make(name, pixels=p, filters=f, warps=min(w, widest))
        for p, f, w in POINTS
        if f <= 2 * most - 1
    ]
    conv, on, tf32 = cost.sized(conv), cost.machine(target), conv.dtypes == Dtypes()
    yield from sorted(
        found, key=lambda c: cost.microseconds(work(conv, c, inside, outside, min(tile, conv.k)), on, tf32)
    )


def loop(config: Config, conv: Conv) -> cost.Loop:
    """Instructions of a warp for one step of DEPTH positions, as counted for sm_80
    (benchmarks/experiments/sass.py; a test compares)."""
    each = config["pixels"] / config["warps"]  # elements of x that a thread gathers
    products = config["pixels"] * config["filters"] / 64 / config["warps"]  # HMMAs
    other = (8.0 if any(conv.pad) else 5.3) * each + 11
    if conv.dtypes == Dtypes():
        return cost.Loop(matrix=2 * products, shared=each + products / 2 + 22, loads=each + 4, other=other)
    return cost.Loop(matrix=products, shared=each + products / 2 + 3, loads=each + 3, other=other)


def work(conv: Conv, config: Config, inside: int, outside: int, tile: int) -> cost.Work:
    """Every position of a tile of `tile` filters is gathered by each of its panels; leftovers are one load
    and FMA each."""
    one, pixels, item = (
        loop(config, conv),
        conv.batch * conv.out[0] * conv.out[1],
        ITEM_BYTES[conv.dtypes.input],
    )
    tiles = ceil_div(conv.k, tile)
    panels, depth = tiles * ceil_div(tile, config["filters"]), -(-inside // conv.k // DEPTH) * DEPTH
    blocks = ceil_div(pixels, config["pixels"]) * panels
    turns = blocks * config["warps"] * depth / DEPTH
    # lines that 32 positions are in
    spread = max(1.0, 32 * item * conv.c // conv.groups * conv.r * conv.s / max(1, depth) / 128)
    first = cost.Work(
        blocks,
        config["warps"],
        turns * one.all + 15.0 * blocks * config["pixels"] * config["filters"] / 32,
        tensor=float(blocks) * config["pixels"] * config["filters"] * depth,
        wavefronts=turns * (one.shared + config["pixels"] / config["warps"] * min(8.0, spread) + 4),
        l2_bytes=blocks
        * (config["pixels"] * 1.5 * conv.c // conv.groups * item + depth * config["filters"] * item),
        dram_bytes=cost.maps_bytes(conv) + panels * depth * config["filters"] * item,
    )
    if not outside:
        return first
    warps = ceil_div(pixels, LANES) * outside / LANES * 32  # a program's four warps have 8 pixels each
    return cost.together(
        first,
        cost.Work(
            ceil_div(pixels, LANES) * ceil_div(conv.k, LANES),
            4,
            warps * 10,
            f32=warps,
            wavefronts=warps * 2,
            l2_bytes=8.0 * pixels * conv.k + outside * 10 * ceil_div(pixels, LANES),
            dram_bytes=8.0 * pixels * conv.k,
        ),
    )


def pack(name: str, weight: Array, conv: Conv, config: Config, tiles: Iterable[Tile]) -> Packed:
    """A weight with these tiles; filters in at most one of them."""
    width, per, own = config["filters"], conv.k // conv.groups, int(np.prod(conv.weight_shape[1:]))
    flat, rest = weight.reshape(conv.k, own), weight.copy().reshape(conv.k, own)
    found = list[tuple[Array, Array, int]]()  # members, positions, number of the tile
    alone = np.ones(conv.k, bool)
    ordered = sorted((t for t in tiles if len(t[0]) and len(t[1])), key=lambda t: -len(t[1]))
    for number, (filters, positions) in enumerate(ordered):
        rest[np.ix_(filters, positions)], alone[filters] = 0, False
        # filters of one group of the convolution read the same channels
        for group in np.unique(filters // per):
            mine = filters[filters // per == group]
            found += [(mine[i : i + width], positions, number) for i in range(0, len(mine), width)]
    nobody = np.flatnonzero(alone)
    found += [(nobody[i : i + width], nobody[:0], len(ordered)) for i in range(0, len(nobody), width)]
    begins = np.concatenate([[0], np.cumsum([len(positions) for _, positions in ordered]), [0]]).astype(
        np.int32
    )
    panel = [(begins[tile], begins[tile] + len(positions)) for _, positions, tile in found]
    member, dense = np.full((len(found), width), -1, np.int32), list[Array]()
    for row, (filters, positions, _) in zip(member, found, strict=True):
        row[: len(filters)] = filters
        block = np.zeros((len(positions), width), weight.dtype)
        block[:, : len(filters)] = flat[np.ix_(filters, positions)].T
        dense.append(block)
    arrays = {
        "member": member,
        "panel": np.array(panel, np.int32).reshape(-1, 2),
        "tile_position": np.concatenate([np.zeros(0), *(p for _, p in ordered)]).astype(np.int32),
        "dense": np.concatenate([np.zeros((0, width), weight.dtype), *dense]),
    }
    lengths = nonzero(rest, conv.dtypes.weight).sum(1)
    lanes = np.full(round_up(conv.k, LANES), -1, np.int32)
    lanes[: conv.k] = np.argsort(-lengths, kind="stable")
    left = np.where(lanes[:, None] >= 0, rest[lanes], weight.dtype.type(0))
    lane, position = np.nonzero(nonzero(left, conv.dtypes.weight))
    start = np.concatenate([[0], np.cumsum(np.bincount(lane, minlength=len(lanes)))])
    arrays |= {
        "filter": lanes,
        "start": start.astype(np.int32),
        "position": position.astype(np.int32),
        "value": left[lane, position],
    }
    return Packed(f"gpu-{name}", VERSION, arrays, {"filters": width})


def unpack(name: str, packed: Packed, conv: Conv) -> Array:
    """The weight again."""
    check(name, packed, conv)
    a, done = packed.arrays, 0
    weight = csr.unpack(a, conv).reshape(conv.k, -1)
    for filters, (begin, end) in zip(a["member"], a["panel"].tolist(), strict=True):
        real = filters >= 0
        weight[np.ix_(filters[real], a["tile_position"][begin:end])] += a["dense"][
            done : done + end - begin
        ].T[real]
        done += end - begin
    return weight.reshape(conv.weight_shape)


def check(name: str, packed: Packed, conv: Conv) -> None:
    """The invariants the kernels rely on."""
    a = packed.arrays
    if (
        (packed.format, packed.version) != (f"gpu-{name}", VERSION)
        or set(a) != _ARRAYS
        or set(packed.meta) != {"filters"}
    ):
        raise InvalidFile(f"not a {name} weight for GPUs")
    inside, width, dtype = (
        int(np.prod(conv.weight_shape[1:])),
        packed.meta["filters"],
        NUMPY[conv.dtypes.weight],
    )
    good = (
        a["member"].shape[1:] == (width,)
        and a["panel"].shape == (len(a["member"]), 2)
        and a["dense"].shape[1:] == (width,)
    )
    good = good and all(a[n].dtype == np.int32 for n in ("member", "panel", "tile_position"))
    good = good and a["dense"].dtype == dtype == a["value"].dtype
    good = good and csr.each_once(a["member"], conv.k) and _in_one_group(a, conv)
    lengths = a["panel"][:, 1].astype(np.int64) - a["panel"][:, 0] if good else np.zeros(0)
    good = (
        good
        and bool((lengths >= 0).all())
        and a["panel"].min(initial=0) >= 0
        and lengths.sum() == len(a["dense"])
    )
    good = good and a["panel"].max(initial=0) <= len(a["tile_position"])
    good = good and (
        not len(a["tile_position"])
        or bool(0 <= a["tile_position"].min() <= a["tile_position"].max() < inside)
    )
    if not good or not csr.sound(a, conv, round_up(conv.k, LANES)):
        raise InvalidFile(f"a {name} weight with filters or positions that {conv} has not")


def _in_one_group(a: Mapping[str, Array], conv: Conv) -> bool:
    """Whether the members of each panel with positions read the same channels."""
    group = a["member"] // (conv.k // conv.groups)
    last = group.max(1, keepdims=True)
    return bool(((group == last) | (group < 0) | (a["panel"][:, :1] == a["panel"][:, 1:])).all())


def build(name: str, packed: Packed, conv: Conv, config: Config) -> list[TritonLaunch]:
    """One launch where every nonzero is in a panel, else a second that finishes."""
    check(name, packed, conv)
    if not conv.batch:
        return []
    a = packed.arrays
    bias, add, kind = (
        "bias" in conv.steps,
        _added(conv),
        next((s for s in conv.steps if s not in ("bias", "add")), ""),
    )
    epilogue: dict[str, bool | str] = {"BIAS": bias, "ADD": add, "KIND": kind}
    alone: dict[str, bool | str] = {"BIAS": False, "ADD": "", "KIND": ""}
    left, tiles = len(a["value"]) > 0, len(a["dense"]) > 0
    launches = []
    if tiles or not left:
        launches.append(_gathered(a, conv, config, alone if left else epilogue, "scratch" if left else "y"))
    if left:
        launches.append(_leftovers(a, conv, epilogue | {"PARTIAL": tiles}))
    return launches


def _added(conv: Conv) -> str:
    """When the residual is added: never (""), before the activation, or after it."""
    if "add" not in conv.steps:
        return ""
    return "after" if conv.activation and conv.steps[-1] == "add" else "before"


def _gathered(
    a: Mapping[str, Array], conv: Conv, config: Config, epilogue: Mapping[str, bool | str], to: str
) -> TritonLaunch:
    """Positions of each panel, and the panels' values, filled up to whole steps, and a step more after the
    last panel."""
    segments, offsets, taps, at = dict[tuple[int, int, int], int](), list[Array](), list[Array](), 0
    values, rows, done, panels = list[Array](), 0, 0, list[tuple[int, int, int]]()
    for filters, (begin, end) in zip(a["member"], a["panel"].tolist(), strict=True):
        count, whole = end - begin, round_up(end - begin, DEPTH)
        group = int(filters.max()) // (conv.k // conv.groups)
        if (key := (begin, end, group)) not in segments and count:
            segments[key] = at
            position = np.pad(a["tile_position"][begin:end], (0, whole - count))
            offset, tap = _places(position, np.full(whole, group), conv)
            offsets.append(offset)
            taps.append(tap)
            at += whole
        values.append(np.pad(a["dense"][done : done + count], ((0, whole - count), (0, 0))))
        panels.append((segments.get(key, 0), segments.get(key, 0) + count, rows))
        rows, done = rows + whole, done + count
    arrays = (
        a["member"].reshape(-1),
        np.array(panels, np.int32).reshape(-1),
        *(np.concatenate([*p, np.zeros(DEPTH, np.int32)]) for p in (offsets, taps)),
        np.concatenate([v.reshape(-1) for v in values]),
    )
    constants = {
        "BLOCK_M": config["pixels"],
        "BLOCK_N": config["filters"],
        "BLOCK_K": DEPTH,
        **_shape(conv),
        **epilogue,
    }
    element, pixels = ELEMENTS[conv.dtypes.input].triton, conv.batch * conv.out[0] * conv.out[1]
    types = (
        element,
        "fp32" if to == "scratch" else element,
        "fp32",
        element,
        "i32",
        "i32",
        "i32",
        "i32",
        element,
    )
    code = TritonCode("gathered", types, tuple(constants.items()), config["warps"])
    grid = (ceil_div(pixels, config["pixels"]) * len(panels), 1, 1)
    scratch = 4 * pixels * conv.k if to == "scratch" else 0
    return TritonLaunch(
        code, grid, ("x", to, "bias", "residual", *arrays, *_numbers(conv, len(panels))), scratch
    )


def _leftovers(a: Mapping[str, Array], conv: Conv, epilogue: Mapping[str, bool | str]) -> TritonLaunch:
    """Slots of 32 lanes: as many as the longest of them has nonzeros."""
    lengths, lanes = np.diff(a["start"]), len(a["filter"])
    longest = lengths.reshape(-1, LANES).max(1)
    slot = np.concatenate([[0], np.cumsum(longest)]).astype(np.int32)
    lane = np.repeat(np.arange(lanes), lengths)
    number = np.arange(len(lane)) - a["start"][lane]
    at = slot[lane // LANES] + number, lane % LANES
    offsets, taps, values = (
        np.zeros((int(slot[-1]), LANES), dtype) for dtype in (np.int32, np.int32, a["value"].dtype)
    )
    offset, tap = _places(a["position"], a["filter"][lane] // (conv.k // conv.groups), conv)
    offsets[at], taps[at], values[at] = offset, tap, a["value"]
    constants = {"BLOCK_M": LANES, "LANES": LANES, **_shape(conv), **epilogue}
    element, pixels = ELEMENTS[conv.dtypes.input].triton, conv.batch * conv.out[0] * conv.out[1]
    code = TritonCode(
        "leftovers",
        (element, element, "fp32", element, "fp32", "i32", "i32", "i32", "i32", element),
        tuple(constants.items()),
        4,
    )
    arrays = a["filter"], slot, offsets.reshape(-1), taps.reshape(-1), values.reshape(-1)
    grid = (ceil_div(pixels, LANES) * (lanes // LANES), 1, 1)
    return TritonLaunch(
        code, grid, ("x", "y", "bias", "residual", "scratch", *arrays, *_numbers(conv, lanes // LANES))
    )


def _places(position: Array, group: Array, conv: Conv) -> tuple[Array, Array]:
    """Offsets in x, channels_last, from a pixel's first tap; and the tap."""
    c, r, s = np.unravel_index(position.astype(np.int64), conv.weight_shape[1:])
    offset = (
        (r * conv.dilation[0] * conv.size[1] + s * conv.dilation[1]) * conv.c
        + group * (conv.c // conv.groups)
        + c
    )
    return offset.astype(np.int32), (r * conv.s + s).astype(np.int32)


def _shape(conv: Conv) -> dict[str, int | bool]:
    (u, v), (dh, dw) = conv.stride, conv.dilation
    return {"R": conv.r, "S": conv.s, "U": u, "V": v, "DH": dh, "DW": dw, "BORDER": any(conv.pad)}


def _numbers(conv: Conv, columns: int) -> tuple[Number, ...]:
    (p, q), (h, w) = conv.out, conv.size
    sizes = conv.batch * p * q, q, p * q, h, w, conv.c, conv.k, conv.pad[0], conv.pad[1], columns
    return (np.float32(conv.parameter), *(np.int32(n) for n in sizes))
