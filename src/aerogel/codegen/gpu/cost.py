"""What a kernel costs on a layer, counted, and from that a modelled time. It orders candidates before they
are timed and fills the modelled table of docs/gpu.md; it decides nothing, and no figure of it is a
measurement.

A method counts its Work: warp instructions (its hot loop's, as they stand in the machine code, times how
often it runs), what the pipes, shared memory and caches are asked for, bytes from L2 and DRAM, registers and
shared memory, and what one warp waits for. A multiprocessor holds as many blocks as those allow; it takes as
long as the busiest of

    instructions / SUSTAINED           what a multiprocessor issues a cycle in such kernels
    multiplications / lanes            f32: 64 on an A100, 128 on an H100; f16x2: 128 words on both
    products on tensor cores / rate    dense rates of the data sheets
    wavefronts / 1                     of shared memory and of loads through L1, 128 bytes each
    rounds of resident blocks x        latency: a warp's instructions depend on each other, and it waits for
        (a warp's instructions / ALONE     weights and for what is staged; where copies go through registers
         + round trips x LATENCY)          (before sm_80) it waits for each copy of its own

and not less than L2's and DRAM's bytes take, nor than a launch takes.

SUSTAINED, ALONE and LATENCY were fitted to 20 runs of these kernels on a cycle simulator (Volta, one
multiprocessor; benchmarks/results/gpu_simulated.json): each within 35 %. Nothing on an A100 or an H100
was simulated or measured: that they sustain as many instructions a cycle is assumed, and that DRAM is read
once for every tensor, boost clock, and blocks spread evenly (the last round is counted whole). Dense is an
implicit GEMM that reaches DENSE of the peak in the best of a few tile sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from aerogel.ir import ITEM_BYTES, Conv, Gpu, ceil_div

SUSTAINED = 1.36
"""Instructions a cycle of a multiprocessor, of 4 that it could issue."""
ALONE = 0.25
"""Instructions a cycle that one warp issues."""
LATENCY = 500
"""Cycles from a load of global memory to its use."""
DENSE = 0.75
"""Of the peak: what cuDNN reaches, and a plain kernel with its patch in registers in the simulator."""
STAGING, EPILOGUE = 14, 20
"""Warp instructions of one copy into shared memory, and of one output that is finished and stored."""
L1_BYTES = 100_000
"""Of a multiprocessor's first cache that hold x, beside shared memory."""
REGISTERS, RESIDENT = 65536, 32
"""Of a multiprocessor: registers, and blocks at once."""


@dataclass(frozen=True)
class Machine:
    """A GPU's data sheet: multiprocessors, GHz (boost); of one multiprocessor f32 and f16x2 warps of FMAs a
    cycle, FMAs of tensor cores a cycle in f16 and tf32; GB/s of L2 (as microbenchmarks report) and of DRAM;
    shared memory; whether copies into it pass no register; the instruction cache that schedulers share (as
    microbenchmarks report); from one kernel of a CUDA graph to the next."""

    processors: int
    ghz: float
    f32: float
    halves: float
    tensor_f16: int
    tensor_tf32: int
    l2_gbs: float
    dram_gbs: float
    shared_bytes: int
    asynchronous: bool = True
    code_bytes: int = 131072
    launch_us: float = 2.0


V100 = Machine(80, 1.53, 2, 2, 512, 64, 2150, 900, 98304, asynchronous=False)
A100 = Machine(108, 1.41, 2, 4, 1024, 512, 3800, 1555, 167936)
H100 = Machine(132, 1.83, 4, 4, 2048, 1024, 5600, 3350, 233472)
"""V100 SXM, A100 SXM with 40 GB, H100 SXM."""


def machine(target: Gpu) -> Machine:
    """The data sheet nearest to a device, with the device's own multiprocessors and shared memory."""
    sheet = A100
    if target.arch in ("sm_90", "sm_100", "sm_103", "sm_120"):
        sheet = H100
    if target.arch in ("sm_70", "sm_72", "sm_75"):
        sheet = V100 if target.arch != "sm_75" else replace(V100, code_bytes=47104)
    return replace(sheet, processors=target.processors, shared_bytes=target.shared_bytes)


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
    """Of one layer: totals over all blocks. `registers` of a thread and `shared_bytes` of a block say how
    many blocks fit on a multiprocessor. A warp waits `trips` times for global memory, and for what is staged
    `stages` times, or, where copies go through registers, `copies` times."""

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
    registers: int = 128
    shared_bytes: int = 0
    trips: float = 0
    stages: float = 0
    copies: float = 0


def resident(work: Work, on: Machine) -> int:
    """Blocks that a multiprocessor holds at once."""
    registers = REGISTERS // (work.registers * 32 * work.warps)
    shared = on.shared_bytes // (work.shared_bytes + 1024)
    return max(1, min(registers, shared, RESIDENT, 64 // work.warps))


def microseconds(work: Work, on: Machine, tf32: bool = False) -> float:
    """Modelled, by the rules above."""
    blocks, warps = max(1, work.blocks), max(1, work.blocks) * work.warps
    mine = ceil_div(blocks, on.processors)
    tensor = on.tensor_tf32 if tf32 else on.tensor_f16
    busiest = max(
        work.instructions / SUSTAINED,
        work.f32 / on.f32,
        work.halves / on.halves,
        work.tensor / tensor,
        work.wavefronts,
    )
    staged = min(work.stages, work.copies) if on.asynchronous else work.copies
    alone = work.instructions / warps / ALONE + (work.trips + staged) * LATENCY
    cycles = max(mine * busiest / blocks, ceil_div(mine, resident(work, on)) * alone)
    bytes_us = max(work.l2_bytes / on.l2_gbs, work.dram_bytes / on.dram_gbs) / 1e3
    return on.launch_us * work.launches + max(cycles / on.ghz / 1e3, bytes_us)


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
    return replace(parts[-1], **{n: sum(getattr(p, n) for p in parts) for n in names})


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
    found = list[float]()
    for (m, n), split in product(((128, 128), (128, 64), (64, 64), (64, 32), (32, 32)), (1, 2, 4, 8)):
        blocks = ceil_div(pixels, m) * ceil_div(per, n) * conv.groups * split
        products = float(blocks) * m * n * depth / split / DENSE
        again = 8.0 * pixels * conv.k * split if split > 1 else 0.0  # sums are written and read once more
        own = Work(
            blocks,
            4 if m * n <= 4096 else 8,
            0,
            f32=products / 32 if precision == "f32" else 0,
            tensor=0 if precision == "f32" else products,
            l2_bytes=blocks * depth / split * (m / taps + n) * item + again,
            dram_bytes=maps + weights,
            launches=1 if split == 1 else 2,
        )
        found.append(microseconds(own, on, precision == "tf32"))
    return min(found)
