"""`rows`: sparse filters over planes. One filter at a time, a block of output pixels in registers, one FMA a
nonzero and vector.

    for each unit of this thread        an image, a block of `vectors` vectors of pixels, a group of filters
      for each block of channels
        for each filter of the group
          acc = 0
          for each nonzero j:  acc[i] += value[j] * x[block + offset[j] + i]      i = 0 .. vectors - 1
          or, for each run of nonzeros whose windows stand at the same lane of a vector:
            z = 0;  z[i] += value[j] * x[block + offset[j] + i], i = 0 .. vectors
            acc += z, moved by that many lanes
          acc += bias or the partial sums so far
              -> partial sums, or epilogue and y after the last block of channels

Pixels are numbered flat, across rows and the gap between them: output pixel (p, q) is p * pitch + q, and the
input under tap (r, s) sits a constant `offset` away from it, because input and output planes have the same
pitch. Lanes that fall into the gap compute rubbish; a table of live lanes turns them into the zeros that the
output's border must hold.

A window that starts within a vector costs two loads a vector instead of one. Runs cost one more vector a
nonzero and a few moves a run instead: worth it where a row has many nonzeros for each of its runs, and the
pitch makes few of them.

The code knows the number of registers, the runs, the epilogue, the element types and the ISA. Everything else
is data: the names in `ARGUMENTS` are 64-bit slots of one array, so all sizes and shapes share the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir

from aerogel.codegen.cpu import abi
from aerogel.codegen.cpu.emit import I32, I64, PTR, STORED, Emit, Value
from aerogel.codegen.cpu.sums import Sums
from aerogel.ir import ITEM_BYTES, VECTOR_BYTES, Dtypes

POINTERS = (*abi.POINTERS, "group", "start", "row", "offset", "value", "live", "parameter")
SIZES = (
    "images",  # batch
    "blocks",  # pixel blocks of one plane
    "groups",  # groups of filters
    "channel_blocks",
    "x_image",  # bytes from one image to the next
    "y_image",
    "y_plane",  # bytes from one output plane to the next
    "plane_vectors",  # whole vectors in an output plane
    "live_vectors",  # vectors of it that hold pixels; the rest is border
    "front_vectors",  # border before the first plane
    "scratch_thread",  # bytes of partial sums of one thread
    "ahead",  # fetch the output lines of the filter this many rows ahead; 0: leave it to the cache
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "rows"


@dataclass(frozen=True)
class RowsCode:
    """What the machine code depends on. `epilogue` as in Conv, its number left out."""

    isa: str
    dtypes: Dtypes
    vectors: int
    epilogue: tuple[str, ...] = ()
    shifts: tuple[int, ...] = ()
    """Lanes at which the windows of each run start, in the order of the runs. Empty: one run, windows
    anywhere."""

    @property
    def lanes(self) -> int:
        """Pixels in one vector, counted in the type that is summed."""
        return VECTOR_BYTES[self.isa] // ITEM_BYTES[self.dtypes.accumulator]

    def __str__(self) -> str:
        d = self.dtypes
        kinds = f"{d.input}.{d.weight}.{d.accumulator}.{d.output}"
        return (
            f"rows-{self.isa}-{kinds}-v{self.vectors}"
            + "".join(f"+{e}" for e in self.epilogue)
            + "".join(f"@{s}" for s in self.shifts)
        )


def emit(code: RowsCode) -> str:
    """LLVM IR of `void rows(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name=str(code))
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    Rows(code, e, e.slots(block, ARGUMENTS, POINTERS), module).units(thread, threads)
    e.b.ret_void()
    return str(module)


class Rows(Sums):
    """The loops of one kernel."""

    def __init__(self, code: RowsCode, e: Emit, a: dict[str, Value], module: Value) -> None:
        super().__init__(code, e, a, module)
        self.code = code

    def units(self, thread: Value, threads: Value) -> None:
        """Images, blocks of pixels and groups of filters; the last block of a plane also writes its
        border."""
        b, a = self.b, self.a
        per_image = b.mul(a["blocks"], a["groups"])
        units = b.mul(a["images"], per_image)
        scratch = self.e.at(a["scratch"], b.mul(thread, a["scratch_thread"]))

        def unit(u: Value) -> None:
            image = b.sdiv(u, per_image)
            inside = b.srem(u, per_image)
            block = b.sdiv(inside, a["groups"])
            group = b.srem(inside, a["groups"])
            self.filters(image, block, group, scratch)
            final = b.icmp_signed("==", block, b.sub(a["blocks"], I64(1)))
            self.e.when(final, lambda: self.border(image, group))

        self.e.share(units, thread, threads, unit)

    def filters(self, image: Value, block: Value, group: Value, scratch: Value) -> None:
        """All filters of one group over one block of pixels, a block of channels at a time."""
        b, a, e = self.b, self.a, self.e
        vectors = I64(self.code.vectors)
        x = e.at(
            a["x"], b.add(b.mul(image, a["x_image"]), b.mul(block, I64(self.code.vectors * self.x_step)))
        )
        shift = b.add(b.mul(image, a["y_image"]), b.mul(block, I64(self.code.vectors * self.y_step)))
        low, high = e.integer(a["group"], group), e.integer(a["group"], b.add(group, I64(1)))
        count = b.sub(high, low)
        base = b.mul(low, a["channel_blocks"])
        first_vector = b.mul(block, vectors)
        whole = b.icmp_signed("<=", b.add(first_vector, vectors), a["live_vectors"])
        live = [
            e.lanes_of(a["live"], b.add(first_vector, I64(i)), self.lanes) for i in range(self.code.vectors)
        ]

        def channels(step: Value, _: list[Value]) -> None:
            opening = self.opening(step)
            closing = b.icmp_signed("==", step, b.sub(a["channel_blocks"], I64(1)))
            begin = b.add(base, b.mul(step, count))

            def one(j: Value, _: list[Value]) -> None:
                k = e.integer(a["row"], j)
                so_far = e.at(scratch, b.mul(b.sub(k, low), I64(self.code.vectors * self.lanes * 4)))
                fetching = b.and_(closing, b.icmp_signed("!=", a["ahead"], I64(0)))
                e.when(fetching, lambda: self.fetch(j, shift))
                sums = self.row(k, opening, so_far, lambda acc: self.nonzeros(x, j, acc))
                plane = b.add(shift, b.mul(k, a["y_plane"]))

                def finish() -> list[Value]:
                    self.finish(sums, plane, first_vector, whole, live)
                    return []

                def keep() -> list[Value]:
                    self.keep(sums, so_far)
                    return []

                e.choose(closing, finish, keep)

            e.loop(begin, b.add(begin, count), one)

        e.loop(I64(0), a["channel_blocks"], channels)

    def opening(self, step: Value) -> Value:
        """Whether a block of channels finds no sums yet."""
        return self.b.icmp_signed("==", step, I64(0))

    def fetch(self, j: Value, shift: Value) -> None:
        """Ask for the output lines of a coming row: planes lie far apart, so no hardware prefetcher sees them
        coming."""
        b, a, e = self.b, self.a, self.e
        later = e.at(a["y"], b.add(shift, b.mul(e.integer(a["row"], b.add(j, a["ahead"])), a["y_plane"])))
        for i in range(0, self.code.vectors * self.y_step, 64):
            b.call(self.prefetch, [e.at(later, I64(i)), I32(1), I32(3), I32(1)])

    def nonzeros(self, x: Value, j: Value, acc: list[Value]) -> list[Value]:
        """All nonzeros of row j: one run, or one for each lane at which windows start."""
        b, e, shifts = self.b, self.e, self.code.shifts or (0,)
        steps = [i * self.x_step for i in range(len(acc) + 1)]
        first = e.integer(self.a["start"], b.mul(j, I64(len(shifts))))
        for i, shift in enumerate(shifts):
            last = e.integer(self.a["start"], b.add(b.mul(j, I64(len(shifts))), I64(i + 1)))
            if shift == 0:
                acc = self.run(x, first, last, acc, steps[:-1])
            else:
                z = self.run(x, first, last, [self.nothing] * (len(acc) + 1), steps)
                moved = ir.Constant(ir.VectorType(I32, self.lanes), list(range(shift, shift + self.lanes)))
                acc = [b.fadd(s, b.shuffle_vector(z[k], z[k + 1], moved)) for k, s in enumerate(acc)]
            first = last
        return acc

    def finish(
        self, sums: list[Value], plane: Value, first_vector: Value, whole: Value, live: list[Value]
    ) -> None:
        """Epilogue and store. Only the last block of a plane has vectors to leave out."""
        b, e, a = self.b, self.e, self.a
        narrow = [self.finished(v, b.add(plane, I64(i * self.y_step)), live[i]) for i, v in enumerate(sums)]

        def store(i: int) -> None:
            e.store(narrow[i], e.at(a["y"], b.add(plane, I64(i * self.y_step))), self.code.dtypes.output)

        def everything() -> list[Value]:
            for i in range(len(narrow)):
                store(i)
            return []

        def some() -> list[Value]:
            for i in range(len(narrow)):
                inside = b.icmp_signed("<", b.add(first_vector, I64(i)), a["live_vectors"])
                e.when(inside, partial(store, i))
            return []

        e.choose(whole, everything, some)

    def border(self, image: Value, group: Value) -> None:
        """Zero what no block writes: the border after each plane of the group, and once the front of the
        buffer."""
        b, e, a = self.b, self.e, self.a
        stored = self.code.dtypes.output
        nothing = ir.Constant(ir.VectorType(STORED[stored], self.lanes), None)

        def zero(v: Value, base: Value) -> None:
            e.store(nothing, e.at(a["y"], b.add(base, b.mul(v, I64(self.y_step)))), stored)

        def plane(k: Value, _: list[Value]) -> None:
            base = b.add(b.mul(image, a["y_image"]), b.mul(k, a["y_plane"]))
            e.loop(a["live_vectors"], a["plane_vectors"], lambda v, _: zero(v, base))

        e.loop(e.integer(a["group"], group), e.integer(a["group"], b.add(group, I64(1))), plane)
        opening = b.icmp_signed("==", b.add(image, group), I64(0))
        e.when(opening, lambda: self._front(zero))

    def _front(self, zero: Any) -> None:
        self.e.loop(self.b.neg(self.a["front_vectors"]), I64(0), lambda v, _: zero(v, I64(0)))
