"""Graph nodes as torch calls: the dense form of everything, used where no kernel of ours runs."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from aerogel.capture import foreign
from aerogel.errors import InvalidFile
from aerogel.graph import Argument, Graph, Node, Ref, Special
from aerogel.methods.dense import plain

_INTS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "truediv": operator.truediv,
    "mod": operator.mod, "neg": operator.neg, "min": min, "max": max, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc,
}  # fmt: skip
_FLOATS = {"inf": math.inf, "minus_inf": -math.inf, "nan": math.nan}


def function(node: Node) -> Callable[..., Any]:
    """What a node calls."""
    if node.op == "getitem":
        return operator.getitem
    kind, _, rest = node.op.partition(".")
    if kind == "int":
        return _INTS[rest]
    base, overload = rest.split(".")
    found: Callable[..., Any] = getattr(getattr(torch.ops.aten, base), overload)
    return found


def argument(raw: Argument, values: Mapping[str, Any]) -> Any:
    """An argument with its references looked up."""
    if isinstance(raw, Ref):
        return values[raw.name]
    if isinstance(raw, tuple):
        return [argument(item, values) for item in raw]
    if isinstance(raw, Special):
        if raw.kind == "float":
            return _FLOATS[raw.name]
        return torch.device(raw.name) if raw.kind == "device" else getattr(torch, raw.name)
    return raw


def call(node: Node, values: Mapping[str, Any]) -> Any:
    """One node in torch."""
    if node.conv is not None:
        return convolve(node, values)
    if node.op == "onnx":
        content, inputs = (argument(a, values) for a in node.args)
        return foreign.run(content, inputs)
    args = [argument(a, values) for a in node.args]
    return function(node)(*args, **{k: argument(v, values) for k, v in node.kwargs.items()})


def convolve(node: Node, values: Mapping[str, Any]) -> torch.Tensor:
    """A conv node, plain. One dimension counts as an image of one row, features as an image of one pixel."""
    assert node.conv is not None
    x, weight, bias, residual = (values[name] if name else None for name in node.conv_inputs())
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight, torch.Tensor)
    if x.dim() == 4:
        return plain(x, weight, node.conv, bias, residual)
    shape = (*x.shape[:2], 1, *x.shape[2:], *([1] * (3 - x.dim())))
    y = plain(
        x.reshape(shape), weight, node.conv, bias, None if residual is None else residual.reshape(*residual.shape[:2], *shape[2:])
    )
    return y.flatten(1) if x.dim() == 2 else y.squeeze(2)


def fits(name: str, value: Any) -> None:
    """A file that asks for a tensor larger than this machine's memory is no model."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for tensor in value if isinstance(value, list | tuple) else [value]:
        if isinstance(tensor, torch.Tensor) and tensor.numel() * tensor.element_size() > most:
            raise InvalidFile(f"'{name}' would take {tensor.numel() * tensor.element_size()} bytes; this machine has {most}")


def run(graph: Graph, constants: Mapping[str, torch.Tensor], inputs: list[Any]) -> dict[str, Any]:
    """Every value of the graph, computed by torch. Outputs are looked up by the caller."""
    values: dict[str, Any] = {**constants, **dict(zip(graph.inputs, inputs, strict=True))}
    for node in graph.nodes:
        values[node.name] = call(node, values)
    return values
