"""`lists`: filters over the windows of x that are not zero (ECR: the feature map compressed once, consumed by
all filters).

    for each unit of this thread        an image, a block of `vectors` vectors of pixels, a group of filters
      for each tile                     filters that keep the same positions (c, r, s)
        for each `width` vectors of the block
          list = the tile's positions whose window of x is not all zeros
                                        compressed once for all filters of the tile
        for each panel of `filters` filters
          for each chunk of positions, for each list
            acc[f, v] = 0;  for each entry in the chunk:  acc[f, v] += value[entry, f] * x[window of entry, v]
            sums[f, v] += acc[f, v]
          y[f] = epilogue(bias + sums[f])

An entry names its window and its row of values; nothing of x is copied. The values of a chunk stay in L1 for
all lists of a block. `-0` is a zero; a NaN is not. Active windows are counted: the runtime sees when the data
is not what the layer was tuned for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce

from llvmlite import ir

from aerogel.codegen.cpu import rows
from aerogel.codegen.cpu.emit import F32, I32, I64, PTR, Emit, Value
from aerogel.codegen.cpu.rows import Rows, RowsCode

POINTERS = (
    *rows.POINTERS,
    "tile",
    "tile_row",
    "tile_panel",
    "tile_value",
    "entry",
    "member",
    "panel",
    "counts",
)
SIZES = (
    *rows.SIZES,
    "list_bytes",  # room for one list: where each chunk begins, then every position of the longest tile
    "list_first",  # bytes of the former
    "sums_first",  # bytes from a thread's scratch to the sums
    "chunk",  # positions of a chunk
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "lists"
COUNTERS = 64
"""Counts of windows, active and all, for each thread (by its number modulo this), a cache line apart."""


@dataclass(frozen=True)
class ListsCode(RowsCode):
    """What the machine code depends on: `width` vectors of pixels share a list, `filters` are summed at
    once."""

    width: int = 1
    filters: int = 1

    def __str__(self) -> str:
        return f"lists-{super().__str__()}-{self.filters}x{self.width}"


def emit(code: ListsCode) -> str:
    """LLVM IR of `void lists(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name=str(code))
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    made = _Lists(code, e, e.slots(block, ARGUMENTS, POINTERS), module)
    made.counter = e.b.gep(
        made.a["counts"], [e.b.mul(e.b.srem(thread, I64(COUNTERS)), I64(8))], source_etype=I64
    )
    made.units(thread, threads)
    e.b.ret_void()
    return str(module)


class _Lists(Rows):
    """The loops of one kernel."""

    code: ListsCode
    counter: Value

    def filters(self, image: Value, block: Value, group: Value, scratch: Value) -> None:
        b, a, e, parts = self.b, self.a, self.e, self.code.vectors // self.code.width
        vectors = I64(self.code.vectors)
        x = e.at(a["x"], b.add(b.mul(image, a["x_image"]), b.mul(block, b.mul(vectors, I64(self.x_step)))))
        shift = b.add(b.mul(image, a["y_image"]), b.mul(block, b.mul(vectors, I64(self.y_step))))
        first_vector = b.mul(block, vectors)

        def tile(t: Value, _: list[Value]) -> None:
            (row, end), (panel, after) = (
                (e.integer(a[name], t), e.integer(a[name], b.add(t, I64(1))))
                for name in ("tile_row", "tile_panel")
            )
            value = e.integer(a["tile_value"], t)

            chunks = b.sdiv(b.add(b.sub(end, row), b.sub(a["chunk"], I64(1))), a["chunk"])

            def one(p: Value, _: list[Value]) -> None:
                first = b.add(value, b.mul(b.sub(p, panel), b.sub(end, row)))
                values = e.at(a["panel"], b.mul(first, I64(self.code.filters * 4)))

                def chunk(c: Value, _: list[Value]) -> None:
                    def part(i: Value, _: list[Value]) -> None:
                        at = e.at(x, b.mul(i, I64(self.code.width * self.x_step)))
                        self.panel(
                            c, values, at, e.at(scratch, b.mul(i, a["list_bytes"])), self.sums_of(scratch, i)
                        )

                    e.loop(I64(0), I64(parts), part)

                def finish(i: Value, _: list[Value]) -> None:
                    own = b.mul(i, I64(self.code.width))
                    place, first = b.add(shift, b.mul(own, I64(self.y_step))), b.add(first_vector, own)
                    sums = self.sums_of(scratch, i)

                    def store(f: Value, _: list[Value]) -> None:
                        k = e.integer(a["member"], b.add(b.mul(p, I64(self.code.filters)), f))
                        e.when(b.icmp_signed(">=", k, I64(0)), lambda: self.filter(k, f, sums, place, first))

                    e.loop(I64(0), I64(self.code.filters), store)

                e.loop(I64(0), chunks, chunk)
                e.loop(I64(0), I64(parts), finish)

            self.compress(x, row, end, [e.at(scratch, b.mul(I64(i), a["list_bytes"])) for i in range(parts)])
            e.loop(panel, after, one)

        e.loop(e.integer(a["tile"], group), e.integer(a["tile"], b.add(group, I64(1))), tile)

    def sums_of(self, scratch: Value, part: Value) -> Value:
        one = self.code.filters * self.code.width * self.lanes * 4
        return self.e.at(scratch, self.b.add(self.a["sums_first"], self.b.mul(part, I64(one))))

    def compress(self, x: Value, row: Value, end: Value, listed: list[Value]) -> None:
        """The entries of positions row .. end whose window is not zero, for all lists at once; and where each
        chunk begins."""
        b, e, a = self.b, self.e, self.a
        entries = [e.at(own, a["list_first"]) for own in listed]

        def one(j: Value, counts: list[Value]) -> list[Value]:
            entry = e.load(b.gep(a["entry"], [j], source_etype=I64), I64, 8)
            window = e.at(x, b.sext(b.trunc(entry, I32), I64))
            for i, own in enumerate(entries):
                b.store(entry, b.gep(own, [counts[i]], source_etype=I64), align=8)
                counts[i] = b.add(counts[i], self._active(window, i))
            return counts

        def begins(c: Value, counts: list[Value]) -> None:
            for own, count in zip(listed, counts, strict=True):
                b.store(count, b.gep(own, [c], source_etype=I64), align=8)

        def chunk(c: Value, counts: list[Value], last: Value) -> list[Value]:
            begins(c, counts)
            return e.loop(b.add(row, b.mul(c, a["chunk"])), last, one, counts)[1]

        def whole(c: Value, counts: list[Value]) -> list[Value]:
            return chunk(c, counts, b.add(row, b.mul(b.add(c, I64(1)), a["chunk"])))

        c, counts = e.loop(I64(0), b.sdiv(b.sub(end, row), a["chunk"]), whole, [I64(0)] * len(listed))
        counts = chunk(c, counts, end)
        begins(b.add(c, I64(1)), counts)
        possible = b.mul(b.sub(end, row), I64(len(listed)))
        for i, seen in enumerate((reduce(b.add, counts), possible)):
            place = b.gep(self.counter, [I64(i)], source_etype=I64)
            b.store(b.add(e.load(place, I64, 8), seen), place, align=8)

    def _active(self, window: Value, part: int) -> Value:
        """1 where any lane of the window is not zero, else 0."""
        b, e, found = self.b, self.e, None
        for v in range(part * self.code.width, (part + 1) * self.code.width):
            x = e.vector(e.at(window, I64(v * self.x_step)), self.code.dtypes.input, "f32", self.lanes)
            some = b.fcmp_unordered("!=", x, ir.Constant(x.type, [0.0] * self.lanes))
            found = some if found is None else b.or_(found, some)
        lanes = ir.IntType(self.lanes)
        return b.zext(b.icmp_unsigned("!=", b.bitcast(found, lanes), lanes(0)), I64)

    def panel(self, c: Value, values: Value, x: Value, listed: Value, sums: Value) -> None:
        """The entries of one chunk into the sums of a panel."""
        b, e, width, filters = self.b, self.e, self.code.width, self.code.filters
        entries = e.at(listed, self.a["list_first"])
        first, last = (e.load(b.gep(listed, [b.add(c, I64(i))], source_etype=I64), I64, 8) for i in range(2))

        def one(i: Value, acc: list[Value]) -> list[Value]:
            entry = b.gep(entries, [i], source_etype=I64)
            window, own = e.at(x, e.integer(entry, I64(0))), e.at(values, e.integer(entry, I64(1)))
            loads = [
                e.vector(e.at(window, I64(v * self.x_step)), self.code.dtypes.input, "f32", self.lanes)
                for v in range(width)
            ]
            for f in range(filters):
                weight = e.splat(e.scalar(own, I64(f), "f32", "f32"), self.lanes)
                for v in range(width):
                    acc[f * width + v] = b.call(self.fma, [weight, loads[v], acc[f * width + v]])
            return acc

        _, acc = e.loop(first, last, one, [self.nothing] * (filters * width))

        def opening() -> list[Value]:
            return acc

        def resumed() -> list[Value]:
            places = (e.at(sums, I64(i * self.lanes * 4)) for i in range(len(acc)))
            return [
                b.fadd(e.vector(p, "f32", "f32", self.lanes), own) for p, own in zip(places, acc, strict=True)
            ]

        for i, own in enumerate(e.choose(b.icmp_signed("==", c, I64(0)), opening, resumed)):
            e.store(own, e.at(sums, I64(i * self.lanes * 4)), "f32")

    def filter(self, k: Value, f: Value, sums: Value, place: Value, first_vector: Value) -> None:
        """Epilogue and store of one filter's vectors."""
        b, e, a, stored = self.b, self.e, self.a, self.code.dtypes.output
        own = e.at(sums, b.mul(f, I64(self.code.width * self.lanes * 4)))
        plane = b.add(place, b.mul(k, a["y_plane"]))

        def one(v: int) -> None:
            found = e.vector(e.at(own, I64(v * self.lanes * 4)), "f32", "f32", self.lanes)
            if "bias" in self.code.epilogue:
                found = b.fadd(
                    found, e.splat(e.load(b.gep(a["bias"], [k], source_etype=F32), F32, 4), self.lanes)
                )
            at = b.add(plane, I64(v * self.y_step))
            live = e.lanes_of(a["live"], b.add(first_vector, I64(v)), self.lanes)
            e.store(self.finished(found, at, live), e.at(a["y"], at), stored)

        for v in range(self.code.width):
            e.when(b.icmp_signed("<", b.add(first_vector, I64(v)), a["live_vectors"]), partial(one, v))
