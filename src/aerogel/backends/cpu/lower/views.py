"""Values that are a part of another: a concatenation's pieces, a map's channels from here to there.

Maps of one size have one layout, so at batch 1 a range of channels is a piece of memory. A kernel whose
result will be concatenated writes where it belongs in the whole, and a slice is read where it stands: neither
costs a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from aerogel.capture.nodes import Shapes
from aerogel.ir import Graph, Node, Ref, ceil_div

Home = tuple[str, int]
"""The whole that a value is a part of, and its first channel there."""


def concatenated(node: Node) -> tuple[str, ...]:
    """The maps a node lays side by side along the channels, or nothing."""
    if node.op != "aten.cat.default" or node.kwargs or len(node.args) != 2 or node.args[1] not in (1, -3):
        return ()
    pieces = node.args[0]
    return tuple(a.name for a in pieces if isinstance(a, Ref)) if isinstance(pieces, tuple) else ()


def cuts(node: Node) -> bool:
    """Whether a node cuts a map along its channels into several."""
    if node.op not in _CUTS or node.kwargs or len(node.args) != 3 or node.args[2] not in (1, -3):
        return False
    sizes = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return isinstance(node.args[0], Ref) and all(type(size) is int for size in sizes)


_CUTS = ("aten.chunk.default", "aten.split.Tensor", "aten.split_with_sizes.default")


def slices(graph: Graph, shapes: Shapes) -> dict[str, Home]:
    """Values that are some of the channels of another map, at batch 1."""
    known = {n.name: n for n in graph.nodes if cuts(n)}
    found: dict[str, Home] = {}
    for node in graph.nodes:
        cut = known.get(node.args[0].name) if node.op == "getitem" else None
        if cut is None or len(shapes[cut.args[0].name]) != 4 or shapes[cut.args[0].name][0] != 1:
            continue
        source, how, index = cut.args[0].name, cut.args[1], node.args[1]
        size = ceil_div(shapes[source][1], how) if cut.op == "aten.chunk.default" else how
        found[node.name] = source, sum(how[:index]) if isinstance(how, tuple) else index * size
    return found


def root(name: str, known: Mapping[str, Home]) -> Home:
    """The memory a value stands in, and its first channel there."""
    first = 0
    while name in known:
        name, more = known[name]
        first += more
    return name, first


def homes(graph: Graph, shapes: Shapes, ours: Collection[str]) -> dict[str, Home]:
    """For each value of `ours` that is a part of another, its home. Later wholes come first: they hold the
    earlier ones."""
    found = {name: home for name, home in slices(graph, shapes).items() if name in ours}
    for node in reversed(graph.nodes):
        if node.name in ours and concatenated(node) and shapes[node.name][0] == 1:
            _house(node, shapes, ours, found)
    return found


def _house(node: Node, shapes: Shapes, ours: Collection[str], found: dict[str, Home]) -> None:
    """Find a place for the parts of one concatenation."""
    at, places = 0, list[tuple[int, int, Home]]()  # channels from, to, and where they stand so far
    for name in concatenated(node):
        places.append((at, at + shapes[name][1], root(name, found)))
        at += shapes[name][1]
    whole, start = places[0][2]
    if (
        node.name not in found
        and whole in ours
        and all(home == (whole, start + low) for low, _, home in places)
    ):
        found[node.name] = whole, start  # all of it stands in another value already, in this order
        return
    for low, _, (name, first) in places:
        begin = low - first
        end = begin + shapes[name][1]
        inside = [(a, home) for a, b, home in places if a < end and b > begin]
        alone = begin >= 0 and end <= at and all(home == (name, a - begin) for a, home in inside)
        if alone and name in ours and name not in found and root(node.name, found)[0] != name:
            found[name] = node.name, begin
