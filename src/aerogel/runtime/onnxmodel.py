"""`OnnxModel`: an ONNX file as a module whose weights train, and that can be written as the same file
again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aerogel.capture import interpret
from aerogel.capture.captured import Captured, drawn
from aerogel.capture.onnx.origins import Origin
from aerogel.capture.onnx.read import FEW, read_to_write
from aerogel.capture.onnx.write import filled
from aerogel.disk import write_whole
from aerogel.errors import AerogelError, ShapeError
from aerogel.ir import Graph, Node
from aerogel.ir.graph import references
from aerogel.ir.tensors import flushed
from aerogel.outputs import check_output
from aerogel.runtime.graphmodel import GraphModel, HasGraph
from aerogel.runtime.layers import Layer, layer_of, legal

_AVERAGES = {"aten.batch_norm.default": (3, 4)}
"""Arguments that are no weights: what a normalisation measured of its inputs."""


class OnnxModel(HasGraph):
    """An ONNX file as a torch module: train it, prune it, compile it, and write the same file again.

    Convolutions, transposed convolutions and products with a constant matrix (MatMul, Gemm) are torch's own
    layers, named after their nodes with `_` for what a name cannot hold, so that `aerogel.prune`, hooks and
    optimizers find them. Nodes that share weight, bias and options share one layer; a weight that they use in
    different ways is a parameter of the model and no layer. Other numbers of the file are parameters too
    where they are vectors or large. What is quantised, or computed from the file's numbers when it is read,
    stays as it is.

    The model is that of the file, for inference: batch norm keeps the averages it has (its scale and shift
    train), dropout does nothing, and `train()` changes no answer. What only onnxruntime can run gives no
    gradient. Weights below 1.2e-38 (subnormal) are read as zeros.

    Example:
        >>> program = torch.onnx.export(model, (x,), "model.onnx", dynamo=True, verbose=False)
        >>> trains = aerogel.OnnxModel("model.onnx")
        >>> same = torch.allclose(trains(x), model(x), atol=1e-3)
        >>> finished = aerogel.finalize(aerogel.prune(trains, 0.9))
        >>> trains.save("pruned.onnx")

    Args:
        path: The file.
        shapes: Sizes of the inputs that the file leaves open, `{"images": (1, 3, 640, 640)}`.
    """

    def __init__(self, path: str | Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        super().__init__()
        captured, origins, self._file = read_to_write(path, shapes or {})
        self._path = Path(path).absolute()
        constants = {name: flushed(value) for name, value in captured.constants.items()}
        captured = replace(captured, constants=constants)
        self._constants: dict[str, _Place] = {}  # of the graph, by name
        self._tensors: dict[str, _Place] = {}  # of the file, by name
        layers = self._add_layers(captured, origins)
        self._add_others(captured, origins)
        nodes = tuple(replace(n, layer=layers.get(n.name, n.layer)) for n in captured.graph.nodes)
        self._captured = replace(captured, constants={}, graph=replace(captured.graph, nodes=nodes))
        self._steps = _steps(self._captured.graph, layers)
        read = {n for node, layer, _ in self._steps if not layer for n in node.inputs}
        self._loose = tuple((read | set(references(captured.graph.outputs))) & captured.constants.keys())
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The file's inputs in their order, or by name; its output, or a tuple of them."""
        values = {name: self._constants[name].value(self) for name in self._loose}
        values |= self._given(args, kwargs)
        for node, layer, last_used in self._steps:
            if layer:
                values[node.name] = self._modules[layer](values[node.args[0].name])  # type: ignore[misc]
            else:
                values[node.name] = interpret.answer(node, values)
            for name in last_used:
                del values[name]
        outputs = [interpret.argument(o, values) for o in self._captured.graph.outputs]
        return pytree.tree_unflatten(outputs, self._captured.out_spec)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The file's inputs in the order of a call."""
        return self._captured.graph.inputs

    @property
    def output_names(self) -> tuple[str, ...]:
        """The file's outputs in the order of an answer."""
        return self._captured.output_names

    @property
    def example(self) -> tuple[torch.Tensor, ...]:
        """Random inputs of the sizes the file was read at, for `model(*model.example)` and
        `aerogel.compile(model, model.example)`."""
        return self._captured.filled()[0]

    def as_graph(self) -> GraphModel:
        names = self._captured.graph.constants
        constants = {name: self._constants[name].value(self).detach().contiguous() for name in names}
        return GraphModel(replace(self._captured, constants=constants), constants)

    def written(self, constant: str) -> tuple[str, tuple[int, ...]] | None:
        """Which tensor of the model a constant of its graph is, and which of its dimensions the constant's
        are; None where `save` would not write it."""
        place = self._constants[constant]
        if (place.module, place.name) not in {(own.module, own.name) for own in self._tensors.values()}:
            return None
        return f"{place.module}.{place.name}".lstrip("."), place.axes

    def save(self, path: str | Path) -> None:
        """Write the file again, with the weights as they are now: the same nodes, names and opset, in one
        file. Masks of `prune` count.

        Args:
            path: Where to: an .onnx file other than the one that was read, in a folder that exists.
        """
        check_output(path, (".onnx",), inputs=[self._path])
        tensors = {name: place.value(self) for name, place in self._tensors.items()}
        try:
            write_whole(Path(path), filled(self._file, tensors))
        except OSError as why:
            raise AerogelError(f"'{path}' cannot be written: {why.strerror or why}") from why

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments by the names of the inputs."""
        named = dict(zip(self.input_names, args, strict=False))
        if len(args) > len(named) or kwargs.keys() ^ named.keys() != set(self.input_names):
            wanted = ", ".join(f"'{name}'" for name in self.input_names)
            raise ShapeError(f"called as f({drawn(args, kwargs)}); the file takes {wanted}, each once")
        return named | dict(kwargs)

    def _add_layers(self, captured: Captured, origins: Mapping[str, Origin]) -> dict[str, str]:
        """Make the layers; their names by node."""
        names: dict[str, str] = {}
        made: dict[str, str] = {}
        held: dict[str, nn.Parameter] = {}
        for node, layer in _as_layers(captured, origins).items():
            origin, shift = origins[layer.weight], origins.get(layer.bias or "")
            if origin.tensor not in made:
                name, bias = legal(layer.name, self), None
                if layer.bias is not None:
                    bias = nn.Parameter(captured.constants[layer.bias], requires_grad=shift is not None)
                if shift is not None and bias is not None:
                    bias = held.setdefault(shift.tensor, bias)
                    self._tensors[shift.tensor] = _Place(name, "bias")
                self.add_module(name, layer.made(nn.Parameter(captured.constants[layer.weight]), bias))
                self._tensors[origin.tensor] = _Place(name, "weight", _inverse(origin.axes))
                made[origin.tensor] = name
            names[node] = made[origin.tensor]
            self._constants[layer.weight] = _Place(names[node], "weight")
            if layer.bias is not None:
                self._constants[layer.bias] = _Place(names[node], "bias")
        return names

    def _add_others(self, captured: Captured, origins: Mapping[str, Origin]) -> None:
        """What no layer holds: numbers that train as parameters, the rest as buffers. A tensor of the file is
        there once, as the file has it."""
        averages = {node.args[i].name for node in captured.graph.nodes for i in _AVERAGES.get(node.op, ())}
        for name in captured.graph.constants:
            if name in self._constants:
                continue
            origin, value = origins.get(name), captured.constants[name]
            if origin is None:
                own = legal(name, self)
                self.register_buffer(own, value)
                self._constants[name] = _Place("", own)
                continue
            if origin.tensor not in self._tensors:
                own, value = legal(origin.tensor, self), value.permute(_inverse(origin.axes)).contiguous()
                if name not in averages and (value.numel() > FEW or 1 < value.numel() == max(value.shape)):
                    self.register_parameter(own, nn.Parameter(value))
                else:
                    self.register_buffer(own, value)
                self._tensors[origin.tensor] = _Place("", own)
            self._constants[name] = replace(self._tensors[origin.tensor], axes=origin.axes)


@dataclass(frozen=True)
class _Place:
    """A tensor of the model: whose it is, its name there, and the order in which its dimensions are
    wanted."""

    module: str
    name: str
    axes: tuple[int, ...] = ()

    def value(self, model: nn.Module) -> torch.Tensor:
        found: torch.Tensor = getattr(model.get_submodule(self.module), self.name)
        return found if self.axes == tuple(sorted(self.axes)) else found.permute(self.axes)


def _inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axes.index(i) for i in range(len(axes)))


def _as_layers(captured: Captured, origins: Mapping[str, Origin]) -> dict[str, Layer]:
    """Nodes that are layers: nothing else reads their weight, or only nodes that do the same with it."""
    users, constants = captured.graph.users(), captured.constants
    uses = Counter(origin.tensor for origin in origins.values())
    able: dict[str, list[tuple[str, Layer, Any]]] = defaultdict(list)
    for node in captured.graph.nodes:
        layer = layer_of(node, constants)
        if layer is not None and layer.weight in origins and users[layer.weight] == (node.name,):
            weight, bias = origins[layer.weight], origins.get(layer.bias or "")
            same = layer.kind, layer.options, weight, layer.bias if bias is None else bias
            able[weight.tensor].append((node.name, layer, same))
    found: dict[str, Layer] = {}
    for tensor, own in able.items():
        if len(own) == uses[tensor] and all(same == own[0][2] for _, _, same in own):
            found |= {name: layer for name, layer, _ in own}
    return found


def _steps(graph: Graph, layers: Mapping[str, str]) -> list[tuple[Node, str, tuple[str, ...]]]:
    """Each node, its layer's name if it has one, and the values that nothing reads after it."""
    last: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        last |= dict.fromkeys((node.name, *node.inputs), i)
    kept = {*graph.constants, *references(graph.outputs)}
    over = defaultdict(list)
    for name, i in last.items():
        if name not in kept:
            over[i].append(name)
    return [(n, layers.get(n.name, ""), tuple(over[i])) for i, n in enumerate(graph.nodes)]
