"""Which layers run in int8, and what the bytes between them mean: measured on real inputs.

Of the range of every map the largest numbers may be cut off, so that all others have finer bytes: RANGES says
how far. Maps that must have one meaning, as those that are concatenated, share a range. A
layer that loses more than MOST of its output in int8 stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aerogel.backends import Backend
from aerogel.capture import interpret
from aerogel.capture.bytemaps import all_apart, apart
from aerogel.capture.int8 import alone, follows, in_int8
from aerogel.capture.network import Network
from aerogel.capture.nodes import RANKS, Shapes, problem
from aerogel.errors import InvalidArgument
from aerogel.ir import F32, Array, Graph, Node, Quantized, Stats, references
from aerogel.methods import BASELINE, METHODS
from aerogel.progress import Progress

MOST = 0.1
"""Of a layer's output, root mean square, that int8 may lose."""
SEEN = 1 << 18
"""Numbers of a map that are looked at, of all inputs together."""
CUTS = tuple(2.0 ** (-i / 8) for i in range(17))
"""Shares of a range that are tried."""

PERCENTILE = 99.99
"""Of a map's numbers on each side of zero, that "percentile" keeps."""

Values = Mapping[str, torch.Tensor]


def quantized(
    network: Network,
    inputs: list[Any],
    samples: Sequence[list[Any]],
    backend: Backend,
    progress: Progress,
    how: str = "mean-square",
) -> tuple[Network, tuple[str, ...], dict[str, float]]:
    """The network with its layers in int8, what is to be said of those that stay, and what of its output each
    of the others loses. `how` ranges are cut is one of RANGES."""
    if not samples:
        raise InvalidArgument(
            'int8 needs real inputs: compile(model, x, dtype="int8", calibration=[x1, x2, ...])'
        )
    if not any(isinstance(value, torch.Tensor) and value.numel() for sample in samples for value in sample):
        raise InvalidArgument("calibration has batches of no images only: int8 needs real inputs")
    graph, shapes = all_apart(network.graph), dict(network.shapes(inputs))
    maps = (
        node for node in network.graph.nodes if node.name in shapes
    )  # others are numbers, or several maps
    shapes |= {part.name: shapes[node.name] for node in maps for part in apart(node)}
    outputs = set(references(network.graph.outputs))
    able = {node.name: node for node in network.convs() if _able(node, shapes, outputs, backend)}
    ranges = _Ranges(graph, shapes, SEEN // len(samples))
    progress.begin("looking at maps", 0.1)
    for number, sample in enumerate(samples, 1):
        progress.step("input", number, len(samples))
        ranges.see(_values(network, graph, sample))
    known = ranges.meanings(RANGES[how])
    able = {name: node for name, node in able.items() if known.keys() >= set(_maps(node))}
    values = _values(network, graph, samples[0])
    lost = {name: _lost(node, values, known) for name, node in able.items()}
    stay = {name: share for name, share in lost.items() if not share <= MOST}
    said = (
        f"{able[name].layer or name}: stays f32, in int8 it would lose {share:.0%} of its output"
        for name, share in stay.items()
    )
    made = network.quantized(known, able.keys() - stay.keys())
    made.shapes(inputs)
    kept = {name: share for name, share in lost.items() if name not in stay}
    most = max(kept.values(), default=0)
    told = f"{len(kept)} layers in int8; one alone loses at most {most:.1%} of its output"
    return made, (told, *said), kept


def _values(network: Network, graph: Graph, inputs: list[Any]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        values = interpret.run(graph, network.real(), inputs)
    return {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}


def _able(node: Node, shapes: Shapes, outputs: Collection[str], backend: Backend) -> bool:
    """Whether some method of ours takes the layer in int8. A Linear that gives the answer stays as it is: of
    two classes that are nearly alike one must be the larger."""
    if node.name in outputs and len(shapes[node.name]) == 2:
        return False
    if node.conv is None or node.conv.dtypes != F32 or len(shapes[node.name]) not in RANKS:
        return False
    conv = in_int8(problem(apart(node)[0], shapes))
    forms = (backend.form(name) for name in METHODS if name != BASELINE)
    stats = Stats(1, 1)
    return any(form.refuse(conv, backend.target, stats) is None for form in forms)


@dataclass
class _Range:
    low: float = 0.0
    high: float = 0.0
    numbers: tuple[Array, ...] = ()


class _Ranges:
    """What numbers each map holds; maps of one meaning together."""

    def __init__(self, graph: Graph, shapes: Shapes, most: int) -> None:
        """`most` numbers of a map are kept of one input."""
        self._most = most
        self._home: dict[str, str] = {}
        self._seen: dict[str, _Range] = {}
        self._maps = [name for name, shape in shapes.items() if len(shape) in RANKS]
        for node in graph.nodes:
            for name in follows(node, shapes):
                self._home[self._root(name)] = self._root(node.name)

    def _root(self, name: str) -> str:
        while (above := self._home.get(name, name)) != name:
            name = above
        return name

    def see(self, values: Values) -> None:
        for name in self._maps:
            value = values.get(name)
            if value is None or value.dtype != torch.float32 or not value.numel():
                continue
            flat = value.flatten()
            own = self._seen.setdefault(self._root(name), _Range())
            low, high = (float(v) for v in torch.aminmax(flat))
            if not math.isfinite(high - low):
                raise InvalidArgument(
                    f"calibration gives '{name}' numbers that are infinite or none: no bytes can hold those"
                )
            some = flat[:: max(1, flat.numel() // max(1, self._most))].numpy().copy()
            own.low, own.high = min(own.low, low), max(own.high, high)
            own.numbers = (*own.numbers, some)

    def meanings(self, meaning: Callable[[_Range], Quantized]) -> dict[str, Quantized]:
        known = {root: meaning(own) for root, own in self._seen.items()}
        return {name: known[self._root(name)] for name in self._maps if self._root(name) in known}


def _least(own: _Range) -> Quantized:
    """Cut where bytes then lose least (least squares): a few large numbers go if all others gain."""
    numbers = np.concatenate(own.numbers)
    tried = [Quantized.of(own.low * cut, own.high * cut) for cut in CUTS]

    def error(how: Quantized) -> float:
        return float(np.square(how.numbers_of(how.bytes_of(numbers)) - numbers).sum(dtype=np.float64))

    return min(tried, key=error)


def _most(own: _Range) -> Quantized:
    """Cut so that all but a few numbers stay as they are, on each side of zero."""
    low, high = np.percentile(np.concatenate(own.numbers), [100 - PERCENTILE, PERCENTILE])
    return Quantized.of(max(own.low, float(low)), min(own.high, float(high)))


def _whole(own: _Range) -> Quantized:
    """Nothing is cut off."""
    return Quantized.of(own.low, own.high)


RANGES = {"mean-square": _least, "percentile": _most, "min-max": _whole}
"""How a map's numbers become the range of its bytes."""


def _maps(node: Node) -> tuple[str, ...]:
    """The maps that a convolution reads and gives."""
    x, _, _, residual = node.conv_inputs()
    given = (part.name for part in apart(node))
    return (x, *given) if residual is None else (x, *given, residual)


def _lost(node: Node, values: Values, known: Mapping[str, Quantized]) -> float:
    """How much of its output a layer loses in int8, its input rounded too."""
    nodes, constants = alone(node, values, known)
    found: dict[str, Any] = {**values, **constants}
    for part in nodes:
        found[part.name] = interpret.call(part, found)
    wanted = values[node.name].double().numpy()
    got = known[node.name].numbers_of(found[node.name].numpy()).astype(np.float64)
    size = float(np.sqrt(np.mean(wanted**2)))
    return float(np.sqrt(np.mean((got - wanted) ** 2))) / size if size else 0.0
