"""`Layout`: where every element of an activation tensor lives, borders included.

Four kinds:

planar          [n][c][plane], rows `pitch` apart. The right border of a row is the left border of the next,
                and the bottom border of a plane is the top border of the next:

                    front   . . . . . . . . .          zeros before the first image row
                    plane   x x x x x x x . x x x x x x x . ...    7 wide, pitch 8: one zero serves both sides
                            . . . . . . . . .          at least max(top, bottom) rows of zeros
                    slack   ? ? ? ? ? ?                readable, never meaningful

contiguous      [n][c][h][w] without any gap: torch's default.
channels_last   [n][h][w][c] without any gap: what dense kernels like best.
phases          [n][c][phase row][phase column][plane]: the padded image cut by a stride, so that
                a strided convolution reads neighbouring elements. Element (i, j) of the padded image is
                element (i // u, j // v) of phase (i % u, j % v).

Planes start on a 64-byte line and their size is a whole number of lines, so a vector store never leaves its
plane.

Maps in int8 (u8) stand in quads where they are planar or in phases: an element of a plane is a pixel of four
channels, 32 bits, and there is a plane for every four channels. Their border holds the byte that means zero.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from aerogel.errors import InvalidArgument, ShapeError
from aerogel.ir.dtypes import NUMPY, Array
from aerogel.ir.numbers import ceil_div, round_up

Shape = tuple[int, int, int, int]
Border = tuple[int, int, int, int]
"""Rows or columns of zeros: (top, left, bottom, right)."""
NO_BORDER: Border = (0, 0, 0, 0)

LINE_BYTES = 64
QUAD = 4
"""Channels that stand together in int8: what one 32-bit lane multiplies at once."""
EVERY_BYTE = 0x01010101

_TEXT = re.compile(
    r"(planar|contiguous|channels_last|phases(\d+)x(\d+)k(\d+)x(\d+)):(f32|f16|bf16|u8):p(\d+):b(\d+)x(\d+)x(\d+)x(\d+):s(\d+)"
)


@dataclass(frozen=True)
class Layout:
    """See the module's picture. `border` is (top, left, bottom, right); `slack` counts readable elements
    after the end.

    `stride` and `kept` belong to kind "phases": the stride that cuts the image, and how many phases (rows,
    columns) are stored.
    """

    kind: str
    pitch: int
    border: Border = NO_BORDER
    slack: int = 0
    dtype: str = "f32"
    stride: tuple[int, int] = (1, 1)
    kept: tuple[int, int] = (1, 1)

    @property
    def quads(self) -> bool:
        """Whether an element is a pixel of four channels."""
        return self.dtype == "u8" and self.kind in ("planar", "phases")

    def planes(self, channels: int) -> int:
        """Planes that so many channels take."""
        return ceil_div(channels, QUAD) if self.quads else channels

    @property
    def item(self) -> np.dtype[Any]:
        """numpy's type of an element of a buffer."""
        return np.dtype(np.uint32) if self.quads else NUMPY[self.dtype]

    @property
    def item_bytes(self) -> int:
        return self.item.itemsize

    @property
    def line(self) -> int:
        """Elements in one 64-byte line."""
        return LINE_BYTES // self.item_bytes

    def rows_columns(self, h: int, w: int) -> tuple[int, int]:
        """Rows and columns of one stored plane (of one phase)."""
        if self.kind != "phases":
            return h, w
        top, left, bottom, right = self.border
        return ceil_div(h + top + bottom, self.stride[0]), ceil_div(w + left + right, self.stride[1])

    def phase_plane(self, h: int, w: int) -> int:
        """Elements from one plane (of one phase) to the next, checked against this layout's own promises."""
        rows, columns = self.rows_columns(h, w)
        _, left, bottom, right = self.border
        if self.kind == "planar":
            if self.pitch < w + max(left, right):
                raise ShapeError(
                    f"{self}: pitch {self.pitch} leaves no room for rows of {w} and their border"
                )
            # a plane's end serves as the next one's front
            zeros = max(self.front, bottom * self.pitch + right, self.pitch - w)
        else:
            if self.pitch < columns:
                raise ShapeError(f"{self}: pitch {self.pitch} is less than a row of {columns}")
            zeros = self.pitch - columns
        return _up((rows - 1) * self.pitch + columns + zeros, self.line)

    def plane(self, h: int, w: int) -> int:
        """Elements from one channel (one quad of channels) to the next."""
        return self.phase_plane(h, w) * self.kept[0] * self.kept[1]

    @property
    def front(self) -> int:
        """Elements before the first image row: zeros that its top and left border read."""
        if self.kind != "planar":
            return 0
        return _up(self.border[0] * self.pitch + self.border[1], self.line)

    def elements(self, shape: Shape) -> int:
        """Elements a buffer for `shape` needs, slack included. Plain integers, so nothing can overflow before
        the check."""
        n, c, h, w = shape
        if self.kind in ("contiguous", "channels_last"):
            return n * c * h * w + self.slack
        return self.front + n * self.planes(c) * self.plane(h, w) + self.slack

    def allocate(self, shape: Shape) -> Array:
        """An uninitialised buffer for `shape` that starts on a 64-byte line."""
        raw = np.empty(self.elements(shape) + self.line, self.item)
        skip = -raw.ctypes.data % LINE_BYTES // self.item_bytes
        return raw[skip : skip + self.elements(shape)]

    def view(self, buffer: Array, shape: Shape) -> Array:
        """The image inside `buffer` as a strided (n, c, h, w) array: a window, not a copy. Not for phases.
        Quads are elements of it."""
        n, c, h, w = shape
        c = self.planes(c)
        if self.kind == "channels_last":
            return buffer[: n * c * h * w].reshape(n, h, w, c).transpose(0, 3, 1, 2)
        if self.kind == "contiguous":
            return buffer[: n * c * h * w].reshape(shape)
        if self.kind == "phases":
            raise ShapeError(f"{self}: phases are not one strided window; use read()")
        plane = self.plane(h, w)
        strides = tuple(s * buffer.itemsize for s in (c * plane, plane, self.pitch, 1))
        return np.lib.stride_tricks.as_strided(buffer[self.front :], (n, c, h, w), strides)

    def write(self, buffer: Array, x: Array, zero: int = 0) -> None:
        """Put x (n, c, h, w) into `buffer`: image, borders and gaps; the slack keeps what it had. `zero` is
        the byte that means zero, in int8."""
        shape: Shape = (x.shape[0], x.shape[1], x.shape[2], x.shape[3])
        n, c, h, w = shape
        filled = zero * EVERY_BYTE
        buffer[: self.elements(shape) - self.slack] = filled
        if self.quads:
            x, c = in_quads(x, zero), self.planes(c)
        if self.kind != "phases":
            if x.size:
                self.view(buffer, shape)[...] = x
            return
        top, left, bottom, right = self.border
        padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=filled)
        plane, (u, v), (a, b) = self.phase_plane(h, w), self.stride, self.kept
        planes = buffer[: n * c * a * b * plane].reshape(n, c, a, b, plane)
        for i in range(a):
            for j in range(b):
                part = padded[:, :, i::u, j::v]
                rows, columns = part.shape[2:]
                if part.size:
                    grid = planes[:, :, i, j, : (rows - 1) * self.pitch + columns]
                    for row in range(rows):
                        grid[:, :, row * self.pitch : row * self.pitch + columns] = part[:, :, row]

    def read(self, buffer: Array, shape: Shape) -> Array:
        """The image in `buffer` as a contiguous copy."""
        if not np.prod(shape):
            return np.empty(shape, NUMPY[self.dtype])
        found = np.ascontiguousarray(self.view(buffer, shape))
        return of_quads(found, shape[1]) if self.quads else found

    def dirty_border(self, buffer: Array, shape: Shape, zero: int = 0) -> int:
        """How many border or gap elements of a planar buffer are not zero: a kernel that writes this layout
        leaves none. A batch of no images has no border: nothing is written, nothing is read."""
        if shape[0] == 0:
            return 0
        border = buffer[: self.elements(shape) - self.slack].copy()
        if np.prod(shape):
            self.view(border, shape)[...] = zero * EVERY_BYTE
        return int(np.count_nonzero(border != zero * EVERY_BYTE))

    def __str__(self) -> str:
        kind = self.kind
        if kind == "phases":
            kind += f"{self.stride[0]}x{self.stride[1]}k{self.kept[0]}x{self.kept[1]}"
        return f"{kind}:{self.dtype}:p{self.pitch}:b{'x'.join(map(str, self.border))}:s{self.slack}"

    @staticmethod
    def parse(text: str) -> Layout:
        """The inverse of `str`."""
        m = _TEXT.fullmatch(text)
        if m is None:
            raise InvalidArgument(
                f"'{text[:200]}' is not a layout; one looks like planar:f32:p57:b1x1x1x1:s128"
            )
        v = [int(g) if g and g.isdigit() else 0 for g in m.groups()]
        phases = m[1].startswith("phases")
        return Layout(
            "phases" if phases else m[1],
            v[6],
            (v[7], v[8], v[9], v[10]),
            v[11],
            m[6],
            (v[1], v[2]) if phases else (1, 1),
            (v[3], v[4]) if phases else (1, 1),
        )


@dataclass(frozen=True)
class Place:
    """How the maps around a layer stand in its network, at least: border and pitch of what it writes, and of
    what it reads. All zeros where nothing is known."""

    border: Border = NO_BORDER
    pitch: int = 0
    x_border: Border = NO_BORDER
    x_pitch: int = 0


ALONE = Place()


def in_quads(x: Array, zero: int = 0) -> Array:
    """Bytes (n, c, h, w) as quads (n, c / 4, h, w) of 32 bits; channels that are not there hold zeros."""
    n, c, h, w = x.shape
    padded = np.pad(x, ((0, 0), (0, -c % QUAD), (0, 0), (0, 0)), constant_values=zero)
    apart = padded.reshape(n, ceil_div(c, QUAD), QUAD, h, w).transpose(0, 1, 3, 4, 2)
    return np.asarray(np.ascontiguousarray(apart).view(np.uint32)[..., 0])


def of_quads(quads: Array, channels: int) -> Array:
    """The inverse of `in_quads`."""
    n, planes, h, w = quads.shape
    apart = np.ascontiguousarray(quads)[..., None].view(np.uint8).transpose(0, 1, 4, 2, 3)
    return np.ascontiguousarray(apart.reshape(n, planes * QUAD, h, w)[:, :channels])


def widest(a: Border, b: Border) -> Border:
    """A border that serves for both."""
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])


def _up(value: int, multiple: int) -> int:
    return round_up(value, multiple)
