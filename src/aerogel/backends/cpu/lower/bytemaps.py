"""Averages, sums and tables of maps of bytes (ir/bytemaps.py) on our planes: the kernel for one shape."""

from __future__ import annotations

import numpy as np

from aerogel.codegen.cpu import averages, llvm, quadwise
from aerogel.codegen.cpu.abi import Kernel
from aerogel.codegen.cpu.sums import lane_bits
from aerogel.errors import PlanMismatch
from aerogel.ir import QUAD, Add, Average, Layout, Node, Shape, Table, Target

LARGEST = 2**31 // 255
"""Pixels of a window whose sum fits 32 bits."""


def fits(node: Node, shape: tuple[int, ...]) -> bool:
    """Whether a kernel of ours takes this node of IN_BYTES, for an x of this shape."""
    how = node.in_bytes()
    if not isinstance(how, Average):
        return True
    rows, columns = how.pool.window if how.pool.window != (0, 0) else shape[2:]
    return rows * columns < LARGEST


def kernel(
    how: Average | Add | Table, x_shape: Shape, y_shape: Shape, reads: Layout, writes: Layout, target: Target
) -> Kernel:
    """From one planar layout of quads to another. A residual stands as y does."""
    if isinstance(how, Average):
        return _average(how, x_shape, y_shape, reads, writes, target)
    if (reads.pitch, reads.border) != (writes.pitch, writes.border):
        raise PlanMismatch(f"no kernel goes from {reads} to {writes} vector by vector")
    n, c, h, w = y_shape
    lanes = target.vector_bytes // QUAD
    plane = writes.plane(h, w)
    number = np.arange(plane)
    live = (number // writes.pitch < h) & (number % writes.pitch < w)
    a, b, scales = (how.a, how.b, how.scales) if isinstance(how, Add) else (how.y, how.y, (0, 0))
    sizes = {
        "planes": n * writes.planes(c),
        "plane_vectors": plane // lanes,
        "front_vectors": writes.front // lanes,
        "zero": how.y.zero,
        "x_zero": a.zero,
        "beside_zero": b.zero,
        "x_scale": _bits(scales[0]),
        "beside_scale": _bits(scales[1]),
    }
    owned = {"live": np.ascontiguousarray(lane_bits(lanes, live.reshape(-1, lanes)))}
    code = quadwise.QuadwiseCode(target.isa, "add" if isinstance(how, Add) else "table")
    entry = llvm.function(str(code), quadwise.ENTRY, lambda: quadwise.emit(code), target.isa)
    return Kernel.of(f"{code.kind} {y_shape}", (reads, writes), entry, quadwise.ARGUMENTS, sizes, owned)


def _average(
    how: Average, x_shape: Shape, y_shape: Shape, reads: Layout, writes: Layout, target: Target
) -> Kernel:
    (n, c, h, w), (_, _, p, q) = x_shape, y_shape
    rows, columns = how.pool.window if how.pool.window != (0, 0) else (h, w)
    sizes = {
        "images": n,
        "x_planes": reads.planes(c),
        "channels": c,
        "x_plane": reads.plane(h, w) * reads.item_bytes,
        "y_plane": writes.plane(p, q) * writes.item_bytes,
        "x_rows": h,
        "x_columns": w,
        "x_row": reads.pitch * reads.item_bytes,
        "y_rows": p,
        "y_columns": q,
        "y_row": writes.pitch * writes.item_bytes,
        "rows": rows,
        "columns": columns,
        "row_stride": how.pool.stride[0],
        "column_stride": how.pool.stride[1],
        "top": how.pool.pad[0],
        "left": how.pool.pad[1],
        "front_bytes": writes.front * writes.item_bytes,
        "x_zero": how.x.zero,
        "zero": 0 if how.y is None else how.y.zero,
        "scale": _bits(how.scale(h, w)),
    }
    code = averages.AveragesCode(target.isa, how.y is None)
    entry = llvm.function(str(code), averages.ENTRY, lambda: averages.emit(code), target.isa)
    return Kernel.of(f"average {x_shape}", (reads, writes), entry, averages.ARGUMENTS, sizes)


def _bits(number: float | np.float32) -> int:
    return int(np.float32(number).view(np.uint32))
