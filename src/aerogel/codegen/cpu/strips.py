"""`strips`: bodies of machine code over strips of pixels.

    for each unit of this thread        an image, a group of filters, a strip of `strip` vectors of pixels
      for each block of channels
        for each set of filters, as many as registers hold
          body(x, sums, values)         codegen/cpu/machine.py: straight code, one FMA a nonzero
      sums -> bias, epilogue, y         of a set, after its last body

Pixels are numbered flat, as in codegen/cpu/rows.py. A block of channels keeps a body's code within the first
cache of instructions, and its windows of x within the first cache of data.
"""

from __future__ import annotations

from llvmlite import ir

from aerogel.codegen.cpu import abi
from aerogel.codegen.cpu.emit import I32, I64, PTR, VOID, Emit, Value
from aerogel.codegen.cpu.rows import Rows, RowsCode
from aerogel.codegen.cpu.sums import UNROLL

POINTERS = (
    *abi.POINTERS,
    "group",  # filters of each group
    "x_group",  # the first channel that a group reads
    "set",  # sets of each group
    "filter",  # the first filter of each set, then the number of all
    "body",  # addresses of code, for each group, block of channels and set; then its end, twice
    "start",  # the first value of each
    "value",
    "live",
    "parameter",
)
SIZES = (
    "images",  # batch
    "blocks",  # strips of one plane
    "groups",  # groups of filters
    "strip",  # vectors of a strip, at most
    "channel_blocks",
    "x_block",  # bytes from one block of channels to the next
    "x_image",  # bytes from one image to the next
    "x_plane",
    "y_image",
    "y_plane",
    "plane_vectors",  # whole vectors in an output plane
    "live_vectors",  # vectors of it that hold pixels; the rest is border
    "front_vectors",  # border before the first plane
    "scratch_thread",  # bytes of one thread's sums
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "strips"


def emit(code: RowsCode) -> str:
    """LLVM IR of `void strips(int64 *arguments, int64 thread, int64 threads)`; one vector is finished at a
    time."""
    module = ir.Module(name=f"{ENTRY} {code}")
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    _Strips(code, e, e.slots(block, ARGUMENTS, POINTERS), module).units(thread, threads)
    e.b.ret_void()
    return str(module)


class _Strips(Rows):
    """The loops around the bodies; finishing and borders are those of rows."""

    def units(self, thread: Value, threads: Value) -> None:
        """Images, groups of filters and strips; the last strip of a plane also writes its border."""
        b, a, e = self.b, self.a, self.e
        per_image = b.mul(a["blocks"], a["groups"])
        scratch = e.at(a["scratch"], b.mul(thread, a["scratch_thread"]))

        def unit(u: Value) -> None:
            image, inside = b.sdiv(u, per_image), b.srem(u, per_image)
            group, block = b.sdiv(inside, a["blocks"]), b.srem(inside, a["blocks"])
            self.filters(image, block, group, scratch)
            final = b.icmp_signed("==", block, b.sub(a["blocks"], I64(1)))
            e.when(final, lambda: self.border(image, group))

        e.share(b.mul(a["images"], per_image), thread, threads, unit)

    def filters(self, image: Value, block: Value, group: Value, scratch: Value) -> None:
        """All filters of one group over one strip."""
        b, a, e = self.b, self.a, self.e
        first = b.mul(block, a["strip"])
        left = b.sub(a["live_vectors"], first)
        count = b.select(b.icmp_signed("<", left, a["strip"]), left, a["strip"])
        x = b.add(b.mul(image, a["x_image"]), b.mul(first, I64(self.x_step)))
        x = b.add(x, b.mul(e.integer(a["x_group"], group), a["x_plane"]))
        far = b.mul(a["strip"], I64(self.lanes * 4))  # bytes from one filter's sums to the next
        y = b.add(b.mul(image, a["y_image"]), b.mul(first, I64(self.y_step)))
        low, high = e.integer(a["set"], group), e.integer(a["set"], b.add(group, I64(1)))
        low_filter = e.integer(a["filter"], low)

        def channels(step: Value, _: list[Value]) -> None:
            under = e.at(a["x"], b.add(x, b.mul(step, a["x_block"])))
            closing = b.icmp_signed("==", step, b.sub(a["channel_blocks"], I64(1)))
            bodies = b.add(b.mul(low, a["channel_blocks"]), b.mul(step, b.sub(high, low)))

            def one(i: Value, _: list[Value]) -> None:
                number = b.add(bodies, b.sub(i, low))
                k, end = e.integer(a["filter"], i), e.integer(a["filter"], b.add(i, I64(1)))
                own = e.at(scratch, b.mul(b.sub(k, low_filter), far))
                e.when(closing, lambda: self.ask(y, k, end, count))
                self.fetch_code(number)
                body = e.load(b.gep(a["body"], [number], source_etype=I64), _BODY.as_pointer(), 8)
                value = e.at(a["value"], b.mul(e.integer(a["start"], number), I64(4)))
                b.call(body, [under, own, value, count])
                e.when(closing, lambda: self.finish_set(own, far, k, end, y, first, count))

            e.loop(low, high, one)

        e.loop(I64(0), a["channel_blocks"], channels)

    def fetch_code(self, number: Value) -> None:
        """Ask for the next body's code: straight code from beyond the second cache comes a line at a time."""
        b, a, e = self.b, self.a, self.e
        later = [b.gep(a["body"], [b.add(number, I64(i))], source_etype=I64) for i in (1, 2)]
        begin, end = (e.load(place, I64, 8) for place in later)

        def line(at: Value, _: list[Value]) -> None:
            b.call(self.prefetch, [b.inttoptr(at, PTR), I32(0), I32(2), I32(1)])

        e.loop(begin, end, line, step=64)

    def ask(self, y: Value, k: Value, end: Value, count: Value) -> None:
        """Ask for the lines of y that a set of filters will write, while its code runs."""
        b, a, e = self.b, self.a, self.e

        def one(j: Value, _: list[Value]) -> None:
            plane = e.at(a["y"], b.add(y, b.mul(j, a["y_plane"])))

            def line(v: Value, _: list[Value]) -> None:
                at = e.at(plane, b.mul(v, I64(self.y_step)))
                b.call(self.prefetch, [at, I32(1), I32(2), I32(1)])

            e.loop(I64(0), count, line)

        e.loop(k, end, one)

    def finish_set(
        self, sums: Value, far: Value, k: Value, end: Value, y: Value, first: Value, count: Value
    ) -> None:
        """Bias, epilogue and y of a set of filters."""
        b, a, e = self.b, self.a, self.e

        def one(j: Value, _: list[Value]) -> None:
            own, plane = e.at(sums, b.mul(b.sub(j, k), far)), b.add(y, b.mul(j, a["y_plane"]))
            bias = self.start(j, ir.Constant(ir.IntType(1), 1), own)[0]

            def vector(v: Value) -> None:
                s = e.vector(e.at(own, b.mul(v, I64(self.lanes * 4))), "f32", "f32", self.lanes)
                place = b.add(plane, b.mul(v, I64(self.y_step)))
                done = self.finished(
                    b.fadd(s, bias), place, e.lanes_of(a["live"], b.add(first, v), self.lanes)
                )
                e.store(done, e.at(a["y"], place), self.code.dtypes.output)

            def several(v: Value, _: list[Value]) -> None:
                for i in range(UNROLL):
                    vector(b.add(v, I64(i)))

            rest, _ = e.loop(I64(0), count, several, step=UNROLL)
            e.loop(rest, count, lambda v, _: vector(v))

        e.loop(k, end, one)


_BODY = ir.FunctionType(VOID, [PTR, PTR, PTR, I64])
