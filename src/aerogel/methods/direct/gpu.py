"""`direct` on GPUs: each nonzero is one load of x and one FMA for every pixel a thread holds.

Paper: Escort (Chen, arXiv 1802.10280). Filters in CSR over flattened (c, r, s), stretched for one image size
and sorted by tap: a position becomes the offset of its window in x, and what is outside of x is known for all
nonzeros of a tap.

    filter  [k]       filters, longest first
    start   [k + 1]   where each begins
    position, value   (c, r, s) flattened, in rising order

Of f16 two pixels go into a word, half of the output's rows apart, and every instruction works on both
(codegen/gpu/element.h); x is copied into such words, with a border of zeros, first.

Wins on small layers and at high sparsity; x comes through the read-only cache, so nothing is staged. Refuses
bf16 and images too large for 32-bit offsets.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aerogel.codegen.gpu import cost
from aerogel.codegen.gpu.launch import HALVES, MOST_BLOCKS, Code, Launch, Number, element, twice
from aerogel.errors import InvalidFile
from aerogel.formats import csr
from aerogel.ir import NUMPY, Array, Config, Conv, Dtypes, Gpu, Packed, Pool, Stats, ceil_div
from aerogel.methods.direct import NAME

VERSION = 1
CHUNK = 256
"""Nonzeros after which sums in f16 go to f32."""
REGISTERS = 72
"""Of a thread, about (gpu_facts)."""


def refuse(conv: Conv, target: Gpu, stats: Stats) -> str | None:
    if conv.dtypes not in (Dtypes(), *HALVES):
        return f"computes in f32 or f16, not {conv.dtypes}"
    if conv.n is not None:
        if (floats := conv.c * _seen(conv)[0] * _seen(conv)[1]) >= 2**31:
            return f"one image has {floats} elements; offsets in this format reach 2^31"
        if conv.k > MOST_BLOCKS or conv.n > MOST_BLOCKS:
            return f"{conv.n} images and {conv.k} filters; a grid has {MOST_BLOCKS} blocks"
    return None


def configs(conv: Conv, target: Gpu, stats: Stats) -> Iterator[Config]:
    """Small maps: rows of few threads, several filters a block. Large ones: wide blocks. By modelled time."""
    conv = cost.sized(conv)
    small, images, on, found = (
        conv.out[0] * conv.out[1] <= 256,
        min(4, max(1, conv.batch)),
        cost.machine(target),
        list[Config](),
    )
    for width, rows in [(64, 4), (32, 8)] if small else [(128, 2), (256, 1), (64, 4)]:
        for per in (1, 2, 4):
            for together in dict.fromkeys((1, images)):
                options = {
                    "pixels": width,
                    "rows": rows,
                    "per": per,
                    "images": together,
                    "filters": 1 if small else 2,
                }
                found.append(Config.make(NAME, **options))
    yield from sorted(found, key=lambda config: cost.microseconds(work(conv, config, stats), on))


def loop(config: Config, conv: Conv) -> cost.Loop:
    """Instructions for one nonzero, as counted in the code for sm_80 (benchmarks/experiments/sass.py; a test
    compares)."""
    loads, dtypes = config["per"] * config["images"], conv.dtypes
    halves = 2 * loads + 1 if dtypes == HALVES[0] else 0  # f16 to f32, and twice as many FMAs
    zeros = loads - 1 if _checked(conv, config) else 0  # what stands where nothing is read
    mac = 2 * loads if dtypes == HALVES[0] else loads
    return cost.Loop(mac=mac, loads=loads + 1, other=config["images"] + 1.2 + halves + zeros)


def work(conv: Conv, config: Config, stats: Stats) -> cost.Work:
    """Every nonzero meets every warp of pixels. x comes from the first cache where what a block reads of it
    fits there."""
    one, half = loop(config, conv), conv.dtypes in HALVES
    across, down, deep = _grid(conv, config)
    warps = across * config["pixels"] // 32 * deep  # that each nonzero meets
    blocks = across * down * deep
    (height, width), checked = _seen(conv), _checked(conv, config)
    window = (config["pixels"] / max(1, conv.out[1]) + 1) * config["per"] * conv.stride[0] + conv.r
    reads = 4.0 * config["images"] * conv.c // conv.groups * min(window, height) * width
    loads = stats.nonzeros * warps * one.loads
    l2 = blocks * reads if reads <= cost.L1_BYTES else loads * 128
    padded = 2 * 4 * conv.batch * conv.c * height * width if half else 0
    macs = stats.nonzeros * warps * one.mac
    taps = conv.k * conv.r * conv.s * warps * (12 + (4 * config["per"] if checked else 0))
    outputs = conv.batch * conv.k * conv.out[0] * conv.out[1]
    return cost.Work(
        blocks,
        config["pixels"] * config["rows"] // 32,
        stats.nonzeros * warps * one.all + taps + 40.0 * outputs / 32,
        f32=0 if conv.dtypes == HALVES[1] else macs,
        halves=macs if conv.dtypes == HALVES[1] else 0,
        wavefronts=stats.nonzeros * warps * (one.loads * 1.25 * min(4, conv.stride[1])),
        l2_bytes=l2 + 8 * stats.nonzeros * across * deep + padded,
        dram_bytes=cost.maps_bytes(conv) + padded + 8 * stats.nonzeros,
        launches=2 if half else 1,
        registers=REGISTERS,
        # a line holds 16 nonzeros, and another warp has often brought it
        trips=config["filters"] * (1 + stats.longest_filter / 32),
    )


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    flat = weight.reshape(conv.k, -1)
    kept = np.count_nonzero(flat, axis=1)
    order = np.argsort(-kept, kind="stable")
    rows, position = np.nonzero(flat[order])
    arrays = {
        "filter": order.astype(np.int32),
        "start": np.concatenate([[0], np.cumsum(kept[order])]).astype(np.int32),
        "position": position.astype(np.int32),
        "value": flat[order][rows, position],
    }
    return Packed(f"gpu-{NAME}", VERSION, arrays)


def unpack(packed: Packed, conv: Conv) -> Array:
    check(packed, conv)
    return csr.unpack(packed.arrays, conv)


def check(packed: Packed, conv: Conv) -> None:
    """The invariants the kernel relies on."""
    a = packed.arrays
    if (packed.format, packed.version) != (f"gpu-{NAME}", VERSION) or set(a) != {
        "filter",
        "start",
        "position",
        "value",
    }:
        raise InvalidFile(f"not a {NAME} weight for GPUs")
    # the kernel wants the longest first
    if (
        a["value"].dtype != NUMPY[conv.dtypes.weight]
        or not csr.sound(a, conv, conv.k)
        or (np.diff(a["start"], n=2) > 0).any()
    ):
        raise InvalidFile(f"a {NAME} weight with filters or positions that {conv} has not")


def build(packed: Packed, conv: Conv, config: Config) -> list[Launch]:
    check(packed, conv)
    if not conv.batch:
        return []
    a, (p, q), (height, width), g = packed.arrays, conv.out, _seen(conv), conv.groups
    c, r, s = np.unravel_index(a["position"].astype(np.int64), conv.weight_shape[1:])
    slot, taps = np.repeat(np.arange(conv.k), np.diff(a["start"])), conv.r * conv.s
    order = np.argsort((slot * conv.r + r) * conv.s + s, kind="stable")
    begins = np.bincount((slot * conv.r + r) * conv.s + s, minlength=conv.k * taps)
    start = np.concatenate([[0], np.cumsum(begins)]).astype(np.int32)
    channel = a["filter"][slot] // (conv.k // g) * (conv.c // g) + c
    offset = (channel * height + r * conv.dilation[0]) * width + s * conv.dilation[1]
    entry = np.stack([offset.astype(np.int32), twice(a["value"]).view(np.int32)], axis=1)[order]
    options, types, apart = dict(config.options), element(conv.dtypes), _rows_apart(conv)
    macros = {n.upper(): options[n] for n in ("pixels", "rows", "per", "images", "filters")} | types
    macros |= {"TAPS_R": conv.r, "TAPS_S": conv.s, "STRIDE_P": conv.stride[0], "STRIDE_Q": conv.stride[1]}
    macros |= {"DILATION_P": conv.dilation[0], "DILATION_Q": conv.dilation[1], "CHUNK": CHUNK}
    macros |= {"ROW_STEP": conv.stride[0] * width, "CHECKED": int(_checked(conv, config))}
    launches, (top, left) = list[Launch](), conv.pad[:2]
    if types["HALF"]:
        pads = *conv.size, height, width, top, left, apart * conv.stride[0]
        grid = (conv.batch * conv.c, ceil_div(height, 8), ceil_div(width, 32))
        code = Code("pad", (32, 8), tuple(types.items()), (), ("element.h", "pad.cu"))
        launches.append(Launch(code, grid, ("x", "scratch", *(np.int32(n) for n in pads))))
        top = left = 0
    sizes = conv.batch, conv.k, height, width, p, q, top, left, apart, conv.c * height * width
    numbers: tuple[Number, ...] = (np.float32(conv.parameter), *(np.int32(n) for n in sizes))
    arrays = (a["filter"], start, np.ascontiguousarray(entry))
    arguments = ("scratch" if launches else "x", "y", "bias", "residual", *arrays, *numbers)
    block, files = (config["pixels"], config["rows"]), ("element.h", "direct.cu")
    code = Code("direct", block, tuple(macros.items()), conv.steps, files)
    scratch = 4 * conv.batch * conv.c * height * width if launches else 0
    return [*launches, Launch(code, _grid(conv, config), arguments, scratch)]


def _grid(conv: Conv, config: Config) -> tuple[int, int, int]:
    """Blocks: of pixels, filters, images."""
    spots = ceil_div(_rows_apart(conv), config["per"]) * conv.out[1]
    return (
        ceil_div(spots, config["pixels"]),
        ceil_div(conv.k, config["rows"] * config["filters"]),
        ceil_div(conv.batch, config["images"]),
    )


def _rows_apart(conv: Conv) -> int:
    """Rows of y that a thread's pixels may be in: all, or of f16 half of them, for the other half comes with
    them."""
    return conv.out[0] if conv.dtypes == Dtypes() else ceil_div(conv.out[0], 2)


def _checked(conv: Conv, config: Config) -> bool:
    """Whether a thread may look outside of what it reads."""
    return (conv.dtypes == Dtypes() and any(conv.pad)) or _rows_apart(conv) % config["per"] != 0


def _seen(conv: Conv) -> tuple[int, int]:
    """Height and width of what is read: x, or of f16 its copy with a border, the rows that the first pixels
    of the words read."""
    if conv.dtypes == Dtypes():
        return conv.size
    width = conv.size[1] + conv.pad[1] + conv.pad[3]
    return (_rows_apart(conv) - 1) * conv.stride[0] + (conv.r - 1) * conv.dilation[0] + 1, width


def layout(config: Config) -> str:
    return "contiguous"


def takes_pool(conv: Conv, config: Config, pool: Pool) -> bool:
    return False
