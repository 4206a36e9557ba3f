"""Four products of bytes, an unsigned and a signed one each, added in a 32-bit lane. Sums are exact however
they are made:

    vnni     one instruction: four products of an unsigned and a signed byte, added to the sum
    evex     the same on 256 bits, encoded as CPUs with AVX-512 know it
    usdot    the same on ARM
    sdot     ARM's for two signed bytes: of x - 128, and what that takes from a filter's sum it starts with
    pairs    products of pairs added in 16 bits, then the pairs: for blocks whose pairs cannot reach past
             16 bits, which stand first in a row; the others like halves
    halves   even and odd bytes apart, as 16 bits
    lanes    a byte at a time: for every machine
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from aerogel.codegen.cpu.emit import I8, I16, I32, Emit, Value
from aerogel.ir import EVERY_BYTE, QUAD, VECTOR_BYTES, Target

SHIFT = 128
"""What `sdot` takes from x, so that it is signed."""
_ONE = {
    ("avx512", "vnni"): "avx512vnni",
    ("avx2", "vnni"): "avxvnni",
    ("avx2", "evex"): "avx512vnni",
    ("neon", "usdot"): "i8mm",
    ("neon", "sdot"): "dotprod",
}
"""Forms that are one instruction, the best first, and the feature that each needs beyond its ISA."""
_OTHERS = {"avx512": "pairs", "avx2": "pairs", "generic": "halves", "neon": "lanes"}
"""Without it."""


def form_of(target: Target) -> str:
    """How products are summed on this machine."""
    able = (form for (isa, form), extra in _ONE.items() if isa == target.isa and extra in target.extras)
    return next(able, _OTHERS[target.isa])


def extra_of(isa: str, form: str) -> str:
    """The feature that a form needs beyond the ISA."""
    return _ONE.get((isa, form), "")


class Products:
    """Four products of bytes in each 32-bit lane."""

    def __init__(self, e: Emit, module: Value, isa: str, form: str) -> None:
        self.b, self.isa, self.form = e.b, isa, form
        size = VECTOR_BYTES[isa]
        self.bytes, self.words, self.sums = (
            ir.VectorType(typ, size // n) for typ, n in ((I8, 1), (I16, 2), (I32, 4))
        )
        self.ones = ir.Constant(self.words, [1] * (size // 2))
        self.eight = ir.Constant(self.words, [8] * (size // 2))
        self.even = ir.Constant(self.words, [0xFF] * (size // 2))
        self.shifted = form == "sdot"
        one = ("vnni", "evex", "usdot", "sdot")
        names = {
            "one": {
                64: "x86.avx512.vpdpbusd.512",
                32: "x86.avx512.vpdpbusd.256",
                16: f"aarch64.neon.{form}.v4i32.v16i8",
            },
            "narrow": {64: "x86.avx512.pmaddubs.w.512", 32: "x86.avx2.pmadd.ub.sw"},
            "wide": {64: "x86.avx512.pmaddw.d.512", 32: "x86.avx2.pmadd.wd", 16: "x86.sse2.pmadd.wd"},
        }
        types = {
            "one": (self.sums, [self.sums, self.bytes, self.bytes]),
            "narrow": (self.words, [self.bytes, self.bytes]),
            "wide": (self.sums, [self.words, self.words]),
        }
        wanted = {"pairs": ("narrow", "wide"), "halves": ("wide",), "lanes": ()}
        wanted |= dict.fromkeys(one, ("one",))
        self.calls = {
            name: ir.Function(module, ir.FunctionType(*types[name]), f"llvm.{names[name][size]}")
            for name in wanted[form]
        }

    def __call__(self, weight: Value, narrow: bool) -> Callable[[Value, Value], Value]:
        """A function that adds the products of a block of weights (in every lane) and of pixels to sums."""
        if self.form == "lanes":
            return self._lanes(weight)
        if "one" in self.calls:
            return self._one(self.b.bitcast(weight, self.bytes))
        if self.form == "pairs" and narrow:
            return self._narrow(self.b.bitcast(weight, self.bytes))
        return self._wide(self.b.bitcast(weight, self.words))

    def _one(self, weight: Value) -> Callable[[Value, Value], Value]:
        b = self.b
        signs = ir.Constant(self.sums, [SHIFT * EVERY_BYTE] * self.sums.count)

        def add(total: Value, x: Value) -> Value:
            own = b.xor(x, signs) if self.shifted else x
            return b.call(self.calls["one"], [total, b.bitcast(own, self.bytes), weight])

        return add

    def _narrow(self, weight: Value) -> Callable[[Value, Value], Value]:
        b = self.b

        def add(total: Value, x: Value) -> Value:
            pairs = b.call(self.calls["narrow"], [b.bitcast(x, self.bytes), weight])
            return b.add(total, b.call(self.calls["wide"], [pairs, self.ones]))

        return add

    def _wide(self, weight: Value) -> Callable[[Value, Value], Value]:
        b = self.b
        even, odd = b.ashr(b.shl(weight, self.eight), self.eight), b.ashr(weight, self.eight)

        def add(total: Value, x: Value) -> Value:
            words = b.bitcast(x, self.words)
            low = b.call(self.calls["wide"], [b.and_(words, self.even), even])
            high = b.call(self.calls["wide"], [b.lshr(words, self.eight), odd])
            return b.add(total, b.add(low, high))

        return add

    def _lanes(self, weight: Value) -> Callable[[Value, Value], Value]:
        b, count = self.b, self.sums.count

        def part(value: Value, i: int, signed: bool) -> Value:
            """Byte i of every lane, as 32 bits."""
            moved = b.shl(value, ir.Constant(self.sums, [24 - 8 * i] * count))
            return (b.ashr if signed else b.lshr)(moved, ir.Constant(self.sums, [24] * count))

        weights = [part(weight, i, signed=True) for i in range(QUAD)]

        def add(total: Value, x: Value) -> Value:
            for i, own in enumerate(weights):
                total = b.add(total, b.mul(part(x, i, signed=False), own))
            return total

        return add
