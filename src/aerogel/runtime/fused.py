"""A convolution with the pooling after it in one kernel (codegen/bands.py): what can be joined, in bands of how many rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from aerogel.candidate import POINTERS, Config, Kernel, Packed
from aerogel.codegen import bands, llvm
from aerogel.graph import Graph
from aerogel.layout import Layout, Shape
from aerogel.methods import method
from aerogel.problem import ITEM_BYTES, Conv, Pool
from aerogel.runtime import pooling
from aerogel.target import Target


def pairs(graph: Graph) -> dict[str, str]:
    """Convolutions whose only reader is a pooling of ours over a window, and that pooling: nodes by name."""
    users, nodes = graph.users(), {node.name: node for node in graph.nodes}
    found = {}
    for node in graph.nodes:
        own = nodes.get(users[node.name][0]) if node.conv is not None and len(users[node.name]) == 1 else None
        pool = None if own is None else pooling.read(own)
        if own is not None and pool is not None and pool.window != (0, 0) and node.conv and "add" not in node.conv.epilogue:
            found[node.name] = own.name
    return found


def kernel(
    packed: Packed,
    conv: Conv,
    config: Config,
    target: Target,
    reads: Layout,
    pool: Pool,
    y_shape: Shape,
    writes: Layout,
) -> Kernel | None:
    """From x to the pooled y, or None where there are fewer bands than threads."""
    module, (p, q), reach = method(config.method), conv.out, (pool.window[0] - 1) * pool.dilation[0] + 1
    _, band = module.layouts(conv, config, target, (0, 0, 0, 0), 0, reads.pitch)
    band = Layout("planar", band.pitch, band.border, max(band.slack, pooling.SLACK), band.dtype)
    pooled = _rows(conv, config, target, band, pool, y_shape[2])
    count = -(-y_shape[2] // pooled)
    if conv.batch * count < target.threads:
        return None
    rows = min(p, (pooled - 1) * pool.stride[0] + reach)
    (first,) = module.build(packed, replace(conv, n=1), config, target, reads, band, rows)
    shape = (1, conv.k, rows, q)
    second = pooling.kernel(pool, shape, (1, *y_shape[1:]), band, writes, target)
    blocks = [first.arguments, second.arguments]
    begin = -(-max(first.scratch_bytes, second.scratch_bytes) // 64) * 64
    after = begin + -(-band.elements(shape) * band.item_bytes // 64) * 64
    row = reads.pitch * reads.item_bytes * (1 if reads.kind != "planar" else conv.stride[0])
    y_plane = writes.plane(*y_shape[2:])
    slots: Mapping[str, int] = {
        "conv_entry": first.entry, "conv_arguments": blocks[0].ctypes.data, "conv_words": len(blocks[0]),
        "pool_entry": second.entry, "pool_arguments": blocks[1].ctypes.data, "pool_words": len(blocks[1]),
        "images": conv.batch, "bands": count, "pooled": pooled, "band_rows": rows, "conv_rows": p,
        "stride": pool.stride[0], "top": pool.pad[0],
        "x_image": conv.c * reads.plane(*conv.size) * reads.item_bytes, "x_row": row,
        "y_image": conv.k * y_plane * writes.item_bytes, "y_row": writes.pitch * writes.item_bytes, "y_rows": y_shape[2],
        "y_pitch": writes.pitch, "plane_elements": y_plane, "front_elements": writes.front,
        "band_first": begin, "arguments_first": after, "scratch_thread": after + 64 * -(-max(map(len, blocks)) // 8),
    }  # fmt: skip
    arguments = np.array([0] * len(POINTERS) + [slots[n] for n in bands.ARGUMENTS[len(POINTERS) :]], np.int64)
    entry = llvm.function("bands", bands.ENTRY, bands.emit, target.isa)
    owned = (*first.owned, *second.owned, *blocks)
    return Kernel(f"{first.name} pooled", reads, writes, entry, arguments, slots["scratch_thread"], owned, None, first.counts)


def _rows(conv: Conv, config: Config, target: Target, band: Layout, pool: Pool, most: int) -> int:
    """Pooled rows of a band: of those that fit half of L2, what computes fewest pixels; every thread has some."""

    def fits(pooled: int) -> bool:
        rows = (pooled - 1) * pool.stride[0] + (pool.window[0] - 1) * pool.dilation[0] + 1
        return (
            2 * conv.k * rows * band.pitch * band.item_bytes <= target.l2_bytes
            and conv.batch * -(-most // pooled) >= target.threads
        )

    return min(
        (n for n in range(1, most + 1) if n == 1 or fits(n)), key=lambda n: (_pixels(conv, config, target, band, pool, most, n), n)
    )


def _pixels(conv: Conv, config: Config, target: Target, band: Layout, pool: Pool, most: int, pooled: int) -> int:
    """Pixels that are computed for a plane in bands of so many pooled rows: bands end where blocks of pixels do not."""
    (p, q), options = conv.out, dict(config.options)
    rows = min(p, (pooled - 1) * pool.stride[0] + (pool.window[0] - 1) * pool.dilation[0] + 1)
    if "columns" in options:
        return -(-rows // options["rows"]) * options["rows"] * band.pitch * -(-most // pooled)
    step = options["vectors"] * target.vector_bytes // ITEM_BYTES[conv.dtypes.accumulator]
    return -(-((rows - 1) * band.pitch + q) // step) * step * -(-most // pooled)
