"""Seeded cases: a Conv, its weight, inputs. The same seed gives the same case for every method and ISA.

Four kinds: exact (small integers, so that a wrong tap cannot hide in a tolerance), real (wide-range numbers,
the float64 bound), edges (pairs of awkward properties, all of them covered) and special (NaN, Inf, -0,
subnormals, the largest floats); and the same in fp16 and bf16: half (exact and real), half-edges,
half-special. In int8 every case is exact: bytes, and bytes-edges, whose weights and limits are extreme.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from aerogel.ir import INT8, Array, Conv, Dtypes, Requantize, from_float64, to_float64
from aerogel.reference import F64
from tests.counts import APART
from tests.suite.pairs import cover

KINDS = (
    "exact",
    "real",
    "edges",
    "special",
    "half",
    "half-edges",
    "half-special",
    "idle",
    "idle-special",
    "bytes",
    "bytes-edges",
    "depthwise",
    "depthwise-edges",
)
BYTES = ("bytes", "bytes-edges")
DEPTHWISE = ("depthwise", "depthwise-edges")
"""The same, with a filter of its own for each channel."""
ZEROS = (0.0, 0.5, 0.9, 0.99, 1.0)
"""Of x, in the kinds that end in zeros of the feature map."""
EDGE_FAMILIES = 6

_EXACT: tuple[tuple[str, ...], ...] = (
    (), ("bias",), ("bias", "relu"), ("bias", "add", "relu"), ("bias", "relu6"), ("bias", "leaky_relu0.5"),
    ("relu", "add"), ("bias", "add", "threshold2"),
)  # fmt: skip
_REAL = (
    *_EXACT[:6],
    ("bias", "leaky_relu0.1", "add"),
    ("bias", "silu"),
    ("bias", "hardswish"),
    ("bias", "silu", "add"),
    ("bias", "gelu"),
    ("bias", "sigmoid"),
    ("bias", "add", "hardsigmoid"),
)
_BYTES: tuple[tuple[str, ...], ...] = (
    (), ("bias",), ("bias", "relu"), ("bias", "add", "relu"), ("bias", "relu6"), ("bias", "leaky_relu0.1"),
    ("relu", "add"), ("bias", "hardswish"), ("bias", "add"), ("bias", "hardswish", "add"),
)  # fmt: skip
_HALF = (
    Dtypes.of("f16"),
    Dtypes("f16", "f16", "f16", "f16"),
    Dtypes.of("bf16"),
    Dtypes("bf16", "f32", "f32", "f32"),
)


@dataclass(frozen=True)
class Case:
    """Stored arrays (rounded to their element types) of one problem. `pick` selects among a method's
    configurations."""

    kind: str
    seed: int
    conv: Conv
    exact: bool
    weight: Array
    x: Array
    bias: Array | None
    residual: Array | None
    pick: float
    border: tuple[int, int, int, int]
    how: Requantize | None = None

    def numbers(self) -> tuple[F64, F64, F64 | None, F64 | None]:
        """x, weight, bias, residual as float64."""
        d = self.conv.dtypes
        bias = None if self.bias is None else self.bias.astype(np.float64)
        residual = None if self.residual is None else to_float64(self.residual, d.output)
        return to_float64(self.x, d.input), to_float64(self.weight, d.weight), bias, residual


def case(kind: str, seed: int, families: int = 0) -> Case:
    """`families`: kernel, stride, dilation, epilogue and element types come from so many drawings, for
    methods whose code depends on them: LLVM would take most of the time. Everything else differs from case to
    case; another run has other families."""
    rng = np.random.default_rng([KINDS.index(kind), seed])
    edge, half = kind.endswith("edges"), kind.startswith("half")
    family = seed // APART * families + seed % APART % (EDGE_FAMILIES if edge else max(1, families))
    few = np.random.default_rng([KINDS.index(kind), family]) if families else rng
    if edge:
        conv, density, empty = _edge(seed % len(edges()))
    else:
        conv, density, empty = (
            _shape(kind, rng, few),
            float(rng.choice([0.05, 0.1, 0.3, 0.6])),
            bool(rng.random() < 0.05),
        )
    if kind in DEPTHWISE:
        conv = replace(conv, c=max(conv.c, conv.k), k=max(conv.c, conv.k), groups=max(conv.c, conv.k))
    if kind in (*BYTES, *DEPTHWISE):
        return _in_bytes(kind, seed, conv, density, empty, rng, few)
    exact = kind == "exact" or ((edge or kind in ("half", "idle")) and seed % 2 == 0)
    menu = _EXACT if exact else _REAL
    conv = replace(conv, epilogue=menu[few.integers(len(menu))])
    if half:
        conv = replace(conv, dtypes=_HALF[seed % (EDGE_FAMILIES if edge else len(_HALF)) % len(_HALF)])
    weight, x, bias, residual = (_numbers(rng, shape, exact, conv) for shape in _shapes(conv))
    kept = rng.random(conv.weight_shape) < density
    if seed % 3 == 2:
        kept = _in_tiles(np.random.default_rng([len(KINDS), KINDS.index(kind), seed]), conv, density)
    if empty:
        kept &= (rng.random(conv.k) < 0.5)[:, None, None, None]
    weight *= kept
    if kind.startswith("idle"):
        _empty(rng, x, ZEROS[seed % len(ZEROS)])
    if kind.endswith("special"):
        _poison(rng, x, half)
    d = conv.dtypes
    strided = np.repeat(x, 2, axis=3)[..., ::2] if edge and seed % 3 == 0 else x
    border = tuple(int(v) for v in rng.choice([0, 0, 1, 2], 4)) if rng.random() < 0.5 else (0, 0, 0, 0)
    return Case(
        kind, seed, conv, exact, from_float64(weight, d.weight), from_float64(strided, d.input),
        bias.astype(np.float32) if "bias" in conv.epilogue else None,
        from_float64(residual, d.output) if "add" in conv.epilogue else None,
        float(rng.random()), (border[0], border[1], border[2], border[3]),
    )  # fmt: skip


def _in_bytes(
    kind: str,
    seed: int,
    conv: Conv,
    density: float,
    empty: bool,
    rng: np.random.Generator,
    few: np.random.Generator,
) -> Case:
    """Bytes of every value, weights to -128, zero points and limits anywhere; masks of single weights, or
    blocks of four channels."""
    conv = replace(conv, dtypes=INT8, epilogue=_BYTES[few.integers(len(_BYTES))])
    low, high = (-128, 128) if kind.endswith("edges") or seed % 2 else (-8, 9)
    weight = rng.integers(low, high, conv.weight_shape)
    kept = rng.random(conv.weight_shape) < density
    if seed % 3:
        kept = np.repeat(kept[:, ::4], 4, axis=1)[:, : conv.c // conv.groups]
    if empty:
        kept &= (rng.random(conv.k) < 0.5)[:, None, None, None]
    x, residual = (rng.integers(0, 256, shape).astype(np.uint8) for shape in (conv.x_shape, conv.y_shape))
    if seed % 4 == 3:
        x[...] = rng.choice([0, 255], x.shape)
    spread = float(np.sqrt(np.prod(conv.weight_shape[1:])) * 100 * (high - low) / 4)
    low_limit, high_limit = sorted(int(v) for v in rng.integers(0, 256, 2)) if seed % 5 == 0 else (0, 255)
    zeros = [int(v) for v in rng.choice([0, 1, 77, 128, 254, 255], 2)]
    how = Requantize(
        rng.integers(-(2**14), 2**14, conv.k).astype(np.int32),
        (rng.random(conv.k) * 200 / spread * rng.choice([0.01, 1, 100])).astype(np.float32),
        x_zero=zeros[0],
        zero=zeros[1],
        low=low_limit,
        high=high_limit,
        beside=float(np.float32(rng.random() * 2)),
        beside_zero=int(rng.integers(256)),
        unit=float(np.float32(rng.random() * 0.1 + 1e-3)),
    )
    border = tuple(int(v) for v in rng.choice([0, 0, 1, 2], 4))
    return Case(
        kind, seed, conv, True, (weight * kept).astype(np.int8), x, how.words,
        residual if "add" in conv.epilogue else None, float(rng.random()),
        (border[0], border[1], border[2], border[3]), how,
    )  # fmt: skip


def _in_tiles(rng: np.random.Generator, conv: Conv, density: float) -> NDArray[np.bool_]:
    """What tile-wise pruning keeps: the same positions for a few filters, now and then another or one
    less."""
    tile = int(rng.choice([2, 8, 32]))
    kept = np.repeat(rng.random((-(-conv.k // tile), *conv.weight_shape[1:])) < density, tile, axis=0)[
        : conv.k
    ]
    return np.asarray(kept ^ (rng.random(conv.weight_shape) < rng.choice([0, 0.02])))


def _empty(rng: np.random.Generator, x: F64, share: float) -> None:
    """Zeros as ReLU leaves them, half of them negative: single ones, runs within rows, or whole channels."""
    n, c, h, w = x.shape
    many = (1, 16, w)[int(rng.integers(3))]  # neighbours that go together; whole rows: the whole channel
    gone = rng.random((n, c, 1 if many == w else h, -(-w // many))) < share
    gone = np.broadcast_to(np.repeat(gone, many, axis=3)[..., :w], x.shape)
    x[gone] = np.where(rng.random(int(gone.sum())) < 0.5, 0.0, -0.0)


def _shapes(conv: Conv) -> tuple[tuple[int, ...], ...]:
    return conv.weight_shape, conv.x_shape, (conv.k,), conv.y_shape


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], exact: bool, conv: Conv) -> F64:
    half = conv.dtypes != Dtypes()
    # every sum fits the significand: 24 bits, or 11 (fp16); what is stored in 8 (bf16) is the rounded sum
    if exact:
        most = 1 if half else 32
        return rng.integers(-most, most + 1, shape).astype(np.float64)
    wide = np.exp2(rng.integers(-3, 3, shape) if half else rng.integers(-12, 12, shape))
    return rng.standard_normal(shape) * wide


def _shape(kind: str, rng: np.random.Generator, few: np.random.Generator) -> Conv:
    """A random small convolution that fits; `few` draws what a family shares."""
    state = few.bit_generator.state if few is not rng else None
    while True:
        if state is not None:
            few.bit_generator.state = state  # a case that does not fit changes its sizes, not its family
        groups = int(rng.choice([1, 1, 1, 2, 3]))
        c, k = (groups * int(rng.integers(1, 20)) for _ in range(2))
        if rng.random() < 0.08:
            groups = k = c
        r, s = (int(v) for v in few.choice([1, 1, 2, 3, 3, 5], 2))
        if few.random() < 0.3:
            r = s = 1
        stride, dilation = (tuple(int(v) for v in few.choice([1, 1, 1, 2, 3], 2)) for _ in range(2))
        pad = tuple(int(v) for v in rng.choice([0, 0, 1, 1, 2, 3], 4))
        if few.random() < 0.4:
            stride, pad = (1, 1), (r // 2, s // 2, r // 2, s // 2)
        h, w = (int(v) for v in rng.integers(1, 24, 2))
        if few.random() < 0.1:  # a 1-D convolution
            h = r = 1
            pad = (0, pad[1], 0, pad[3])
        n = int(rng.choice([1, 1, 1, 2, 3]))
        if n * k * (c // groups) * r * s * h * w > 300_000 or h * w * c > 20_000:
            continue
        if h + pad[0] + pad[2] > dilation[0] * (r - 1) and w + pad[1] + pad[3] > dilation[1] * (s - 1):
            return Conv(c, k, r, s, (stride[0], stride[1]), (pad[0], pad[1], pad[2], pad[3]),
                        (dilation[0], dilation[1]), groups, n=n, h=h, w=w)  # fmt: skip


_Q = tuple(range(1, 17))  # output widths: every q mod 16
_C = tuple(range(1, 66))
_K = (1, 2, 3, 16, 17, 33)
_KERNEL = ((1, 1), (3, 3), (1, 5), (2, 3))
_PAD = ((0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 1, 3), (0, 3, 0, 0))
_STRIDE = ((1, 1), (2, 2), (1, 3))
_DILATION = ((1, 1), (2, 2), (3, 1))
_GROUPS = ("one", "depthwise", "two")
_DENSITY = (0.0, 0.1, 1.0, 0.3)  # the last one with empty filters
_N = (0, 1, 2)
_P = (1, 2, 5)
_AXES = (_Q, _C, _K, _KERNEL, _PAD, _STRIDE, _DILATION, _GROUPS, _DENSITY, _N, _P)


@cache
def edges() -> tuple[tuple[int, ...], ...]:
    """Rows of indices into the axes above, together holding every pair."""
    return tuple(cover(tuple(len(axis) for axis in _AXES)))


def _edge(index: int) -> tuple[Conv, float, bool]:
    """The Conv of one row; the input is as large as the wanted output needs, at least one pixel."""
    q, c, k, kernel, pad, stride, dilation, groups, density, n, p = edges()[index]
    (r, s), (u, v), (dh, dw), (top, left, bottom, right) = (
        _KERNEL[kernel],
        _STRIDE[stride],
        _DILATION[dilation],
        _PAD[pad],
    )
    channels, filters = _C[c], _K[k]
    if _GROUPS[groups] == "two":
        channels, filters = channels + channels % 2, filters + filters % 2
    if _GROUPS[groups] == "depthwise":
        filters = channels
    count = {"one": 1, "two": 2, "depthwise": channels}[_GROUPS[groups]]
    h = max(1, (_P[p] - 1) * u + dh * (r - 1) + 1 - top - bottom)
    w = max(1, (_Q[q] - 1) * v + dw * (s - 1) + 1 - left - right)
    conv = Conv(channels, filters, r, s, (u, v), _PAD[pad], (dh, dw), count, n=_N[n], h=h, w=w)
    return conv, _DENSITY[density], density == len(_DENSITY) - 1


def _poison(rng: np.random.Generator, x: F64, half: bool) -> None:
    """Put the numbers that break kernels into about one in thirty elements."""
    awkward = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, -1e-42, 3.4028234e38, -3.4028234e38])
    if half:
        awkward = np.append(awkward, [6e-8, -3e-6, 65504.0, -65504.0])  # the same in fp16
    hit = rng.random(x.shape) < 0.03
    x[hit] = rng.choice(awkward, int(hit.sum()))
