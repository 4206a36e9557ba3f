"""Weights in the code: every nonzero is one FMA with the weight as an immediate operand, and no instruction
fetches a weight.

A thread is a pixel and holds the sums of 32 filters; a value of x is loaded from the staged tile (stage.h)
once and meets every filter that wants it. Each unit, (group of filters, stage of channels), is a branch of
its own, so code grows with nonzeros: for small, hot layers. A prototype of this form was the fastest on one
small layer in a cycle simulator (25,424 cycles; direct 30,584).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from aerogel.methods.stridepack.spf import LANES

ACROSS, DOWN = 8, 4
"""Pixels of a warp."""


def source(units: Iterable[Iterable[tuple[int, int, float]]]) -> str:
    """The kernel. For each unit its nonzeros: place in the tile, which of the 32 filters, value. Filters keep
    their order."""
    cases = "".join(
        f"        case {number}:\n{_unit(own)}            break;\n" for number, own in enumerate(units)
    )
    clear = " ".join(f"float a{i} = 0.0f;" for i in range(LANES))
    store = "".join(f"    STORE_LANE({i}, a{i})\n" for i in range(LANES))
    return _KERNEL.replace("@CLEAR", clear).replace("@CASES", cases).replace("@STORE", store)


def _unit(nonzeros: Iterable[tuple[int, int, float]]) -> str:
    lines, last = [], -1
    for place, lane, value in sorted(nonzeros, key=lambda one: one[:2]):
        if place != last:
            lines.append(f"            v = from[{place}];\n")
        lines.append(f"            a{lane} = FMA(v, {_literal(value)}, a{lane});\n")
        last = place
    return "".join(lines)


def _literal(value: float) -> str:
    """The same float for every compiler."""
    if not np.isfinite(value):
        return f"AS_FLOAT({int(np.float32(value).view(np.int32))})"
    text = f"{value:.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


_KERNEL = """
#define STORE_LANE(lane, sum)                                          \\
    {                                                                  \\
        if (lane < count) {                                            \\
            int own = first + lane;                                    \\
            float v = sum;                                             \\
            LONG at = pixel * filters + own;                           \\
            FINISH(v, own, at);                                        \\
            y[at] = v;                                                 \\
        }                                                              \\
    }

KERNEL(32, WARPS_P *WARPS_Q)
baked(GLOBAL const float *RESTRICT x, GLOBAL float *RESTRICT y, GLOBAL const float *RESTRICT bias,
      GLOBAL const float *RESTRICT residual, float parameter, int channels, int height, int width,
      int filters, int rows, int columns, int top, int left, int tiles_across, int stages,
      int group_channels, int groups_of_32)
{
    SHARED float tile[TILE_FLOATS];
    int thread = THREAD_Y * 32 + THREAD_X, tile_p = BLOCK_X / tiles_across,
        tile_q = BLOCK_X - tile_p * tiles_across;
    int row0 = tile_p * (WARPS_P * 4), column0 = tile_q * (WARPS_Q * 8);
    int begin = BLOCK_Y / groups_of_32 * group_channels, end = begin + group_channels;
    int own_p = THREAD_Y / WARPS_Q * 4 + THREAD_X / 8, own_q = THREAD_Y % WARPS_Q * 8 + THREAD_X % 8;
    LOCAL const float *from = tile + (own_p * STRIDE_P * TILE_W + own_q * STRIDE_Q) * PITCH;
    GLOBAL const float *image = x + (LONG)BLOCK_Z * height * width * channels;
    float v;
    @CLEAR
    for (int number = 0; number < stages; ++number) {
        BARRIER();
        stage(tile, image, thread, begin + number * TILE_C, end, channels, height, width,
              row0 * STRIDE_P - top, column0 * STRIDE_Q - left);
        COPIED();
        BARRIER();
        switch (BLOCK_Y * stages + number) {
@CASES        }
    }
    int p = row0 + own_p, q = column0 + own_q;
    if (p >= rows || q >= columns) return;
    LONG pixel = ((LONG)BLOCK_Z * rows + p) * columns + q;
    int group_filters = filters / (channels / group_channels), done = BLOCK_Y % groups_of_32 * 32;
    int first = BLOCK_Y / groups_of_32 * group_filters + done, count = LEAST(32, group_filters - done);
@STORE}
"""
