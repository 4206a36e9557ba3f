"""`pool`: maximum or average over windows of bordered planes, any window, stride, padding and dilation.

    for each unit of this thread        an image, a channel
      for each output row
        line = the largest (sum) of the window's rows, column by column
                                        whole vectors; rows outside the image do not count
        y[q] = the largest (sum / window) of line[q * stride + s * dilation]
                                        line has -inf (0) where the image has no column
      zeros up to the end of the row and of the plane: the border

The two passes need r + s comparisons a pixel instead of r * s. The line of the next row is made before this
row's is read: what was only just stored would be waited for. NaN wins over every number, as it does in torch.
Lines are f32 whatever floats the maps are. Maps in int8 are compared byte by byte, four channels of a pixel
at once, and have no averages.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from aerogel.codegen.cpu.abi import POINTERS
from aerogel.codegen.cpu.emit import F32, I8, I32, I64, PTR, STORED, Emit, Value
from aerogel.ir import VECTOR_BYTES

SIZES = (
    "units",
    "x_plane",
    "y_plane",  # planes, and bytes from one to the next
    # the image: rows, bytes between them, columns, and those up to whole vectors
    "x_rows",
    "x_row",
    "x_real",
    "x_columns",
    "y_rows",
    "y_row",
    "y_columns",  # the output: rows, elements between them, columns
    "plane_elements",  # elements of an output plane, border included
    "front_elements",  # border before the first plane
    "top",
    "left",
    "taps",
    "row_dilation",
    "row_stride",
    "line_elements",  # elements of a line
    "scratch_thread",  # bytes of one thread's two lines
    "scale",  # bits of the f32 that an average is multiplied with
    "border",  # bits of what the border holds
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "pool"
UNROLLED = 8
"""Windows up to this width are written out, pixel by pixel; a wider one, such as a whole image, is a loop
over vectors."""


@dataclass(frozen=True)
class PoolCode:
    """Window width, column stride and dilation are compiled in; everything else is data. `kind` is "max" or
    "average"."""

    isa: str
    kind: str
    width: int
    stride: int
    dilation: int
    dtype: str = "f32"

    def __str__(self) -> str:
        return f"pool-{self.isa}-{self.dtype}-{self.kind}-{self.width}-{self.stride}-{self.dilation}"


def emit(code: PoolCode) -> str:
    """LLVM IR of `void pool(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name=str(code))
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    b = e.b
    a = e.slots(block, ARGUMENTS, POINTERS)
    lanes = VECTOR_BYTES[code.isa] // 4
    bytewise = code.dtype == "u8"
    single = I32 if bytewise else F32
    vector = ir.VectorType(single, lanes)
    of_bytes = {typ: ir.VectorType(I8, 4 * count) for typ, count in ((vector, lanes), (I32, 1))}
    largest = {
        typ: ir.Function(module, ir.FunctionType(own, [own] * 2), f"llvm.{name}")
        for typ, own, name in (
            ((vector, of_bytes[vector], f"umax.v{4 * lanes}i8"), (I32, of_bytes[I32], "umax.v4i8"))
            if bytewise
            else ((vector, vector, f"maximum.v{lanes}f32"), (F32, F32, "maximum.f32"))
        )
    }
    every_other = ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(0, 2 * lanes, 2)))
    stored = single if bytewise else STORED[code.dtype]
    lowest = I32(0) if bytewise else F32(float("-inf") if code.kind == "max" else 0.0)
    scale = b.bitcast(b.trunc(a["scale"], I32), F32)
    edge = b.trunc(a["border"], I32) if bytewise else F32(0)

    def join(first: Value, second: Value) -> Value:
        if bytewise:
            own = of_bytes[first.type]
            both = [b.bitcast(v, own) for v in (first, second)]
            return b.bitcast(b.call(largest[first.type], both), first.type)
        return b.call(largest[first.type], [first, second]) if code.kind == "max" else b.fadd(first, second)

    lines = e.at(a["scratch"], b.mul(thread, a["scratch_thread"]))

    def put(base: Value, i: Value, value: Value) -> None:
        b.store(value, b.gep(base, [i], source_etype=single), align=4)

    def put_out(base: Value, i: Value, value: Value) -> None:
        """A pixel, or a vector of them, in the maps' own type."""
        if bytewise:
            put(base, i, value)
            return
        e.store(
            e.narrow(value, code.dtype, 0 if value.type == F32 else lanes),
            b.gep(base, [i], source_etype=stored),
            code.dtype,
        )

    def wide_load(place: Value) -> Value:
        return e.vector(place, code.dtype, "f32", lanes)

    def line(p: Value) -> Value:
        return b.gep(lines, [b.mul(b.and_(p, I64(1)), a["line_elements"])], source_etype=single)

    e.loop(I64(0), b.mul(I64(2), a["line_elements"]), lambda i, _: put(lines, i, lowest))

    def unit(u: Value) -> None:
        x, y = e.at(a["x"], b.mul(u, a["x_plane"])), e.at(a["y"], b.mul(u, a["y_plane"]))

        def step(p: Value, _: list[Value]) -> None:
            e.when(b.icmp_signed("<", p, a["y_rows"]), lambda: down(x, p))
            e.when(b.icmp_signed(">", p, I64(0)), lambda: across(y, b.sub(p, I64(1))))

        e.loop(I64(0), b.add(a["y_rows"], I64(1)), step)
        e.loop(b.mul(a["y_rows"], a["y_row"]), a["plane_elements"], lambda i, _: put_out(y, i, edge))
        e.when(
            b.icmp_signed("==", u, I64(0)),
            lambda: e.loop(b.neg(a["front_elements"]), I64(0), lambda i, _: put_out(y, i, edge)) and None,
        )

    def down(x: Value, p: Value) -> None:
        """The line of row p. Taps from `low` up to `high` are rows of the image."""
        top, dilation = b.sub(b.mul(p, a["row_stride"]), a["top"]), a["row_dilation"]
        inner = b.gep(line(p), [a["left"]], source_etype=single)
        less = b.sub(dilation, I64(1))
        before, behind = (b.sdiv(b.add(b.sub(edge, top), less), dilation) for edge in (I64(0), a["x_rows"]))
        low = b.select(b.icmp_signed(">", before, I64(0)), before, I64(0))
        high = b.select(b.icmp_signed("<", behind, a["taps"]), behind, a["taps"])

        def columns(j: Value, _: list[Value]) -> None:
            def tap(i: Value, acc: list[Value]) -> list[Value]:
                row = e.at(x, b.mul(b.add(top, b.mul(i, dilation)), a["x_row"]))
                place = b.gep(row, [j], source_etype=stored)
                return [join(acc[0], e.load(place, vector, 4) if bytewise else wide_load(place))]

            _, (best,) = e.loop(low, high, tap, [ir.Constant(vector, [lowest.constant] * lanes)])
            b.store(best, b.gep(inner, [j], source_etype=single), align=4)

        e.loop(I64(0), a["x_columns"], columns, step=lanes)
        e.loop(a["x_real"], a["x_columns"], lambda i, _: put(inner, i, lowest))

    def across(y: Value, p: Value) -> None:
        """Row p of the output from its line: whole vectors where columns are neighbours or every other one,
        then pixels."""
        out, own = b.gep(y, [b.mul(p, a["y_row"])], source_etype=stored), line(p)

        def finished(value: Value) -> Value:
            if code.kind == "max":
                return value
            return b.fmul(value, scale if value.type == F32 else e.splat(scale, lanes))

        def several(q: Value, _: list[Value]) -> None:
            best = ir.Constant(vector, [lowest.constant] * lanes)
            for i in range(code.width):
                at = b.add(b.mul(q, I64(code.stride)), I64(i * code.dilation))
                parts = [
                    e.load(b.gep(own, [b.add(at, I64(j * lanes))], source_etype=single), vector, 4)
                    for j in range(code.stride)
                ]
                best = join(best, parts[0] if code.stride == 1 else b.shuffle_vector(*parts, every_other))
            put_out(out, q, finished(best))

        def pixel(q: Value, _: list[Value]) -> None:
            start = b.gep(own, [b.mul(q, I64(code.stride))], source_etype=single)
            if code.width > UNROLLED and code.dilation == 1:
                put_out(out, q, finished(wide(start)))
                return
            best = lowest
            for i in range(code.width):
                best = join(
                    best, e.load(b.gep(start, [I64(i * code.dilation)], source_etype=single), single, 4)
                )
            put_out(out, q, finished(best))

        done: Value = I64(0)
        if code.stride <= 2 and code.width <= UNROLLED:
            done, _ = e.loop(I64(0), a["y_columns"], several, step=lanes)
        e.loop(done, a["y_columns"], pixel)
        e.loop(a["y_columns"], a["y_row"], lambda i, _: put_out(out, i, edge))

    def wide(first: Value) -> Value:
        """Over a window of many columns: a chain for each lane, then lanes in pairs. One chain would round
        far more."""

        def vectors(j: Value, acc: list[Value]) -> list[Value]:
            return [join(acc[0], e.load(b.gep(first, [j], source_etype=single), vector, 4))]

        whole = code.width - code.width % lanes
        _, (sums,) = e.loop(
            I64(0), I64(whole), vectors, [ir.Constant(vector, [lowest.constant] * lanes)], step=lanes
        )
        parts = [b.extract_element(sums, ir.Constant(ir.IntType(32), i)) for i in range(lanes)]
        parts += [
            e.load(b.gep(first, [I64(i)], source_etype=single), single, 4) for i in range(whole, code.width)
        ]
        while len(parts) > 1:
            parts = [*map(join, parts[::2], parts[1::2]), *parts[len(parts) & ~1 :]]
        return parts[0]

    e.share(a["units"], thread, threads, unit)
    b.ret_void()
    return str(module)
