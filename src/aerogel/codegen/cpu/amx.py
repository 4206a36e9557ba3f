"""`amx`: the tiles of `blocks` on AMX, the matrix engine of recent Xeons; x and weights in bf16, sums in f32.

One instruction multiplies 16 filters x 32 positions by 32 positions x 16 pixels. Positions go in pairs: a row
of the stage has for each pixel the two halves of a pair side by side, a row of a panel the pairs of one
filter.

    for each panel of 32 filters, for two vectors of 16 pixels
      C00 C01 C10 C11 = 0
      for each 32 positions of the stage
        A0, A1 <- values of filters 0..16, 16..32;   B0, B1 <- the stage under both vectors;   Cij += Ai . Bj
      sums += C

Everything else, sums, rows, epilogue and borders, is `blocks`. Positions are filled up to a multiple of 32
with zeros in the stage and in the panels. The engine takes subnormal numbers for zeros.

The tests run it on the engine where the CPU has one (Emerald Rapids, so far). Everywhere they compile it,
look at the instructions, and run it with the seven tile instructions replaced by plain loops that do what the
manual says (`emulated`).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from aerogel.codegen.cpu import llvm
from aerogel.codegen.cpu.abi import Code
from aerogel.codegen.cpu.blocks import ARGUMENTS, ENTRY, POINTERS, Blocks, BlocksCode
from aerogel.codegen.cpu.emit import F32, I8, I16, I32, I64, PTR, VOID, Emit, Value
from aerogel.ir import Array

SIDE = 16
"""Rows of a tile, and 32-bit elements of a row."""
ROW = 64
"""Bytes of a tile's row."""
TILE = SIDE * ROW
FILTERS, WIDTH, PAIRED = 2 * SIDE, 2, 2 * SIDE
"""Of a panel: filters, vectors of pixels; positions of one instruction."""
_C, _A, _B = (0, 1, 2, 3), (4, 5), (6, 7)


def panels(block: Array) -> Array:
    """Values of panels x positions x filters in the order in which tiles are loaded: panels x chunks x halves
    x filters x 32."""
    count, positions, _ = block.shape
    whole = np.zeros((count, positions + -positions % PAIRED, FILTERS), block.dtype)
    whole[:, :positions] = block
    return whole.reshape(count, -1, PAIRED, 2, SIDE).transpose(0, 1, 3, 4, 2).reshape(-1)


def function(code: BlocksCode) -> Code:
    """The kernel; refused where the CPU or the operating system has no AMX."""
    return llvm.function(f"amx-{code}", ENTRY, lambda: emit(code), code.isa, "amx_bf16")


def emit(code: BlocksCode, *, emulated: bool = False) -> str:
    """LLVM IR of `void blocks(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name=f"amx-{code}")
    tiles = _Emulated(module) if emulated else _Tiles(module)
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    tiles.open(e)
    _Amx(code, e, e.slots(block, ARGUMENTS, POINTERS), module, tiles).units(thread, threads)
    tiles.close(e)
    e.b.ret_void()
    return str(module)


class _Tiles:
    """The tile instructions, by LLVM's intrinsics with the registers named."""

    def __init__(self, module: Value) -> None:
        def intrinsic(name: str, *arguments: Value) -> Value:
            return ir.Function(module, ir.FunctionType(VOID, arguments), f"llvm.x86.{name}")

        self.zero, self.dot = intrinsic("tilezero", I8), intrinsic("tdpbf16ps", I8, I8, I8)
        self.load, self.store = (
            intrinsic("tileloadd64", I8, PTR, I64),
            intrinsic("tilestored64", I8, PTR, I64),
        )
        self._configure, self._release = intrinsic("ldtilecfg", PTR), intrinsic("tilerelease")
        # palette 1; from byte 16 two bytes a tile: bytes of a row; from byte 48 one byte a tile: rows
        shape = bytes([1] + [0] * 15) + bytes([ROW, 0] * 8) + bytes(16) + bytes([SIDE] * 8) + bytes(8)
        self._shape = ir.GlobalVariable(module, ir.ArrayType(I8, len(shape)), "shape")
        self._shape.initializer, self._shape.global_constant = (
            ir.Constant(self._shape.value_type, bytearray(shape)),
            True,
        )
        self._shape.linkage, self._shape.align = "internal", 64

    def open(self, e: Emit) -> None:
        e.b.call(self._configure, [e.b.bitcast(self._shape, PTR)])

    def close(self, e: Emit) -> None:
        e.b.call(self._release, [])


class _Emulated:
    """The same instructions as functions over eight tiles in memory, for one thread: for tests on machines
    without AMX."""

    def __init__(self, module: Value) -> None:
        self._module, self._row = module, ir.VectorType(I32, SIDE)
        self._tiles = ir.GlobalVariable(module, ir.ArrayType(I8, 8 * TILE), "tiles")
        self._tiles.initializer, self._tiles.linkage, self._tiles.align = (
            ir.Constant(self._tiles.value_type, None),
            "internal",
            64,
        )
        nothing = ir.Constant(self._row, None)
        self.zero = self._rows("zero", [I8], lambda e, place, i, given: e.b.store(nothing, place, align=64))
        self.load = self._rows("load", [I8, PTR, I64], self._loaded)
        self.store = self._rows("store", [I8, PTR, I64], self._stored)
        self.dot = self._rows("dot", [I8, I8, I8], self._dot)

    def open(self, e: Emit) -> None: ...

    def close(self, e: Emit) -> None: ...

    def _rows(self, name: str, arguments: list[Value], body: Value) -> Value:
        e = Emit.start(self._module, name, arguments)
        given = e.function.args
        e.loop(I64(0), I64(SIDE), lambda i, _: body(e, self._place(e, given[0], i), i, given) and None)
        e.b.ret_void()
        return e.function

    def _place(self, e: Emit, tile: Value, row: Value) -> Value:
        b = e.b
        return e.at(
            b.inttoptr(b.ptrtoint(self._tiles, I64), PTR),
            b.add(b.mul(b.zext(tile, I64), I64(TILE)), b.mul(row, I64(ROW))),
        )

    def _loaded(self, e: Emit, place: Value, i: Value, given: list[Value]) -> None:
        e.b.store(e.load(e.at(given[1], e.b.mul(i, given[2])), self._row, 4), place, align=64)

    def _stored(self, e: Emit, place: Value, i: Value, given: list[Value]) -> None:
        e.b.store(e.load(place, self._row, 64), e.at(given[1], e.b.mul(i, given[2])), align=4)

    def _dot(self, e: Emit, place: Value, i: Value, given: list[Value]) -> None:
        b, sums = e.b, ir.VectorType(F32, SIDE)

        def halves(both: Value) -> list[Value]:
            low = b.shl(both, ir.Constant(self._row, [16] * SIDE))
            return [
                b.bitcast(bits, sums) for bits in (low, b.and_(both, ir.Constant(self._row, [-65536] * SIDE)))
            ]

        def pair(k: Value, acc: list[Value]) -> list[Value]:
            own = e.load(e.at(self._place(e, given[1], i), b.mul(k, I64(4))), I32, 4)
            met = e.load(self._place(e, given[2], k), self._row, 64)
            for weight, x in zip(halves(e.splat(own, SIDE)), halves(met), strict=True):
                acc = [b.fadd(acc[0], b.fmul(weight, x))]
            return acc

        b.store(e.loop(I64(0), I64(SIDE), pair, [e.load(place, sums, 64)])[1][0], place, align=64)


class _Amx(Blocks):
    """Stage and panels for the matrix engine."""

    def __init__(
        self, code: BlocksCode, e: Emit, a: dict[str, Value], module: Value, tiles: _Tiles | _Emulated
    ) -> None:
        super().__init__(code, e, a, module)
        self.tiles, self.value_bytes = tiles, 2
        held = e.b.alloca(ir.ArrayType(I8, len(_C) * TILE))
        held.align = 64
        self.held = e.b.bitcast(held, PTR)

    def padded(self, count: Value) -> Value:
        return self.b.and_(self.b.add(count, I64(PAIRED - 1)), I64(-PAIRED))

    def gather(self, x: Value, first: Value, count: Value, stage: Value) -> None:
        """Bring the windows of each pair of positions side by side, pixel by pixel."""
        b, e = self.b, self.e
        words = ir.VectorType(I32, SIDE)
        high = ir.Constant(words, [16] * SIDE)

        def window(i: Value, v: int) -> Value:
            place = e.at(x, b.add(e.integer(self.a["tile_offset"], b.add(first, i)), I64(v * self.x_step)))
            return b.zext(e.load(place, ir.VectorType(I16, SIDE), 2), words)

        def put(pair: Value, v: int, both: Value) -> None:
            e.b.store(both, e.at(stage, b.add(b.mul(pair, I64(WIDTH * ROW)), I64(v * ROW))), align=4)

        def two(i: Value, _: list[Value]) -> None:
            for v in range(WIDTH):
                put(b.sdiv(i, I64(2)), v, b.or_(window(i, v), b.shl(window(b.add(i, I64(1)), v), high)))

        def last(i: Value, _: list[Value]) -> None:
            for v in range(WIDTH):
                put(b.sdiv(i, I64(2)), v, window(i, v))

        def nothing(i: Value, _: list[Value]) -> None:
            for v in range(WIDTH):
                put(i, v, ir.Constant(words, None))

        rest, _ = e.loop(I64(0), count, two, step=2)
        e.loop(rest, count, last)
        e.loop(b.sdiv(b.add(count, I64(1)), I64(2)), b.sdiv(self.padded(count), I64(2)), nothing)

    def panel(self, values: Value, count: Value, stage: Value, member: Value, sums: Value) -> None:
        """Four tiles of sums; then each filter's go where its sums lie."""
        b, e, t = self.b, self.e, self.tiles
        for c in _C:
            b.call(t.zero, [I8(c)])

        def step(i: Value, _: list[Value]) -> None:
            own, met = (e.at(base, b.mul(i, I64(2 * TILE))) for base in (values, stage))
            for j in range(2):
                b.call(t.load, [I8(_A[j]), e.at(own, I64(j * TILE)), I64(ROW)])
                b.call(t.load, [I8(_B[j]), e.at(met, I64(j * ROW)), I64(WIDTH * ROW)])
            for c in _C:
                b.call(t.dot, [I8(c), I8(_A[c // 2]), I8(_B[c % 2])])

        e.loop(I64(0), b.sdiv(self.padded(count), I64(PAIRED)), step)
        for c in _C:
            b.call(t.store, [I8(c), e.at(self.held, I64(c * TILE)), I64(ROW)])

        def filter_(f: Value, _: list[Value]) -> None:
            at = self.sums_of(sums, e.integer(self.a["member"], b.add(member, f)))
            first = b.add(b.mul(b.sdiv(f, I64(SIDE)), I64(2 * TILE)), b.mul(b.srem(f, I64(SIDE)), I64(ROW)))
            for v in range(WIDTH):
                found = e.vector(e.at(self.held, b.add(first, I64(v * TILE))), "f32", "f32", self.lanes)
                place = e.at(at, I64(v * self.vector))
                e.store(b.fadd(e.vector(place, "f32", "f32", self.lanes), found), place, "f32")

        e.loop(I64(0), I64(FILTERS), filter_)
