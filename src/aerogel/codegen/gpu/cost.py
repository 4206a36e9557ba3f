"""What a kernel costs on a layer, counted, and from that a modelled time. It orders candidates before they
are timed and fills the modelled table of docs/gpu.md; it decides nothing, and no figure of it is a
measurement.

A method counts its Work: warp instructions (its hot loop's, as they stand in the machine code, times how
often it runs), what the pipes, shared memory and caches are asked for, and bytes from L2 and DRAM. A kernel
then takes as long as the busiest of them:

    cycles of a multiprocessor = its blocks x the largest of
        instructions / issued a cycle      at most 4; a warp issues one every 4 cycles when it is alone
                                           (dependent instructions)
        multiplications / lanes            f32: 64 on an A100, 128 on an H100; f16x2: 128 words on both
        products on tensor cores / rate    dense rates of the data sheets
        wavefronts / 1                     of shared memory and of loads through L1, 128 bytes each
    and not less than L2's and DRAM's bytes take, nor than LAUNCH_US for each launch

Assumed: perfect overlap of these five, no cache misses beyond the stated bytes, DRAM read once for every
tensor, boost clock, blocks spread evenly (the last round of blocks is counted whole). Dense is modelled by
the same rules with the best of a few tile sizes and instructions for nothing but multiplying, which flatters
it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from aerogel.ir import ITEM_BYTES, Conv, Gpu, ceil_div

LAUNCH_US = 2.0
"""From one kernel of a CUDA graph to the next."""
ALONE = 0.25
"""Instructions a cycle that one warp issues."""
L1_BYTES = 100_000
"""Of a multiprocessor's first cache that hold x, beside shared memory."""


@dataclass(frozen=True)
class Machine:
    """A GPU's data sheet: multiprocessors, GHz (boost); of one multiprocessor f32 and f16x2 warps of FMAs a
    cycle, FMAs of tensor cores a cycle in f16 and tf32; GB/s of L2 (as microbenchmarks report) and of DRAM;
    shared memory."""

    processors: int
    ghz: float
    f32: float
    halves: float
    tensor_f16: int
    tensor_tf32: int
    l2_gbs: float
    dram_gbs: float
    shared_bytes: int


A100 = Machine(108, 1.41, 2, 4, 1024, 512, 3800, 1555, 167936)
H100 = Machine(132, 1.83, 4, 4, 2048, 1024, 5600, 3350, 233472)
"""A100 SXM with 40 GB, H100 SXM."""


def machine(target: Gpu) -> Machine:
    """The data sheet nearest to a device."""
    return H100 if target.arch in ("sm_90", "sm_100", "sm_103", "sm_120") else A100


@dataclass(frozen=True)
class Loop:
    """Warp instructions of one turn of a hot loop, by kind."""

    mac: float = 0
    matrix: float = 0
    shared: float = 0
    loads: float = 0
    other: float = 0

    @property
    def all(self) -> float:
        return self.mac + self.matrix + self.shared + self.loads + self.other


@dataclass(frozen=True)
class Work:
    """Of one layer: totals over all blocks. `room` is how many blocks fit on a multiprocessor."""

    blocks: int
    warps: int
    instructions: float
    f32: float = 0
    halves: float = 0
    tensor: float = 0
    wavefronts: float = 0
    l2_bytes: float = 0
    dram_bytes: float = 0
    launches: int = 1
    room: int = 4


def microseconds(work: Work, on: Machine, tf32: bool = False) -> float:
    """Modelled, by the rules above."""
    mine = max(1, ceil_div(work.blocks, on.processors))
    issued = min(4.0, ALONE * work.warps * min(mine, work.room))
    tensor = on.tensor_tf32 if tf32 else on.tensor_f16
    busiest = max(
        work.instructions / issued,
        work.f32 / on.f32,
        work.halves / on.halves,
        work.tensor / tensor,
        work.wavefronts,
    )
    cycles = mine * busiest / max(1, work.blocks)
    bytes_us = max(work.l2_bytes / on.l2_gbs, work.dram_bytes / on.dram_gbs) / 1e3
    return LAUNCH_US * work.launches + max(cycles / on.ghz / 1e3, bytes_us)


def sized(conv: Conv) -> Conv:
    """A layer as a problem: with an image of the usual size where it has none yet."""
    return (
        conv
        if conv.n is not None
        else conv.at(1, 56 + conv.r * conv.dilation[0], 56 + conv.s * conv.dilation[1])
    )


def maps_bytes(conv: Conv) -> int:
    """x and y once."""
    (h, w), (p, q), d = conv.size, conv.out, conv.dtypes
    return conv.batch * (conv.c * h * w * ITEM_BYTES[d.input] + conv.k * p * q * ITEM_BYTES[d.output])


def together(*parts: Work) -> Work:
    """Launches one after another; the last one's blocks."""
    names = ("instructions", "f32", "halves", "tensor", "wavefronts", "l2_bytes", "dram_bytes", "launches")
    last = parts[-1]
    return Work(
        last.blocks, last.warps, room=last.room, **{n: sum(getattr(p, n) for p in parts) for n in names}
    )


def dense(conv: Conv, on: Machine, precision: str) -> float:
    """Microseconds of a dense implicit GEMM, `precision` f32, tf32 or f16: the best of a few tiles, each also
    with its depth split."""
    pixels, depth, per = (
        conv.batch * conv.out[0] * conv.out[1],
        conv.c // conv.groups * conv.r * conv.s,
        conv.k // conv.groups,
    )
    item, taps = (
        2 if precision == "f16" else 4,
        conv.r * conv.s / min(conv.stride[0] * conv.stride[1], conv.r * conv.s),
    )
    weights, maps = conv.groups * depth * per * item, maps_bytes(conv) * item / ITEM_BYTES[conv.dtypes.input]
    each, found = (
        {"f32": 32, "tf32": 16 * 8 * 8, "f16": 16 * 8 * 16}[precision],
        [],
    )  # FMAs of one instruction
    for (m, n), split in product(((128, 128), (128, 64), (64, 64), (64, 32), (32, 32)), (1, 2, 4, 8)):
        blocks = ceil_div(pixels, m) * ceil_div(per, n) * conv.groups * split
        products = float(blocks) * m * n * depth / split
        again = 8.0 * pixels * conv.k * split if split > 1 else 0.0  # sums are written and read once more
        own = Work(blocks, 4 if m * n <= 4096 else 8, (1.15 if precision == "f32" else 2.5) * products / each)
        own = replace(
            own, f32=products / 32 if precision == "f32" else 0, tensor=0 if precision == "f32" else products
        )
        own = replace(
            own, l2_bytes=blocks * depth / split * (m / taps + n) * item + again, dram_bytes=maps + weights
        )
        found.append(microseconds(replace(own, launches=1 if split == 1 else 2), on, precision == "tf32"))
    return min(found)
