"""Graph nodes as torch calls: the dense form of everything, used where no kernel of ours runs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from aerogel.graph import Argument, Graph, Node, Ref, Special

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
    args = [argument(a, values) for a in node.args]
    return function(node)(*args, **{k: argument(v, values) for k, v in node.kwargs.items()})


def convolve(node: Node, values: Mapping[str, Any]) -> torch.Tensor:
    """A conv node, plain: convolution and its epilogue, one torch call each."""
    conv = node.conv
    assert conv is not None
    x, weight, bias, residual = (values[name] if name else None for name in node.conv_inputs())
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight, torch.Tensor)
    flat = x.dim() == 3
    top, left, bottom, right = conv.pad
    if (top, left) == (bottom, right):
        padding = (top, left)
    else:
        x, padding = F.pad(x, (left, right, top, bottom) if not flat else (left, right)), (0, 0)
    own = None if bias is None else bias.to(x.dtype)
    if flat:
        y = F.conv1d(x, weight[:, :, 0], own, conv.stride[1], padding[1], conv.dilation[1], conv.groups)
    else:
        y = F.conv2d(x, weight, own, conv.stride, padding, conv.dilation, conv.groups)
    for step in conv.epilogue:
        if step == "add":
            assert residual is not None
            y = y + residual
        elif step != "bias":
            y = _ACTIVATIONS[conv.activation or ""](y, conv.slope)
    return y


_ACTIVATIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "relu": lambda y, _: F.relu(y),
    "relu6": lambda y, _: F.relu6(y),
    "leaky": lambda y, slope: F.leaky_relu(y, slope),
    "silu": lambda y, _: F.silu(y),
    "hardswish": lambda y, _: F.hardswish(y),
}


def run(graph: Graph, constants: Mapping[str, torch.Tensor], inputs: list[Any]) -> dict[str, Any]:
    """Every value of the graph, computed by torch. Outputs are looked up by the caller."""
    values: dict[str, Any] = {**constants, **dict(zip(graph.inputs, inputs, strict=True))}
    for node in graph.nodes:
        values[node.name] = call(node, values)
    return values
