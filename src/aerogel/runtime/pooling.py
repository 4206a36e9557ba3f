"""Max-pooling nodes on our planes: what is taken, and the kernel for one shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aerogel.candidate import POINTERS, Kernel
from aerogel.codegen import llvm, pool
from aerogel.graph import Node, Ref
from aerogel.layout import Layout, Shape
from aerogel.target import Target


@dataclass(frozen=True)
class MaxPool:
    """Window, stride, padding (rows, columns) and dilation of a pooling node."""

    window: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]
    dilation: tuple[int, int]


def read(node: Node) -> MaxPool | None:
    """The node's numbers, or None where it is no max-pool of ours."""
    if node.op != "aten.max_pool2d.default" or not isinstance(node.args[0], Ref) or node.kwargs:
        return None
    args = (*node.args[1:], *((), (0, 0), (1, 1), False)[len(node.args) - 2 :])
    window, stride, pad, dilation, ceil = args
    pairs = [_pair(v) for v in (window, stride or window, pad, dilation)]
    if ceil or any(p is None for p in pairs):
        return None
    w, s, p, d = (p or (0, 0) for p in pairs)
    return MaxPool(w, s, p, d)


def _pair(value: object) -> tuple[int, int] | None:
    values = value if isinstance(value, tuple) else (value,)
    if not values or not all(isinstance(v, int) for v in values):
        return None
    return int(values[0]), int(values[-1])


def kernel(pooling: MaxPool, x_shape: Shape, y_shape: Shape, reads: Layout, writes: Layout, target: Target) -> Kernel:
    """The kernel from one planar layout to another. The line of a thread has room for the widest window."""
    code = pool.PoolCode(target.isa, pooling.window[1], pooling.stride[1], pooling.dilation[1])
    entry = llvm.function(str(code), pool.ENTRY, lambda: pool.emit(code), target.isa)
    (n, c, h, w), (_, _, p, q) = x_shape, y_shape
    lanes = target.vector_bytes // 4
    columns = -(-w // lanes) * lanes
    line = max((q - 1) * code.stride + (code.width - 1) * code.dilation + 1, pooling.pad[1] + columns) + lanes
    sizes = {
        "units": n * c, "x_plane": reads.plane(h, w) * 4, "y_plane": writes.plane(p, q) * 4,
        "x_rows": h, "x_row": reads.pitch * 4, "x_real": w, "x_columns": columns,
        "y_rows": p, "y_row": writes.pitch, "y_columns": q, "plane_elements": writes.plane(p, q),
        "front_elements": writes.front, "top": pooling.pad[0], "left": pooling.pad[1], "taps": pooling.window[0],
        "row_dilation": pooling.dilation[0], "row_stride": pooling.stride[0], "line_elements": line,
        "scratch_thread": -(-line * 4 // 64) * 64,
    }  # fmt: skip
    arguments = np.array([0] * len(POINTERS) + [sizes[name] for name in pool.SIZES], np.int64)
    return Kernel(f"pool {x_shape} {pooling.window}", reads, writes, entry, arguments, sizes["scratch_thread"])
