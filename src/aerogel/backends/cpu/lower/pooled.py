"""A convolution with the pooling after it in one kernel (codegen/cpu/bands.py): what can be joined, in bands
of how many rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aerogel.backends.cpu.lower import pooling
from aerogel.codegen.cpu import bands, llvm
from aerogel.codegen.cpu.abi import Kernel, block, native
from aerogel.ir import INT8, Config, Conv, Layout, Packed, Place, Pool, Shape, Target, ceil_div, round_up
from aerogel.methods import cpu_form


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
    """From x to the pooled y, or None where there are fewer bands than threads, or in int8."""
    if conv.dtypes == INT8:
        return None
    module, (p, q), reach = cpu_form(config.method), conv.out, (pool.window[0] - 1) * pool.dilation[0] + 1
    _, band = module.layouts(conv, config, target, Place(x_pitch=reads.pitch))
    band = Layout("planar", band.pitch, band.border, max(band.slack, pooling.SLACK), band.dtype)
    pooled = _rows(conv, config, target, band, pool, y_shape[2])
    count = ceil_div(y_shape[2], pooled)
    if conv.batch * count < target.threads:
        return None
    rows = min(p, (pooled - 1) * pool.stride[0] + reach)
    (first,) = native(module.build(packed, replace(conv, n=1), config, target, reads, band, rows))
    shape = (1, conv.k, rows, q)
    second = pooling.kernel(pool, shape, (1, *y_shape[1:]), band, writes, target)
    blocks = [first.arguments, second.arguments]
    begin = round_up(max(first.scratch_bytes, second.scratch_bytes), 64)
    after = begin + -(-band.elements(shape) * band.item_bytes // 64) * 64
    row = reads.pitch * reads.item_bytes * (1 if reads.kind != "planar" else conv.stride[0])
    y_plane = writes.plane(*y_shape[2:])
    slots: Mapping[str, int] = {
        "conv_entry": first.entry.address,
        "conv_arguments": blocks[0].ctypes.data,
        "conv_words": len(blocks[0]),
        "pool_entry": second.entry.address,
        "pool_arguments": blocks[1].ctypes.data,
        "pool_words": len(blocks[1]),
        "images": conv.batch,
        "bands": count,
        "pooled": pooled,
        "band_rows": rows,
        "conv_rows": p,
        "stride": pool.stride[0],
        "top": pool.pad[0],
        "x_image": conv.c * reads.plane(*conv.size) * reads.item_bytes,
        "x_row": row,
        "y_image": conv.k * y_plane * writes.item_bytes,
        "y_row": writes.pitch * writes.item_bytes,
        "y_rows": y_shape[2],
        "y_pitch": writes.pitch,
        "plane_elements": y_plane,
        "front_elements": writes.front,
        "band_first": begin,
        "arguments_first": after,
        "scratch_thread": after + 64 * ceil_div(max(map(len, blocks)), 8),
    }
    arguments = block(bands.ARGUMENTS, slots)
    entry = llvm.function("bands", bands.ENTRY, bands.emit, target.isa)
    owned, scratch = (*first.owned, *second.owned, *blocks), slots["scratch_thread"]
    name = f"{first.name} pooled"
    return Kernel(name, reads, writes, entry, arguments, scratch, owned, first.counts, (first, second))


def _rows(conv: Conv, config: Config, target: Target, band: Layout, pool: Pool, most: int) -> int:
    """Pooled rows of a band: of those that fit half of L2, what computes fewest pixels; every thread has
    some."""

    def fits(pooled: int) -> bool:
        rows = (pooled - 1) * pool.stride[0] + (pool.window[0] - 1) * pool.dilation[0] + 1
        return (
            2 * conv.k * rows * band.pitch * band.item_bytes <= target.l2_bytes
            and conv.batch * ceil_div(most, pooled) >= target.threads
        )

    return min(
        (n for n in range(1, most + 1) if n == 1 or fits(n)),
        key=lambda n: (_pixels(conv, config, target, band, pool, most, n), n),
    )


def _pixels(
    conv: Conv, config: Config, target: Target, band: Layout, pool: Pool, most: int, pooled: int
) -> int:
    """Pixels that are computed for a plane in bands of so many pooled rows: bands end where blocks of pixels
    do not."""
    rows = min(conv.out[0], (pooled - 1) * pool.stride[0] + (pool.window[0] - 1) * pool.dilation[0] + 1)
    return cpu_form(config.method).pixels(conv, config, target, band.pitch, rows) * ceil_div(most, pooled)
