"""Sums, products, gates and activations that no convolution took along, on our planes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from aerogel.capture.nodes import Shapes, Stored, activation_of
from aerogel.codegen.cpu import elementwise, llvm
from aerogel.codegen.cpu.abi import Kernel
from aerogel.codegen.cpu.sums import lane_bits
from aerogel.errors import PlanMismatch
from aerogel.ir import Conv, Graph, Layout, Node, Ref, Shape, Target

_FLOATS = ("f32", "f16", "bf16")
_KINDS = {"aten.add.Tensor": "add", "aten.mul.Tensor": "mul"}


@dataclass(frozen=True)
class Elementwise:
    """What a node does to a map: `beside` is a second one, `gate` a number for each channel."""

    kind: str
    x: str
    beside: str | None = None
    gate: str | None = None
    step: str | None = None
    """The activation after it."""

    @property
    def maps(self) -> tuple[str, ...]:
        return tuple(name for name in (self.x, self.beside, self.gate) if name is not None)


def passes(node: Node) -> bool:
    """Whether a node may be one of these, at some sizes."""
    return activation_of(node) is not None or len(_two(node)) == 2


def elementwise_of(node: Node, shapes: Shapes, stored: Stored) -> Elementwise | None:
    """What a node is at these sizes, or None: torch's."""
    step, (first, *more) = activation_of(node), (*_two(node), "")
    found = Elementwise("alone", node.args[0].name, step=step) if step is not None else None
    if found is None and more:
        found = _of_two(_KINDS[node.op], first, more[0], shapes)
    if found is None or len(shapes.get(node.name, ())) != 4 or shapes[node.name] != shapes.get(found.x):
        return None
    types = {stored.get(name) for name in (node.name, *found.maps)}
    return found if len(types) == 1 and types <= {*_FLOATS} else None


def _two(node: Node) -> tuple[str, ...]:
    plain = node.op in _KINDS and not node.kwargs and len(node.args) == 2
    return tuple(a.name for a in node.args if isinstance(a, Ref)) if plain else ()


def _of_two(kind: str, first: str, second: str, shapes: Shapes) -> Elementwise | None:
    one, other = shapes.get(first, ()), shapes.get(second, ())
    if one == other:
        return Elementwise(kind, first, beside=second)
    if kind != "mul":
        return None
    for x, gate, small, large in ((first, second, other, one), (second, first, one, other)):
        if len(large) == 4 and small == (*large[:2], 1, 1):
            return Elementwise("gate", x, gate=gate)
    return None


def gated(
    graph: Graph, known: Mapping[str, Elementwise], users: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, Elementwise]]:
    """Sums of a map and its product with a gate: one kernel, if nothing else reads the product. By the sum's
    name the product's, and what both are."""
    found = {}
    for node in graph.nodes:
        own = known.get(node.name)
        if own is None or own.kind != "add":
            continue
        for x, product in ((own.x, own.beside), (own.beside, own.x)):
            inner = known.get(product or "")
            if inner is not None and inner.kind == "gate" and inner.x == x and len(users[product or ""]) == 1:
                found[node.name] = product or "", Elementwise("gated", inner.x, gate=inner.gate)
    return found


def kernel(own: Elementwise, shape: Shape, planes: Layout, gates: Layout | None, target: Target) -> Kernel:
    """From planes to planes of one layout; `gates` is how a gate stands."""
    n, c, h, w = shape
    lanes, plane = target.vector_bytes // 4, planes.plane(h, w)
    if plane % lanes or planes.front % lanes:
        raise PlanMismatch(f"no kernel goes over {planes} vector by vector")
    number = np.arange(plane)
    live = (number // planes.pitch < h) & (number % planes.pitch < w)
    layer = Conv(1, 1, epilogue=() if own.step is None else (own.step,))
    sizes = {
        "planes": n * c,
        "plane_vectors": plane // lanes,
        "front_vectors": planes.front // lanes,
        "gate_first": 0 if gates is None else gates.front * gates.item_bytes,
        "gate_plane": 0 if gates is None else gates.plane(1, 1) * gates.item_bytes,
    }
    owned = {
        "live": np.ascontiguousarray(lane_bits(lanes, live.reshape(-1, lanes))),
        "parameter": np.array([layer.parameter], np.float32),
    }
    code = elementwise.ElementwiseCode(target.isa, planes.dtype, own.kind, layer.activation)
    entry = llvm.function(str(code), elementwise.ENTRY, lambda: elementwise.emit(code), target.isa)
    return Kernel.of(f"{own.kind} {shape}", (planes, planes), entry, elementwise.ARGUMENTS, sizes, owned)
