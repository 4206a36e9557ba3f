"""Copies between torch's tensors and ours, as calls that can be timed: an assignment counts them."""

from __future__ import annotations

from collections.abc import Collection

from aerogel.backends import Crossings, Trial
from aerogel.backends.cpu import threads
from aerogel.backends.cpu.lower.convert import convert
from aerogel.backends.cpu.lower.residency import readers, sources
from aerogel.capture.nodes import Shapes, image_shape
from aerogel.ir import Config, Conv, Graph, Layout, Node, Shape, Target
from aerogel.methods import cpu_form


def crossings(graph: Graph, shapes: Shapes, able: Collection[str], target: Target) -> Crossings:
    """What it takes to bring each value next to a convolution of ours across: one call for each shape."""
    through = sources(graph)
    ours = [node for node in graph.nodes if node.name in set(able)]
    near = {n: node.conv.dtypes.input for node in ours if node.conv for n in (node.name, *_maps(node))}
    names = {s: dtype for name, dtype in near.items() for s in through.get(name, (name,))}
    known: dict[tuple[Shape, str], Trial] = {}
    found = {}
    for name, dtype in names.items():
        if len(shapes.get(name, ())) not in (2, 3, 4):
            continue
        shape = image_shape(shapes[name])
        if (shape, dtype) not in known:
            plain = Layout("contiguous", shape[3], dtype=dtype)
            known[shape, dtype] = _copy(shape, plain, _bordered(shape[3], dtype), target)
        found[name] = known[shape, dtype]
    return Crossings(found, readers(graph))


def entry(conv: Conv, config: Config, target: Target) -> Trial | None:
    """A strided layer of ours reads phases: the copy that cuts them is part of its time."""
    reads, _ = cpu_form(config.method).layouts(conv, config, target)
    if reads.kind != "phases":
        return None
    return _copy(conv.x_shape, _bordered(conv.size[1], reads.dtype), reads, target)


def _bordered(width: int, dtype: str) -> Layout:
    return Layout("planar", width + 1, (1, 1, 1, 1), dtype=dtype)


def _copy(shape: Shape, source: Layout, target: Layout, machine: Target) -> Trial:
    kernels = convert(shape, source, target, machine)
    x, y = source.allocate(shape), target.allocate(shape)
    x[:] = 0
    bound = [(kernel, kernel.bind(x=x.ctypes.data, y=y.ctypes.data)) for kernel in kernels]
    segment = threads.Segment(bound, machine.threads)
    held = (segment, x, y)
    return lambda: held[0]()


def _maps(node: Node) -> tuple[str, ...]:
    x, _, _, residual = node.conv_inputs()
    return (x,) if residual is None else (x, residual)
