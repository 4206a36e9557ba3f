"""Pooling nodes on our planes: what is taken, and the kernel for one shape."""

from __future__ import annotations

import numpy as np

from aerogel.codegen.cpu import llvm, pool
from aerogel.codegen.cpu.abi import Kernel
from aerogel.ir import EVERY_BYTE, Layout, Pool, Shape, Target, round_up

SLACK = 16
"""Elements that pooling may read past the end of what it pools: the widest f32 vector."""


def kernel(
    pooling: Pool,
    x_shape: Shape,
    y_shape: Shape,
    reads: Layout,
    writes: Layout,
    target: Target,
    zero: int = 0,
) -> Kernel:
    """The kernel from one planar layout to another. The lines of a thread have room for the widest window.
    `zero` is the byte that means zero, in int8."""
    (n, c, h, w), (_, _, p, q) = x_shape, y_shape
    taps, width = pooling.window if pooling.window != (0, 0) else (h, w)
    code = pool.PoolCode(target.isa, pooling.kind, width, pooling.stride[1], pooling.dilation[1], reads.dtype)
    entry = llvm.function(str(code), pool.ENTRY, lambda: pool.emit(code), target.isa)
    lanes, area = target.vector_bytes // 4, taps * width
    columns = round_up(w, lanes)
    line = max((q - 1) * code.stride + (code.width - 1) * code.dilation + 1, pooling.pad[1] + columns) + lanes
    sizes = {
        "units": n * reads.planes(c),
        "x_plane": reads.plane(h, w) * reads.item_bytes,
        "y_plane": writes.plane(p, q) * writes.item_bytes,
        "x_rows": h,
        "x_row": reads.pitch * reads.item_bytes,
        "x_real": w,
        "x_columns": columns,
        "y_rows": p,
        "y_row": writes.pitch,
        "y_columns": q,
        "plane_elements": writes.plane(p, q),
        "front_elements": writes.front,
        "top": pooling.pad[0],
        "left": pooling.pad[1],
        "taps": taps,
        "row_dilation": pooling.dilation[0],
        "row_stride": pooling.stride[0],
        "line_elements": line,
        "scratch_thread": -(-line * 8 // 64) * 64,
        "scale": int(np.float32(1 / area).view(np.uint32)),
        "border": zero * EVERY_BYTE,
    }
    return Kernel.of(f"pool {x_shape} {(taps, width)}", (reads, writes), entry, pool.ARGUMENTS, sizes)
