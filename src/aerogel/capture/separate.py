"""Whether each image of a batch can run alone: what the graph gives for one depends on no other.

Told from the graph, not from numbers: every value begins with the open batch size, and every operator is one
that keeps to its image, with dimensions that leave the first alone. What is not known to do so does not.
"""

from __future__ import annotations

import re
from typing import Any

from aerogel.capture.captured import Captured
from aerogel.ir import Node, Ref, references

_ALONE = (
    "conv1d",
    "conv2d",
    "conv_transpose2d",
    "linear",
    "relu",
    "relu6",
    "threshold",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "silu",
    "sigmoid",
    "tanh",
    "leaky_relu",
    "elu",
    "gelu",
    "clamp",
    "add",
    "sub",
    "mul",
    "div",
    "max_pool1d",
    "max_pool2d",
    "avg_pool2d",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "upsample_nearest2d",
    "upsample_bilinear2d",
    "view",
    "reshape",
    "pad",
)
"""Operators that keep to their image wherever the result still begins with the batch."""
_DIMS = {
    "cat": (1, 0),
    "chunk": (2, 0),
    "softmax": (1, None),
    "mean": (1, None),
    "flatten": (1, 0),
    "unsqueeze": (1, None),
}
"""Operators with dimensions, which must leave the first alone: where the argument stands, and what it is if
left out."""
_OFF = {"batch_norm": 5, "dropout": 2}
"""Operators that mix images while training: where that flag stands."""


def separate(captured: Captured) -> bool:
    """Whether a batch may run image by image."""
    given = [s for s, dtype in zip(captured.sizes, captured.dtypes, strict=True) if dtype is not None]
    if not given or not given[0] or not isinstance(given[0][0], str):
        return False
    batch = given[0][0]
    shapes = dict(captured.shapes) | {
        n: s for n, s in zip(captured.graph.inputs, captured.sizes, strict=True) if s
    }
    if not all(_begins(sizes, batch) for sizes in given):
        return False
    outputs = all(
        isinstance(o, Ref) and _begins(shapes.get(o.name, ()), batch) for o in captured.graph.outputs
    )
    numbers = {n.name for n in captured.graph.nodes if _name(n) == "sym_size"}
    if not all(_counts_nothing(n, captured) for n in captured.graph.nodes if n.name in numbers):
        return False
    other = numbers | set(captured.graph.constants)
    return outputs and all(
        _alone(n, shapes, batch, other) for n in captured.graph.nodes if n.name not in numbers
    )


def _name(node: Node) -> str:
    return node.op.removeprefix("aten.").partition(".")[0]


def _counts_nothing(node: Node, captured: Captured) -> bool:
    """A size that is not the number of images, or only says so to a reshape."""
    users = [n for n in captured.graph.nodes if node.name in references(n.args)]
    given = any(isinstance(o, Ref) and o.name == node.name for o in captured.graph.outputs)
    return _argument(node, 1, 0) != 0 or (not given and all(_name(n) in ("view", "reshape") for n in users))


def _begins(sizes: tuple[int | str, ...], batch: str) -> bool:
    """A value of `batch` images, whose other sizes do not depend on how many there are."""
    rest = (str(s) for s in sizes[1:])
    return (
        bool(sizes) and sizes[0] == batch and not any(re.search(rf"\b{re.escape(batch)}\b", s) for s in rest)
    )


def _alone(node: Node, shapes: dict[str, tuple[int | str, ...]], batch: str, other: set[str]) -> bool:
    """`other` are values that hold no images: constants and sizes."""
    name = _name(node)
    read = [shapes.get(r, ()) for r in references(node.args) if r not in other]
    if name == "getitem":  # a piece of what was cut before
        return _begins(shapes.get(node.name, ()), batch)
    if (
        not read
        or not all(_begins(sizes, batch) for sizes in read)
        or any([*references(v)] for v in node.kwargs.values())
    ):
        return False
    if name == "chunk":
        return _leaves_first(_argument(node, *_DIMS[name]), len(read[0]))
    if not _begins(shapes.get(node.name, ()), batch):
        return False
    if name in _OFF:
        return _argument(node, _OFF[name], None) is False
    if name in _DIMS:
        return _leaves_first(_argument(node, *_DIMS[name]), len(read[0]))
    return name in _ALONE


def _argument(node: Node, place: int, otherwise: Any) -> Any:
    return node.args[place] if len(node.args) > place else otherwise


def _leaves_first(dims: Any, rank: int) -> bool:
    listed = dims if isinstance(dims, tuple | list) else (dims,)
    return bool(listed) and all(type(d) is int and d % rank != 0 for d in listed)
