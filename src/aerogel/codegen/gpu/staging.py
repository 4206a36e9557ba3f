"""The tile of x in shared memory that `stridepack` and `actsparse` stage (stage.h): how large it is, and its
macros.

A point is a configuration's options: `channels` of a stage, `wide` of them copied at once, `warps_p` x
`warps_q` of a block.
"""

from __future__ import annotations

from collections.abc import Mapping

from aerogel.codegen.gpu.launch import element
from aerogel.ir import Conv

LANES = 32
STATIC_BYTES = 48 * 1024
"""Shared memory that a kernel may have without asking for more."""

MOST_ELEMENTS = 2**30
"""Of one image: offsets within it are 32 bits, and reach some rows further."""


def elements(conv: Conv) -> int:
    """Of one image of x or of y, whichever has more."""
    (h, w), (p, q) = conv.size, conv.out
    return max(conv.c * h * w, conv.k * p * q)


def pitch(point: Mapping[str, int]) -> int:
    """Words of a pixel. Four more than channels: still whole copies of 16 bytes, and taps of one channel lie
    in different banks."""
    return point["channels"] + 4 if point["wide"] == 4 else point["channels"] + 1


def reach(outputs: tuple[int, int], conv: Conv) -> tuple[int, int]:
    """Rows and columns of x under so many rows and columns of y."""
    parts = zip(outputs, conv.stride, (conv.r, conv.s), conv.dilation, strict=True)
    down, across = ((n - 1) * stride + (size - 1) * dilation + 1 for n, stride, size, dilation in parts)
    return down, across


def fits(point: Mapping[str, int]) -> bool:
    """Whether a block has a thread for every part of the channels."""
    return point["channels"] // point["wide"] <= LANES * point["warps_p"] * point["warps_q"]


def macros(point: Mapping[str, int], conv: Conv, tile: tuple[int, int]) -> dict[str, int | str]:
    """What stage.h and element.h ask for; `tile` is its rows and columns."""
    found: dict[str, int | str] = {
        "TILE_C": point["channels"],
        "PITCH": pitch(point),
        "TILE_H": tile[0],
        "TILE_W": tile[1],
    }
    found |= {name.upper(): point[name] for name in ("warps_p", "warps_q", "wide")}
    found |= {
        "STRIDE_P": conv.stride[0],
        "STRIDE_Q": conv.stride[1],
        "THREADS": LANES * point["warps_p"] * point["warps_q"],
    }
    return found | {"COPY": "copy_bytes16" if point["wide"] == 4 else "copy_bytes4", **element(conv.dtypes)}
