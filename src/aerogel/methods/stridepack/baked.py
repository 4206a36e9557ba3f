"""Weights in the code: every nonzero is one FMA with the weight as an immediate operand, and no instruction
fetches a weight.

A thread is a pixel and holds the sums of 32 filters; four channels of x are loaded from the staged tile
(stage.h) at once and meet every filter that wants them. Each unit, (group of filters, stage of channels), is
a branch of its own, so code grows with nonzeros: it must find room in the instruction
cache. In a cycle simulator whose cache never misses this form was the fastest on every layer,
once x and y were moved 16 bytes at a time; with a cache that is cold `stridepack` was. A GPU lies between,
and its own timing decides.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from aerogel.codegen.gpu import cost
from aerogel.ir import Conv, Stats, ceil_div
from aerogel.methods.stridepack.spf import LANES

ACROSS, DOWN = 8, 4
"""Pixels of a warp."""
CHANNELS = 32
"""Of a stage."""


def work(conv: Conv, wide: int, stats: Stats, blocks: int, warps: int, shared_bytes: int) -> cost.Work:
    """An FMA for each nonzero, and loads of shared memory for the positions that any of 32 filters keeps."""
    groups = conv.groups * ceil_div(conv.k // conv.groups, LANES)
    tiles, stages = blocks * warps / groups, ceil_div(conv.c // conv.groups, CHANNELS)
    macs, seen = stats.nonzeros * tiles, _seen(conv, stats) * tiles
    staged_bytes = blocks * stages * shared_bytes
    copied = staged_bytes / (4 * wide) / LANES
    # every lane's store is in another line
    outputs, lines = blocks * warps * LANES, LANES / _stored(conv)
    return cost.Work(
        blocks,
        warps,
        macs + seen / wide + cost.STAGING * copied + (cost.EPILOGUE + lines) * outputs,
        f32=macs,
        wavefronts=seen + staged_bytes / 128 + outputs * lines,
        l2_bytes=staged_bytes,
        dram_bytes=cost.maps_bytes(conv),
        registers=96,
        shared_bytes=shared_bytes,
        trips=1,
        stages=stages,
        copies=copied / max(1, blocks) / warps,
    )


def _seen(conv: Conv, stats: Stats) -> float:
    """Positions that any of a group's filters keeps, of all groups."""
    kept = (1 - stats.sparsity**LANES) * conv.c // conv.groups * conv.r * conv.s
    return kept * conv.groups * ceil_div(conv.k // conv.groups, LANES)


def _stored(conv: Conv) -> int:
    """Filters that are stored at once."""
    return 4 if conv.k // conv.groups % 4 == 0 else 1


def code_bytes(conv: Conv, wide: int, stats: Stats) -> float:
    """Machine code of all groups: 16 bytes an instruction."""
    return 16 * (stats.nonzeros + _seen(conv, stats) / wide)


def macros(conv: Conv) -> dict[str, int | str]:
    return {"STORED_AT_ONCE": _stored(conv)}


def source(units: Iterable[Iterable[tuple[int, int, float]]], wide: int) -> str:
    """The kernel. For each unit its nonzeros: place in the tile, which of the 32 filters, value. Filters keep
    their order. `wide` channels are loaded at once."""
    cases = "".join(
        f"        case {number}:\n{_unit(own, wide)}            break;\n" for number, own in enumerate(units)
    )
    clear = " ".join(f"float a{i} = 0.0f;" for i in range(LANES))
    store = "".join(f"    STORE_FOUR({i}, a{i}, a{i + 1}, a{i + 2}, a{i + 3})\n" for i in range(0, LANES, 4))
    return _KERNEL.replace("@CLEAR", clear).replace("@CASES", cases).replace("@STORE", store)


def _unit(nonzeros: Iterable[tuple[int, int, float]], wide: int) -> str:
    lines, last = [], -1
    for place, lane, value in sorted(nonzeros, key=lambda one: one[:2]):
        if place // wide != last:
            last = place // wide
            lines.append(f"            v = AT({last * wide});\n")
        one = f"v.{'xyzw'[place % 4]}" if wide == 4 else "v"
        lines.append(f"            a{lane} = FMA({one}, {_literal(value)}, a{lane});\n")
    return "".join(lines)


def _literal(value: float) -> str:
    """The same float for every compiler."""
    if not np.isfinite(value):
        return f"AS_FLOAT({int(np.float32(value).view(np.int32))})"
    text = f"{value:.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


_KERNEL = """
#undef AT
#undef STORE_FOUR
#if WIDE == 4
#define SEEN float4
#define AT(place) *(LOCAL const float4 *)(from + (place))
#else
#define SEEN float
#define AT(place) from[place]
#endif
#define FINISH_LANE(lane, sum)                                         \\
    if (lane < count) {                                                \\
        int own = first + lane;                                        \\
        FINISH(sum, own, at + own);                                    \\
    }
#define STORE_LANE(lane, sum)                                          \\
    if (lane < count) y[at + first + lane] = sum;
#define STORE_FOUR(lane, a, b, c, d)                                   \\
    FINISH_LANE(lane, a)                                               \\
    FINISH_LANE(lane + 1, b)                                           \\
    FINISH_LANE(lane + 2, c)                                           \\
    FINISH_LANE(lane + 3, d)                                           \\
    if (STORED_AT_ONCE == 4) {                                         \\
        float4 four;                                                   \\
        four.x = a, four.y = b, four.z = c, four.w = d;                \\
        if (lane < count) *(GLOBAL float4 *)(y + at + first + lane) = four; \\
    } else {                                                           \\
        STORE_LANE(lane, a)                                            \\
        STORE_LANE(lane + 1, b)                                        \\
        STORE_LANE(lane + 2, c)                                        \\
        STORE_LANE(lane + 3, d)                                        \\
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
    SEEN v;
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
    LONG at = (((LONG)BLOCK_Z * rows + p) * columns + q) * filters;
    int group_filters = filters / (channels / group_channels), done = BLOCK_Y % groups_of_32 * 32;
    int first = BLOCK_Y / groups_of_32 * group_filters + done, count = LEAST(32, group_filters - done);
@STORE}
"""
