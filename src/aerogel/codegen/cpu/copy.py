"""`copy`: from one layout to another. Planes of the source, cut by a stride if asked, into bordered planes of
the target.

    for each unit of this thread        an image, a channel
      for each row i of the target      source row i // repeat * row_step + row_first, or nothing
        zeros | source columns column_first + j * column_step | zeros, up to the pitch
      zeros up to the end of the plane

An image is enlarged by `repeat` pixels a pixel and direction, each from a source plane `x_part` bytes after
the one before: 0 repeats the pixel, a whole plane weaves several planes into one (pixel_shuffle).

One call fills one phase; a plain copy is the only phase of stride 1. Source strides are free, so an NCHW
tensor, a bordered plane and a channels_last tensor all serve. The code knows the element types and whether
columns are neighbours; the rest is data. Source and target may differ in type, f32 on one side and 16 bits on
the other: a value that changes precision is moved anyway. Maps in int8 stand in quads (ir/layout.py): numbers
become bytes and are put together, or are taken out of a quad and become numbers, on the way too.
"""

from __future__ import annotations

from llvmlite import ir

from aerogel.codegen.cpu.abi import POINTERS
from aerogel.codegen.cpu.elements import CopyCode, Turn, kind
from aerogel.codegen.cpu.emit import I32, I64, PTR, VOID, Emit, Value

SIZES = (
    "images",
    "channels",  # of the target: planes
    "x_image",
    "x_channel",
    "x_row",
    "x_column",  # source strides in bytes
    "x_part",  # bytes between the sources of neighbouring pixels of an enlarged image
    "y_first",
    "y_image",
    "y_channel",
    "y_row",  # where the target's phase starts, and its strides, in bytes
    "rows",  # rows of the target
    "row_first",
    "row_step",
    "x_rows",  # source row = row_first + i * row_step, there if 0 <= it < x_rows
    "column_low",
    "column_high",  # target columns that have a source
    "column_first",  # bytes to the source of column_low
    "row_bytes",  # bytes of a target row, gap included
    "tail_bytes",  # zeros after the last row, to the end of the plane
    "front_bytes",  # zeros before the first plane
    "x_last",  # the last channel of the source
    "border",  # bits of what a border of quads holds
    "scale",  # bits of what a byte's unit means
    "zero",  # the byte that means zero
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "copy"


def emit(code: CopyCode) -> str:
    """LLVM IR of `void copy(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name=str(code))
    x_bytes, item_bytes = code.item_bytes
    source_kind, target_kind = (
        kind(code, name, size) for name, size in zip((code.reads, code.writes), code.item_bytes, strict=True)
    )
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    b = e.b
    a = e.slots(block, ARGUMENTS, POINTERS)
    scope = _scope(module, "x")
    units = b.mul(a["images"], a["channels"])
    item, repeat = I64(item_bytes), I64(code.repeat)
    nothing = (
        b.trunc(a["border"], I32)
        if item_bytes == 4 and code.writes == "u8"
        else ir.Constant(target_kind, None)
    )
    turn = Turn(code, e, a)
    wide = _Wide(code, e, a, module, nothing) if code.wide else None

    def zero(at: Value, size: Value) -> None:
        e.loop(
            I64(0),
            b.sdiv(size, item),
            lambda i, _: b.store(nothing, e.at(at, b.mul(i, item)), align=item_bytes) and None,
        )

    def unit(u: Value) -> None:
        image, channel = b.sdiv(u, a["channels"]), b.srem(u, a["channels"])
        first = e.at(a["x"], b.mul(image, a["x_image"]))
        sources, shift = turn.sources(first, channel)
        place = b.add(b.mul(image, a["y_image"]), b.mul(channel, a["y_channel"]))
        target = e.at(a["y"], b.add(a["y_first"], place))

        def row(i: Value, _: list[Value]) -> None:
            out = e.at(target, b.mul(i, a["y_row"]))
            at = b.add(a["row_first"], b.mul(b.sdiv(i, repeat), a["row_step"]))
            part = b.mul(b.mul(b.srem(i, repeat), repeat), a["x_part"])
            there = b.and_(b.icmp_signed(">=", at, I64(0)), b.icmp_signed("<", at, a["x_rows"]))

            def present() -> list[Value]:
                inside = b.add(part, b.add(b.mul(at, a["x_row"]), a["column_first"]))
                begins = [e.at(source, inside) for source in sources]
                low, high = b.mul(a["column_low"], item), b.mul(a["column_high"], item)
                zero(out, low)
                start = e.at(out, low)

                def column(j: Value, _: list[Value]) -> None:
                    step = b.mul(j, I64(code.step * x_bytes)) if code.step else b.mul(j, a["x_column"])
                    for i in range(code.repeat):
                        where = b.add(step, b.mul(I64(i), a["x_part"]))
                        values = [e.load(e.at(begin, where), source_kind, x_bytes) for begin in begins]
                        for value in values:
                            value.set_metadata("alias.scope", scope)
                        place = b.add(b.mul(j, repeat), I64(i))
                        moved = turn(values, shift)
                        store = b.store(moved, e.at(start, b.mul(place, item)), align=item_bytes)
                        store.set_metadata("noalias", scope)

                if wide is not None:
                    wide.row(begins, start)
                    return []
                e.loop(I64(0), b.sdiv(b.sub(a["column_high"], a["column_low"]), repeat), column)
                zero(e.at(out, high), b.sub(a["row_bytes"], high))
                return []

            def absent() -> list[Value]:
                zero(out, a["row_bytes"])
                return []

            e.choose(there, present, absent)

        e.loop(I64(0), a["rows"], row)
        zero(e.at(target, b.mul(a["rows"], a["y_row"])), a["tail_bytes"])
        opening = b.icmp_signed("==", u, I64(0))
        e.when(opening, lambda: zero(e.at(a["y"], b.neg(a["front_bytes"])), a["front_bytes"]))

    e.share(units, thread, threads, unit)
    b.ret_void()
    return str(module)


def _scope(module: Value, name: str) -> Value:
    """Tells LLVM that what is read is never what is written, so that it may use vectors."""
    domain = module.add_metadata([f"copy {name} domain"])
    return module.add_metadata([module.add_metadata([f"copy {name}", domain])])


class _Wide:
    """A row in whole vectors, its border after it too: lanes without a source hold what a border holds, and
    those beyond the row are left alone."""

    def __init__(self, code: CopyCode, e: Emit, a: dict[str, Value], module: Value, nothing: Value) -> None:
        self.code, self.e, self.b, self.a, self.lanes = code, e, e.b, a, code.wide
        self.turn = Turn(code, e, a, self.lanes)
        self.nothing = e.splat(nothing, self.lanes)
        source, target = (
            ir.VectorType(kind(code, name, 4), self.lanes) for name in (code.reads, code.writes)
        )
        mask = ir.VectorType(ir.IntType(1), self.lanes)
        self.empty = ir.Constant(source, None)
        names = {
            t: f"v{self.lanes}{'i' if isinstance(t.element, ir.IntType) else 'f'}32" for t in (source, target)
        }
        self.load = ir.Function(
            module, ir.FunctionType(source, [PTR, mask, source]), f"llvm.masked.load.{names[source]}.p0"
        )
        self.store = ir.Function(
            module, ir.FunctionType(VOID, [target, PTR, mask]), f"llvm.masked.store.{names[target]}.p0"
        )
        self.number = ir.Constant(ir.VectorType(I32, self.lanes), list(range(self.lanes)))

    def below(self, limit: Value) -> Value:
        """The lanes whose number is below a limit."""
        return self.b.icmp_signed("<", self.number, self.e.splat(self.b.trunc(limit, I32), self.lanes))

    def row(self, begins: list[Value], start: Value) -> None:
        b, a, e = self.b, self.a, self.e
        real = b.sub(a["column_high"], a["column_low"])
        whole = b.sub(b.sdiv(a["row_bytes"], I64(4)), a["column_low"])

        repeat = self.code.repeat

        def some(j: Value, _: list[Value]) -> None:
            made = self.enlarged(begins[0], j, real) if repeat > 1 else [self.moved(begins, j, real)]
            for i, vector in enumerate(made):
                at = b.add(j, I64(i * self.lanes))
                value = b.select(self.below(b.sub(real, at)), vector, self.nothing)
                b.call(self.store, [value, e.at(start, b.mul(at, I64(4))), self.below(b.sub(whole, at))])

        step = self.lanes * repeat
        e.loop(I64(0), b.add(whole, I64(step - 1)), some, step=step)

    def moved(self, begins: list[Value], j: Value, real: Value) -> Value:
        left = self.b.sub(real, j)
        return self.turn([self.columns(begin, j, left) for begin in begins], I32(0))

    def enlarged(self, begin: Value, j: Value, real: Value) -> list[Value]:
        """The vectors from column j on that a vector of each part of the source becomes, in turn."""
        b, e, repeat = self.b, self.e, self.code.repeat
        own, left = (b.sdiv(v, I64(repeat)) for v in (j, b.sub(real, j)))
        parts = [self.columns(e.at(begin, b.mul(I64(i), self.a["x_part"])), own, left) for i in range(repeat)]
        return self.woven(parts)

    def woven(self, parts: list[Value]) -> list[Value]:
        """The first elements of all parts, then the second ones, and so on."""
        if len(parts) == 1:
            return parts
        low = [i // 2 + (i % 2) * self.lanes for i in range(self.lanes)]
        orders = [[i + half * self.lanes // 2 for i in low] for half in range(2)]
        masks = [ir.Constant(ir.VectorType(I32, self.lanes), order) for order in orders]
        pairs = zip(self.woven(parts[::2]), self.woven(parts[1::2]), strict=True)
        return [self.b.shuffle_vector(one, other, mask) for one, other in pairs for mask in masks]

    def columns(self, begin: Value, j: Value, left: Value) -> Value:
        """Elements j * step and on, of which so many are left."""
        b, e, lanes = self.b, self.e, self.lanes
        place = e.at(begin, b.mul(j, I64(4 * self.code.step)))
        if self.code.step == 1:
            return b.call(self.load, [place, self.below(left), self.empty])
        last = b.sub(b.mul(left, I64(2)), I64(1))
        halves = [
            b.call(
                self.load,
                [e.at(place, I64(4 * lanes * i)), self.below(b.sub(last, I64(lanes * i))), self.empty],
            )
            for i in range(2)
        ]
        even = ir.Constant(ir.VectorType(I32, lanes), list(range(0, 2 * lanes, 2)))
        return b.shuffle_vector(*halves, even)
