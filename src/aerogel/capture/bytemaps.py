"""What stands between convolutions in int8 and stays in bytes: averages, sums of two maps, and any function
of one number, which is a table of 256 answers.

An activation whose f32 differs from machine to machine (SiLU: an exponential) is no step of a convolution in
bytes: it stands apart, as a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from aerogel.capture import interpret
from aerogel.capture.nodes import RANKS, Shapes, pooled_shape, pooling_of
from aerogel.errors import InvalidFile
from aerogel.ir import Add, Average, Graph, Node, Quantized, Ref, Table, references
from aerogel.ir.bytemaps import LARGEST
from aerogel.ir.quantized import EXACT

Known = Mapping[str, Quantized]
_UNARY = """
    abs celu clamp clamp_max clamp_min elu gelu hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu
    sigmoid silu softplus tanh threshold
"""
UNARY = frozenset(f"aten.{name}" for name in _UNARY.split())
_ACTIVATIONS = {
    name: f"aten.{name}.default" for name in ("silu", "threshold", "gelu", "sigmoid", "hardsigmoid")
}
_TABLE = 256


def apart(node: Node) -> tuple[Node, ...]:
    """A convolution as the nodes that it is in bytes: itself, or itself up to its activation, that, and what
    comes after."""
    conv = node.conv
    if conv is None or conv.activation not in _ACTIVATIONS or conv.activation in EXACT:
        return (node,)
    cut = next(i for i, step in enumerate(conv.epilogue) if step.startswith(conv.activation))
    before, after = conv.epilogue[:cut], conv.epilogue[cut + 1 :]
    inputs = node.args if "add" in before or not after else node.args[:-1]
    first = replace(node, name=f"{node.name}#sum", conv=replace(conv, epilogue=before), args=inputs)
    name = f"{node.name}#act" if after else node.name
    numbers = (conv.parameter, 0.0) if conv.activation == "threshold" else ()
    act = Node(name, _ACTIVATIONS[conv.activation], (Ref(first.name), *numbers), layer=node.layer)
    if not after:
        return first, act
    return first, act, Node(node.name, "aten.add.Tensor", (Ref(name), node.args[-1]), layer=node.layer)


def all_apart(graph: Graph) -> Graph:
    """The graph with every convolution apart."""
    return replace(graph, nodes=tuple(part for node in graph.nodes for part in apart(node)))


def between(node: Node, shapes: Shapes) -> tuple[str, ...]:
    """The maps that a node reads which bytes are enough for; none for most nodes."""
    if node.conv is not None or len(shapes.get(node.name, ())) not in RANKS:
        return ()
    names = tuple(references((node.args, tuple(node.kwargs.values()))))
    if node.op.rpartition(".")[0] in UNARY:
        return names if len(names) == 1 and isinstance(node.args[0], Ref) else ()
    if node.op == "aten.add.Tensor":
        sizes = [shapes.get(name) for name in (*names, node.name)]
        return names if len(names) == 2 and not node.kwargs and sizes[1:] == sizes[:-1] else ()
    pool = pooling_of(node)
    if pool is None or pool.kind != "average" or len(shapes[names[0]]) != 4:
        return ()
    small = max(*pool.window, *pool.stride, *pool.pad) < LARGEST
    return names if small and pooled_shape(pool, shapes[names[0]], node) else ()


def whole(node: Node) -> bool:
    """Whether a node is an average over whole images: so few that they are given as numbers."""
    pool = pooling_of(node)
    return pool is not None and pool.window == (0, 0)


def in_bytes(node: Node, known: Known) -> tuple[Node, torch.Tensor | None]:
    """A node of `between` as one of IN_BYTES, and its table. Inputs keep their names."""
    maps, y = [known[name] for name in references(node.args)], known[node.name]
    if node.op == "aten.add.Tensor":
        return replace(node, op="u8.add", args=(*node.args, *Add(maps[0], maps[1], y).args)), None
    pool = pooling_of(node)
    if pool is not None:
        keeps = node.op != "aten.mean.dim" or (len(node.args) > 2 and node.args[2] is True)
        args = (node.args[0], *Average(maps[0], None if whole(node) else y, pool, keeps).args)
        return replace(node, op="u8.average", args=args), None
    table = f"{node.name}#table"
    args = (node.args[0], Ref(table), *Table(y).args)
    return replace(node, op="u8.table", args=args, kwargs={}), answers(node, maps[0], y)


def answers(node: Node, x: Quantized, y: Quantized) -> torch.Tensor:
    """What torch says of the 256 numbers that a byte can mean, as bytes."""
    numbers = torch.from_numpy(x.numbers_of(np.arange(_TABLE, dtype=np.uint8)))
    values = dict.fromkeys(node.inputs, numbers)
    values["#"] = interpret.call(node, values)
    found: torch.Tensor = interpret.call(Node("q", "quantize", (Ref("#"), y.scale, y.zero)), values)
    return found


def meaning(node: Node, known: Known) -> Quantized | None:
    """What the bytes of a node of IN_BYTES mean, None where it gives numbers; an InvalidFile where it takes
    its maps for something else."""
    how = node.in_bytes()
    given = {Add: ("a", "b"), Average: ("x",)}.get(type(how), ())
    maps = [ref.name for ref in node.args[: 2 if node.op == "u8.add" else 1]]
    wanted = [getattr(how, name) for name in given] or [known.get(maps[0])]
    if [known.get(name) for name in maps] != wanted or None in wanted:
        raise InvalidFile(f"node '{node.name}' reads bytes that mean something else")
    return how.y


def tables(graph: Graph, constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tables of a graph. What is no constant of 256 bytes is an InvalidFile."""
    found = {}
    for node in graph.nodes:
        if node.op == "u8.table":
            name = node.args[1].name
            held = constants.get(name)
            if held is None or held.dtype != torch.uint8 or tuple(held.shape) != (_TABLE,):
                raise InvalidFile(f"node '{node.name}': a table is a constant of {_TABLE} bytes")
            found[name] = held
    return found
