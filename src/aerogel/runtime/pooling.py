"""Pooling nodes on our planes: what is taken, and the kernel for one shape."""

from __future__ import annotations

import numpy as np

from aerogel.candidate import POINTERS, Kernel
from aerogel.codegen import llvm, pool
from aerogel.graph import Node, Ref
from aerogel.layout import Layout, Shape
from aerogel.problem import Pool
from aerogel.target import Target

SLACK = 16
"""Elements that pooling may read past the end of what it pools: the widest f32 vector."""


def out(own: Pool, shape: tuple[int, ...], node: Node) -> tuple[int, ...] | None:
    """The shape that pooling gives for images of this one, or None where it does not fit them."""
    if len(shape) != 4 or own.window == (0, 0):
        keeps = len(node.args) > 2 and node.args[2] is True
        return (*shape[:2], *((1, 1) if keeps else ())) if len(shape) == 4 else None
    h, w = own.out(*shape[2:])
    return (*shape[:2], h, w) if min(h, w) > 0 and all(2 * p <= k for p, k in zip(own.pad, own.window, strict=True)) else None


_ARGUMENTS = {
    "max": ("window", "stride", "pad", "dilation", "ceil"),
    "average": ("window", "stride", "pad", "ceil", "padding_counts", "divisor"),
}


def read(node: Node) -> Pool | None:
    """The node's numbers, or None where it is no pooling of ours.

    Sizes rounded up, and averages over real pixels only, are torch's.
    """
    if node.op == "aten.mean.dim":
        keeps = node.args[2] if len(node.args) > 2 else False
        whole = not node.kwargs and isinstance(node.args[0], Ref) and node.args[1] in ((2, 3), (-2, -1), (-1, -2), (3, 2))
        return Pool("average", (0, 0), (1, 1), (0, 0), (1, 1)) if whole and isinstance(keeps, bool) else None
    kind = {"aten.max_pool2d.default": "max", "aten.avg_pool2d.default": "average"}.get(node.op)
    if kind is None or not isinstance(node.args[0], Ref) or node.kwargs:
        return None
    given = dict(zip(_ARGUMENTS[kind], node.args[1:], strict=False))
    window, stride, pad = given["window"], given.get("stride") or given["window"], given.get("pad", (0, 0))
    dilation, ceil = given.get("dilation", (1, 1)), given.get("ceil", False)
    if not given.get("padding_counts", True) or given.get("divisor") is not None:
        return None
    pairs = [_pair(v) for v in (window, stride, pad, dilation)]
    if ceil or any(p is None for p in pairs):
        return None
    w, s, p, d = (p or (0, 0) for p in pairs)
    return Pool(kind, w, s, p, d)


def _pair(value: object) -> tuple[int, int] | None:
    values = value if isinstance(value, tuple) else (value,)
    if not values or not all(isinstance(v, int) for v in values):
        return None
    return int(values[0]), int(values[-1])


def kernel(pooling: Pool, x_shape: Shape, y_shape: Shape, reads: Layout, writes: Layout, target: Target) -> Kernel:
    """The kernel from one planar layout to another. The lines of a thread have room for the widest window."""
    (n, c, h, w), (_, _, p, q) = x_shape, y_shape
    taps, width = pooling.window if pooling.window != (0, 0) else (h, w)
    code = pool.PoolCode(target.isa, pooling.kind, width, pooling.stride[1], pooling.dilation[1], reads.dtype)
    entry = llvm.function(str(code), pool.ENTRY, lambda: pool.emit(code), target.isa)
    lanes, area = target.vector_bytes // 4, taps * width
    columns = -(-w // lanes) * lanes
    line = max((q - 1) * code.stride + (code.width - 1) * code.dilation + 1, pooling.pad[1] + columns) + lanes
    sizes = {
        "units": n * c, "x_plane": reads.plane(h, w) * reads.item_bytes, "y_plane": writes.plane(p, q) * reads.item_bytes,
        "x_rows": h, "x_row": reads.pitch * reads.item_bytes, "x_real": w, "x_columns": columns,
        "y_rows": p, "y_row": writes.pitch, "y_columns": q, "plane_elements": writes.plane(p, q),
        "front_elements": writes.front, "top": pooling.pad[0], "left": pooling.pad[1], "taps": taps,
        "row_dilation": pooling.dilation[0], "row_stride": pooling.stride[0], "line_elements": line,
        "scratch_thread": -(-line * 8 // 64) * 64, "scale": int(np.float32(1 / area).view(np.uint32)),
    }  # fmt: skip
    arguments = np.array([0] * len(POINTERS) + [sizes[name] for name in pool.SIZES], np.int64)
    return Kernel(f"pool {x_shape} {(taps, width)}", reads, writes, entry, arguments, sizes["scratch_thread"])
