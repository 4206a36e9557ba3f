"""`Conv`: one convolution as a frozen value with a string that says it all.

The same string is the test id, the benchmark input, the log line, part of the tuning key and the command that
repeats a failure:

    n1c64h56w56k64r3s3u1p1+bias+relu
    c32k64r1s7u1x2p0x3d1x2g4:f16+bias+silu+add        (no n, h, w: the layer, not yet a concrete problem)

Letters: n batch, c input channels, h w input, k filters, r s kernel, u stride, p padding, d dilation, g
groups. `u`, `d` take one number or `rows x columns`; `p` takes one, two (rows x columns) or four (top x left
x bottom x right).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from aerogel.errors import InvalidArgument, ShapeError
from aerogel.ir.dtypes import F32, Dtypes

_ACTIVATIONS = "relu relu6 leaky_relu threshold silu hardswish gelu sigmoid hardsigmoid"
ACTIVATIONS = tuple(_ACTIVATIONS.split())
NUMBERED = ("leaky_relu", "threshold")
"""Activations that carry a number: a slope below zero, or the limit that a value must be above to stay."""
_ONCE = {"leaky": "leaky_relu", "above": "threshold"}
"""What files of earlier versions call them."""

_SHAPE = re.compile(
    r"(?:n(?P<n>\d+))?c(?P<c>\d+)(?:h(?P<h>\d+)w(?P<w>\d+))?k(?P<k>\d+)r(?P<r>\d+)s(?P<s>\d+)"
    r"u(?P<u>\d+(?:x\d+)?)p(?P<p>\d+(?:x\d+){0,3})(?:d(?P<d>\d+(?:x\d+)?))?(?:g(?P<g>\d+))?"
    r"(?::(?P<dtypes>[a-z0-9.]+))?(?P<epilogue>(?:\+[a-z0-9_.-]+)*)"
)


@dataclass(frozen=True)
class Conv:
    """A convolution, optionally with the batch and image size that make it a concrete problem.

    `pad` is (top, left, bottom, right). `epilogue` holds, in the order they are applied: "bias" (first if
    present), "add" (a residual of the output's shape) and at most one activation; "leaky_relu0.1" carries
    its slope, "threshold0.25" its limit.
    """

    c: int
    k: int
    r: int = 1
    s: int = 1
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    dtypes: Dtypes = F32
    epilogue: tuple[str, ...] = ()
    n: int | None = None
    h: int | None = None
    w: int | None = None

    def __post_init__(self) -> None:
        positive = (self.c, self.k, self.r, self.s, *self.stride, *self.dilation, self.groups)
        if min(positive) < 1 or min(self.pad) < 0 or max(*positive, *self.pad) >= 2**31:
            raise ShapeError(
                f"{self}: sizes, stride, dilation and groups start at 1, padding at 0, all under 2^31"
            )
        if self.c % self.groups or self.k % self.groups:
            raise ShapeError(
                f"{self}: {self.groups} groups do not divide {self.c} input and {self.k} output channels"
            )
        if (self.h is None) != (self.w is None) or (self.n is None) != (self.h is None):
            raise ShapeError("a Conv has all of n, h and w, or none of them")
        kinds = [_kind(e) for e in self.epilogue]
        if len(set(kinds)) != len(kinds) or ("bias" in kinds and kinds[0] != "bias"):
            raise InvalidArgument(
                f"epilogue {self.epilogue}: bias comes first; one add and one activation at most"
            )
        if self.n is not None:
            if self.n < 0 or self.size[0] < 1 or self.size[1] < 1:
                raise ShapeError(f"{self}: an image has at least one row and one column")
            if min(self.out) < 1:
                raise ShapeError(
                    f"{self}: the kernel does not fit the padded image; the output would be empty"
                )

    @property
    def size(self) -> tuple[int, int]:
        """Input height and width; only a concrete problem has them."""
        if self.h is None or self.w is None:
            raise ShapeError(f"{self} has no image size; call .at(n, h, w) first")
        return self.h, self.w

    @property
    def batch(self) -> int:
        if self.n is None:
            raise ShapeError(f"{self} has no batch; call .at(n, h, w) first")
        return self.n

    @property
    def out(self) -> tuple[int, int]:
        """Output height p and width q."""
        (h, w), (top, left, bottom, right) = self.size, self.pad
        p = (h + top + bottom - self.dilation[0] * (self.r - 1) - 1) // self.stride[0] + 1
        q = (w + left + right - self.dilation[1] * (self.s - 1) - 1) // self.stride[1] + 1
        return p, q

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return self.k, self.c // self.groups, self.r, self.s

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.c, *self.size

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.k, *self.out

    @property
    def activation(self) -> str | None:
        """The activation's name without its number, or None."""
        return next((_kind(e) for e in self.epilogue if _kind(e) in ACTIVATIONS), None)

    @property
    def parameter(self) -> float:
        """The number that the activation carries; 0 where it carries none."""
        return next((number for e in self.epilogue if (number := _numbered(e)[1]) is not None), 0.0)

    @property
    def steps(self) -> tuple[str, ...]:
        """The epilogue without its number, which is data: what code depends on."""
        return tuple(_kind(e) for e in self.epilogue)

    @property
    def dense_flops(self) -> int:
        """Multiplications and additions of the dense convolution."""
        n, k, p, q = self.y_shape
        return 2 * n * k * p * q * (self.c // self.groups) * self.r * self.s

    def at(self, n: int, h: int, w: int) -> Conv:
        """The concrete problem of this layer for one batch and image size."""
        return replace(self, n=n, h=h, w=w)

    def layer(self) -> Conv:
        """The layer without batch and image size: what packing sees."""
        return replace(self, n=None, h=None, w=None)

    def __str__(self) -> str:
        n = "" if self.n is None else f"n{self.n}"
        hw = "" if self.h is None else f"h{self.h}w{self.w}"
        d = "" if self.dilation == (1, 1) else f"d{_short(self.dilation)}"
        g = "" if self.groups == 1 else f"g{self.groups}"
        t = "" if self.dtypes == F32 else f":{self.dtypes}"
        top, left, bottom, right = self.pad
        pad = _short((top, left)) if (top, left) == (bottom, right) else f"{top}x{left}x{bottom}x{right}"
        tail = "".join(f"+{e}" for e in self.epilogue)
        return f"{n}c{self.c}{hw}k{self.k}r{self.r}s{self.s}u{_short(self.stride)}p{pad}{d}{g}{t}{tail}"

    @staticmethod
    def parse(text: str) -> Conv:
        """The inverse of `str`."""
        m = _SHAPE.fullmatch(text) if len(text) < 500 else None
        if m is None:
            raise InvalidArgument(
                f"'{text[:200]}' is not a convolution; write it like n1c64h56w56k64r3s3u1p1+bias+relu"
            )
        pad = [int(v) for v in m["p"].split("x")]
        if len(pad) == 3:
            raise InvalidArgument(
                f"'{text}': padding is one number, rows x columns, or top x left x bottom x right"
            )
        pad = pad * 4 if len(pad) == 1 else pad * 2 if len(pad) == 2 else pad
        return Conv(
            c=int(m["c"]),
            k=int(m["k"]),
            r=int(m["r"]),
            s=int(m["s"]),
            stride=_two(m["u"]),
            pad=(pad[0], pad[1], pad[2], pad[3]),
            dilation=_two(m["d"] or "1"),
            groups=int(m["g"] or 1),
            dtypes=Dtypes.parse(m["dtypes"] or "f32"),
            epilogue=tuple(_named(e) for e in m["epilogue"].split("+")[1:]),
            n=None if m["n"] is None else int(m["n"]),
            h=None if m["h"] is None else int(m["h"]),
            w=None if m["w"] is None else int(m["w"]),
        )


@dataclass(frozen=True)
class Pool:
    """Kind ("max" or "average"), window, stride, padding (rows, columns) and dilation. A window of (0, 0) is
    the whole image."""

    kind: str
    window: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]
    dilation: tuple[int, int]

    def out(self, h: int, w: int) -> tuple[int, int]:
        """Rows and columns that pooling an image of this size gives; less than one where it does not fit."""
        parts = zip((h, w), self.window, self.stride, self.pad, self.dilation, strict=True)
        p, q = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in parts)
        return p, q


def _named(entry: str) -> str:
    """An epilogue entry of a text, by the name it has today."""
    if entry.startswith(NUMBERED):
        return entry
    old = next((name for name in _ONCE if entry.startswith(name)), "")
    return _ONCE.get(old, "") + entry.removeprefix(old)


def _numbered(entry: str) -> tuple[str, float | None]:
    """An epilogue entry's name, and the number it carries: 'leaky_relu0.1' -> 'leaky_relu', 0.1."""
    name = next((n for n in NUMBERED if entry.startswith(n)), None)
    if name is None:
        return entry, None
    try:
        return name, float(entry.removeprefix(name))
    except ValueError:
        return name, math.nan


def _kind(entry: str) -> str:
    """What an epilogue entry is, checked."""
    name, number = _numbered(entry)
    if name not in ("bias", "add", *ACTIVATIONS):
        raise InvalidArgument(f"epilogue '{entry}' is unknown; known are bias, add, {', '.join(ACTIVATIONS)}")
    if number is not None and (not math.isfinite(number) or (name == "threshold" and number < 0)):
        raise InvalidArgument(
            f"'{entry}': leaky_relu carries its slope, as in leaky_relu0.1, and threshold a limit from 0, "
            "as in threshold0.25"
        )
    return name


def _short(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}x{pair[1]}"


def _two(text: str) -> tuple[int, int]:
    values = [int(v) for v in text.split("x")]
    return values[0], values[-1]
