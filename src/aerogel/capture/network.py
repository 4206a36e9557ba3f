"""`Network`: a fused graph with its constants, runnable under any choices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from aerogel.capture import interpret
from aerogel.capture.alias import lent
from aerogel.capture.bytemaps import tables
from aerogel.capture.captured import Captured
from aerogel.capture.half import Half, halved
from aerogel.capture.int8 import meanings, quantized
from aerogel.capture.sizes import blank, computed
from aerogel.ir import Array, Graph, Node, Plan, Quantized, Ref, Stats, Weight
from aerogel.ir.tensors import DTYPE_NAMES, NAMES, from_torch, to_torch


class Network:
    """A fused graph with its constants, runnable under any choices. Holds no workspace itself.

    Weights of convolutions are held once, in `weights`; `constants` has them over the same memory, and where
    they were let go without any (`real` gives them back). `like` is a network of the same model: weights of
    layers that have the same numbers in both are shared, with what was packed of them.
    """

    def __init__(
        self,
        captured: Captured,
        graph: Graph,
        constants: dict[str, torch.Tensor],
        half: Half | None = None,
        like: Network | None = None,
        weights: Mapping[str, Weight] | None = None,
    ) -> None:
        """`weights` are those that are there already, as from a file; `constants` has none of them."""
        self.captured, self.graph, self.half = captured, graph, half
        self.stored: dict[str, str] = {}
        self._sized: tuple[Any, dict[str, tuple[int, ...]]] | None = None
        self._lent = lent(graph)
        self.meanings: dict[str, Quantized] = meanings(graph, constants)
        self.constants: dict[str, torch.Tensor] = dict(constants)
        self.biases: dict[str, Array] = {}
        self.weights: dict[str, Weight] = dict(weights or {})
        for node in self.convs():
            _, weight, bias, _ = node.conv_inputs()
            if weight not in self.weights:
                # a copy: torch moves a tensor's memory when it is sent to another process. Pruning leaves
                # minus zeros, which as bits of bf16 are none
                array = from_torch(constants[weight] + 0)
                if like is not None and like._holds(node, weight, array):
                    self.weights[weight], self.constants[weight] = (
                        like.weights[weight],
                        like.constants[weight],
                    )
                else:
                    self.weights[weight] = Weight(array)
                    self.constants[weight] = to_torch(array, NAMES[constants[weight].dtype])
            if bias is not None:
                own = constants[bias]
                self.biases[bias] = (own if own.dtype == torch.int32 else own.float()).numpy().copy()
        self.biases |= {name: table.numpy().copy() for name, table in tables(graph, constants).items()}

    def _holds(self, node: Node, name: str, array: Array) -> bool:
        """Whether a layer here reads a weight of this name with these numbers, and nothing else reads it."""
        readers = {layer.conv for layer in self.convs() if layer.conv_inputs()[1] == name}
        if readers != {node.conv}:
            return False
        mine = self.weights[name].array
        return mine.dtype == array.dtype and np.array_equal(mine, array)

    def let_go(self, name: str, unpack: Callable[[], Array]) -> None:
        """Keep no dense copy of a weight that kernels hold as it was packed; `unpack` gives it."""
        self.weights[name].let_go(unpack)
        self.constants[name] = blank(self.constants[name])

    def real(self, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Constants with their numbers, all or those named."""
        return {
            name: to_torch(self.weights[name].array, NAMES[value.dtype]) if value.is_meta else value
            for name, value in self.constants.items()
            if names is None or name in names
        }

    def halved(self, half: Half, like: Network | None = None) -> Network:
        """The same network in half precision."""
        return Network(self.captured, *halved(self.graph, self.real(), half), half, like)

    def quantized(self, known: Mapping[str, Quantized], layers: Collection[str]) -> Network:
        """The same network with these layers in int8, where bytes of values mean what is known of them."""
        return Network(self.captured, *quantized(self.graph, self.real(), self._sizes(), known, layers))

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        assert self._sized is not None
        return self._sized[1]

    def fixed(self) -> Network:
        """The same network, for calls of the example's sizes only."""
        fixed = copy.copy(self)
        fixed.captured, fixed._sized = self.captured.fixed(), None
        return fixed

    def convs(self) -> list[Node]:
        return [n for n in self.graph.nodes if n.conv is not None]

    def stats(self, node: Node) -> Stats:
        return self.weight(node).stats

    def weight(self, node: Node) -> Weight:
        """Of a convolution."""
        return self.weights[node.conv_inputs()[1]]

    def keep(self, plan: Plan) -> None:
        """Of what was packed, only what the plan runs."""
        weights = {node.name: node.conv_inputs()[1] for node in self.convs()}
        for name, weight in self.weights.items():
            weight.keep({c.config for c in plan.choices if weights.get(c.node) == name})

    def values(self, inputs: list[Any]) -> dict[str, torch.Tensor]:
        """Every tensor of the graph for these inputs, computed by torch."""
        with torch.no_grad():
            values = interpret.run(self.graph, self.real(), inputs)
        return {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}

    def shapes(self, inputs: list[Any]) -> dict[str, tuple[int, ...]]:
        """Sizes of every value for these inputs. Their element types are noted on the way."""
        known = self._sized  # threads may call at once
        if known is None or known[0] != sizes_of(inputs):
            found = computed(self.graph, self.constants, inputs, self.captured.bounded)
            return self.learn(inputs, self.values(inputs) if found is None else found)
        return known[1]

    def learn(self, inputs: list[Any], values: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """Remember the sizes and element types that inputs like these give every value; `values` may have no
        memory."""
        self.stored = {name: DTYPE_NAMES[v.dtype] for name, v in values.items() if v.dtype in DTYPE_NAMES}
        self.stored |= {name: "u8" for name in self.meanings if name in values}
        found = {name: tuple(v.shape) for name, v in values.items()}
        self._sized = sizes_of(inputs), found
        return found

    def outputs(self, values: Mapping[str, Any]) -> list[Any]:
        """What the graph gives, in order; nothing returned shares memory with an input or a constant."""
        found = [interpret.argument(o, values) for o in self.graph.outputs]
        lent = [isinstance(o, Ref) and o.name in self._lent for o in self.graph.outputs]
        return [
            v.clone() if own and isinstance(v, torch.Tensor) else v
            for v, own in zip(found, lent, strict=True)
        ]


def sizes_of(inputs: list[Any]) -> tuple[Any, ...]:
    """Shapes of the tensors of a call, and its other values as they are."""
    return tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in inputs)
