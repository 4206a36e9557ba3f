"""`blocks`: dense blocks of filters x positions first, then what is left of each filter as `rows` do it.

    for each unit of this thread        an image, a block of `vectors` vectors of pixels, a group of filters
      sums[k] = bias
      for each tile                     filters that keep the same positions (c, r, s)
        for each `width` of the pixels' vectors, for each stage of its positions
          stage[i] = x[block + offset[i]]                         gathered once for all filters of the tile
          for each panel of `filters` filters
            acc[f, v] = 0                                         filters x width sums in registers
            for each i:  acc[f, v] += value[i, f] * stage[i, v]
            sums[f] += acc[f]
      rows: nonzeros outside the tiles are added, then epilogue and y

A panel reads each gathered vector once for all its filters, where a row would read it once for each: loads no
longer bound it, FMAs do. The stage lies in L1 and is aligned whatever the taps; values stand in the order in
which they are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from aerogel.codegen.cpu import rows
from aerogel.codegen.cpu.emit import I64, PTR, Emit, Value
from aerogel.codegen.cpu.rows import Rows, RowsCode
from aerogel.ir import ITEM_BYTES

POINTERS = (*rows.POINTERS, "tile", "tile_row", "tile_panel", "tile_value", "tile_offset", "member", "panel")
SIZES = (
    *rows.SIZES,
    "stage_first",  # bytes from a thread's scratch to its stage: sums come first
    "stage_rows",  # gathered at once
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "blocks"


@dataclass(frozen=True)
class BlocksCode(RowsCode):
    """What the machine code depends on: `width` vectors of pixels and `filters` of a tile are summed at
    once."""

    width: int = 1
    filters: int = 1

    def __str__(self) -> str:
        return f"blocks-{super().__str__()}-{self.filters}x{self.width}"


def emit(code: BlocksCode) -> str:
    """LLVM IR of `void blocks(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name=str(code))
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    Blocks(code, e, e.slots(block, ARGUMENTS, POINTERS), module).units(thread, threads)
    e.b.ret_void()
    return str(module)


class Blocks(Rows):
    """The loops of one kernel."""

    code: BlocksCode

    def __init__(self, code: BlocksCode, e: Emit, a: dict[str, Value], module: Value) -> None:
        super().__init__(code, e, a, module)
        self.vector = self.lanes * ITEM_BYTES["f32"]  # bytes of one vector of sums, or of the stage
        self.value_bytes = ITEM_BYTES["f32"]  # of a panel's

    def opening(self, step: Value) -> Value:
        """Never: the tiles have left sums for every row."""
        return ir.IntType(1)(0)

    def filters(self, image: Value, block: Value, group: Value, scratch: Value) -> None:
        """The tiles of one group over one block of pixels, then its rows."""
        b, a, e = self.b, self.a, self.e
        x = e.at(
            a["x"], b.add(b.mul(image, a["x_image"]), b.mul(block, I64(self.code.vectors * self.x_step)))
        )
        low, high = e.integer(a["group"], group), e.integer(a["group"], b.add(group, I64(1)))

        def fresh(k: Value, _: list[Value]) -> None:
            self.keep(self.start(k, ir.IntType(1)(1), scratch), self.sums_of(scratch, b.sub(k, low)))

        e.loop(low, high, fresh)
        first, last = e.integer(a["tile"], group), e.integer(a["tile"], b.add(group, I64(1)))
        stage = e.at(scratch, a["stage_first"])

        def tile(t: Value, _: list[Value]) -> None:
            def part(i: Value, _: list[Value]) -> None:
                at = e.at(x, b.mul(i, I64(self.code.width * self.x_step)))
                self.tile(t, at, stage, e.at(scratch, b.mul(i, I64(self.code.width * self.vector))))

            e.loop(I64(0), I64(self.code.vectors // self.code.width), part)

        e.loop(first, last, tile)
        super().filters(image, block, group, scratch)

    def sums_of(self, scratch: Value, slot: Value) -> Value:
        return self.e.at(scratch, self.b.mul(slot, I64(self.code.vectors * self.vector)))

    def tile(self, t: Value, x: Value, stage: Value, sums: Value) -> None:
        """One tile over `width` vectors of pixels, a stage of its positions at a time."""
        b, a, e = self.b, self.a, self.e
        (row, end), (panel, after) = (
            (e.integer(a[name], t), e.integer(a[name], b.add(t, I64(1))))
            for name in ("tile_row", "tile_panel")
        )
        count, value = b.sub(end, row), e.integer(a["tile_value"], t)
        held = self.padded(count)
        stages = b.sdiv(b.add(count, b.sub(a["stage_rows"], I64(1))), a["stage_rows"])

        def staged(i: Value, _: list[Value]) -> None:
            done = b.mul(i, a["stage_rows"])
            rest = b.sub(count, done)
            here = b.select(b.icmp_signed("<", rest, a["stage_rows"]), rest, a["stage_rows"])
            self.gather(x, b.add(row, done), here, stage)

            def one(p: Value, _: list[Value]) -> None:
                first = b.add(value, b.add(b.mul(b.sub(p, panel), held), done))
                values = e.at(a["panel"], b.mul(first, I64(self.code.filters * self.value_bytes)))
                self.panel(values, here, stage, b.mul(p, I64(self.code.filters)), sums)

            e.loop(panel, after, one)

        e.loop(I64(0), stages, staged)

    def padded(self, count: Value) -> Value:
        """Positions of a panel as they are stored."""
        return count

    def gather(self, x: Value, first: Value, count: Value, stage: Value) -> None:
        """Bring the windows of `count` positions next to each other."""
        b, e, width, stored = self.b, self.e, self.code.width, self.code.dtypes.input

        def one(i: Value, _: list[Value]) -> None:
            window = e.at(x, e.integer(self.a["tile_offset"], b.add(first, i)))
            for v in range(width):
                found = e.vector(e.at(window, I64(v * self.x_step)), stored, "f32", self.lanes)
                place = b.add(b.mul(i, I64(width * self.vector)), I64(v * self.vector))
                e.store(found, e.at(stage, place), "f32")

        e.loop(I64(0), count, one)

    def panel(self, values: Value, count: Value, stage: Value, member: Value, sums: Value) -> None:
        """The inner loop: every value meets `width` vectors, every vector `filters` values."""
        b, e, width, filters = self.b, self.e, self.code.width, self.code.filters

        def one(i: Value, acc: list[Value]) -> list[Value]:
            place, own = (b.mul(i, I64(step)) for step in (width * self.vector, filters * 4))
            loads = [
                e.vector(e.at(stage, b.add(place, I64(v * self.vector))), "f32", "f32", self.lanes)
                for v in range(width)
            ]
            for f in range(filters):
                weight = e.splat(
                    e.scalar(e.at(values, b.add(own, I64(4 * f))), I64(0), "f32", "f32"), self.lanes
                )
                for v in range(width):
                    acc[f * width + v] = b.call(self.fma, [weight, loads[v], acc[f * width + v]])
            return acc

        _, acc = e.loop(I64(0), count, one, [self.nothing] * (filters * width))
        for f in range(filters):
            at = self.sums_of(sums, e.integer(self.a["member"], b.add(member, I64(f))))
            for v in range(width):
                place = e.at(at, I64(v * self.vector))
                e.store(b.fadd(e.vector(place, "f32", "f32", self.lanes), acc[f * width + v]), place, "f32")
