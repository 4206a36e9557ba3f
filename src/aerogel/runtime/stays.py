"""What stays in the arena between convolutions of ours: nodes that only move, cut, pool or enlarge maps, and a dense head."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from aerogel.graph import Graph, Node
from aerogel.layout import Shape
from aerogel.problem import Conv
from aerogel.runtime import features, pooling
from aerogel.runtime.convert import enlarges
from aerogel.runtime.views import concatenated, cuts, slices

Shapes = Mapping[str, tuple[int, ...]]
Kinds = Mapping[str, str]
"""The element type of each value that is f32, f16 or bf16."""


def image_shape(shape: tuple[int, ...]) -> Shape:
    """(n, c, l) counts as (n, c, 1, l), features (n, c) as (n, c, 1, 1)."""
    rows, columns = {2: (1, 1), 3: (1, shape[-1])}.get(len(shape), shape[2:])
    return shape[0], shape[1], rows, columns


def passes(node: Node) -> bool:
    """Whether a node can stay in the arena without being timed: it only moves, cuts, pools or enlarges maps."""
    larger = node.op == "aten.pixel_shuffle.default" or node.op.startswith("aten.upsample_nearest2d.")
    return larger or bool(concatenated(node)) or cuts(node) or pooling.read(node) is not None


def casts(node: Node, kinds: Kinds) -> bool:
    """Whether a node only changes the element type of a map."""
    if node.op != "aten.to.dtype" or len(node.inputs) != 1:
        return False
    both = kinds.get(node.inputs[0]), kinds.get(node.name)
    return None not in both and both[0] != both[1] and "f32" in both


def problem(node: Node, shapes: Shapes) -> Conv:
    """The concrete problem of a conv node for known shapes."""
    assert node.conv is not None
    n, _, h, w = image_shape(shapes[node.conv_inputs()[0]])
    return node.conv.at(n, h, w)


def staying(graph: Graph, shapes: Shapes, kinds: Kinds, native: Collection[str], kernels: Collection[str]) -> set[str]:
    """The nodes that stay, where what they read is ours: a kernel's (`native`) or itself staying.

    `kernels` are all convolutions that were given one, the library's among them.
    """
    found, changed = set[str](), set[str]()
    parts = slices(graph, shapes)

    def ours(name: str) -> bool:
        return name in native or name in found

    for node in graph.nodes:
        if node.name in native:
            continue
        if node.conv is not None:
            x, _, _, residual = node.conv_inputs()
            held = node.name in kernels and ours(x) and (residual is None or ours(residual)) and len(shapes[x]) == 2
            stays = held and features.takes(problem(node, shapes))
        elif casts(node, kinds):
            stays = ours(node.inputs[0])
            changed.add(node.name)
        elif node.name in parts:
            stays = ours(parts[node.name][0]) and parts[node.name][0] not in changed  # else it stands nowhere to be cut
        else:
            joined = concatenated(node)
            taken = bool(joined) or pooling.read(node) is not None or enlarges(node, shapes) is not None
            maps = [name for name in node.inputs if name in shapes]  # a size is an input too
            fits = taken and len(shapes[node.name]) in (2, 4) and all(len(shapes[name]) == 4 for name in maps)
            stays = fits and any(map(ours, joined or node.inputs))
        if stays:
            found.add(node.name)
    return found
