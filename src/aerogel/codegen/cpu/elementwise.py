"""`elementwise`: maps of floats, pixel by pixel: sums and products of two of them, maps times a gate, and
activations that stand alone.

    for each unit of this thread        a plane: an image, a channel
      for each vector of the plane      border and gaps too: maps of one size stand alike
        y = activation(f(x, residual or the channel's gate))
                                        lanes that hold no pixel become zero

A gate is one number for each image and channel, as squeeze and excitation gives it; it stands in the place of
a bias. All is computed in f32, whatever floats the maps are.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from aerogel.codegen.cpu import abi
from aerogel.codegen.cpu.emit import F32, I64, PTR, Emit, Value, constant
from aerogel.codegen.cpu.epilogue import activation
from aerogel.ir import ITEM_BYTES, VECTOR_BYTES

POINTERS = (*abi.POINTERS, "live", "parameter")
SIZES = (
    "planes",  # of all images
    "plane_vectors",  # of a plane
    "front_vectors",  # border before the first plane
    "gate_first",  # bytes to the first gate
    "gate_plane",  # and from one to the next
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "elementwise"


@dataclass(frozen=True)
class ElementwiseCode:
    """`kind`: add and mul of two maps, gate, gated (a map and its product with a gate, summed), or alone."""

    isa: str
    dtype: str
    kind: str
    activation: str | None = None

    def __str__(self) -> str:
        return f"elementwise-{self.isa}-{self.dtype}-{self.kind}-{self.activation or ''}"


def emit(code: ElementwiseCode) -> str:
    """LLVM IR of `void elementwise(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name=str(code))
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    block, thread, threads = e.function.args
    b, a = e.b, e.slots(block, ARGUMENTS, POINTERS)
    lanes = VECTOR_BYTES[code.isa] // 4
    step = lanes * ITEM_BYTES[code.dtype]
    zeros = e.narrow(constant(lanes, 0.0), code.dtype, lanes)
    gated = code.kind in ("gate", "gated")
    parameter = e.splat(e.load(a["parameter"], F32, 4), lanes)

    def unit(u: Value) -> None:
        first = b.mul(b.mul(u, a["plane_vectors"]), I64(step))
        gate = None
        if gated:
            place = e.at(a["bias"], b.add(a["gate_first"], b.mul(u, a["gate_plane"])))
            gate = e.splat(e.scalar(place, I64(0), code.dtype, "f32"), lanes)

        def vector(v: Value, _: list[Value]) -> None:
            at = b.add(first, b.mul(v, I64(step)))
            made = e.vector(e.at(a["x"], at), code.dtype, "f32", lanes)
            if code.kind in ("add", "mul"):
                other = e.vector(e.at(a["residual"], at), code.dtype, "f32", lanes)
                made = b.fadd(made, other) if code.kind == "add" else b.fmul(made, other)
            if gate is not None:
                product = b.fmul(made, gate)
                made = b.fadd(made, product) if code.kind == "gated" else product
            if code.activation is not None:
                made = activation(e, code.activation, made, lanes, parameter)
            kept = b.select(e.lanes_of(a["live"], v, lanes), e.narrow(made, code.dtype, lanes), zeros)
            e.store(kept, e.at(a["y"], at), code.dtype)

        e.loop(I64(0), a["plane_vectors"], vector)

    def front() -> None:
        def one(v: Value, _: list[Value]) -> None:
            e.store(zeros, e.at(a["y"], b.mul(v, I64(step))), code.dtype)

        e.loop(b.neg(a["front_vectors"]), I64(0), one)

    e.share(a["planes"], thread, threads, unit)
    e.when(b.icmp_signed("==", thread, I64(0)), front)
    b.ret_void()
    return str(module)
