"""A function of a byte, looked up for every byte of a vector at once: its 256 answers stand in registers.

avx512, avx2    sixteen tables of sixteen bytes; a shuffle answers for each, the high half of the byte
                says which of them counts
neon            four tables of sixty-four; what is not in a table is answered with zero
generic         one byte after the other
"""

from __future__ import annotations

from llvmlite import ir

from aerogel.codegen.cpu.emit import I8, I32, I64, Emit, Value
from aerogel.ir import QUAD, VECTOR_BYTES

_SHUFFLE = {"avx512": "llvm.x86.avx512.pshuf.b.512", "avx2": "llvm.x86.avx2.pshuf.b"}
_ROW, _ROWS = 16, 16


class Table:
    """Looks bytes up that stand as quads, 32 bits each."""

    def __init__(self, e: Emit, module: Value, isa: str, base: Value) -> None:
        self.e, self.b, self.isa, self.base = e, e.b, isa, base
        self.size = VECTOR_BYTES[isa]
        self.quads, self.bytes = ir.VectorType(I32, self.size // QUAD), ir.VectorType(I8, self.size)
        row = ir.VectorType(I8, _ROW)
        rows = [e.load(e.at(base, I64(_ROW * i)), row, 1) for i in range(_ROWS)] if isa != "generic" else []
        if isa in _SHUFFLE:
            typ = ir.FunctionType(self.bytes, [self.bytes] * 2)
            self.shuffle = ir.Function(module, typ, _SHUFFLE[isa])
            wide = ir.Constant(ir.VectorType(I32, self.size), [i % _ROW for i in range(self.size)])
            rows = [self.b.shuffle_vector(r, ir.Constant(row, ir.Undefined), wide) for r in rows]
        elif isa == "neon":
            typ = ir.FunctionType(row, [row] * 5)
            self.shuffle = ir.Function(module, typ, "llvm.aarch64.neon.tbl4.v16i8")
        self.rows = rows

    def __call__(self, quads: Value) -> Value:
        b = self.b
        if self.isa == "generic":
            return self._single(quads)
        at = b.bitcast(quads, self.bytes)
        found = self._fours(at) if self.isa == "neon" else self._sixteens(at)
        return b.bitcast(found, self.quads)

    def _every(self, number: int) -> Value:
        return ir.Constant(self.bytes, [number] * self.size)

    def _sixteens(self, at: Value) -> Value:
        b = self.b
        low, high = b.and_(at, self._every(15)), b.lshr(at, self._every(4))
        found = b.call(self.shuffle, [self.rows[0], low])
        for i, row in enumerate(self.rows[1:], 1):
            here = b.icmp_unsigned("==", high, self._every(i))
            found = b.select(here, b.call(self.shuffle, [row, low]), found)
        return found

    def _fours(self, at: Value) -> Value:
        b, found = self.b, None
        for i in range(0, _ROWS, 4):
            own = b.call(self.shuffle, [*self.rows[i : i + 4], b.sub(at, self._every(_ROW * i))])
            found = own if found is None else b.or_(found, own)
        return found

    def _single(self, quads: Value) -> Value:
        b, e = self.b, self.e
        found = quads
        for lane in range(self.size // QUAD):
            word = b.extract_element(quads, I32(lane))
            total: Value = I32(0)
            for i in range(QUAD):
                at = b.zext(b.and_(b.lshr(word, I32(8 * i)), I32(255)), I64)
                own = b.zext(e.load(e.at(self.base, at), I8, 1), I32)
                total = b.or_(total, b.shl(own, I32(8 * i)))
            found = b.insert_element(found, total, I32(lane))
        return found
