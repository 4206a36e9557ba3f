"""`semistructured` on GPUs: values and indices for torch's own product (backends/gpu/twofour.py).

    value    [filters, channels / 2]    what is kept of every four, two each; zeros where there is less
    index    [filters, channels / 4]    where the two stood: the first in bits 0 and 1, the second in 2 and 3

Filters are filled up with zeros to a multiple of 32. Which places stand for zeros is as in torch's
conversion, so that the arrays can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aerogel.codegen.gpu.launch import HALVES, TorchLaunch
from aerogel.errors import InvalidFile
from aerogel.ir import NUMPY, Array, Config, Conv, Dtypes, Gpu, Packed, Pool, Stats, nonzero, round_up
from aerogel.methods.semistructured import NAME

VERSION = 1
FOUR, KEPT = 4, 2
FILTERS, CHANNELS = 32, 64
"""What torch's kernels take multiples of."""
TYPES = (*HALVES, Dtypes.of("bf16"))
_PLACES = np.array([14, 8, 9, 4, 14, 8, 9, 4, 14, 12, 13, 4, 14, 12, 13, 4], np.uint8)
"""The index of four weights by which of them are not zero, a bit each, the first in bit 0."""


def refuse(conv: Conv, target: Gpu, stats: Stats) -> str | None:
    if target.kind != "cuda" or not target.arch.startswith("sm_8"):
        return f"torch's kernels for two of four weights run on compute capability 8.x, not on {target.arch}"
    if conv.dtypes not in TYPES:
        return f"multiplies f16 or bf16, not {conv.dtypes}"
    if (conv.r, conv.s, conv.groups) != (1, 1, 1) or conv.stride != (1, 1) or any(conv.pad):
        return "is a product of matrices: 1x1 convolutions of stride 1 without padding or groups, and Linear"
    if stats.crowded:
        fours = conv.k * conv.c // FOUR
        return (
            f"{stats.crowded:,} of {fours:,} groups of four input channels keep more than two weights; "
            'prune(pattern="2:4") leaves two'
        )
    if conv.c % CHANNELS:
        return f"{conv.c} input channels; torch's kernels take multiples of {CHANNELS}"
    return "an empty batch has nothing to multiply" if conv.n == 0 else None


def configs(conv: Conv, target: Gpu, stats: Stats) -> Iterator[Config]:
    yield Config.make(NAME)


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    rows = np.zeros((round_up(conv.k, FILTERS), conv.c), weight.dtype)
    rows[: conv.k] = weight.reshape(conv.k, conv.c)
    fours = rows.reshape(len(rows), -1, FOUR)
    kept = nonzero(fours, conv.dtypes.weight)
    if (kept.sum(2) > KEPT).any():
        raise InvalidFile(f"a {NAME} weight with more than {KEPT} of {FOUR} channels")
    index = _PLACES[(kept << np.arange(FOUR)).sum(2)]
    value = np.take_along_axis(fours, _two(index), axis=2).reshape(len(rows), -1)
    return Packed(f"gpu-{NAME}", VERSION, {"value": np.ascontiguousarray(value), "index": index})


def _two(index: Array) -> Array:
    """Where the two of each four stand."""
    return np.stack([index & 3, index >> 2], axis=2).astype(np.int64)


def unpack(packed: Packed, conv: Conv) -> Array:
    check(packed, conv)
    value, index = packed.arrays["value"], packed.arrays["index"]
    fours = np.zeros((*index.shape, FOUR), value.dtype)
    np.put_along_axis(fours, _two(index), value.reshape(*index.shape, KEPT), axis=2)
    return fours.reshape(len(value), conv.c)[: conv.k].reshape(conv.weight_shape)


def check(packed: Packed, conv: Conv) -> None:
    """What the hardware relies on: two places of every four, the first before the second."""
    a = packed.arrays
    if (packed.format, packed.version) != (f"gpu-{NAME}", VERSION) or set(a) != {"value", "index"}:
        raise InvalidFile(f"not a {NAME} weight for GPUs")
    rows, good = round_up(conv.k, FILTERS), conv.c % CHANNELS == 0
    good = good and a["value"].shape == (rows, conv.c // KEPT) and a["index"].shape == (rows, conv.c // FOUR)
    good = good and a["value"].dtype == NUMPY[conv.dtypes.weight] and a["index"].dtype == np.uint8
    if not good or (a["index"] > 15).any() or (a["index"] & 3 >= a["index"] >> 2).any():
        raise InvalidFile(f"a {NAME} weight with filters or places that {conv} has not")


def metadata(index: Array) -> Array:
    """Indices as CUTLASS's kernels read them: four in a word of 16 bits; of every 32 rows those eight apart
    together, of every two by two words the off-diagonal ones exchanged, and two columns beside each other."""
    words = (index.astype(np.uint16).reshape(len(index), -1, 4) << np.arange(0, 16, 4).astype(np.uint16)).sum(
        2, dtype=np.uint16
    )
    row, column = np.indices(words.shape)
    row = row // 32 * 32 + row % 8 * 4 + row % 32 // 8
    exchanged = (row % 2 == 0) & (column % 2 == 1), (row % 2 == 1) & (column % 2 == 0)
    shift = exchanged[0].astype(np.int64) - exchanged[1]
    row, column = row + shift, column - shift
    laid = np.empty(words.size, np.uint16)
    laid[column // 2 * len(words) * 2 + row * 2 + column % 2] = words
    return laid.reshape(words.shape).view(np.int16)


def build(packed: Packed, conv: Conv, config: Config, pool: Pool | None = None) -> list[TorchLaunch]:
    check(packed, conv)
    return [TorchLaunch(conv, packed.arrays["value"], metadata(packed.arrays["index"]))] if conv.batch else []


def layout(config: Config) -> str:
    return "channels_last"


def takes_pool(conv: Conv, config: Config, pool: Pool) -> bool:
    return False
