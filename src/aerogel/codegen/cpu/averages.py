"""`averages`: of maps of bytes, four channels of a pixel at once, any window, stride and padding.

    for each unit of this thread        a plane of four channels, of an image
      for each pixel of the output
        sums[4] = the window's pixels within the image        sixteen bytes at a time, then four
        y = (sums - pixels * zero) * scale, to the nearest byte
      the byte that means zero, up to the end of the row and of the plane: the border

Where numbers are wanted, which is for averages of whole images, they go to four planes of f32.
ir/bytemaps.py says it to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from aerogel.codegen.cpu.abi import POINTERS
from aerogel.codegen.cpu.emit import F32, I8, I32, I64, PTR, ROUND, Emit, Value, constant
from aerogel.ir import EVERY_BYTE, QUAD

SIZES = (
    "images",
    "x_planes",  # planes of x, of an image
    "channels",  # of an image
    "x_plane",
    "y_plane",  # bytes from one to the next
    "x_rows",
    "x_columns",
    "x_row",  # the image: rows, columns, bytes from one row to the next
    "y_rows",
    "y_columns",
    "y_row",
    "rows",
    "columns",  # of the window
    "row_stride",
    "column_stride",
    "top",
    "left",
    "front_bytes",  # border before the first plane
    "x_zero",
    "zero",  # the bytes that mean zero
    "scale",  # bits of the f32 that sums are multiplied with
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "averages"
_WIDE = 16


@dataclass(frozen=True)
class AveragesCode:
    """Everything else is data."""

    isa: str
    numbers: bool = False

    def __str__(self) -> str:
        return f"averages-{self.isa}{'-f32' * self.numbers}"


def emit(code: AveragesCode) -> str:
    """LLVM IR of `void averages(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name=str(code))
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    _Averages(e, e.slots(block, ARGUMENTS, POINTERS), code.numbers).planes(thread, threads)
    e.b.ret_void()
    return str(module)


class _Averages:
    def __init__(self, e: Emit, a: dict[str, Value], numbers: bool) -> None:
        self.e, self.b, self.a, self.numbers = e, e.b, a, numbers
        self.four, self.wide = (ir.VectorType(I32, n) for n in (QUAD, _WIDE))
        self.zero = e.b.trunc(a["zero"], I32)
        self.x_zero = e.b.trunc(a["x_zero"], I32)
        self.filled = e.b.mul(self.zero, I32(EVERY_BYTE))
        self.scale = e.splat(e.b.bitcast(e.b.trunc(a["scale"], I32), F32), QUAD)

    def planes(self, thread: Value, threads: Value) -> None:
        b, a, e = self.b, self.a, self.e

        def image(u: Value) -> None:
            self._numbers(
                e.at(a["x"], b.mul(u, a["x_plane"])), b.sdiv(u, a["x_planes"]), b.srem(u, a["x_planes"])
            )

        def unit(u: Value) -> None:
            x, y = e.at(a["x"], b.mul(u, a["x_plane"])), e.at(a["y"], b.mul(u, a["y_plane"]))

            def row(p: Value, _: list[Value]) -> None:
                at = e.at(y, b.mul(p, a["y_row"]))
                rows = self._within(p, "row_stride", "top", "rows", "x_rows")

                def pixel(q: Value, _: list[Value]) -> None:
                    columns = self._within(q, "column_stride", "left", "columns", "x_columns")
                    made = self.finished(self.sums(x, rows, columns), rows, columns)
                    b.store(made, e.at(at, b.mul(q, I64(QUAD))), align=4)

                e.loop(I64(0), a["y_columns"], pixel)
                self.fill(at, b.mul(a["y_columns"], I64(QUAD)), a["y_row"])

            e.loop(I64(0), a["y_rows"], row)
            self.fill(y, b.mul(a["y_rows"], a["y_row"]), a["y_plane"])

        e.share(b.mul(a["images"], a["x_planes"]), thread, threads, image if self.numbers else unit)
        first = b.icmp_signed("==", thread, I64(0))
        e.when(first, lambda: self.fill(a["y"], b.neg(a["front_bytes"]), I64(0)))

    def _numbers(self, x: Value, image: Value, quad: Value) -> None:
        """The averages of four channels over all of x, each in a plane of its own."""
        b, a, e = self.b, self.a, self.e
        rows, columns = (I64(0), a["x_rows"]), (I64(0), a["x_columns"])
        v = self._scaled(self.sums(x, rows, columns), rows, columns)
        for i in range(QUAD):
            channel = b.add(b.mul(quad, I64(QUAD)), I64(i))
            plane = e.at(a["y"], b.mul(b.add(b.mul(image, a["channels"]), channel), a["y_plane"]))

            def store(plane: Value = plane, i: int = i) -> None:
                b.store(b.extract_element(v, I32(i)), plane, align=4)
                self.fill(plane, I64(4), a["y_plane"])

            e.when(b.icmp_signed("<", channel, a["channels"]), store)

    def fill(self, base: Value, first: Value, last: Value) -> None:
        """Bytes from `first` up to `last` mean zero."""

        def one(at: Value, _: list[Value]) -> None:
            self.b.store(self.filled, self.e.at(base, at), align=4)

        self.e.loop(first, last, one, step=QUAD)

    def _within(self, i: Value, stride: str, pad: str, window: str, size: str) -> tuple[Value, Value]:
        """The window's part inside the image: from, up to."""
        b, a = self.b, self.a
        first = b.sub(b.mul(i, a[stride]), a[pad])
        last = b.add(first, a[window])
        low = b.select(b.icmp_signed(">", first, I64(0)), first, I64(0))
        return low, b.select(b.icmp_signed("<", last, a[size]), last, a[size])

    def sums(self, x: Value, rows: tuple[Value, Value], columns: tuple[Value, Value]) -> Value:
        """Of four channels over a window."""
        b, e = self.b, self.e

        def row(i: Value, total: list[Value]) -> list[Value]:
            line = e.at(x, b.mul(i, self.a["x_row"]))

            def several(j: Value, sums: list[Value]) -> list[Value]:
                return [b.add(sums[0], self._bytes(line, j, self.wide))]

            def one(j: Value, sums: list[Value]) -> list[Value]:
                return [b.add(sums[0], self._bytes(line, j, self.four))]

            rest, (wide,) = e.loop(columns[0], columns[1], several, total[:1], _WIDE // QUAD)
            return [wide, *e.loop(rest, columns[1], one, total[1:])[1]]

        nothing = [ir.Constant(typ, None) for typ in (self.wide, self.four)]
        wide, four = e.loop(rows[0], rows[1], row, nothing)[1]
        for first in range(0, _WIDE, QUAD):
            order = ir.Constant(ir.VectorType(I32, QUAD), list(range(first, first + QUAD)))
            four = b.add(four, b.shuffle_vector(wide, ir.Constant(self.wide, ir.Undefined), order))
        return four

    def _bytes(self, line: Value, column: Value, typ: Value) -> Value:
        at = self.e.at(line, self.b.mul(column, I64(QUAD)))
        return self.b.zext(self.e.load(at, ir.VectorType(I8, typ.count), 4), typ)

    def finished(self, sums: Value, rows: tuple[Value, Value], columns: tuple[Value, Value]) -> Value:
        """A pixel of four channels."""
        b, e = self.b, self.e
        v = self._scaled(sums, rows, columns)
        limits = (b.neg(self.zero), b.sub(I32(255), self.zero))
        low, high = (e.splat(b.sitofp(limit, F32), QUAD) for limit in limits)
        v = b.select(b.fcmp_ordered("<", v, low), low, v)
        v = b.select(b.fcmp_ordered(">", v, high), high, v)
        whole = b.bitcast(b.fadd(v, constant(QUAD, ROUND)), self.four)
        narrow = b.trunc(b.add(whole, e.splat(self.zero, QUAD)), ir.VectorType(I8, QUAD))
        return b.bitcast(narrow, I32)

    def _scaled(self, sums: Value, rows: tuple[Value, Value], columns: tuple[Value, Value]) -> Value:
        """Sums as numbers, in units of the output."""
        b, e = self.b, self.e
        inside = b.mul(b.sub(rows[1], rows[0]), b.sub(columns[1], columns[0]))
        taken = b.mul(b.trunc(inside, I32), self.x_zero)
        whole = b.sub(sums, e.splat(taken, QUAD))
        return b.fmul(b.sitofp(whole, ir.VectorType(F32, QUAD)), self.scale)
