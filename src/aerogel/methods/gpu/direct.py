"""`direct` on GPUs: each nonzero is one load of x and one FMA for every pixel a thread holds.

Paper: Escort (Chen, arXiv 1802.10280). Filters in CSR over flattened (c, r, s), stretched for one image size: a position becomes
the offset of its window in x, which is copied into a border of zeros first where the layer pads.

    filter  [k]       filters, longest first
    start   [k + 1]   where each begins
    position, value   (c, r, s) flattened, in rising order

Wins on small layers and at high sparsity; x comes through the read-only cache, so nothing is staged but the nonzeros. Refuses
half precision and images too large for 32-bit offsets.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aerogel.candidate import Config, Packed, Stats
from aerogel.codegen.gpu import csr
from aerogel.codegen.gpu.launch import Code, Launch, Number
from aerogel.errors import InvalidFile
from aerogel.layout import Array
from aerogel.problem import Conv, Dtypes
from aerogel.target import Gpu

NAME, PAPER = "direct", "Escort, arXiv 1802.10280"
SUMMARY = "one load and one FMA for each nonzero and pixel; unstructured sparsity, small layers"
LAYOUT = "contiguous"
VERSION = 1
MOST_BLOCKS = 65535
"""Of a grid, down and in depth."""


def refuse(conv: Conv, target: Gpu, stats: Stats) -> str | None:
    if conv.dtypes != Dtypes():
        return f"computes in f32, not {conv.dtypes}"
    if conv.n is not None:
        if (floats := conv.c * _padded(conv)[0] * _padded(conv)[1]) >= 2**31:
            return f"one image has {floats} elements; offsets in this format reach 2^31"
        if conv.k > MOST_BLOCKS or conv.n > MOST_BLOCKS:
            return f"{conv.n} images and {conv.k} filters; a grid has {MOST_BLOCKS} blocks"
    return None


def configs(conv: Conv, target: Gpu, stats: Stats) -> Iterator[Config]:
    """Small maps: rows of few threads, several filters a block. Large ones: wide blocks, several pixels a thread."""
    p, q = conv.out if conv.n is not None else (56, 56)
    small, images = p * q <= 256, min(4, conv.n or 1)
    shapes = [(64, 4), (32, 8)] if small else [(128, 2), (256, 1), (64, 4)]
    for per in (1, 2) if small else (2, 1, 4):
        for width, rows in shapes:
            for together in dict.fromkeys((images, 1)):
                yield Config.make(NAME, pixels=width, rows=rows, per=per, images=together, filters=1 if small else 2, chunk=256)


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    flat = weight.reshape(conv.k, -1)
    kept = np.count_nonzero(flat, axis=1)
    order = np.argsort(-kept, kind="stable")
    rows, position = np.nonzero(flat[order])
    arrays = {
        "filter": order.astype(np.int32),
        "start": np.concatenate([[0], np.cumsum(kept[order])]).astype(np.int32),
        "position": position.astype(np.int32),
        "value": flat[order][rows, position].astype(np.float32),
    }
    return Packed(f"gpu-{NAME}", VERSION, arrays)


def unpack(packed: Packed, conv: Conv) -> Array:
    check(packed, conv)
    return csr.unpack(packed.arrays, conv)


def check(packed: Packed, conv: Conv) -> None:
    """The invariants the kernel relies on."""
    a = packed.arrays
    if (packed.format, packed.version) != (f"gpu-{NAME}", VERSION) or set(a) != {"filter", "start", "position", "value"}:
        raise InvalidFile(f"not a {NAME} weight for GPUs")
    if not csr.sound(a, conv, conv.k) or (np.diff(a["start"], n=2) > 0).any():  # the kernel wants the longest first
        raise InvalidFile(f"a {NAME} weight with filters or positions that {conv} has not")


def build(packed: Packed, conv: Conv, config: Config) -> list[Launch]:
    check(packed, conv)
    if not conv.batch:
        return []
    a, (p, q), (rows, columns), g = packed.arrays, conv.out, _padded(conv), conv.groups
    c, r, s = np.unravel_index(a["position"], conv.weight_shape[1:])
    group = np.repeat(a["filter"], np.diff(a["start"])) // (conv.k // g)
    offset = ((group * (conv.c // g) + c) * rows + r * conv.dilation[0]) * columns + s * conv.dilation[1]
    entry = np.stack([offset.astype(np.int32), np.ascontiguousarray(a["value"]).view(np.int32)], axis=1)
    options = dict(config.options)
    macros = tuple((name.upper(), options[name]) for name in ("pixels", "rows", "per", "images", "filters", "chunk"))
    padded, launches = any(conv.pad), list[Launch]()
    if padded:
        sizes = *conv.size, rows, columns, conv.pad[0], conv.pad[1]
        grid = (conv.batch * conv.c, -(-rows // 8), -(-columns // 32))
        launches.append(Launch(Code("pad", (32, 8), (), (), ("pad.cu",)), grid, ("x", "scratch", *(np.int32(n) for n in sizes))))
    sizes = conv.batch, conv.k, p * q, q, conv.stride[0] * columns, conv.stride[1]
    numbers: tuple[Number, ...] = (np.float32(conv.parameter), *(np.int32(n) for n in sizes), np.int64(conv.c * rows * columns))
    grid = (
        -(-p * q // (config["pixels"] * config["per"])),
        -(-conv.k // (config["rows"] * config["filters"])),
        -(-conv.batch // config["images"]),
    )
    arrays = (a["filter"], a["start"], np.ascontiguousarray(entry))
    arguments = ("scratch" if padded else "x", "y", "bias", "residual", *arrays, *numbers)
    code = Code("direct", (config["pixels"], config["rows"]), macros, conv.steps, ("direct.cu",))
    scratch = 4 * conv.batch * conv.c * rows * columns if padded else 0
    return [*launches, Launch(code, grid, arguments, scratch)]


def _padded(conv: Conv) -> tuple[int, int]:
    """Height and width of x with its border."""
    top, left, bottom, right = conv.pad
    return conv.size[0] + top + bottom, conv.size[1] + left + right
