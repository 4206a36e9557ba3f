"""What stays in the arena between convolutions of ours: nodes that only move, cut, pool or enlarge maps, and
a dense head."""

from __future__ import annotations

from collections.abc import Collection

from aerogel.backends.cpu.lower import bytemaps, elementwise, features
from aerogel.backends.cpu.lower.convert import enlarges
from aerogel.backends.cpu.lower.elementwise import elementwise_of
from aerogel.backends.cpu.lower.views import concatenated, cuts, slices
from aerogel.capture.nodes import Shapes, Stored, casts, lowest_pad, padded_pools, pooling_of, problem
from aerogel.ir import IN_BYTES, Graph, Node, references


def passes(node: Node) -> bool:
    """Whether a node can stay in the arena without being timed: it only moves, cuts, pools or enlarges
    maps."""
    larger = node.op == "aten.pixel_shuffle.default" or node.op.startswith("aten.upsample_nearest2d.")
    moves = larger or node.op in IN_BYTES or bool(concatenated(node)) or lowest_pad(node) is not None
    return elementwise.passes(node) or moves or cuts(node) or pooling_of(node) is not None


def staying(
    graph: Graph, shapes: Shapes, stored: Stored, native: Collection[str], kernels: Collection[str]
) -> set[str]:
    """The nodes that stay, where what they read is ours: a kernel's (`native`) or itself staying.

    `kernels` are all convolutions that were given one, the library's among them.
    """
    found, changed, from_bytes = set[str](), set[str](), set[str]()
    parts, pools = slices(graph, shapes), padded_pools(graph)
    padded = {next(iter(n.inputs)): pools[n.name][0] for n in graph.nodes if n.name in pools}

    def ours(name: str) -> bool:
        return name in native or name in found

    for node in graph.nodes:
        if node.name in native:
            continue
        if node.conv is not None:
            x, _, _, residual = node.conv_inputs()
            held = (
                node.name in kernels
                and ours(x)
                and (residual is None or ours(residual))
                and len(shapes[x]) == 2
            )
            stays = held and features.takes(problem(node, shapes))
        elif casts(node, stored):
            # a cast of a cast must round in between
            stays = ours(node.inputs[0]) and node.inputs[0] not in changed
            changed.add(node.name)
            if stored[node.inputs[0]] == "u8":
                from_bytes.add(node.name)
        elif node.op in IN_BYTES:
            maps = [name for name in node.inputs if name not in graph.constants]
            stays = any(map(ours, maps)) and bytemaps.fits(node, shapes[maps[0]])
        elif node.name in padded:  # the maximum over it reads what was padded
            stays = ours(padded[node.name])
        elif (own := elementwise_of(node, shapes, stored)) is not None:
            stays = ours(own.x) or (own.beside is not None and ours(own.beside))
        elif node.name in parts:
            # else it stands nowhere to be cut
            held = node.name in stored  # a part of bytes that nothing says the meaning of is torch's
            stays = held and ours(parts[node.name][0]) and parts[node.name][0] not in changed
        else:
            joined = concatenated(node)
            larger = enlarges(node, shapes)
            # pixels that are woven of several channels are read one by one, which bytes in quads are not
            quads = larger is not None and larger.woven and node.inputs[0] in from_bytes
            taken = bool(joined) or pooling_of(node) is not None or (larger is not None and not quads)
            maps = [name for name in node.inputs if name in shapes]  # a size is an input too
            fits = taken and len(shapes[node.name]) in (2, 4) and all(len(shapes[name]) == 4 for name in maps)
            stays = fits and any(map(ours, joined or node.inputs))
        if stays:
            found.add(node.name)
    return found


def sources(graph: Graph) -> dict[str, tuple[str, ...]]:
    """For pooling and concatenation, which go where their maps are: the values they are made of."""
    found: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        if passes(node) or (node.op == "getitem" and node.args[0].name in found):
            found[node.name] = tuple(
                dict.fromkeys(s for name in node.inputs for s in found.get(name, (name,)))
            )
    return found


def readers(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Who reads each value in the end: pooling and concatenation are looked through."""
    through = sources(graph)
    found: dict[str, list[str]] = {name: [] for name in graph.users()}
    read = [(n.name, n.inputs) for n in graph.nodes if n.name not in through]
    for reader, names in [*read, ("", tuple(references(graph.outputs)))]:
        for name in names:
            for source in through.get(name, (name,)):
                found[source].append(reader)
    return {name: tuple(dict.fromkeys(r)) for name, r in found.items()}
