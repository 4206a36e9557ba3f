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
the other: a value that changes precision is moved anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from aerogel.codegen.cpu.abi import POINTERS
from aerogel.codegen.cpu.emit import I16, I32, I64, PTR, STORED, Emit, Value
from aerogel.ir import ITEM_BYTES

SIZES = (
    "images",
    "channels",
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
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "copy"


@dataclass(frozen=True)
class CopyCode:
    """`step` is the distance of neighbouring source columns in elements: 1 and 2 are compiled in, 0 means it
    is data.

    `repeat` is how many target rows and columns come of one source row and column: 1, or more to enlarge an
    image.
    """

    isa: str
    reads: str
    writes: str
    step: int
    repeat: int = 1

    def __str__(self) -> str:
        kinds = f"{self.reads}.{self.writes}" if self.reads != self.writes else str(ITEM_BYTES[self.writes])
        return f"copy-{self.isa}-{kinds}-{self.step}x{self.repeat}"


def emit(code: CopyCode) -> str:
    """LLVM IR of `void copy(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name=str(code))
    same, item_bytes, x_bytes = code.reads == code.writes, ITEM_BYTES[code.writes], ITEM_BYTES[code.reads]
    source_kind, kind = (
        [{2: I16, 4: I32}[item_bytes]] * 2 if same else [STORED[code.reads], STORED[code.writes]]
    )
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    b = e.b
    a = e.slots(block, ARGUMENTS, POINTERS)
    scope = _scope(module, "x")
    units = b.mul(a["images"], a["channels"])
    item, repeat = I64(item_bytes), I64(code.repeat)
    nothing = ir.Constant(kind, None)

    def zero(at: Value, size: Value) -> None:
        e.loop(
            I64(0),
            b.sdiv(size, item),
            lambda i, _: b.store(nothing, e.at(at, b.mul(i, item)), align=item_bytes) and None,
        )

    def moved(value: Value) -> Value:
        return value if same else e.narrow(e.widen(value, code.reads, "f32", 0), code.writes, 0)

    def unit(u: Value) -> None:
        image, channel = b.sdiv(u, a["channels"]), b.srem(u, a["channels"])
        source = e.at(a["x"], b.add(b.mul(image, a["x_image"]), b.mul(channel, a["x_channel"])))
        place = b.add(b.mul(image, a["y_image"]), b.mul(channel, a["y_channel"]))
        target = e.at(a["y"], b.add(a["y_first"], place))

        def row(i: Value, _: list[Value]) -> None:
            out = e.at(target, b.mul(i, a["y_row"]))
            at = b.add(a["row_first"], b.mul(b.sdiv(i, repeat), a["row_step"]))
            part = b.mul(b.mul(b.srem(i, repeat), repeat), a["x_part"])
            there = b.and_(b.icmp_signed(">=", at, I64(0)), b.icmp_signed("<", at, a["x_rows"]))

            def present() -> list[Value]:
                begin = e.at(source, b.add(part, b.add(b.mul(at, a["x_row"]), a["column_first"])))
                low, high = b.mul(a["column_low"], item), b.mul(a["column_high"], item)
                zero(out, low)
                start = e.at(out, low)

                def column(j: Value, _: list[Value]) -> None:
                    step = b.mul(j, I64(code.step * x_bytes)) if code.step else b.mul(j, a["x_column"])
                    for i in range(code.repeat):
                        value = e.load(
                            e.at(begin, b.add(step, b.mul(I64(i), a["x_part"]))), source_kind, x_bytes
                        )
                        value.set_metadata("alias.scope", scope)
                        place = b.add(b.mul(j, repeat), I64(i))
                        store = b.store(moved(value), e.at(start, b.mul(place, item)), align=item_bytes)
                        store.set_metadata("noalias", scope)

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
