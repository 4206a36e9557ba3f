"""A transposed convolution whose windows do not overlap (stride as large as the kernel) is a 1x1 convolution
and a rearrangement.

Output pixel (r * i + a, r * j + b) of filter k is the product of input pixel (i, j) with tap (a, b): one 1x1
filter for each of the r * r taps, whose maps torch's pixel_shuffle lays out side by side. That makes it a
layer like any other.
"""

from __future__ import annotations

from typing import Any

import torch

from aerogel.ir import Conv, Dtypes, Node, Ref
from aerogel.ir.tensors import DTYPE_NAMES

_DEFAULTS = (None, 1, 0, 0, 1, 1)
"""bias, stride, padding, output padding, groups, dilation"""


def enlarging(node: Node, constants: dict[str, torch.Tensor]) -> tuple[Node, Node] | None:
    """The two nodes that do the same, their weight and bias added to the constants; None where windows
    overlap."""
    if node.op != "aten.conv_transpose2d.input" or node.kwargs:
        return None
    given: list[Any] = [*node.args, *_DEFAULTS[len(node.args) - 2 :]]
    x, weight, bias, stride, pad, more, groups, dilation = given
    held = constants.get(weight.name) if isinstance(weight, Ref) else None
    if held is None or held.dtype not in DTYPE_NAMES or (bias is not None and bias.name not in constants):
        return None
    c, k, r, s = held.shape
    plain = {_once(pad), _once(more)} == {(0,)} and groups == 1 and _once(dilation) == (1,)
    if not plain or r != s or r < 2 or _once(stride) != (r,):
        return None
    inner = f"{node.name}#1x1"
    names = f"{inner}.weight", f"{inner}.bias"
    constants[names[0]] = held.permute(1, 2, 3, 0).reshape(k * r * r, c, 1, 1).contiguous()
    if bias is not None:
        constants[names[1]] = constants[bias.name].repeat_interleave(r * r)
    conv = Conv(
        c, k * r * r, dtypes=Dtypes.of(DTYPE_NAMES[held.dtype]), epilogue=() if bias is None else ("bias",)
    )
    args = (x, *map(Ref, names[: 1 + (bias is not None)]))
    layer = node.layer or node.name
    return Node(inner, "conv", args, {}, conv, layer), Node(
        node.name, "aten.pixel_shuffle.default", (Ref(inner), r), layer=layer
    )


def _once(value: object) -> tuple[object, ...]:
    """The different numbers of an argument given once or for each dimension."""
    return tuple(dict.fromkeys(value if isinstance(value, tuple) else (value,)))
