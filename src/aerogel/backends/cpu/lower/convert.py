"""From one Layout to another: the copy kernels that stand on the edges of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from aerogel.codegen.cpu import copy, llvm
from aerogel.codegen.cpu.abi import Kernel
from aerogel.codegen.cpu.elements import CopyCode
from aerogel.errors import PlanMismatch
from aerogel.ir import EVERY_BYTE, QUAD, Layout, Node, Quantized, Shape, Target, ceil_div


@dataclass(frozen=True)
class Enlarge:
    """`repeat` pixels a pixel and direction: of the same one, or (`woven`) of as many channels in turn."""

    repeat: int = 1
    woven: bool = False


def enlarges(node: Node, shapes: Mapping[str, tuple[int, ...]]) -> Enlarge | None:
    """What a node does to an image if it only enlarges it; None for all others."""
    if node.op == "aten.pixel_shuffle.default":
        return Enlarge(node.args[1], woven=True)
    if not node.op.startswith("aten.upsample_nearest2d."):
        return None
    (h, w), (p, q) = shapes[node.inputs[0]][2:], shapes[node.name][2:]
    by = next((n for n in (2, 4, 8) if (p, q) == (n * h, n * w)), None)
    return None if by is None or any(scale not in (None, by) for scale in _scales(node)) else Enlarge(by)


def _scales(node: Node) -> list[float | None]:
    """The factors that an upsampling names. They, not the sizes, say which pixel is repeated: 4.05 is not 4
    where both give 32."""
    if node.op.endswith(".vec"):
        return list((node.args[2] if len(node.args) > 2 else node.kwargs.get("scale_factors")) or [])
    return [*node.args[2:], node.kwargs.get("scales_h"), node.kwargs.get("scales_w")]


_SAME = Enlarge()


def convert(
    shape: Shape,
    source: Layout,
    target: Layout,
    machine: Target,
    place: tuple[int, int] = (0, 0),
    larger: Enlarge = _SAME,
    how: Quantized | None = None,
) -> list[Kernel]:
    """Kernels that copy a tensor of `shape`: one, or one for each phase. Borders of the target are written as
    zeros. `how` says what the bytes mean, of a map in int8.

    `place` is (first channel, channels of the whole) where the target is a part of a wider tensor: a
    concatenation.
    """
    mixed = source.dtype != target.dtype and "f32" not in (source.dtype, target.dtype)
    joins, parts = target.quads and not source.quads, source.quads and not target.quads
    uneven = source.quads and (larger.woven or (target.quads and place[0] % QUAD))
    if source.kind == "phases" or target.kind == "channels_last" or mixed or uneven:
        raise PlanMismatch(f"no kernel copies {source} to {target}")
    n, c, h, w = shape
    repeat, maps = larger.repeat, larger.repeat**2 if larger.woven else 1
    c //= maps
    first, whole = target.planes(place[0]), target.planes(place[1] or c)
    meaning = how or Quantized(1.0, 0)
    item, x_item = target.item_bytes, source.item_bytes
    x_image, x_channel, x_row, x_column = _strides(source, shape)
    h_out, w_out = h * repeat, w * repeat
    rows, columns = target.rows_columns(h_out, w_out)
    top, left = target.border[:2] if target.kind == "phases" else (0, 0)
    u, v = target.stride
    phase_plane = h_out * w_out if target.kind == "contiguous" else target.phase_plane(h_out, w_out)
    plane = phase_plane * target.kept[0] * target.kept[1]
    pitch = w_out if target.kind == "contiguous" else target.pitch
    step = v if x_column == 1 and v <= 2 else 0
    code = CopyCode(machine.isa, source.dtype, target.dtype, step, repeat, joins, parts)
    entry = llvm.function(str(code), copy.ENTRY, lambda: copy.emit(code), machine.isa)
    kernels = []
    for a in range(target.kept[0]):
        for b in range(target.kept[1]):
            low = min(columns, max(0, ceil_div(left - b, v)))
            high = max(low, min(columns, ceil_div(w_out + left - b, v)))
            sizes = {
                "images": n,
                "channels": target.planes(c),
                "x_image": x_image * x_item,
                "x_channel": maps * x_channel * x_item,
                "x_row": x_row * x_item,
                "x_column": v * x_column * x_item,
                "x_part": x_channel * x_item if larger.woven else 0,
                "y_first": (first * plane + (a * target.kept[1] + b) * phase_plane) * item,
                "y_image": whole * plane * item,
                "y_channel": plane * item,
                "y_row": pitch * item,
                "rows": rows,
                "row_first": a - top,
                "row_step": u,
                "x_rows": h,
                "column_low": low,
                "column_high": high,
                "column_first": (low * v + b - left) * x_column * x_item,
                "row_bytes": pitch * item,
                "tail_bytes": (phase_plane - rows * pitch) * item,
                "front_bytes": target.front * item if a == b == first == 0 else 0,
                "x_last": c - 1,
                "border": meaning.zero * EVERY_BYTE,
                "scale": int(np.float32(meaning.scale).view(np.uint32)),
                "zero": meaning.zero,
            }
            name = f"copy {shape} {source} {target}"
            kernels.append(Kernel.of(name, (source, target), entry, copy.ARGUMENTS, sizes))
    return kernels


def _strides(layout: Layout, shape: Shape) -> tuple[int, int, int, int]:
    """Elements from one image, channel, row and column to the next."""
    _, c, h, w = shape
    c = layout.planes(c)
    if layout.kind == "channels_last":
        return h * w * c, 1, w * c, c
    if layout.kind == "contiguous":
        return c * h * w, h * w, w, 1
    return c * layout.plane(h, w), layout.plane(h, w), layout.pitch, 1
