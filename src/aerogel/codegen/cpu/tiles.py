"""`tiles`: sparse filters over a tile of x that is staged next to the core first.

    for each unit of this thread        an image, a block of `rows` x `columns` vectors of output pixels,
                                        a group of filters
      for each stage                    a block of channels
        tile[c, i, s] = `columns` vectors of input row i, column s + stride * lane
                                        once for all filters of the group
        for each filter of the group
          acc = bias or the partial sums so far
          for each nonzero n:  acc[j, t] += value[n] * tile[offset[n] + j * row step + t]
          acc -> partial sums, or epilogue and y after the last stage

The tile is in L1, every load from it is a whole aligned vector, and a stride is gone: lanes of the tile are
neighbouring output pixels. So x keeps its plain planes whatever the stride, and input and output may have
different pitches. An offset counts vectors of the tile and fits two bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from aerogel.codegen.cpu import abi
from aerogel.codegen.cpu.emit import I32, I64, PTR, STORED, VOID, Emit, Value
from aerogel.codegen.cpu.sums import Sums
from aerogel.ir import ITEM_BYTES, VECTOR_BYTES, Dtypes

POINTERS = (
    *abi.POINTERS,
    "group",
    "x_group",
    "filter",
    "start",
    "row",
    "offset",
    "value",
    "live",
    "stored",
    "parameter",
)
SIZES = (
    "images",
    "row_blocks",
    "column_blocks",
    "groups",
    "stages",
    "channels",
    "stage_channels",  # that a filter reads, and of one stage
    "x_first",  # bytes from x to the first tap of the first pixel
    # bytes from one image, channel, row of blocks and row of the tile to the next
    "x_image",
    "x_plane",
    "x_block",
    "x_row",
    "tile_rows",  # rows of x under a block
    "y_image",
    "y_plane",
    "y_row",
    "pixel_rows",  # rows of y
    "covered",
    "pitch",  # columns of y that vectors cover, and all, in elements
    "plane_elements",
    "front_elements",
    "tile_bytes",
    "scratch_thread",  # the tile, then the partial sums, of one thread
    "ahead",  # fetch the output lines of the filter this many rows ahead; 0: leave it to the cache
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "tiles"


@dataclass(frozen=True)
class TilesCode:
    """What the machine code depends on.

    `rows` x `columns` output vectors are summed at once. `taps` are the kernel's columns, `dilation` apart;
    `stride` is that of columns; `row_step` is how many rows of the tile lie between two rows of pixels.
    """

    isa: str
    dtypes: Dtypes
    rows: int
    columns: int
    taps: int
    stride: int
    dilation: int
    row_step: int
    epilogue: tuple[str, ...] = ()

    @property
    def vectors(self) -> int:
        return self.rows * self.columns

    @property
    def lanes(self) -> int:
        return VECTOR_BYTES[self.isa] // ITEM_BYTES[self.dtypes.accumulator]

    def __str__(self) -> str:
        d = self.dtypes
        kinds = f"{d.input}.{d.weight}.{d.accumulator}.{d.output}"
        shape = f"{self.rows}x{self.columns}-s{self.taps}u{self.stride}d{self.dilation}i{self.row_step}"
        return f"tiles-{self.isa}-{kinds}-{shape}" + "".join(f"+{e}" for e in self.epilogue)


def emit(code: TilesCode) -> str:
    """LLVM IR of `void tiles(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name=str(code))
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    _Tiles(code, e, e.slots(block, ARGUMENTS, POINTERS), module).units(thread, threads)
    e.b.ret_void()
    return str(module)


class _Tiles(Sums):
    """The loops of one kernel."""

    short = True

    def __init__(self, code: TilesCode, e: Emit, a: dict[str, Value], module: Value) -> None:
        super().__init__(code, e, a, module)
        self.code = code
        stored = ir.VectorType(STORED[code.dtypes.output], self.lanes)
        suffix = f"v{self.lanes}{_SUFFIX[code.dtypes.output]}.p0"
        flags = ir.VectorType(ir.IntType(1), self.lanes)
        self.put = ir.Function(
            module, ir.FunctionType(VOID, [stored, PTR, I32, flags]), f"llvm.masked.store.{suffix}"
        )
        row_step = code.row_step * code.taps * code.columns
        self.steps = [(j * row_step + t) * self.x_step for j in range(code.rows) for t in range(code.columns)]

    def units(self, thread: Value, threads: Value) -> None:
        """Images, blocks of pixels and groups of filters; the last block of a plane also writes its
        border."""
        b, a, e = self.b, self.a, self.e
        per_image = b.mul(b.mul(a["row_blocks"], a["column_blocks"]), a["groups"])
        units = b.mul(a["images"], per_image)
        tile = e.at(a["scratch"], b.mul(thread, a["scratch_thread"]))

        def unit(u: Value) -> None:
            image, inside = b.sdiv(u, per_image), b.srem(u, per_image)
            group, block = b.srem(inside, a["groups"]), b.sdiv(inside, a["groups"])
            down, across = b.sdiv(block, a["column_blocks"]), b.srem(block, a["column_blocks"])
            self.filters(image, down, across, group, tile)
            final = b.icmp_signed("==", b.add(block, I64(1)), b.mul(a["row_blocks"], a["column_blocks"]))
            e.when(final, lambda: self.border(image, group))

        e.share(units, thread, threads, unit)

    def filters(self, image: Value, down: Value, across: Value, group: Value, tile: Value) -> None:
        """All filters of one group over one block of pixels, a stage at a time."""
        b, a, e, code = self.b, self.a, self.e, self.code
        item = ITEM_BYTES[code.dtypes.input]
        x = b.add(b.add(a["x_first"], b.mul(image, a["x_image"])), b.mul(down, a["x_block"]))
        x = b.add(x, b.mul(e.integer(a["x_group"], group), a["x_plane"]))
        x = b.add(x, b.mul(across, I64(code.columns * self.lanes * code.stride * item)))
        y = b.add(b.mul(image, a["y_image"]), b.mul(across, I64(code.columns * self.y_step)))
        y = b.add(y, b.mul(b.mul(down, I64(code.rows)), a["y_row"]))
        low, high = e.integer(a["group"], group), e.integer(a["group"], b.add(group, I64(1)))
        count, partial_sums = b.sub(high, low), e.at(tile, a["tile_bytes"])
        left = b.sub(a["pixel_rows"], b.mul(down, I64(code.rows)))

        def stage(step: Value, _: list[Value]) -> None:
            done = b.mul(step, a["stage_channels"])
            rest = b.sub(a["channels"], done)
            channels = b.select(b.icmp_signed("<", rest, a["stage_channels"]), rest, a["stage_channels"])
            self.stage(e.at(a["x"], b.add(x, b.mul(done, a["x_plane"]))), tile, channels)
            opening = b.icmp_signed("==", step, I64(0))
            closing = b.icmp_signed("==", step, b.sub(a["stages"], I64(1)))
            begin = b.add(b.mul(low, a["stages"]), b.mul(step, count))

            def one(j: Value, _: list[Value]) -> None:
                place = e.integer(a["row"], j)
                k = e.integer(a["filter"], place)
                so_far = e.at(partial_sums, b.mul(b.sub(place, low), I64(code.vectors * self.lanes * 4)))
                e.when(b.and_(closing, b.icmp_signed("!=", a["ahead"], I64(0))), lambda: self.fetch(j, y))
                first, last = e.integer(a["start"], j), e.integer(a["start"], b.add(j, I64(1)))
                sums = self.row(k, opening, so_far, lambda acc: self.run(tile, first, last, acc, self.steps))
                plane = b.add(y, b.mul(k, a["y_plane"]))

                def finish() -> list[Value]:
                    self.finish(sums, plane, b.mul(across, I64(code.columns)), left)
                    return []

                def keep() -> list[Value]:
                    self.keep(sums, so_far)
                    return []

                e.choose(closing, finish, keep)

            e.loop(begin, b.add(begin, count), one)

        e.loop(I64(0), a["stages"], stage)

    def stage(self, source: Value, tile: Value, channels: Value) -> None:
        """Bring a block of channels into the tile, lanes `stride` apart in x becoming neighbours."""
        b, a, e, code = self.b, self.a, self.e, self.code
        stored, item = code.dtypes.input, ITEM_BYTES[code.dtypes.input]

        def channel(c: Value, _: list[Value]) -> None:
            plane = e.at(source, b.mul(c, a["x_plane"]))
            target = b.mul(c, a["tile_rows"])

            def line(i: Value, _: list[Value]) -> None:
                begin = e.at(plane, b.mul(i, a["x_row"]))
                out = e.at(tile, b.mul(b.add(target, i), I64(code.taps * code.columns * self.x_step)))
                for s in range(code.taps):
                    for t in range(code.columns):
                        at = e.at(begin, I64((t * self.lanes * code.stride + s * code.dilation) * item))
                        e.store(self.apart(at), e.at(out, I64((s * code.columns + t) * self.x_step)), stored)

            e.loop(I64(0), a["tile_rows"], line)

        e.loop(I64(0), channels, channel)

    def apart(self, at: Value) -> Value:
        """A vector of elements `stride` apart: one load, every other lane of two, or lane by lane."""
        b, e, stride, item = self.b, self.e, self.code.stride, ITEM_BYTES[self.code.dtypes.input]
        one = STORED[self.code.dtypes.input]
        typ = ir.VectorType(one, self.lanes)
        if stride == 1:
            return e.load(at, typ, item)
        if stride == 2:
            even = ir.Constant(ir.VectorType(I32, self.lanes), list(range(0, 2 * self.lanes, 2)))
            return b.shuffle_vector(
                e.load(at, typ, item), e.load(e.at(at, I64(self.lanes * item)), typ, item), even
            )
        value = ir.Constant(typ, ir.Undefined)
        for i in range(self.lanes):
            value = b.insert_element(value, e.load(e.at(at, I64(i * stride * item)), one, item), I32(i))
        return value

    def fetch(self, j: Value, y: Value) -> None:
        """Ask for the output lines of a coming row: planes lie far apart, so no hardware prefetcher sees them
        coming."""
        b, a, e = self.b, self.a, self.e
        later = e.integer(a["filter"], e.integer(a["row"], b.add(j, a["ahead"])))
        plane = e.at(a["y"], b.add(y, b.mul(later, a["y_plane"])))
        for row in range(self.code.rows):
            begin = e.at(plane, b.mul(I64(row), a["y_row"]))
            for i in range(0, self.code.columns * self.y_step, 64):
                b.call(self.prefetch, [e.at(begin, I64(i)), I32(1), I32(3), I32(1)])

    def finish(self, sums: list[Value], plane: Value, first: Value, left: Value) -> None:
        """Epilogue and store: lanes past the pitch are not written, rows past the last one neither."""
        b, e, a, code = self.b, self.e, self.a, self.code
        for j in range(code.rows):

            def line(j: int) -> None:
                for t in range(code.columns):
                    vector = b.add(first, I64(t))
                    place = b.add(plane, b.add(b.mul(I64(j), a["y_row"]), I64(t * self.y_step)))
                    value = self.finished(
                        sums[j * code.columns + t], place, e.lanes_of(a["live"], vector, self.lanes)
                    )
                    item = I32(ITEM_BYTES[code.dtypes.output])
                    b.call(
                        self.put,
                        [value, e.at(a["y"], place), item, e.lanes_of(a["stored"], vector, self.lanes)],
                    )

            e.when(b.icmp_signed("<", I64(j), left), partial(line, j))

    def border(self, image: Value, group: Value) -> None:
        """Zero what no block writes: columns past the vectors, the border after each plane, once the front of
        the buffer."""
        b, e, a = self.b, self.e, self.a
        typ = STORED[self.code.dtypes.output]
        item, nothing = ITEM_BYTES[self.code.dtypes.output], ir.Constant(typ, None)

        def zeros(base: Value, low: Value, high: Value) -> None:
            def one(i: Value, _: list[Value]) -> None:
                b.store(nothing, b.gep(e.at(a["y"], base), [i], source_etype=typ), align=item)

            e.loop(low, high, one)

        def plane(place: Value, _: list[Value]) -> None:
            base = b.add(b.mul(image, a["y_image"]), b.mul(e.integer(a["filter"], place), a["y_plane"]))
            e.loop(
                I64(0),
                a["pixel_rows"],
                lambda p, _: zeros(b.add(base, b.mul(p, a["y_row"])), a["covered"], a["pitch"]),
            )
            zeros(base, b.mul(a["pixel_rows"], a["pitch"]), a["plane_elements"])

        e.loop(e.integer(a["group"], group), e.integer(a["group"], b.add(group, I64(1))), plane)
        opening = b.icmp_signed("==", b.add(image, group), I64(0))
        e.when(opening, lambda: zeros(I64(0), b.neg(a["front_elements"]), I64(0)))


_SUFFIX = {"f32": "f32", "f16": "f16", "bf16": "i16"}
