"""`direct` on GPUs: each nonzero is one load of x and one FMA for every pixel a thread holds.

Paper: Escort (Chen, arXiv 1802.10280). Filters in CSR over flattened (c, r, s), stretched for one image size:
a position becomes the offset of its window in x, which is copied into a border of zeros first where the layer
pads.

    filter  [k]       filters, longest first
    start   [k + 1]   where each begins
    position, value   (c, r, s) flattened, in rising order

Of f16 two pixels go into a word, half of the output's rows apart, and every instruction works on both
(codegen/gpu/element.h).

Wins on small layers and at high sparsity; x comes through the read-only cache, so nothing is staged but the
nonzeros. Refuses bf16 and images too large for 32-bit offsets.
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


def refuse(conv: Conv, target: Gpu, stats: Stats) -> str | None:
    if conv.dtypes not in (Dtypes(), *HALVES):
        return f"computes in f32 or f16, not {conv.dtypes}"
    if conv.n is not None:
        if (floats := conv.c * _padded(conv)[0] * _padded(conv)[1]) >= 2**31:
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
        for per in (1, 2) if small else (1, 2, 4):
            for together in dict.fromkeys((1, images)):
                options = {
                    "pixels": width,
                    "rows": rows,
                    "per": per,
                    "images": together,
                    "filters": 1 if small else 2,
                }
                found.append(Config.make(NAME, **options, chunk=256))
    yield from sorted(found, key=lambda config: cost.microseconds(work(conv, config, stats), on))


def loop(config: Config, dtypes: Dtypes) -> cost.Loop:
    """Instructions for one nonzero, as counted in the code for sm_80 (benchmarks/experiments/sass.py; a test
    compares)."""
    loads = config["per"] * config["images"]
    halves = 2 * loads + 1 if dtypes == HALVES[0] else 0  # f16 to f32, and twice as many FMAs
    mac = 2 * loads if dtypes == HALVES[0] else loads
    return cost.Loop(mac=mac, shared=0.5, loads=loads, other=config["per"] + loads + 1.2 + halves)


def work(conv: Conv, config: Config, stats: Stats) -> cost.Work:
    """Every nonzero meets every warp of pixels. x comes from the first cache where what a block reads of it
    fits there."""
    pixels, one = _rows_apart(conv) * conv.out[1], loop(config, conv.dtypes)
    across, down, deep = _grid(conv, config)
    warps = across * config["pixels"] // 32 * deep  # that each nonzero meets
    blocks = across * down * deep
    window = (config["pixels"] * config["per"] / max(1, conv.out[1]) + conv.r) * _padded(conv)[1]
    reads = 4.0 * config["images"] * conv.c // conv.groups * min(window, _padded(conv)[0] * _padded(conv)[1])
    loads = stats.nonzeros * warps * one.loads
    l2 = blocks * reads if reads <= cost.L1_BYTES else loads * 128
    padded = (
        2 * 4 * conv.batch * conv.c * _padded(conv)[0] * _padded(conv)[1]
        if any(conv.pad) or conv.dtypes in HALVES
        else 0
    )
    macs = stats.nonzeros * warps * one.mac
    return cost.Work(
        blocks,
        config["pixels"] * config["rows"] // 32,
        stats.nonzeros * warps * one.all + 60.0 * pixels * conv.k / 32,
        f32=0 if conv.dtypes == HALVES[1] else macs,
        halves=macs if conv.dtypes == HALVES[1] else 0,
        wavefronts=stats.nonzeros * warps * (one.shared + one.loads * 1.25 * min(4, conv.stride[1])),
        l2_bytes=l2 + 8 * stats.nonzeros * across * deep + padded,
        dram_bytes=cost.maps_bytes(conv) + padded + 8 * stats.nonzeros,
        launches=2 if padded else 1,
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
    a, (p, q), (rows, columns), g = packed.arrays, conv.out, _padded(conv), conv.groups
    c, r, s = np.unravel_index(a["position"], conv.weight_shape[1:])
    group = np.repeat(a["filter"], np.diff(a["start"])) // (conv.k // g)
    offset = ((group * (conv.c // g) + c) * rows + r * conv.dilation[0]) * columns + s * conv.dilation[1]
    entry = np.stack([offset.astype(np.int32), twice(a["value"]).view(np.int32)], axis=1)
    options, types = dict(config.options), element(conv.dtypes)
    macros = tuple(
        (name.upper(), options[name]) for name in ("pixels", "rows", "per", "images", "filters", "chunk")
    )
    padded, launches, pixels = any(conv.pad) or types["HALF"], list[Launch](), _rows_apart(conv) * q
    if padded:
        sizes = *conv.size, rows, columns, conv.pad[0], conv.pad[1], _rows_apart(conv) * conv.stride[0]
        grid = (conv.batch * conv.c, ceil_div(rows, 8), ceil_div(columns, 32))
        code = Code("pad", (32, 8), tuple(types.items()), (), ("element.h", "pad.cu"))
        launches.append(Launch(code, grid, ("x", "scratch", *(np.int32(n) for n in sizes))))
    sizes = conv.batch, conv.k, pixels, q, conv.stride[0] * columns, conv.stride[1], p * q
    numbers: tuple[Number, ...] = (
        np.float32(conv.parameter),
        *(np.int32(n) for n in sizes),
        np.int64(conv.c * rows * columns),
    )
    grid = _grid(conv, config)
    arrays = (a["filter"], a["start"], np.ascontiguousarray(entry))
    arguments = ("scratch" if padded else "x", "y", "bias", "residual", *arrays, *numbers)
    code = Code(
        "direct",
        (config["pixels"], config["rows"]),
        (*macros, *types.items()),
        conv.steps,
        ("element.h", "direct.cu"),
    )
    scratch = 4 * conv.batch * conv.c * rows * columns if padded else 0
    return [*launches, Launch(code, grid, arguments, scratch)]


def _grid(conv: Conv, config: Config) -> tuple[int, int, int]:
    """Blocks: of pixels, filters, images."""
    pixels, filters = _rows_apart(conv) * conv.out[1], config["rows"] * config["filters"]
    return (
        ceil_div(pixels, config["pixels"] * config["per"]),
        ceil_div(conv.k, filters),
        ceil_div(conv.batch, config["images"]),
    )


def _rows_apart(conv: Conv) -> int:
    """Rows of y that a thread's pixels may be in: all, or of f16 half of them, for the other half comes with
    them."""
    return conv.out[0] if conv.dtypes == Dtypes() else ceil_div(conv.out[0], 2)


def _padded(conv: Conv) -> tuple[int, int]:
    """Height and width of x with its border; of f16 the rows that the first pixels of the words read."""
    top, left, bottom, right = conv.pad
    width = conv.size[1] + left + right
    if conv.dtypes == Dtypes():
        return conv.size[0] + top + bottom, width
    return (_rows_apart(conv) - 1) * conv.stride[0] + (conv.r - 1) * conv.dilation[0] + 1, width


def layout(config: Config) -> str:
    return "contiguous"


def takes_pool(conv: Conv, config: Config, pool: Pool) -> bool:
    return False
