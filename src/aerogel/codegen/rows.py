"""`rows`: sparse filters over planes. One filter at a time, a block of output pixels in registers, one FMA a nonzero and vector.

    for each unit of this thread        an image, a block of `vectors` vectors of pixels, a group of filters
      for each block of channels
        for each filter of the group
          acc = 0, bias or the partial sums so far
          for each nonzero j:  acc[i] += value[j] * x[block + offset[j] + i]      i = 0 .. vectors - 1
          or, for each run of nonzeros whose windows stand at the same lane of a vector:
            z = 0;  z[i] += value[j] * x[block + offset[j] + i], i = 0 .. vectors;  acc += z, moved by that many lanes
          acc -> partial sums, or epilogue and y after the last block of channels

Pixels are numbered flat, across rows and the gap between them: output pixel (p, q) is p * pitch + q, and the input under tap
(r, s) sits a constant `offset` away from it, because input and output planes have the same pitch. Lanes that fall into the gap
compute rubbish; a table of live lanes turns them into the zeros that the output's border must hold.

A window that starts within a vector costs two loads a vector instead of one. Runs cost one more vector a nonzero and a few moves
a run instead: worth it where a row has many nonzeros for each of its runs, and the pitch makes few of them.

The code knows the number of registers, the runs, the epilogue, the element types and the ISA. Everything else is data: the names in
`ARGUMENTS` are 64-bit slots of one array, so all sizes and shapes share the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from aerogel import candidate
from aerogel.codegen.emit import F16, F32, I8, I16, I32, I64, PTR, STORED, VOID, Emit, Value, constant
from aerogel.codegen.epilogue import activation
from aerogel.problem import ITEM_BYTES, Dtypes
from aerogel.target import VECTOR_BYTES

POINTERS = (*candidate.POINTERS, "group", "start", "row", "offset", "value", "live", "slope")
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
UNROLL = 4
ENTRY = "rows"


@dataclass(frozen=True)
class RowsCode:
    """What the machine code depends on. `epilogue` as in Conv, the slope of leaky left out."""

    isa: str
    dtypes: Dtypes
    vectors: int
    epilogue: tuple[str, ...] = ()
    shifts: tuple[int, ...] = ()
    """Lanes at which the windows of each run start, in the order of the runs. Empty: one run, windows anywhere."""

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

    def live_dtype(self) -> np.dtype[Any]:
        """Type of the live-lane table: one bit a lane, in the smallest integer that holds a vector's."""
        return np.dtype({4: np.uint8, 8: np.uint8, 16: np.uint16, 32: np.uint32}[self.lanes])

    def live_table(self, live: NDArray[np.bool_]) -> NDArray[Any]:
        """Pack a boolean (vectors, lanes) table into `live_dtype` integers."""
        weights = 1 << np.arange(self.lanes, dtype=np.uint64)
        packed = (live * weights).sum(axis=1).astype(self.live_dtype())
        return np.asarray(packed)


def emit(code: RowsCode) -> str:
    """LLVM IR of `void rows(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name=str(code))
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    _Rows(code, e, e.slots(block, ARGUMENTS, POINTERS), module).units(thread, threads)
    e.b.ret_void()
    return str(module)


class _Rows:
    """The loops of one kernel; `a` holds the argument slots by name."""

    def __init__(self, code: RowsCode, e: Emit, a: dict[str, Value], module: Value) -> None:
        self.code, self.e, self.b, self.a = code, e, e.b, a
        d, self.lanes = code.dtypes, code.lanes
        self.summed = d.accumulator
        kind = ir.VectorType(F16 if self.summed == "f16" else F32, self.lanes)
        suffix = f"v{self.lanes}f{16 if self.summed == 'f16' else 32}"
        self.fma = ir.Function(module, ir.FunctionType(kind, [kind] * 3), f"llvm.fmuladd.{suffix}")
        hint = ir.FunctionType(VOID, [PTR, I32, I32, I32])
        self.prefetch = ir.Function(module, hint, "llvm.prefetch.p0")
        self.nothing = ir.Constant(kind, [0.0] * self.lanes)
        self.x_step = self.lanes * ITEM_BYTES[d.input]
        self.y_step = self.lanes * ITEM_BYTES[d.output]

    def units(self, thread: Value, threads: Value) -> None:
        """This thread's share: whole units, in order; which thread takes one does not change a bit of it."""
        b, a = self.b, self.a
        per_image = b.mul(a["blocks"], a["groups"])
        units = b.mul(a["images"], per_image)
        first = b.sdiv(b.mul(units, thread), threads)
        last = b.sdiv(b.mul(units, b.add(thread, I64(1))), threads)
        scratch = self.e.at(a["scratch"], b.mul(thread, a["scratch_thread"]))

        def unit(u: Value, _: list[Value]) -> None:
            image = b.sdiv(u, per_image)
            inside = b.srem(u, per_image)
            block = b.sdiv(inside, a["groups"])
            group = b.srem(inside, a["groups"])
            self.filters(image, block, group, scratch)
            final = b.icmp_signed("==", block, b.sub(a["blocks"], I64(1)))
            self.e.when(final, lambda: self.border(image, group))

        self.e.loop(first, last, unit)

    def filters(self, image: Value, block: Value, group: Value, scratch: Value) -> None:
        """All filters of one group over one block of pixels, a block of channels at a time."""
        b, a, e = self.b, self.a, self.e
        vectors = I64(self.code.vectors)
        x = e.at(a["x"], b.add(b.mul(image, a["x_image"]), b.mul(block, I64(self.code.vectors * self.x_step))))
        shift = b.add(b.mul(image, a["y_image"]), b.mul(block, I64(self.code.vectors * self.y_step)))
        low, high = e.integer(a["group"], group), e.integer(a["group"], b.add(group, I64(1)))
        count = b.sub(high, low)
        base = b.mul(low, a["channel_blocks"])
        first_vector = b.mul(block, vectors)
        whole = b.icmp_signed("<=", b.add(first_vector, vectors), a["live_vectors"])

        def channels(step: Value, _: list[Value]) -> None:
            opening = b.icmp_signed("==", step, I64(0))
            closing = b.icmp_signed("==", step, b.sub(a["channel_blocks"], I64(1)))
            begin = b.add(base, b.mul(step, count))

            def one(j: Value, _: list[Value]) -> None:
                k = e.integer(a["row"], j)
                so_far = e.at(scratch, b.mul(b.sub(k, low), I64(self.code.vectors * self.lanes * 4)))
                fetching = b.and_(closing, b.icmp_signed("!=", a["ahead"], I64(0)))
                e.when(fetching, lambda: self.fetch(j, shift))
                sums = self.sums(x, j, k, opening, so_far)
                plane = b.add(shift, b.mul(k, a["y_plane"]))

                def finish() -> list[Value]:
                    self.finish(sums, plane, first_vector, whole)
                    return []

                def keep() -> list[Value]:
                    for i, v in enumerate(sums):
                        e.store(v, e.at(so_far, I64(i * self.lanes * 4)), "f32")
                    return []

                e.choose(closing, finish, keep)

            e.loop(begin, b.add(begin, count), one)

        e.loop(I64(0), a["channel_blocks"], channels)

    def fetch(self, j: Value, shift: Value) -> None:
        """Ask for the output lines of a coming row: planes lie far apart, so no hardware prefetcher sees them coming."""
        b, a, e = self.b, self.a, self.e
        later = e.at(a["y"], b.add(shift, b.mul(e.integer(a["row"], b.add(j, a["ahead"])), a["y_plane"])))
        for i in range(0, self.code.vectors * self.y_step, 64):
            b.call(self.prefetch, [e.at(later, I64(i)), I32(1), I32(3), I32(1)])

    def sums(self, x: Value, j: Value, k: Value, opening: Value, kept: Value) -> list[Value]:
        """The f32 sums of filter k so far, with the nonzeros of its row j added."""
        b, e, a, code = self.b, self.e, self.a, self.code

        def fresh() -> list[Value]:
            if "bias" not in code.epilogue:
                return [constant(self.lanes, 0.0)] * code.vectors
            return [e.splat(e.scalar(a["bias"], k, "f32", "f32"), self.lanes)] * code.vectors

        def resumed() -> list[Value]:
            places = (e.at(kept, I64(i * self.lanes * 4)) for i in range(code.vectors))
            return [e.vector(p, "f32", "f32", self.lanes) for p in places]

        so_far = e.choose(opening, fresh, resumed)
        if self.summed == "f32":
            return self.nonzeros(x, j, so_far)
        added = self.nonzeros(x, j, [self.nothing] * code.vectors)
        return [b.fadd(s, e.widen(v, self.summed, "f32", self.lanes)) for s, v in zip(so_far, added, strict=True)]

    def nonzeros(self, x: Value, j: Value, acc: list[Value]) -> list[Value]:
        """All nonzeros of row j: one run, or one for each lane at which windows start."""
        b, e, shifts = self.b, self.e, self.code.shifts or (0,)
        first = e.integer(self.a["start"], b.mul(j, I64(len(shifts))))
        for i, shift in enumerate(shifts):
            last = e.integer(self.a["start"], b.add(b.mul(j, I64(len(shifts))), I64(i + 1)))
            if shift == 0:
                acc = self.run(x, first, last, acc)
            else:
                z = self.run(x, first, last, [self.nothing] * (len(acc) + 1))
                moved = ir.Constant(ir.VectorType(I32, self.lanes), list(range(shift, shift + self.lanes)))
                acc = [b.fadd(s, b.shuffle_vector(z[k], z[k + 1], moved)) for k, s in enumerate(acc)]
            first = last
        return acc

    def run(self, x: Value, first: Value, last: Value, acc: list[Value]) -> list[Value]:
        """The inner loop: one broadcast and an FMA with a memory operand for each nonzero and vector."""
        b, e, a, d = self.b, self.e, self.a, self.code.dtypes

        def one(at: Value, sums: list[Value]) -> list[Value]:
            weight = e.splat(e.scalar(a["value"], at, d.weight, self.summed), self.lanes)
            window = e.at(x, e.integer(a["offset"], at))
            loads = [e.vector(e.at(window, I64(i * self.x_step)), d.input, self.summed, self.lanes) for i in range(len(sums))]
            return [b.call(self.fma, [weight, v, s]) for v, s in zip(loads, sums, strict=True)]

        def several(at: Value, sums: list[Value]) -> list[Value]:
            for i in range(UNROLL):
                sums = one(b.add(at, I64(i)), sums)
            return sums

        rest, acc = e.loop(first, last, several, acc, UNROLL)
        return e.loop(rest, last, one, acc)[1]

    def finish(self, sums: list[Value], plane: Value, first_vector: Value, whole: Value) -> None:
        """Epilogue, rubbish lanes to zero, store. Only the last block of a plane has vectors to leave out."""
        b, e, a, lanes = self.b, self.e, self.a, self.lanes
        stored = self.code.dtypes.output
        slope = e.splat(e.load(a["slope"], F32, 4), lanes) if "leaky" in self.code.epilogue else None
        narrow = []
        for i, v in enumerate(sums):
            place = b.add(plane, I64(i * self.y_step))
            for step in self.code.epilogue:
                if step == "add":
                    v = b.fadd(v, e.vector(e.at(a["residual"], place), stored, "f32", lanes))
                elif step != "bias":
                    v = activation(e, step, v, lanes, slope)
            v = e.narrow(v, stored, lanes)
            live = self.live(b.add(first_vector, I64(i)))
            narrow.append(b.select(live, v, ir.Constant(v.type, None)))

        def store(i: int) -> None:
            e.store(narrow[i], e.at(a["y"], b.add(plane, I64(i * self.y_step))), stored)

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

    def live(self, vector: Value) -> Value:
        """The lanes of one vector that are pixels."""
        b = self.b
        bits = max(8, self.lanes)
        kind = {8: I8, 16: I16, 32: I32}[bits]
        word = self.e.load(b.gep(self.a["live"], [vector], source_etype=kind), kind, bits // 8)
        if self.lanes < 8:
            word = b.trunc(word, ir.IntType(self.lanes))
        return b.bitcast(word, ir.VectorType(ir.IntType(1), self.lanes))

    def border(self, image: Value, group: Value) -> None:
        """Zero what no block writes: the border after each plane of the group, and once the front of the buffer."""
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
