"""Graph -> Graph: what stands between bytes that a quantiser chose runs in integers, with the quantiser's own
scales and zero points.

    dequantize -> conv (+ add of a dequantized map) (+ activation, clamp) -> quantize       conv of bytes
    dequantize, dequantize -> add (+ activation, clamp) -> quantize                         conv by one, + add
    dequantize -> (activation, clamp) -> quantize                                           conv by one
    dequantize -> largest of windows, enlarging by repeating, concatenation -> quantize     the same on bytes

A convolution "by one" has a single weight for each channel, which is 1: it changes the scale of a map, or
adds another to it, by the same kernel as the others. Rounding happens where the quantiser has it and nowhere
else, so a sum that is rounded before a residual is added to it stays two nodes.

Weights must be whole multiples, from -128 to 127, of a known step for each filter. What does not fit stays in
floats, between the same bytes, and convolutions of which that is so are named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from aerogel.capture.fuse import Shapes
from aerogel.capture.int8 import follows, in_int8
from aerogel.capture.nodes import added, zero_pad
from aerogel.ir import F32, INT8, Conv, Graph, Node, Quantized, Ref, Requantize, references
from aerogel.ir.quantized import EXACT

_ACTIVATIONS = {
    "aten.relu.default": "relu",
    "aten.relu6.default": "relu6",
    "aten.hardswish.default": "hardswish",
}
_CLAMPS = ("aten.clamp.default", "aten.hardtanh.default", "aten.relu.default", "aten.relu6.default")
_NEAR = 1e-4
"""Of a step: how far a weight may be from a whole one. f32 rounds a product of both by less."""
_LEAST = float(np.finfo(np.float32).tiny)


def integers(
    graph: Graph, constants: Mapping[str, torch.Tensor], shapes: Shapes, steps: Mapping[str, torch.Tensor]
) -> tuple[Graph, dict[str, torch.Tensor], tuple[str, ...]]:
    """The graph with all that fits in integers, its constants, and what is to be said. `steps` are of
    weights: one for each filter."""
    if not any(node.op == "quantize" for node in graph.nodes):
        return graph, dict(constants), ()
    work = _Integers(graph, dict(constants), shapes, steps)
    for node in graph.nodes:
        work.take(node)
    return work.result()


class _Misfit(Exception):
    """Why a convolution stays in floats."""


class _Integers:
    def __init__(
        self,
        graph: Graph,
        constants: dict[str, torch.Tensor],
        shapes: Shapes,
        steps: Mapping[str, torch.Tensor],
    ) -> None:
        self.source, self.constants, self.shapes, self.steps = graph, constants, shapes, steps
        self.uses = {name: len(users) for name, users in graph.users().items()}
        self.before = {node.name: node for node in graph.nodes}
        self.nodes: list[Node] = []
        self.known: dict[str, Quantized] = {}
        self.same: dict[str, str] = {}
        """Bytes that are other bytes."""
        self.left: dict[str, str] = {}

    def result(self) -> tuple[Graph, dict[str, torch.Tensor], tuple[str, ...]]:
        used, kept = set(references(self.source.outputs)), list[Node]()
        for node in reversed(self.nodes):
            if node.name in used:
                kept.append(node)
                used.update(node.inputs)
        constants = {name: value for name, value in self.constants.items() if name in used}
        made = Graph(self.source.inputs, tuple(constants), tuple(reversed(kept)), self.source.outputs)
        layers = sum(
            n.conv is not None and n.conv.dtypes == INT8 and "#one" not in n.args[1].name for n in kept
        )
        said = [f"{layers} layers run in integers, by the scales that the model brings"] if layers else []
        names = {node.name for node in kept}
        return made, constants, (*said, *(why for name, why in self.left.items() if name in names))

    def take(self, node: Node) -> None:
        if node.op == "quantize":
            self._quantize(node)
            return
        if node.op == "dequantize":
            self.nodes.append(replace(node, args=(Ref(self._bytes(node.args[0].name)), *node.args[1:])))
            return
        if node.conv is not None and node.conv.dtypes == F32 and self._weight(node)[1] is not None:
            self.left[node.name] = (
                f"{node.layer or node.name}: stays in floats, nothing quantizes what it gives"
            )
        self.nodes.append(node)

    def _bytes(self, name: str) -> str:
        return self.same.get(name, name)

    def _quantize(self, node: Node) -> None:
        """A change to bytes, or all that stands between it and other bytes."""
        y = node.quantized()
        base, low, high = self._clamped(node.args[0].name, y)
        try:
            made = self._made(node, base, y, low, high)
        except _Misfit as why:
            if base is not None and base.conv is not None:
                self.left[base.name] = f"{base.layer or base.name}: stays in floats, {why}"
            made = False
        if not made:
            self.nodes.append(node)
        self.known[node.name] = y

    def _made(self, node: Node, base: Node | None, y: Quantized, low: int, high: int) -> bool:
        if base is None:
            return False
        if base.conv is not None:
            return base.conv.dtypes == F32 and self._convolution(node, base, y, low, high)
        activation = _activation(base)
        if activation is not None and isinstance(base.args[0], Ref):
            inner = self._only(base.args[0].name)
            if inner is not None and self._beside(node, inner, y, low, high, activation):
                return True
        if self._beside(node, base, y, low, high):
            return True
        return (low, high) == (0, 255) and self._moved(node, base, y)

    def _only(self, name: str) -> Node | None:
        """The node behind a value, if that has one reader; bytes read as numbers may have many."""
        found = self.before.get(name)
        alone = found is not None and (found.op == "dequantize" or self.uses[name] == 1)
        return found if alone else None

    def _clamped(self, name: str, y: Quantized) -> tuple[Node | None, int, int]:
        """What is quantized, looked at through clamps, and the bytes that these leave."""
        low, high = 0, 255
        node = self._only(name)
        while node is not None and node.op in _CLAMPS and isinstance(node.args[0], Ref):
            bounds = _bounds(node)
            if bounds is None:
                break
            least, most = (int(y.bytes_of(np.array([b]))[0]) for b in bounds)
            low, high = min(max(least, low), high), max(min(most, high), low)
            node = self._only(node.args[0].name)
        return node, low, high

    def _of(self, name: str) -> tuple[str, Quantized] | None:
        """The bytes whose numbers a value is."""
        node = self.before.get(name)
        if node is None or node.op != "dequantize":
            return None
        own = self._bytes(node.args[0].name)
        return (own, node.quantized()) if self.known.get(own) == node.quantized() else None

    def _padded(self, x: str, conv: Conv) -> tuple[str, Conv]:
        """A convolution that pads its image itself, where a node before it did: sides may differ here."""
        node = self.before.get(x)
        sides = None if node is None else zero_pad(node)
        if node is None or sides is None:
            return x, conv
        return node.args[0].name, replace(conv, pad=added(conv.pad, sides))

    def _weight(self, node: Node) -> tuple[str, torch.Tensor | None]:
        """A convolution's weight, and its steps where they are known; the fused graph may hold it in another
        shape."""
        name = node.conv_inputs()[1]
        return name, self.steps.get(name, self.steps.get(name.removesuffix("#2d").removesuffix("#4d")))

    def _convolution(self, node: Node, base: Node, y: Quantized, low: int, high: int) -> bool:
        assert base.conv is not None
        conv, (x, _, bias, residual) = base.conv, base.conv_inputs()
        weight, steps = self._weight(base)
        if steps is None:
            return False
        x, conv = self._padded(x, conv)
        own = self._of(x)
        beside = None if residual is None else self._of(residual)
        if own is None or (residual is not None and beside is None):
            raise _Misfit("what it reads is not in bytes")
        if conv.activation not in (None, *EXACT):
            raise _Misfit(f"{conv.activation} is none of the activations of bytes")
        signed = _signed(self.constants[weight], steps)
        added = None if bias is None else self.constants[bias].float().numpy()
        words = _words(signed.numpy(), steps.numpy(), added, own[1], y, beside and beside[1], low, high)
        self._add(node, base, conv, signed, f"{weight}#s8", words, own[0], beside and beside[0])
        return True

    def _beside(
        self, node: Node, base: Node, y: Quantized, low: int, high: int, activation: str | None = None
    ) -> bool:
        """A map of bytes in another scale, or two that are added: a convolution by one."""
        if base.op == "dequantize":
            first, second = self._of(base.name), None
        elif _adds(base):
            first, second = (self._of(a.name) for a in base.args)
            if second is None or self.shapes.get(base.args[0].name) != self.shapes.get(base.args[1].name):
                return False
        else:
            return False
        if first is None:
            return False
        if second is None and activation is None and first[1] == y and (low, high) == (0, 255):
            self.same[node.name] = first[0]
            return True
        shape = self.shapes.get(base.name, ())
        if len(shape) != 4 or not isinstance(shape[1], int):
            return False
        try:
            self._by_one(node, base, shape[1], first, second, y, (low, high), activation)
        except _Misfit:
            return False
        return True

    def _by_one(
        self,
        node: Node,
        base: Node,
        channels: int,
        first: tuple[str, Quantized],
        second: tuple[str, Quantized] | None,
        y: Quantized,
        limits: tuple[int, int] = (0, 255),
        activation: str | None = None,
    ) -> None:
        one = torch.ones((channels, 1, 1, 1), dtype=torch.int8)
        words = _words(
            one.numpy(), np.ones(channels, np.float32), None, first[1], y, second and second[1], *limits
        )
        steps = (*(("add",) if second else ()), *((activation,) if activation else ()))
        conv = Conv(channels, channels, groups=channels, epilogue=steps)
        self._add(node, base, conv, one, f"{channels}#one", words, first[0], second and second[0])

    def _add(
        self,
        node: Node,
        base: Node,
        conv: Conv,
        weight: torch.Tensor,
        name: str,
        words: torch.Tensor,
        x: str,
        residual: str | None,
    ) -> None:
        self.constants[name], self.constants[f"{node.name}#words"] = weight, words
        args = [Ref(x), Ref(name), Ref(f"{node.name}#words")]
        if residual is not None:
            args.append(Ref(residual))
        layer = base.layer or base.name
        self.nodes.append(Node(node.name, "conv", tuple(args), {}, in_int8(conv), layer))

    def _moved(self, node: Node, base: Node, y: Quantized) -> bool:
        """What only moves bytes, or takes the largest of them. Where it takes several, each has the meaning
        of the whole first."""
        shapes: dict[str, Any] = dict.fromkeys(self.uses, (1, 1))
        shapes |= {name: shape for name, shape in self.shapes.items() if _fixed(shape)}
        maps = follows(base, shapes)
        if not maps or len(self.shapes.get(base.name, ())) != 4:
            return False
        if len(maps) == 1 and len(base.inputs) == 1 and self.before.get(maps[0], node).op != "dequantize":
            first = Node(f"{node.name}#first", "quantize", (Ref(maps[0]), y.scale, y.zero))
            self._quantize(first)  # the largest of windows is the same byte before as after
            names = {maps[0]: self._bytes(first.name)}
            self.nodes.append(replace(base, name=node.name, args=_with(base.args, names)))
            return True
        found = {name: own for name in maps if (own := self._of(name)) is not None}
        if len(found) < len(set(maps)):
            return False
        if len(maps) == 1 and found[maps[0]][1] != y:
            how = found[maps[0]][1]
            inner = replace(
                base, name=f"{node.name}#moved", args=_with(base.args, {maps[0]: found[maps[0]][0]})
            )
            channels = self.shapes[base.name][1]
            if not isinstance(channels, int):
                return False
            self.nodes.append(inner)
            self.known[inner.name] = how
            self._by_one(node, base, channels, (inner.name, how), None, y)
            return True
        names = {}
        for name, own in found.items():
            names[name] = own[0]
            if own[1] != y:
                names[name] = f"{node.name}#{name}"
                rescaled = Node(names[name], "quantize", (Ref(name), y.scale, y.zero))
                channels = self.shapes[name][1]
                assert isinstance(channels, int)
                self._by_one(rescaled, self.before[name], channels, own, None, y)
                self.known[names[name]] = y
        self.nodes.append(replace(base, name=node.name, args=_with(base.args, names)))
        return True


def _activation(node: Node) -> str | None:
    if node.op == "aten.leaky_relu.default":
        slope = node.args[1] if len(node.args) > 1 else 0.01
        return f"leaky_relu{slope!r}" if isinstance(slope, float) and abs(slope) <= 1 else None
    return _ACTIVATIONS.get(node.op)


def _adds(node: Node) -> bool:
    plain = node.op == "aten.add.Tensor" and node.kwargs.get("alpha", 1) == 1
    return plain and all(isinstance(a, Ref) for a in node.args)


def _bounds(node: Node) -> tuple[float, float] | None:
    """The least and the largest number that a clamp leaves."""
    if node.op == "aten.relu.default":
        return 0.0, math.inf
    if node.op == "aten.relu6.default":
        return 0.0, 6.0
    if node.kwargs:
        return None
    given = [*node.args[1:], None, None][:2] if len(node.args) > 1 else [-1.0, 1.0]
    if node.op == "aten.hardtanh.default" and len(node.args) < 3:
        return None
    least, most = (-math.inf if given[0] is None else given[0]), (math.inf if given[1] is None else given[1])
    if not all(type(b) in (int, float) and not math.isnan(b) for b in (least, most)) or least > most:
        return None
    return float(least), float(most)


def _fixed(shape: tuple[int | str, ...]) -> bool:
    return len(shape) > 1 and isinstance(shape[1], int)


def _with(argument: Any, names: Mapping[str, str]) -> Any:
    if isinstance(argument, tuple):
        return tuple(_with(item, names) for item in argument)
    return Ref(names.get(argument.name, argument.name)) if isinstance(argument, Ref) else argument


def _signed(weight: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Weights as the signed bytes that they are times a step."""
    if steps.shape != weight.shape[:1] or not bool(((steps >= _LEAST) & torch.isfinite(steps)).all()):
        raise _Misfit("the scale of a filter is no positive number")
    whole = weight.double() / steps.double().reshape(-1, *[1] * (weight.dim() - 1))
    rounded = whole.round()
    if not bool(((whole - rounded).abs() <= _NEAR).all()):
        raise _Misfit("its weights are no multiples of their scales")
    if not bool(((rounded >= -128) & (rounded <= 127)).all()):
        raise _Misfit("its weights are no signed bytes, less their zero point")
    return rounded.to(torch.int8)


def _words(
    weight: Any,
    steps: Any,
    bias: Any,
    x: Quantized,
    y: Quantized,
    beside: Quantized | None,
    low: int,
    high: int,
) -> torch.Tensor:
    """The requantisation, with the scales multiplied in the order of onnxruntime's QLinearConv."""
    with np.errstate(all="ignore"):
        product = np.float32(x.scale) * steps.astype(np.float32)
        scale = product / np.float32(y.scale)
    share = 0.0 if beside is None else beside.scale / y.scale
    if not (np.isfinite(scale).all() and (scale >= _LEAST).all() and (product >= _LEAST).all()):
        raise _Misfit("its scales together are no numbers that f32 has")
    if not share <= float(np.finfo(np.float32).max) or y.scale < _LEAST:
        raise _Misfit("the scale of its residual is too large beside its own")
    units = (
        np.zeros(len(steps)) if bias is None else bias.astype(np.float64) / (x.scale * steps.astype(float))
    )
    flat = weight.reshape(len(weight), -1).astype(np.int64)
    whole = np.rint(units) - x.zero * flat.sum(1)
    if not (np.abs(whole) + 255 * np.abs(flat).sum(1) < 2**31).all():
        raise _Misfit("its bias is too large for its scales")
    how = Requantize.of(weight, steps, bias, x, y, beside)
    how = replace(how, bias=whole.astype(np.int32), scale=scale, low=low, high=high)
    return torch.from_numpy(how.words)
