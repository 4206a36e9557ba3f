"""`bytewise`: sparse filters over maps of bytes. Four channels of a pixel stand in one 32-bit lane, and a
block of four weights meets them in one instruction.

    for each unit of this thread        an image, a block of `vectors` vectors of pixels, a group of filters
      for each block of channels
        for each four filters, which are four channels of the output
          for each of the four
            sum[i] = bias, or what the block of channels before left
            for each block j of weights:  sum[i] += dot4(x[block + offset[j] + i], value[j])
          after the last block of channels: y[i] = the sums of all four as bytes (ir/quantized.py, narrow.py)

Pixels are numbered flat, as in codegen/cpu/rows.py. Sums are 32-bit integers, exact however they are
made (codegen/cpu/products.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from aerogel.codegen.cpu import abi
from aerogel.codegen.cpu.emit import F32, I32, I64, PTR, Emit, Value
from aerogel.codegen.cpu.finish import Head
from aerogel.codegen.cpu.narrow import Bytes
from aerogel.codegen.cpu.products import Products, extra_of
from aerogel.codegen.cpu.sums import UNROLL
from aerogel.ir import QUAD, VECTOR_BYTES
from aerogel.ir.quantized import HEADER

POINTERS = (*abi.POINTERS, "group", "start", "offset", "value", "live", "parameter", "shift")
SIZES = (
    "images",  # batch
    "blocks",  # pixel blocks of one plane
    "groups",  # groups of filters
    "channel_blocks",
    "planes",  # of y
    "x_image",  # bytes from one image to the next
    "y_image",
    "y_plane",  # bytes from one plane of four channels to the next
    "plane_vectors",  # whole vectors in an output plane
    "live_vectors",  # vectors of it that hold pixels; the rest is border
    "front_vectors",  # border before the first plane
    "scratch_thread",  # bytes of partial sums of one thread
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "bytewise"
_LARGE, _LARGE_BITS = 2.0**23, 0x4B000000


@dataclass(frozen=True)
class BytesCode:
    """What the machine code depends on."""

    isa: str
    form: str
    vectors: int
    epilogue: tuple[str, ...] = ()

    @property
    def lanes(self) -> int:
        return VECTOR_BYTES[self.isa] // 4

    @property
    def extra(self) -> str:
        """The feature that it needs beyond the ISA."""
        return extra_of(self.isa, self.form)

    def __str__(self) -> str:
        return f"bytewise-{self.isa}-{self.form}-v{self.vectors}" + "".join(f"+{e}" for e in self.epilogue)


def emit(code: BytesCode, *, emulated: bool = False) -> str:
    """LLVM IR of `void bytewise(int64 *arguments, int64 thread, int64 threads)`. What is `emulated` computes
    what the instruction would, on every machine."""
    module = ir.Module(name=str(code))
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    dot = Products(e, module, code.isa, "lanes" if emulated else code.form)
    _Kernel(code, e, module, e.slots(block, ARGUMENTS, POINTERS), dot).units(thread, threads)
    e.b.ret_void()
    return str(module)


class _Kernel:
    """The loops of one kernel. `a` holds the argument slots by name."""

    def __init__(self, code: BytesCode, e: Emit, module: Value, a: dict[str, Value], dot: Products) -> None:
        self.code, self.e, self.b, self.a, self.dot = code, e, e.b, a, dot
        self.lanes, self.step = code.lanes, VECTOR_BYTES[code.isa]
        self.sums = ir.VectorType(I32, self.lanes)
        self.nothing = ir.Constant(self.sums, None)
        self.padded = self.b.mul(a["planes"], I64(QUAD))
        self.head = Head(e, a["bias"], a["parameter"], code.epilogue, self.lanes)
        self.bytes = Bytes(e, module, code.isa, self.head.zero, self.head.low, self.head.high)

    def _filters_own(self, k: Value, which: int, typ: Value) -> Value:
        """The bias (0) or scale (1) of filter k."""
        at = self.b.add(I64(len(HEADER)), self.b.add(self.b.mul(self.padded, I64(which)), k))
        return self.e.load(self.b.gep(self.a["bias"], [at], source_etype=I32), typ, 4)

    def units(self, thread: Value, threads: Value) -> None:
        """Images, blocks of pixels and groups of filters; the last block of a plane also writes its
        border."""
        b, a = self.b, self.a
        per_image = b.mul(a["blocks"], a["groups"])
        scratch = self.e.at(a["scratch"], b.mul(thread, a["scratch_thread"]))

        def unit(u: Value) -> None:
            image, inside = b.sdiv(u, per_image), b.srem(u, per_image)
            block, group = b.sdiv(inside, a["groups"]), b.srem(inside, a["groups"])
            self.filters(image, block, group, scratch)
            final = b.icmp_signed("==", block, b.sub(a["blocks"], I64(1)))
            self.e.when(final, lambda: self.border(image, group))

        self.e.share(b.mul(a["images"], per_image), thread, threads, unit)

    def filters(self, image: Value, block: Value, group: Value, scratch: Value) -> None:
        """All filters of one group over one block of pixels, a block of channels at a time."""
        b, a, e, vectors = self.b, self.a, self.e, self.code.vectors
        far = I64(vectors * self.step)
        x = e.at(a["x"], b.add(b.mul(image, a["x_image"]), b.mul(block, far)))
        shift = b.add(b.mul(image, a["y_image"]), b.mul(block, far))
        low, high = e.integer(a["group"], group), e.integer(a["group"], b.add(group, I64(1)))
        first_vector = b.mul(block, I64(vectors))

        def channels(step: Value, _: list[Value]) -> None:
            opening = b.icmp_signed("==", step, I64(0))
            closing = b.icmp_signed("==", step, b.sub(a["channel_blocks"], I64(1)))
            begin = b.mul(b.mul(step, a["planes"]), I64(QUAD))

            def four(j: Value, _: list[Value]) -> None:
                own = [b.add(b.mul(j, I64(QUAD)), I64(f)) for f in range(QUAD)]
                kept = [e.at(scratch, b.mul(b.sub(k, b.mul(low, I64(QUAD))), far)) for k in own]
                plane = b.add(shift, b.mul(j, a["y_plane"]))

                def sums(f: int) -> list[Value]:
                    return self.row(x, b.add(begin, own[f]), self.start(own[f], opening, kept[f]))

                def pair(f: int) -> list[Value]:
                    both = (self.finished(sums(g), own[g], g, plane) for g in (f, f + 1))
                    return [self.bytes.pair(v, w) for v, w in zip(*both, strict=True)]

                def finish() -> tuple[()]:
                    both = zip(pair(0), pair(2), strict=True)
                    self.store([self.bytes.joined(v, w) for v, w in both], plane, first_vector)
                    return ()

                def keep() -> tuple[()]:
                    for f in range(QUAD):
                        for i, v in enumerate(sums(f)):
                            b.store(v, e.at(kept[f], I64(i * self.step)), align=4)
                    return ()

                e.choose(closing, finish, keep)

            e.loop(low, high, four)

        e.loop(I64(0), a["channel_blocks"], channels)

    def start(self, k: Value, opening: Value, kept: Value) -> list[Value]:
        """The sums of filter k so far."""
        e, vectors = self.e, self.code.vectors

        def fresh() -> list[Value]:
            bias = self._filters_own(k, 0, I32)
            if self.dot.shifted:
                shift = self.b.gep(self.a["shift"], [k], source_etype=I32)
                bias = self.b.add(bias, e.load(shift, I32, 4))
            return [e.splat(bias, self.lanes)] * vectors

        def resumed() -> list[Value]:
            return [e.load(e.at(kept, I64(i * self.step)), self.sums, 4) for i in range(vectors)]

        return e.choose(opening, fresh, resumed)

    def row(self, x: Value, row: Value, sums: list[Value]) -> list[Value]:
        """All blocks of a row: first those whose pairs stay within 16 bits, then the others."""
        start = self.b.mul(row, I64(2))
        first, middle, last = (self.e.integer(self.a["start"], self.b.add(start, I64(i))) for i in range(3))
        if self.code.form == "pairs":
            return self.run(x, middle, last, self.run(x, first, middle, sums, True), False)
        return self.run(x, first, last, sums, False)

    def run(self, x: Value, first: Value, last: Value, sums: list[Value], narrow: bool) -> list[Value]:
        """The inner loop. Few vectors are summed in several chains: each waits for its last product."""
        b, e, many = self.b, self.e, len(sums)

        def one(at: Value, total: Sequence[Value]) -> list[Value]:
            value = e.load(b.gep(self.a["value"], [at], source_etype=I32), I32, 4)
            add = self.dot(e.splat(value, self.lanes), narrow)
            window = e.at(x, e.integer(self.a["offset"], at))
            loads = [e.load(e.at(window, I64(i * self.step)), self.sums, 4) for i in range(many)]
            return [add(s, v) for s, v in zip(total, loads, strict=True)]

        def several(at: Value, total: list[Value]) -> list[Value]:
            for i in range(UNROLL):
                own = slice(i % chains * many, (i % chains + 1) * many)
                total[own] = one(b.add(at, I64(i)), total[own])
            return total

        chains = max(1, UNROLL // many)
        rest, total = e.loop(first, last, several, [*sums, *[self.nothing] * (many * (chains - 1))], UNROLL)
        found = e.loop(rest, last, one, total[:many])[1]
        for chain in range(1, chains):
            found = [b.add(s, v) for s, v in zip(found, total[chain * many :], strict=False)]
        return found

    def finished(self, sums: list[Value], k: Value, f: int, plane: Value) -> list[Value]:
        """Sums of filter k, channel f of its quad, in units of y: ir/quantized.py says what each step is."""
        b, e = self.b, self.e
        scale = e.splat(self._filters_own(k, 1, F32), self.lanes)

        def beside(i: int) -> Value:
            return self._beside(b.add(plane, I64(i * self.step)), f)

        return [self.head.scaled(v, scale, partial(beside, i)) for i, v in enumerate(sums)]

    def _beside(self, place: Value, f: int) -> Value:
        """The residual less its zero. A byte in the last bits of 2^23 is the sum of both."""
        b, e, lanes = self.b, self.e, self.lanes
        four = e.load(e.at(self.a["residual"], place), self.sums, 4)
        moved = b.lshr(four, ir.Constant(self.sums, [8 * f] * lanes))
        byte = b.and_(moved, ir.Constant(self.sums, [255] * lanes))
        number = b.bitcast(
            b.or_(byte, ir.Constant(self.sums, [_LARGE_BITS] * lanes)), ir.VectorType(F32, lanes)
        )
        zero = b.fadd(F32(_LARGE), b.sitofp(self.head.beside_zero, F32))
        return b.fsub(number, e.splat(zero, lanes))

    def store(self, packed: list[Value], plane: Value, first_vector: Value) -> None:
        """Four channels of each pixel; lanes in the gap between rows hold zeros. Only the last block of a
        plane has vectors to leave out."""
        b, e, a = self.b, self.e, self.a
        zeros = self.head.zeros()

        def one(i: int) -> None:
            live = e.lanes_of(a["live"], b.add(first_vector, I64(i)), self.lanes)
            value = b.select(live, packed[i], zeros)
            b.store(value, e.at(a["y"], b.add(plane, I64(i * self.step))), align=4)

        def every() -> tuple[()]:
            for i in range(len(packed)):
                one(i)
            return ()

        def some() -> tuple[()]:
            for i in range(len(packed)):
                e.when(b.icmp_signed("<", b.add(first_vector, I64(i)), a["live_vectors"]), partial(one, i))
            return ()

        past = b.add(first_vector, I64(len(packed)))
        e.choose(b.icmp_signed("<=", past, a["live_vectors"]), every, some)

    def border(self, image: Value, group: Value) -> None:
        """What no block writes: the border after each plane of the group, and once the front of the
        buffer."""
        b, e, a = self.b, self.e, self.a
        zeros = self.head.zeros()

        def zero(v: Value, base: Value) -> None:
            b.store(zeros, e.at(a["y"], b.add(base, b.mul(v, I64(self.step)))), align=4)

        def plane(j: Value, _: list[Value]) -> None:
            base = b.add(b.mul(image, a["y_image"]), b.mul(j, a["y_plane"]))
            e.loop(a["live_vectors"], a["plane_vectors"], lambda v, _: zero(v, base))

        e.loop(e.integer(a["group"], group), e.integer(a["group"], b.add(group, I64(1))), plane)
        opening = b.icmp_signed("==", b.add(image, group), I64(0))
        e.when(
            opening,
            lambda: e.loop(b.neg(a["front_vectors"]), I64(0), lambda v, _: zero(v, I64(0))) and None,
        )
