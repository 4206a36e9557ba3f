"""Graph -> Graph in half precision: convolutions read, hold and give 16 bits; what torch computes stays as
precise as it was.

    conv, Linear                                    half, unless its layer is among those that stay
    pooling, concatenation, slices, enlarging       as their inputs: they only move maps
    everything else, and the outputs                the model's own type

A cast stands where a value is wanted in the other type, once for all its readers. Inputs and outputs keep
their types, so that a caller notices nothing but the time and the rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from aerogel.ir import Dtypes, Graph, Node, Ref, Special, references
from aerogel.ir.tensors import TORCH

_FOLLOW = (
    "cat",
    "chunk",
    "split",
    "split_with_sizes",
    "max_pool2d",
    "avg_pool2d",
    "pixel_shuffle",
    "upsample_nearest2d",
)
_NAMES = {name: str(dtype).removeprefix("torch.") for name, dtype in TORCH.items()}


@dataclass(frozen=True)
class Half:
    """What to do: the types of a convolution, the values' types before, and the layers that stay f32."""

    dtypes: Dtypes
    stored: Mapping[str, str]
    stay: frozenset[str] = frozenset()


def halved(
    graph: Graph, constants: Mapping[str, torch.Tensor], half: Half
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The graph with its convolutions in half precision, and its constants."""
    work = _Halve(graph, dict(constants), dict(half.stored), half.dtypes)
    for node in graph.nodes:
        work.add(node, (node.layer or node.name) not in half.stay)
    outputs = work.wanted(graph.outputs)
    used = {*references(outputs), *(name for node in work.nodes for name in node.inputs)}
    kept = {name: value for name, value in work.constants.items() if name in used}
    return Graph(graph.inputs, tuple(kept), tuple(work.nodes), outputs), kept


class _Halve:
    def __init__(
        self, graph: Graph, constants: dict[str, torch.Tensor], before: dict[str, str], dtypes: Dtypes
    ) -> None:
        self.constants, self.before, self.dtypes = constants, before, dtypes
        self.stored = {name: before[name] for name in (*graph.inputs, *graph.constants) if name in before}
        self.nodes: list[Node] = []
        self.known: set[str] = set()

    def add(self, node: Node, able: bool) -> None:
        """One node of the graph, in the type that is right for it."""
        if node.conv is not None and node.conv.dtypes in (Dtypes(), Dtypes.of(self.dtypes.input)):
            self._conv(node, self.dtypes if able else Dtypes())
            return
        if (
            node.op == "getitem"
            or (node.op.startswith("aten.") and node.op.split(".")[1] in _FOLLOW)
            or _global_mean(node)
        ):
            maps = [name for name in node.inputs if name in self.stored]
            if maps and all(self.stored[name] == self.dtypes.output for name in maps):
                self._keep(node, self.dtypes.output)
                return
        self._keep(
            replace(
                node, args=self.wanted(node.args), kwargs={k: self.wanted(v) for k, v in node.kwargs.items()}
            )
        )

    def _conv(self, node: Node, dtypes: Dtypes) -> None:
        assert node.conv is not None
        x, weight, bias, residual = node.conv_inputs()
        held = weight if self.stored[weight] == dtypes.weight else f"{weight}#{dtypes.weight}"
        self.constants[held] = self.constants[weight].to(TORCH[dtypes.weight])
        names = (
            self.cast(x, dtypes.input),
            held,
            bias,
            None if residual is None else self.cast(residual, dtypes.output),
        )
        args = tuple(Ref(name) for name in names if name is not None)
        self._keep(replace(node, conv=replace(node.conv, dtypes=dtypes), args=args), dtypes.output)

    def _keep(self, node: Node, dtype: str | None = None) -> None:
        self.nodes.append(node)
        if node.name in self.before or node.op in (
            "aten.chunk.default",
            "aten.split.Tensor",
            "aten.split_with_sizes.default",
        ):
            self.stored[node.name] = dtype or self.before.get(node.name, "f32")

    def wanted(self, argument: Any) -> Any:
        """An argument with every value in the type it had before."""
        if isinstance(argument, tuple):
            return tuple(self.wanted(item) for item in argument)
        if isinstance(argument, Ref) and argument.name in self.stored and argument.name in self.before:
            return Ref(self.cast(argument.name, self.before[argument.name]))
        return argument

    def cast(self, name: str, dtype: str) -> str:
        """The name of a value in a type, cast if it has another."""
        if self.stored[name] == dtype:
            return name
        changed = f"{name}#{dtype}"
        if changed not in self.known:
            self.known.add(changed)
            self.nodes.append(Node(changed, "aten.to.dtype", (Ref(name), Special("dtype", _NAMES[dtype]))))
        return changed


def _global_mean(node: Node) -> bool:
    """A mean over whole images, which is a pooling."""
    return (
        node.op == "aten.mean.dim"
        and len(node.args) > 1
        and node.args[1] in ((2, 3), (-2, -1), (-1, -2), (3, 2))
    )
