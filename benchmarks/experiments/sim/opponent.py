"""The fair opponent of sparse kernels: a dense convolution with its patch of x and its filters in registers
(codegen/gpu/dense.cu)."""

from __future__ import annotations

import numpy as np

from aerogel.codegen.gpu import staging
from aerogel.codegen.gpu.launch import Code, Launch, Number
from aerogel.ir import Array, Conv, ceil_div, round_up


def opponent(conv: Conv, weight: Array) -> Launch:
    """Four by four outputs and two filters a thread; where there is one tap, two by four and four channels at
    once."""
    if conv.groups > 1:
        raise SystemExit("the dense opponent takes no groups")
    alone, wide = conv.r * conv.s == 1, 4 if conv.c % 4 == 0 else 1
    tile_p, tile_q, filters = 2 if alone else 4, 4, 2 if conv.k > staging.LANES else 1
    point = {"warps_p": 2, "warps_q": 2, "wide": wide, "channels": 64}
    outputs = 2 * tile_p, 2 * tile_q
    tile = staging.reach(outputs, conv)
    while point["channels"] > 4 and (
        4 * tile[0] * tile[1] * staging.pitch(point) > staging.STATIC_BYTES
        or point["channels"] >= 2 * conv.c
        or not staging.fits(point)
    ):
        point["channels"] //= 2
    lanes, stages = staging.LANES * filters, ceil_div(conv.c, point["channels"])
    rounded = round_up(conv.k, lanes)
    laid = np.zeros((stages * point["channels"], conv.r, conv.s, rounded), np.float32)
    laid[: conv.c, :, :, : conv.k] = weight.transpose(1, 2, 3, 0)
    macros = staging.macros(point, conv, tile)
    macros |= {"TILE_P": tile_p, "TILE_Q": tile_q, "FILTERS": filters, "DEPTH": wide if alone else 1}
    macros |= {"TAPS_R": conv.r, "TAPS_S": conv.s, "ROUNDED": rounded}
    macros |= {"DILATION_P": conv.dilation[0], "DILATION_Q": conv.dilation[1]}
    files = ("element.h", "stage.h", "dense.cu")
    code = Code("dense", (staging.LANES, 4), tuple(macros.items()), conv.steps, files)
    (p, q), (down, across) = conv.out, outputs
    sizes = conv.c, *conv.size, conv.k, p, q, conv.pad[0], conv.pad[1], ceil_div(q, across), stages
    numbers: tuple[Number, ...] = np.float32(conv.parameter), *(np.int32(n) for n in sizes)
    grid = ceil_div(q, across) * ceil_div(p, down), rounded // lanes, conv.batch
    return Launch(code, grid, ("x", "y", "bias", "residual", laid, *numbers))
