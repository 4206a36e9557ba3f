"""`dot`: a dense Linear over features that stand in the arena, one to a plane. Every weight is read once and
multiplied.

    for each image
      line = the image's features, side by side        each thread gathers its own
      for each filter of this thread
        y = sum over c of value[filter, c] * line[c]   four chains of vectors, then lanes in pairs;
                                                       bias, activation

Bound by the memory the weights come from, as torch's is; being ours it needs no call out of the segment.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from aerogel.codegen.cpu import abi
from aerogel.codegen.cpu.emit import F32, I32, I64, PTR, STORED, Emit, Value
from aerogel.codegen.cpu.sums import Sums
from aerogel.ir import ITEM_BYTES, VECTOR_BYTES, Dtypes

POINTERS = (*abi.POINTERS, "value", "live", "parameter")
SIZES = (
    "images",
    "filters",
    "channels",
    "padded",  # of a filter, and up to whole steps, where weights are zero
    "x_image",
    "x_plane",
    "y_image",
    "y_plane",  # bytes from one to the next
    "plane_vectors",  # whole vectors in an output plane; all but the first lane of the first are border
    "front_vectors",  # border before the first plane
    "scratch_thread",  # bytes of one thread's line
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "dot"
CHAINS = 4
AHEAD = 4096
"""Bytes between a weight that is read and the line that is asked for: a page, since the hardware's own
prefetching ends where a page does."""
STEP = 64
"""Weights of a filter are padded to a multiple of this: the widest step of any ISA."""


@dataclass(frozen=True)
class DotCode:
    """Features and weights in one type, summed in f32. `epilogue` as in Conv, its number left out."""

    isa: str
    epilogue: tuple[str, ...] = ()
    dtype: str = "f32"
    vectors: int = 1

    @property
    def dtypes(self) -> Dtypes:
        return Dtypes.of(self.dtype)

    @property
    def lanes(self) -> int:
        return VECTOR_BYTES[self.isa] // 4

    def __str__(self) -> str:
        return f"dot-{self.isa}-{self.dtype}" + "".join(f"+{e}" for e in self.epilogue)


def emit(code: DotCode) -> str:
    """LLVM IR of `void dot(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name=str(code))
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    _Dot(code, e, e.slots(block, ARGUMENTS, POINTERS), module).images(thread, threads)
    e.b.ret_void()
    return str(module)


class _Dot(Sums):
    def images(self, thread: Value, threads: Value) -> None:
        b, a, e = self.b, self.a, self.e
        line = e.at(a["scratch"], b.mul(thread, a["scratch_thread"]))

        def image(i: Value, _: list[Value]) -> None:
            x = e.at(a["x"], b.mul(i, a["x_image"]))
            dtype = self._code.dtypes.input

            def gather(c: Value, _: list[Value]) -> None:
                self._put(line, c, e.scalar(e.at(x, b.mul(c, a["x_plane"])), I64(0), dtype, "f32"))

            e.loop(I64(0), a["channels"], gather)
            e.loop(a["channels"], a["padded"], lambda c, _: self._put(line, c, F32(0)))
            e.share(a["filters"], thread, threads, lambda k: self.filter(i, k, line))

        e.loop(I64(0), a["images"], image)

    def _put(self, base: Value, i: Value, value: Value) -> None:
        self.b.store(value, self.b.gep(base, [i], source_etype=F32), align=4)

    def filter(self, image: Value, k: Value, line: Value) -> None:
        """One output: its sum in every lane, of which the first is kept."""
        b, a, e = self.b, self.a, self.e
        dtype = self._code.dtypes.input
        item = ITEM_BYTES[dtype]
        row = e.at(a["value"], b.mul(b.mul(k, a["padded"]), I64(item)))
        size = self.lanes * item

        def step(c: Value, sums: list[Value]) -> list[Value]:
            places = [b.add(c, I64(i * self.lanes)) for i in range(CHAINS)]
            held = ((row, dtype, item), (line, "f32", 4))
            for p in places[:: max(1, 64 // size)]:
                later = e.at(row, b.add(b.mul(p, I64(item)), I64(AHEAD)))
                b.call(self.prefetch, [later, I32(0), I32(3), I32(1)])
            pairs = [
                [e.vector(e.at(base, b.mul(p, I64(n))), t, "f32", self.lanes) for base, t, n in held]
                for p in places
            ]
            return [b.call(self.fma, [*pair, s]) for pair, s in zip(pairs, sums, strict=True)]

        _, sums = e.loop(I64(0), a["padded"], step, [self.nothing] * CHAINS, step=CHAINS * self.lanes)
        while len(sums) > 1:
            sums = [b.fadd(p, q) for p, q in zip(sums[::2], sums[1::2], strict=True)]
        parts = [b.extract_element(sums[0], I32(i)) for i in range(self.lanes)]
        while len(parts) > 1:
            parts = [b.fadd(p, q) for p, q in zip(parts[::2], parts[1::2], strict=True)]
        total = parts[0]
        if "bias" in self._code.epilogue:
            total = b.fadd(total, e.scalar(a["bias"], k, "f32", "f32"))
        plane = b.add(b.mul(image, a["y_image"]), b.mul(k, a["y_plane"]))
        first = e.lanes_of(a["live"], I64(0), self.lanes)
        e.store(self.finished(e.splat(total, self.lanes), plane, first), e.at(a["y"], plane), dtype)
        nothing = ir.Constant(ir.VectorType(STORED[dtype], self.lanes), None)

        def zero(v: Value, base: Value) -> None:
            e.store(nothing, e.at(a["y"], b.add(base, b.mul(v, I64(size)))), dtype)

        e.loop(I64(1), a["plane_vectors"], lambda v, _: zero(v, plane))
        opening = b.icmp_signed("==", b.add(image, k), I64(0))
        e.when(
            opening, lambda: e.loop(b.neg(a["front_vectors"]), I64(0), lambda v, _: zero(v, I64(0))) and None
        )
