"""A dense Linear over features of ours: torch's would be as fast, but a call out of the segment, and back,
costs more than it."""

from __future__ import annotations

import numpy as np

from aerogel.codegen.cpu import dot, llvm
from aerogel.codegen.cpu.abi import Kernel
from aerogel.codegen.cpu.sums import lane_bits
from aerogel.ir import NUMPY, Array, Conv, Layout, Target, round_up

FEW = 2
"""Images up to which weights read once for each image are as fast as a matrix product."""


def takes(conv: Conv) -> bool:
    """Whether this is a Linear over few features of one pixel."""
    plain = (conv.r, conv.s, conv.stride, conv.groups, conv.pad) == (1, 1, (1, 1), 1, (0, 0, 0, 0))
    d = conv.dtypes
    return (
        plain
        and conv.size == (1, 1)
        and conv.n is not None
        and 0 < conv.n <= FEW
        and d.input == d.weight == d.output
    )


def kernel(weight: Array, conv: Conv, reads: Layout, writes: Layout, target: Target) -> Kernel:
    """The kernel from one planar layout to another."""
    code = dot.DotCode(target.isa, conv.steps, reads.dtype)
    entry = llvm.function(str(code), dot.ENTRY, lambda: dot.emit(code), target.isa)
    padded = round_up(conv.c, dot.STEP)
    value = np.ascontiguousarray(weight.reshape(conv.k, conv.c), NUMPY[reads.dtype])
    if padded > conv.c:
        value = np.pad(value, ((0, 0), (0, padded - conv.c)))
    live = lane_bits(code.lanes, np.arange(code.lanes)[None] < 1)
    owned = {"value": value, "live": live, "parameter": np.array([conv.parameter], np.float32)}
    x_plane, y_plane = reads.plane(1, 1) * reads.item_bytes, writes.plane(1, 1) * writes.item_bytes
    sizes = {
        "images": conv.batch,
        "filters": conv.k,
        "channels": conv.c,
        "padded": padded,
        "x_image": conv.c * x_plane,
        "x_plane": x_plane,
        "y_image": conv.k * y_plane,
        "y_plane": y_plane,
        "plane_vectors": writes.plane(1, 1) // code.lanes,
        "front_vectors": writes.front // code.lanes,
        "scratch_thread": padded * 4,
    }
    return Kernel.of(f"dot {conv}", (reads, writes), entry, dot.ARGUMENTS, sizes, owned)
