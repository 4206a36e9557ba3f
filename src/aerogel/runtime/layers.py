"""Nodes of a graph as torch's own layers: what walks over modules (pruning, hooks, optimizers) finds them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aerogel.ir import Node, Ref

_CONVS: dict[str, type[nn.Module]] = {
    "aten.conv1d.default": nn.Conv1d,
    "aten.conv2d.default": nn.Conv2d,
    "aten.conv3d.default": nn.Conv3d,
}
_TRANSPOSED: dict[str, type[nn.Module]] = {
    "aten.conv_transpose1d.default": nn.ConvTranspose1d,
    "aten.conv_transpose2d.input": nn.ConvTranspose2d,
}
_OPTIONS = ("stride", "padding", "dilation", "groups")
_TRANSPOSED_OPTIONS = ("stride", "padding", "output_padding", "groups", "dilation")


@dataclass(frozen=True)
class Layer:
    """A layer that a node could be, and the constants of the graph that it holds."""

    name: str
    kind: type[nn.Module]
    options: tuple[tuple[str, Any], ...]
    weight: str
    bias: str | None

    def made(self, weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Module:
        """The module, with these parameters and no others."""
        options, shape = dict(self.options), tuple(weight.shape)
        groups = options.get("groups", 1)
        if self.kind is nn.Linear:
            sizes: tuple[Any, ...] = (shape[1], shape[0])
        elif self.kind in _TRANSPOSED.values():
            sizes = (shape[0], shape[1] * groups, shape[2:])
        else:
            sizes = (shape[1] * groups, shape[0], shape[2:])
        made: Any = self.kind(*sizes, **options, bias=bias is not None, device="meta")
        made.weight, made.bias = weight, bias
        return made  # type: ignore[no-any-return]


def layer_of(node: Node, constants: Mapping[str, torch.Tensor]) -> Layer | None:
    """What a node is as a layer, or None: its weight is a constant, its bias one or none, its options are
    numbers."""
    kind = _CONVS.get(node.op) or _TRANSPOSED.get(node.op) or {"aten.linear.default": nn.Linear}.get(node.op)
    if kind is None or node.kwargs:
        return None
    weight, bias, more = node.args[1], (*node.args, None)[2], node.args[3:]
    names = _TRANSPOSED_OPTIONS if node.op in _TRANSPOSED else _OPTIONS
    options = tuple(zip(names, more, strict=False))
    whole = all(isinstance(n, int) for _, o in options for n in (o if isinstance(o, tuple) else (o,)))
    held = [r for r in (weight, bias) if r is not None]
    if not whole or not all(isinstance(r, Ref) and r.name in constants for r in held):
        return None
    if constants[weight.name].dim() < 2:
        return None
    return Layer(node.layer or node.name, kind, options, weight.name, None if bias is None else bias.name)


def legal(name: str, taken: nn.Module | None = None) -> str:
    """A name as a module may have it: letters, digits and underscores; one that `taken` has not."""
    found = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "value"
    number, own = 1, found
    while taken is not None and hasattr(taken, own):
        number, own = number + 1, f"{found}_{number + 1}"
    return own
