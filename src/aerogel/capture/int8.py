"""Graph -> Graph in int8: chosen layers read, hold and give bytes; what torch computes stays as it was.

    conv                                      bytes, if its layer is among those chosen
    largest of windows, concatenation,        as their inputs, where those are bytes
    enlarging by repeating
    averages, sums, functions of one number   bytes, where their inputs are (bytemaps.py)
    everything else, and the outputs          numbers, as before

A value is quantized or dequantized where it is wanted in the other form, once for all its readers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from aerogel.capture.bytemaps import apart, between, in_bytes, meaning, whole
from aerogel.errors import InvalidFile
from aerogel.ir import IN_BYTES, INT8, QUAD, Conv, Graph, Node, Quantized, Ref, Requantize, Table, references

_SAME = ("max_pool2d", "upsample_nearest2d")
"""Operators whose output holds only bytes of their input."""
_JOINS = "aten.cat.default"
FINER = 256
"""Parts of a step of the output, to which a filter without weights rounds its bias."""
MOST_BIAS = 2**29
"""A bias in units of the sums: beside it there is room for what zero points add."""


def follows(node: Node, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The maps whose bytes a node only moves; none for most nodes."""
    name = node.op.split(".")[1] if node.op.startswith("aten.") else ""
    if name in _SAME and isinstance(node.args[0], Ref) and not node.kwargs:
        return (node.args[0].name,)
    if node.op == _JOINS and len(node.args) == 2 and node.args[1] in (1, -3):
        names = tuple(references(node.args[0]))
        whole = len(names) == len(node.args[0]) and all(shapes[name][1] % QUAD == 0 for name in names)
        return names if whole else ()
    return ()


def meanings(graph: Graph, constants: Mapping[str, torch.Tensor]) -> dict[str, Quantized]:
    """What the bytes of each map in int8 mean. What cannot be is an InvalidFile."""
    known: dict[str, Quantized] = {}
    for node in graph.nodes:
        if node.op == "quantize":
            known[node.name] = node.quantized()
        elif node.conv is not None and node.conv.dtypes == INT8:
            x, _, bias, residual = node.conv_inputs()
            if x not in known or (residual is not None and residual not in known):
                raise InvalidFile(f"node '{node.name}' reads bytes that nothing says the meaning of")
            words = constants[bias or ""]
            how = Requantize.parse(words.numpy(), node.conv.k)
            known[node.name] = Quantized(how.unit, how.zero)
        elif node.op in IN_BYTES:
            if (own := meaning(node, known)) is not None:
                known[node.name] = own
        elif node.op.startswith("aten.") and known:
            maps = [name for name in node.inputs if name in known]
            if maps and node.op.split(".")[1] in (*_SAME, "cat"):
                if any(known[name] != known[maps[0]] for name in maps):
                    raise InvalidFile(f"node '{node.name}' joins bytes of several meanings")
                known[node.name] = known[maps[0]]
    return known


def quantized(
    graph: Graph,
    constants: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    known: Mapping[str, Quantized],
    layers: Collection[str],
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The graph with these convolutions in int8, and its constants. `known` says what bytes of each value
    mean."""
    work = _Quantize(dict(constants), known)
    for node in graph.nodes:
        maps = follows(node, shapes)
        if node.conv is not None and node.name in layers:
            work.layer(node)
        elif maps and all(name in work.bytes and known[name] == known[node.name] for name in maps):
            work.keep(replace(node, args=work.wanted(node.args, work.in_bytes)), work.bytes)
        elif maps and node.op == _JOINS and work.take(maps, node.name):
            own = known[node.name]
            args = work.wanted(node.args, lambda name, own=own: work.meaning(name, own))
            work.keep(replace(node, args=args), work.bytes)
        elif work.take(between(node, shapes), node.name):
            work.between(node)
        else:
            work.keep(node.with_arguments(lambda a: work.wanted(a, work.in_numbers)), work.numbers)
    outputs = work.wanted(graph.outputs, work.in_numbers)
    used = {*references(outputs), *(name for node in work.nodes for name in node.inputs)}
    kept = {name: value for name, value in work.constants.items() if name in used}
    return Graph(graph.inputs, tuple(kept), tuple(work.nodes), outputs), kept


class _Quantize:
    """`bytes` and `numbers` have the names of values in each form."""

    def __init__(self, constants: dict[str, torch.Tensor], known: Mapping[str, Quantized]) -> None:
        self.constants, self.known = constants, known
        self.nodes: list[Node] = []
        self.bytes: dict[str, str] = {}
        self.numbers: dict[str, str] = {}

    def keep(self, node: Node, form: dict[str, str]) -> None:
        self.nodes.append(node)
        form[node.name] = node.name

    def in_bytes(self, name: str) -> str:
        if name not in self.bytes:
            own = self.known[name]
            made = Node(f"{name}#u8", "quantize", (Ref(name), own.scale, own.zero))
            self.nodes.append(made)
            self.bytes[name] = made.name
        return self.bytes[name]

    def in_numbers(self, name: str) -> str:
        if name in self.bytes and name not in self.numbers and self.bytes[name] == name:
            own = self.known[name]
            made = Node(f"{name}#f32", "dequantize", (Ref(name), own.scale, own.zero))
            self.nodes.append(made)
            self.numbers[name] = made.name
        return self.numbers.get(name, name)

    def take(self, maps: tuple[str, ...], name: str) -> bool:
        """Whether a node stays in bytes: what it reads and gives can be, and some of it is already."""
        able = all(map_ in self.bytes and map_ in self.known for map_ in maps) and name in self.known
        return able and any(self.bytes[map_] == map_ for map_ in maps)

    def meaning(self, name: str, how: Quantized) -> str:
        """A value in bytes that mean this."""
        own = self.known[name]
        made = f"{name}#{how.scale!r}.{how.zero}"
        if own == how:
            return self.in_bytes(name)
        if made not in self.constants:
            self.constants[made] = torch.from_numpy(Table.same(own, how))
            args = (Ref(self.in_bytes(name)), Ref(made), *Table(how).args)
            self.nodes.append(Node(f"{made}#u8", "u8.table", args))
        return f"{made}#u8"

    def between(self, node: Node) -> None:
        made, table = in_bytes(node, self.known)
        if table is not None:
            self.constants[f"{node.name}#table"] = table
        args = self.wanted(made.args, lambda name: self.in_bytes(name) if name in self.bytes else name)
        self.keep(replace(made, args=args), self.numbers if whole(node) else self.bytes)

    def wanted(self, argument: Any, form: Any) -> Any:
        """An argument with every value in a form."""
        if isinstance(argument, tuple):
            return tuple(self.wanted(item, form) for item in argument)
        return Ref(form(argument.name)) if isinstance(argument, Ref) else argument

    def layer(self, node: Node) -> None:
        """A convolution, and what stands apart from it in bytes."""
        first, *after = apart(node)
        self.convolution(first)
        for part in after:
            for name in part.inputs:
                self.in_bytes(name)
            self.between(part)

    def convolution(self, node: Node) -> None:
        assert node.conv is not None
        x, weight, _, residual = node.conv_inputs()
        names = f"{weight}#s8", f"{node.name}#words"
        self.constants[names[0]], self.constants[names[1]] = weights(node, self.constants, self.known)
        args = [Ref(self.in_bytes(x)), Ref(names[0]), Ref(names[1])]
        if residual is not None:
            args.append(Ref(self.in_bytes(residual)))
        self.keep(replace(node, conv=in_int8(node.conv), args=tuple(args)), self.bytes)


def alone(
    node: Node, constants: Mapping[str, torch.Tensor], known: Mapping[str, Quantized]
) -> tuple[list[Node], dict[str, torch.Tensor]]:
    """One layer in int8: from numbers of its inputs to the bytes it gives, and constants."""
    work = _Quantize(dict(constants), known)
    work.layer(node)
    return work.nodes, work.constants


def in_int8(conv: Conv) -> Conv:
    """The same convolution of bytes. Its bias is its requantisation, which it always has."""
    steps = ("bias", *(step for step in conv.epilogue if step != "bias"))
    return replace(conv, dtypes=INT8, epilogue=steps)


def weights(
    node: Node, constants: Mapping[str, torch.Tensor], known: Mapping[str, Quantized]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of a convolution as signed bytes, a scale for each filter, and its requantisation. What was
    zero stays zero. A filter with small weights or none has a scale by which its bias fits as well."""
    x, name, bias, residual = node.conv_inputs()
    weight = constants[name].detach().float()
    flat = weight.flatten(1)
    largest = flat.abs().amax(1)
    finest = known[node.name].scale / known[x].scale / FINER
    scale = torch.where(largest > 0, largest / 127, torch.full_like(largest, finest))
    added = torch.zeros_like(largest) if bias is None else constants[bias].detach().float().abs()
    scale = torch.maximum(scale, added / (known[x].scale * MOST_BIAS)).clamp_min(
        torch.finfo(torch.float32).tiny
    )
    values = (flat / scale[:, None]).round().clamp(-127, 127).to(torch.int8).reshape(weight.shape)
    own = None if bias is None else constants[bias].float().numpy()
    beside = None if residual is None else known[residual]
    how = Requantize.of(values.numpy(), scale.numpy(), own, known[x], known[node.name], beside)
    return values, torch.from_numpy(how.words)
