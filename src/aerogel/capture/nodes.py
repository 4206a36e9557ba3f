"""What a node of a graph is, read from its arguments: a concrete convolution, a pooling, a change of element
type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from aerogel.errors import ShapeError
from aerogel.ir import BYTES, Conv, Graph, Node, Pool, Quantized, Ref, Shape

Shapes = Mapping[str, tuple[int, ...]]
Stored = Mapping[str, str]
"""The element type of each value that is f32, f16 or bf16, and u8 of maps in int8."""
Meanings = Mapping[str, Quantized]
"""What the bytes of each map in int8 mean."""


RANKS = (2, 3, 4)
"""Dimensions of what counts as images: features, signals, images."""


def image_shape(shape: tuple[int, ...]) -> Shape:
    """(n, c, l) counts as (n, c, 1, l), features (n, c) as (n, c, 1, 1)."""
    rows, columns = {2: (1, 1), 3: (1, shape[-1])}.get(len(shape), shape[2:])
    return shape[0], shape[1], rows, columns


def problem(node: Node, shapes: Shapes) -> Conv:
    """The concrete problem of a conv node for known shapes."""
    assert node.conv is not None
    n, _, h, w = image_shape(shapes[node.conv_inputs()[0]])
    return node.conv.at(n, h, w)


def added_alike(graph: Graph, shapes: Shapes) -> None:
    """Kernels add by address: a residual has the sizes of what it is added to."""
    for node in graph.nodes:
        residual = None if node.conv is None else node.conv_inputs()[3]
        if residual is not None and image_shape(shapes[residual]) != problem(node, shapes).y_shape:
            raise ShapeError(f"layer '{node.layer or node.name}': what is added has other sizes")


def casts(node: Node, stored: Stored) -> bool:
    """Whether a node only changes the element type of a map."""
    if node.op in BYTES:
        return True
    if node.op != "aten.to.dtype" or len(node.inputs) != 1:
        return False
    both = stored.get(node.inputs[0]), stored.get(node.name)
    return None not in both and both[0] != both[1] and "f32" in both


def pooled_shape(own: Pool, shape: tuple[int, ...], node: Node) -> tuple[int, ...] | None:
    """The shape that pooling gives for images of this one, or None where it does not fit them."""
    if len(shape) != 4 or own.window == (0, 0):
        keeps = len(node.args) > 2 and node.args[2] is True
        return (*shape[:2], *((1, 1) if keeps else ())) if len(shape) == 4 else None
    h, w = own.out(*shape[2:])
    return (
        (*shape[:2], h, w)
        if min(h, w) > 0 and all(2 * p <= k for p, k in zip(own.pad, own.window, strict=True))
        else None
    )


_ARGUMENTS = {
    "max": ("window", "stride", "pad", "dilation", "ceil"),
    "average": ("window", "stride", "pad", "ceil", "padding_counts", "divisor"),
}

LARGEST = 2**15
"""Windows, strides, paddings and dilations from here on are torch's: our kernel keeps a padded line."""


def pooling_of(node: Node) -> Pool | None:
    """The node's numbers, or None where it is no pooling of ours.

    Sizes rounded up, averages over real pixels only, and numbers from LARGEST on are torch's.
    """
    if node.op == "aten.mean.dim":
        keeps = node.args[2] if len(node.args) > 2 else False
        whole = (
            not node.kwargs
            and isinstance(node.args[0], Ref)
            and node.args[1] in ((2, 3), (-2, -1), (-1, -2), (3, 2))
        )
        return Pool("average", (0, 0), (1, 1), (0, 0), (1, 1)) if whole and isinstance(keeps, bool) else None
    kind = {"aten.max_pool2d.default": "max", "aten.avg_pool2d.default": "average"}.get(node.op)
    if kind is None or not isinstance(node.args[0], Ref) or node.kwargs:
        return None
    given = dict(zip(_ARGUMENTS[kind], node.args[1:], strict=False))
    window, stride, pad = given["window"], given.get("stride") or given["window"], given.get("pad", (0, 0))
    dilation, ceil = given.get("dilation", (1, 1)), given.get("ceil", False)
    if not given.get("padding_counts", True) or given.get("divisor") is not None:
        return None
    w, s, p, d = _pair(window), _pair(stride), _pair(pad, least=0), _pair(dilation)
    return Pool(kind, w, s, p, d) if w and s and p and d and not ceil else None


def _pair(value: object, least: int = 1) -> tuple[int, int] | None:
    values = value if isinstance(value, tuple) else (value,)
    if not values or not all(isinstance(v, int) and least <= v < LARGEST for v in values):
        return None
    return int(values[0]), int(values[-1])


_ACTIVATIONS = {
    "aten.relu.default": "relu",
    "aten.relu6.default": "relu6",
    "aten.silu.default": "silu",
    "aten.hardswish.default": "hardswish",
    "aten.gelu.default": "gelu",
    "aten.sigmoid.default": "sigmoid",
    "aten.hardsigmoid.default": "hardsigmoid",
}


def activation_of(node: Node) -> str | None:
    """The activation that a node is, as an epilogue names it."""
    if node.op in _ACTIVATIONS and node.kwargs.get("approximate", "none") == "none":
        return _ACTIVATIONS[node.op]
    if node.op == "aten.leaky_relu.default":
        slope = node.args[1] if len(node.args) > 1 else 0.01
        return f"leaky_relu{slope!r}" if isinstance(slope, float) and abs(slope) <= 1 else None
    if (
        node.op == "aten.threshold.default"
        and node.args[2] == 0
        and _finite(node.args[1])
        and node.args[1] >= 0
    ):
        return f"threshold{float(node.args[1])!r}"
    if node.op == "aten.hardtanh.default" and tuple(node.args[1:3]) in ((0, 6), (0.0, 6.0)):
        return "relu6"
    return None


def _finite(value: Any) -> bool:
    """Infinities and computed numbers are no numbers here."""
    return type(value) in (int, float) and math.isfinite(value)


Sides = tuple[int, int, int, int]
"""Pixels around an image: top, left, bottom, right."""


def added(pad: Sides, more: Sides) -> Sides:
    return pad[0] + more[0], pad[1] + more[1], pad[2] + more[2], pad[3] + more[3]


def zero_pad(node: Node) -> Sides | None:
    """The zeros that a node puts around images or signals; None of a node that does something else."""
    found = _padding(node)
    return found[0] if found is not None and found[1] in (0, None) else None


def lowest_pad(node: Node) -> Sides | None:
    """The pixels that a node puts around images where they are no more than any float."""
    found = _padding(node)
    low = found is not None and type(found[1]) is float and found[1] <= LOWEST
    return found[0] if found is not None and low else None


LOWEST = -3.4028234663852886e38
"""What onnxruntime's maximum begins with."""


def padded_pools(graph: Graph) -> dict[str, tuple[str, Sides]]:
    """Maxima over padded maps whose padding never wins: what is padded is never below zero. By the pool's
    name the map and its padding."""
    users, nodes, found = graph.users(), {node.name: node for node in graph.nodes}, {}
    for node in graph.nodes:
        own = pooling_of(node)
        pad = nodes.get(node.inputs[0]) if own is not None and own.kind == "max" else None
        sides = None if pad is None else lowest_pad(pad)
        plain = own is not None and own.pad == (0, 0) and own.dilation == (1, 1)
        if own is None or pad is None or sides is None or len(users[pad.name]) > 1 or not plain:
            continue
        source = nodes.get(pad.inputs[0])
        inside = all(side < own.window[i % 2] for i, side in enumerate(sides))
        if inside and source is not None and source.conv is not None and source.conv.steps[-1:] in _POSITIVE:
            found[node.name] = source.name, sides
    return found


_POSITIVE = (("relu",), ("relu6",))


def _padding(node: Node) -> tuple[Sides, object] | None:
    """The sides of a padding with one number, and that number."""
    mode = ("constant",) if node.op == "aten.pad.default" else ()
    if not mode and node.op != "aten.constant_pad_nd.default":
        return None
    x, sides, *rest = node.args
    given = (*rest, *(*mode, 0)[len(rest) :])
    if node.kwargs or not isinstance(x, Ref) or not isinstance(sides, tuple) or len(sides) not in (2, 4):
        return None
    fixed = [s for s in (*sides, 0, 0)[:4] if type(s) is int and 0 <= s < LARGEST]
    if len(fixed) < 4 or given[:-1] != mode:
        return None
    left, right, top, bottom = fixed
    return (top, left, bottom, right), given[-1]


def pairs(graph: Graph) -> dict[str, str]:
    """Convolutions whose only reader is a pooling of ours over a window, and that pooling: nodes by name."""
    users, nodes = graph.users(), {node.name: node for node in graph.nodes}
    found = {}
    for node in graph.nodes:
        own = nodes.get(users[node.name][0]) if node.conv is not None and len(users[node.name]) == 1 else None
        pool = None if own is None else pooling_of(own)
        if (
            own is not None
            and pool is not None
            and pool.window != (0, 0)
            and node.conv
            and "add" not in node.conv.epilogue
        ):
            found[node.name] = own.name
    return found
