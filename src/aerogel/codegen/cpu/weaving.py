"""`weaving`: depthwise filters over maps of bytes. Four windows are woven so that a lane holds one channel of
one pixel under four taps.

    for each unit of this thread        an image, a plane of four channels
      for each block of `vectors` vectors of pixels
        sum[4][i] = bias of the lane's channel
        for each four taps
          four loads, woven into four vectors: lanes of pixels 0, 4, 8, 12; 1, 5, 9, 13; ...
          sum[m][i] += dot4(woven[m], value)
        sums -> bytes (ir/quantized.py); four vectors narrow to one, pixels in their order
      the byte that means zero, up to the end of the plane: the border

Weaving and narrowing both stay within 16 bytes, which is why pixels come back in order. Pixels are numbered
flat, as in codegen/cpu/rows.py; products are those of codegen/cpu/products.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from aerogel.codegen.cpu import abi
from aerogel.codegen.cpu.emit import F32, I8, I16, I32, I64, PTR, Emit, Value
from aerogel.codegen.cpu.finish import Finish
from aerogel.codegen.cpu.products import Products, extra_of
from aerogel.ir import QUAD, VECTOR_BYTES
from aerogel.ir.quantized import HEADER

POINTERS = (*abi.POINTERS, "offset", "value", "live", "parameter", "shift")
SIZES = (
    "images",
    "planes",  # of an image: fours of channels
    "fours",  # of taps
    "blocks",  # of pixels of one plane
    "x_plane",
    "y_plane",  # bytes from one plane to the next
    "plane_vectors",  # whole vectors in an output plane
    "live_vectors",  # vectors of it that hold pixels; the rest is border
    "front_vectors",  # border before the first plane
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "weaving"
_LANE = 16
"""Bytes within which vectors are woven."""


@dataclass(frozen=True)
class WeavingCode:
    """What the machine code depends on. `narrow`: no pair of products reaches past 16 bits."""

    isa: str
    form: str
    vectors: int
    narrow: bool
    epilogue: tuple[str, ...] = ()

    @property
    def extra(self) -> str:
        """The feature that it needs beyond the ISA."""
        return extra_of(self.isa, self.form)

    def __str__(self) -> str:
        kind = f"{self.form}{'-narrow' * self.narrow}-v{self.vectors}"
        return f"weaving-{self.isa}-{kind}" + "".join(f"+{e}" for e in self.epilogue)


def emit(code: WeavingCode) -> str:
    """LLVM IR of `void weaving(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name=str(code))
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    dot = Products(e, module, code.isa, code.form)
    _Weaving(code, e, e.slots(block, ARGUMENTS, POINTERS), dot).units(thread, threads)
    e.b.ret_void()
    return str(module)


class _Weaving:
    def __init__(self, code: WeavingCode, e: Emit, a: dict[str, Value], dot: Products) -> None:
        self.code, self.e, self.b, self.a, self.dot = code, e, e.b, a, dot
        self.step = VECTOR_BYTES[code.isa]
        self.lanes = self.step // QUAD
        self.sums = ir.VectorType(I32, self.lanes)
        self.finish = Finish(e, a["bias"], a["parameter"], code.epilogue, self.lanes)
        self.zeros = self.finish.zeros()

    def units(self, thread: Value, threads: Value) -> None:
        b, a, e = self.b, self.a, self.e

        def unit(u: Value) -> None:
            plane = b.srem(u, a["planes"])
            x, y = e.at(a["x"], b.mul(u, a["x_plane"])), b.mul(u, a["y_plane"])
            bias, scale = self._fours_own(plane, 0, I32), self._fours_own(plane, 1, F32)
            if self.dot.shifted:
                shift = b.gep(a["shift"], [b.mul(plane, I64(QUAD))], source_etype=I32)
                bias = b.add(bias, self._spread(e.load(shift, ir.VectorType(I32, QUAD), 4)))
            value = e.at(a["value"], b.mul(b.mul(plane, a["fours"]), I64(_LANE)))
            e.loop(I64(0), a["blocks"], lambda i, _: self.block(x, y, i, bias, scale, value))
            e.loop(a["live_vectors"], a["plane_vectors"], lambda v, _: self._zero(b.add(y, self._far(v))))

        e.share(b.mul(a["images"], a["planes"]), thread, threads, unit)
        first = b.icmp_signed("==", thread, I64(0))
        e.when(
            first,
            lambda: e.loop(b.neg(a["front_vectors"]), I64(0), lambda v, _: self._zero(self._far(v))) and None,
        )

    def _far(self, vectors: Value) -> Value:
        return self.b.mul(vectors, I64(self.step))

    def _zero(self, at: Value) -> None:
        self.b.store(self.zeros, self.e.at(self.a["y"], at), align=4)

    def _fours_own(self, plane: Value, which: int, typ: Value) -> Value:
        """Bias (0) or scale (1) of four channels, in every sixteen bytes."""
        b, padded = self.b, self.b.mul(self.a["planes"], I64(QUAD))
        at = b.add(I64(len(HEADER)), b.add(b.mul(padded, I64(which)), b.mul(plane, I64(QUAD))))
        place = b.gep(self.a["bias"], [at], source_etype=I32)
        return self._spread(self.e.load(place, ir.VectorType(typ, QUAD), 4))

    def _spread(self, four: Value) -> Value:
        order = ir.Constant(ir.VectorType(I32, self.lanes), [i % QUAD for i in range(self.lanes)])
        return self.b.shuffle_vector(four, ir.Constant(four.type, ir.Undefined), order)

    def block(self, x: Value, y: Value, number: Value, bias: Value, scale: Value, value: Value) -> None:
        """Some vectors of pixels of a plane."""
        b, e, a, vectors = self.b, self.e, self.a, self.code.vectors
        first = b.mul(number, I64(vectors))
        at = self._far(first)
        x, y = e.at(x, at), b.add(y, at)

        def four(i: Value, sums: list[Value]) -> list[Value]:
            starts = [e.integer(a["offset"], b.add(b.mul(i, I64(QUAD)), I64(tap))) for tap in range(QUAD)]
            raw = e.load(e.at(value, b.mul(i, I64(_LANE))), ir.VectorType(I32, QUAD), 4)
            add = self.dot(self._spread(raw), self.code.narrow)
            found = []
            for v in range(vectors):
                loads = [e.load(e.at(e.at(x, s), I64(v * self.step)), self.sums, 4) for s in starts]
                woven = self.woven(loads)
                found += [add(s, w) for s, w in zip(sums[QUAD * v : QUAD * (v + 1)], woven, strict=True)]
            return found

        sums = e.loop(I64(0), a["fours"], four, [bias] * (QUAD * vectors))[1]
        for v in range(vectors):
            place = b.add(y, I64(v * self.step))
            inside = b.icmp_signed("<", b.add(first, I64(v)), a["live_vectors"])
            own = sums[QUAD * v : QUAD * (v + 1)]
            e.when(inside, partial(self.store, own, scale, b.add(first, I64(v)), place))

    def store(self, sums: list[Value], scale: Value, vector: Value, place: Value) -> None:
        """A vector of pixels from its four vectors of sums; lanes in the gap between rows hold zeros."""
        b, e = self.b, self.e
        beside: list[Value] | list[None] = [None] * QUAD
        if "add" in self.code.epilogue:
            nothing = ir.Constant(self.sums, None)
            beside = self.woven([e.load(e.at(self.a["residual"], place), self.sums, 4), *[nothing] * 3])
        words = [self.finish(s, scale, r) for s, r in zip(sums, beside, strict=True)]
        live = e.lanes_of(self.a["live"], vector, self.lanes)
        made = b.select(live, self.narrowed(words), self.zeros)
        b.store(made, e.at(self.a["y"], place), align=4)

    def woven(self, loads: list[Value]) -> list[Value]:
        """From pixels under four taps to lanes of one channel of one pixel under all of them."""
        b, bytes_, words = self.b, ir.VectorType(I8, self.step), ir.VectorType(I16, self.step // 2)
        taps = [b.bitcast(v, bytes_) for v in loads]
        pairs = [[self._mixed(taps[i], taps[i + 1], half) for half in (0, 1)] for i in (0, 2)]
        found = []
        for half in (0, 1):
            low, high = (b.bitcast(p[half], words) for p in pairs)
            found += [b.bitcast(self._mixed(low, high, part), self.sums) for part in (0, 1)]
        return found

    def _mixed(self, first: Value, second: Value, half: int) -> Value:
        """One half of each sixteen bytes of two vectors, in turn."""
        count = first.type.count
        own = count * _LANE // self.step  # elements of sixteen bytes
        order = [
            lane + half * own // 2 + i // 2 + (i % 2) * count
            for lane in range(0, count, own)
            for i in range(own)
        ]
        return self.b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, count), order))

    def narrowed(self, words: list[Value]) -> Value:
        """The last bytes of the lanes of four vectors: the inverse of weaving, where only they count."""
        b = self.b
        bytes_ = ir.VectorType(I8, self.step)
        low = [b.bitcast(w, bytes_) for w in words]

        def taken(first: Value, second: Value) -> Value:
            """Every other element of each sixteen bytes of one vector, then of the other."""
            count = first.type.count
            own = count * _LANE // self.step
            half = own // 2
            order = [
                lane + 2 * (i % half) + (i // half) * count
                for lane in range(0, count, own)
                for i in range(own)
            ]
            return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, count), order))

        return b.bitcast(taken(taken(low[0], low[1]), taken(low[2], low[3])), self.sums)
