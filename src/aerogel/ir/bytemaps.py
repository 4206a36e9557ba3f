"""What is done to maps of bytes between convolutions, to the last bit.

    u8.average   v = f32(sum over the window of (q - zero)) * (f32(sx) / (f32(sy) * f32(pixels)))
                 or, over a whole image and with no y, the number f32(sum) * (f32(sx) / f32(pixels)) itself
    u8.add       v = f32(a - a_zero) * f32(sa / sy) + f32(b - b_zero) * f32(sb / sy)
    u8.table     y = table[q]: an activation, or the same numbers at another scale

Of the first two y = rne(clamp(v, -zero, 255 - zero)) + zero. Each step is f32, rounded to nearest even, none
fused with another; pixels outside the image count as zero, and the window is as large as if they were there.
That is ONNX's QLinearGlobalAveragePool, QLinearAveragePool and QLinearAdd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aerogel.errors import InvalidFile
from aerogel.ir.conv import Pool
from aerogel.ir.dtypes import Array
from aerogel.ir.quantized import Quantized

IN_BYTES = ("u8.average", "u8.add", "u8.table")
LARGEST = 2**10
"""Windows, strides and paddings from here on are refused: the reference pads."""


@dataclass(frozen=True)
class Average:
    """Averages over windows of x; numbers where nothing says what bytes of y mean. `keeps`: a window of the
    whole image leaves an image of one pixel."""

    x: Quantized
    y: Quantized | None
    pool: Pool
    keeps: bool = True

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of a node, after its input."""
        pool = self.pool
        y = (None, None) if self.y is None else _said(self.y)
        return (*_said(self.x), *y, pool.window, pool.stride, pool.pad, self.keeps)

    def scale(self, h: int, w: int) -> np.float32:
        """What a sum over a window of an image of this size is multiplied with."""
        rows, columns = self.pool.window if self.pool.window != (0, 0) else (h, w)
        unit = np.float32(1 if self.y is None else self.y.scale)
        return np.float32(self.x.scale) / (unit * np.float32(rows * columns))

    def shape(self, x: Sequence[int]) -> tuple[int, ...] | None:
        """Of y, for an x of this shape; None where it does not fit."""
        if len(x) != 4:
            return None
        if self.pool.window == (0, 0):
            return (x[0], x[1], 1, 1) if self.keeps else (x[0], x[1])
        p, q = self.pool.out(x[2], x[3])
        wide = any(2 * pad > size for pad, size in zip(self.pool.pad, self.pool.window, strict=True))
        return None if min(p, q) < 1 or wide else (x[0], x[1], p, q)

    def bytes_of(self, x: Array) -> Array:
        """The reference."""
        (h, w), pool = x.shape[2:], self.pool
        (r, s) = pool.window if pool.window != (0, 0) else (h, w)
        (top, left), (u, v) = pool.pad, pool.stride
        centred = np.pad(x.astype(np.int64) - self.x.zero, ((0, 0), (0, 0), (top, top), (left, left)))
        windows = np.lib.stride_tricks.sliding_window_view(centred, (r, s), (2, 3))[:, :, ::u, ::v]
        y: Array = windows.sum((4, 5)).astype(np.float32) * self.scale(h, w)
        y = y if self.y is None else rounded(y, self.y.zero)
        return y if self.keeps else y[:, :, 0, 0]


@dataclass(frozen=True)
class Add:
    """The sum of two maps, each with its own meaning."""

    a: Quantized
    b: Quantized
    y: Quantized

    @property
    def args(self) -> tuple[Any, ...]:
        return (*_said(self.a), *_said(self.b), *_said(self.y))

    @property
    def scales(self) -> tuple[np.float32, np.float32]:
        return np.float32(self.a.scale / self.y.scale), np.float32(self.b.scale / self.y.scale)

    def bytes_of(self, a: Array, b: Array) -> Array:
        """The reference."""
        own, other = self.scales
        v = (a.astype(np.float32) - np.float32(self.a.zero)) * own
        return rounded(v + (b.astype(np.float32) - np.float32(self.b.zero)) * other, self.y.zero)


@dataclass(frozen=True)
class Table:
    """Any function of a byte, as its 256 answers, which are a constant of the graph."""

    y: Quantized

    @property
    def args(self) -> tuple[Any, ...]:
        return _said(self.y)

    @staticmethod
    def same(x: Quantized, y: Quantized) -> Array:
        """The table that keeps numbers, and changes what bytes mean."""
        q = np.arange(256).astype(np.float32) - np.float32(x.zero)
        return rounded(q * np.float32(x.scale / y.scale), y.zero)


def rounded(v: Array, zero: int) -> Array:
    """Numbers in units of the output as bytes."""
    return np.asarray(np.rint(np.clip(v, np.float32(-zero), np.float32(255 - zero))) + zero).astype(np.uint8)


def parsed(op: str, args: Sequence[Any]) -> Average | Add | Table:
    """What a node's arguments after its inputs say. From a file they may say anything."""
    match op, tuple(args):
        case "u8.table", (scale, zero):
            return Table(_meant(scale, zero))
        case "u8.add", (sa, za, sb, zb, sy, zy):
            return Add(_meant(sa, za), _meant(sb, zb), _meant(sy, zy))
        case "u8.average", (sx, zx, sy, zy, window, stride, pad, bool(keeps)) if all(
            _two(pair) for pair in (window, stride, pad)
        ):
            whole = window == (0, 0) and stride == (1, 1) and pad == (0, 0)
            if whole or (keeps and sy is not None and min(*window, *stride) > 0 and min(pad) >= 0):
                pool = Pool("average", window, stride, pad, (1, 1))
                y = None if sy is None and zy is None else _meant(sy, zy)
                return Average(_meant(sx, zx), y, pool, keeps)
    raise InvalidFile(f"{op} takes its maps, their scales and zero points")


def _two(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and all(type(v) is int and v < LARGEST for v in pair)


def _said(how: Quantized) -> tuple[float, int]:
    return how.scale, how.zero


def _meant(scale: object, zero: object) -> Quantized:
    if type(scale) is float and type(zero) is int and 0 < scale < math.inf and 0 <= zero <= 255:
        return Quantized(scale, zero)
    raise InvalidFile(f"{scale!r:.40} and {zero!r:.40} are no scale and zero point")
