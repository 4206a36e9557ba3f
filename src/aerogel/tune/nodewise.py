"""Whether a network in bytes computes each node right, where its answer alone does not tell.

A number that torch rounds elsewhere, in the last bit, may become the next byte; that changes others behind
it, and after dozens of layers an answer to noise may have little in common with torch's. So each node is
looked at with what it was really given.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from aerogel.backends import Backend
from aerogel.capture import interpret
from aerogel.capture.network import Network
from aerogel.ir import Plan, Ref
from aerogel.runtime.eager import DOUBTFUL, alike


def right(network: Network, plan: Plan, backend: Backend, inputs: list[Any], answers: list[Any]) -> bool:
    """Whether every node is right, and the answers are those of the same nodes run so that each is seen."""
    graph, real = network.graph, network.real()
    shapes = network.shapes(inputs)
    names = [node.name for node in graph.nodes if node.name in shapes]
    seen = replace(graph, outputs=(*graph.outputs, *map(Ref, names)))
    whole = Network(network.captured, seen, real, weights=network.weights)
    found = backend.runner(whole, plan)(inputs)
    count = len(graph.outputs)
    own = dict(zip(names, found[count:], strict=True))
    values: dict[str, Any] = {**real, **dict(zip(graph.inputs, inputs, strict=True))}
    for node in graph.nodes:
        wanted = interpret.answer(node, values)
        if node.name in own and not _near(wanted, own[node.name]):
            return False
        values[node.name] = own.get(node.name, wanted)
    return alike(found[:count], answers)


def _near(wanted: torch.Tensor, got: torch.Tensor) -> bool:
    """Bytes are the same but for a few, and those are the next ones."""
    if wanted.dtype != torch.uint8 or got.dtype != torch.uint8 or wanted.shape != got.shape:
        return alike(wanted, got)
    apart = (wanted.int() - got.int()).abs()
    return apart.numel() == 0 or bool(apart.max() <= 1 and (apart > 0).float().mean() <= DOUBTFUL)
