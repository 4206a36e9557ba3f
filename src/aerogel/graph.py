"""`Graph`: the network as functional nodes. What files, ONNX, torch.export and replicas all speak.

A node is a Conv, whose weight and bias are named arrays kept beside the graph, or one of `OPS` with JSON arguments. Nothing is in
place: every node gives a new value with its own name, and uses only names that came before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aerogel.errors import InvalidFile, UnsupportedModel
from aerogel.problem import Conv

OPS = frozenset({
    "add", "mul", "cat", "relu", "relu6", "leaky_relu", "silu", "hardswish", "sigmoid", "max_pool2d", "avg_pool2d",
    "adaptive_avg_pool2d", "interpolate", "flatten", "reshape", "linear",
})  # fmt: skip
"""Operators a node may have besides "conv": torch.nn.functional or torch names, called with `arguments`."""

FORMAT = "aerogel-graph-1"


@dataclass(frozen=True)
class Node:
    """One value of the network: `op` applied to the values named in `inputs`."""

    name: str
    op: str
    inputs: tuple[str, ...]
    conv: Conv | None = None
    weight: str | None = None
    bias: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.op != "conv" and self.op not in OPS:
            raise UnsupportedModel(
                f"node '{self.name}': operator '{self.op}' is not known; known are conv, {', '.join(sorted(OPS))}"
            )
        if (self.op == "conv") != (self.conv is not None) or (self.conv is not None) != (self.weight is not None):
            raise InvalidFile(f"node '{self.name}': a conv node has a Conv and names its weight; no other node does")
        if self.conv is not None:
            wanted = 1 + ("add" in self.conv.epilogue)
            if len(self.inputs) != wanted or ("bias" in self.conv.epilogue) != (self.bias is not None):
                raise InvalidFile(f"node '{self.name}': {self.conv} takes {wanted} inputs, and a bias where it says so")


@dataclass(frozen=True)
class Graph:
    """Nodes in an order they can run in, with the names that come in and go out."""

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        known = set(self.inputs)
        for node in self.nodes:
            missing = [name for name in node.inputs if name not in known]
            if missing:
                raise InvalidFile(f"node '{node.name}' uses '{missing[0]}', which nothing before it gives")
            if node.name in known:
                raise InvalidFile(f"the name '{node.name}' stands for two values")
            known.add(node.name)
        lost = [name for name in self.outputs if name not in known]
        if lost:
            raise InvalidFile(f"the output '{lost[0]}' is given by no node")

    def users(self) -> dict[str, tuple[str, ...]]:
        """For each value, the nodes that read it."""
        users: dict[str, list[str]] = {name: [] for name in (*self.inputs, *(n.name for n in self.nodes))}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                users[name].append(node.name)
        return {name: tuple(nodes) for name, nodes in users.items()}

    def to_json(self) -> str:
        nodes = [
            {
                "name": n.name, "op": n.op, "inputs": list(n.inputs), "conv": None if n.conv is None else str(n.conv),
                "weight": n.weight, "bias": n.bias, "arguments": dict(n.arguments),
            }
            for n in self.nodes
        ]  # fmt: skip
        raw = {"format": FORMAT, "inputs": list(self.inputs), "nodes": nodes, "outputs": list(self.outputs)}
        return json.dumps(raw, indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Graph:
        """The inverse of `to_json`. Any damage is an InvalidFile."""
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise InvalidFile(f"graph format '{raw['format']}' is not {FORMAT}")
            nodes = tuple(
                Node(
                    _text(n["name"]), _text(n["op"]), _names(n["inputs"]),
                    None if n["conv"] is None else Conv.parse(_text(n["conv"])),
                    None if n["weight"] is None else _text(n["weight"]),
                    None if n["bias"] is None else _text(n["bias"]),
                    dict(n["arguments"]),
                )
                for n in raw["nodes"]
            )  # fmt: skip
            return Graph(_names(raw["inputs"]), nodes, _names(raw["outputs"]))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as why:
            raise InvalidFile(f"not a graph: {type(why).__name__} {why}") from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidFile(f"{value!r:.80} should be text")
    return value


def _names(values: object) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise InvalidFile(f"{values!r:.80} should be a list of names")
    return tuple(_text(v) for v in values)
