"""`Graph`: the network as functional nodes. What files, ONNX, torch.export and replicas all speak.

A node is a convolution (op "conv": a Conv, with weight and bias among the graph's constants), one of torch's `OPS` by name with
JSON arguments, arithmetic on sizes ("int.add"), or a piece of ONNX for onnxruntime ("onnx": its bytes among the constants, and a
tuple of inputs; it gives a list). Nothing is in place: every node gives a new value with its own name, and
uses only names that came before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aerogel.errors import InvalidFile, UnsupportedModel
from aerogel.problem import Conv

_OPS = """
    abs adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d add addmm amax amin any arange
    argmax argsort avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bitwise_and bitwise_not bitwise_or bmm cat ceil
    channel_shuffle chunk clamp clamp_max clamp_min clone constant_pad_nd contiguous conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d copy cos cumsum detach div dropout elu embedding empty eq erf exp expand expand_as
    eye feature_dropout flatten flip floor full full_like gather ge gelu glu group_norm gt hardsigmoid hardswish hardtanh
    index index_select instance_norm isnan layer_norm le leaky_relu lift_fresh_copy linear linspace log log_softmax
    logical_and logical_not logical_or lt masked_fill matmul max max_pool1d max_pool2d max_pool3d maximum mean meshgrid
    min minimum mish mm movedim mul narrow ne neg new_full new_ones new_zeros nonzero norm numpy_T ones ones_like pad
    permute pixel_shuffle pixel_unshuffle pow prelu prod relu relu6 remainder repeat repeat_interleave reshape rms_norm
    roll round rsqrt rsub scalar_tensor scaled_dot_product_attention select sigmoid sign silu sin slice softmax softplus
    sort split split_with_sizes sqrt square squeeze stack std sub sum sym_size t tan tanh tensor_split threshold tile to topk
    transpose tril triu type_as unbind unflatten unfold unsqueeze upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d var view view_as where zeros zeros_like
"""
OPS = frozenset(_OPS.split())
"""Functions of torch a node may call, as "aten.NAME.OVERLOAD". All are pure: none writes to its arguments or opens a file."""

INTS = ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "min", "max", "floor", "ceil", "trunc")
FORMAT = "aerogel-graph-1"

Argument = Any  # None, bool, int, float, str, Ref, Special, or a tuple of these


@dataclass(frozen=True)
class Ref:
    """A value of the graph, used as an argument."""

    name: str


@dataclass(frozen=True)
class Special:
    """A torch constant in an argument: ("dtype", "float32"), ("memory_format", "channels_last"), ("device", "cpu")."""

    kind: str
    name: str

    def __post_init__(self) -> None:
        if self.kind not in ("dtype", "memory_format", "device", "layout", "float") or not self.name.isidentifier():
            raise InvalidFile(f"'{self.kind} {self.name}' is not an argument torch takes")


def references(argument: Argument) -> Iterator[str]:
    """The names an argument uses, nested ones included."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


@dataclass(frozen=True)
class Node:
    """One value of the network: `op` applied to `args`. `layer` is the module it came from, for people."""

    name: str
    op: str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument] = field(default_factory=dict)
    conv: Conv | None = None
    layer: str = ""

    def __post_init__(self) -> None:
        kind, *rest = self.op.split(".")
        known = self.op in ("conv", "getitem", "onnx") or (kind == "int" and len(rest) == 1 and rest[0] in INTS)
        torchs = kind == "aten" and len(rest) == 2 and rest[0] in OPS and rest[1].isidentifier() and not rest[1].startswith("_")
        if not known and not torchs:
            raise UnsupportedModel(f"node '{self.name}': operator '{self.op}' is not one aerogel calls")
        if (self.op == "conv") != (self.conv is not None):
            raise InvalidFile(f"node '{self.name}': a conv node has a Conv; no other node does")
        if self.op == "onnx" and not (len(self.args) == 2 and isinstance(self.args[0], Ref) and isinstance(self.args[1], tuple)):
            raise InvalidFile(f"node '{self.name}': a piece of ONNX has its bytes and its inputs")
        if self.conv is not None:
            wanted = 2 + ("bias" in self.conv.epilogue) + ("add" in self.conv.epilogue)
            if len(self.args) != wanted or not all(isinstance(a, Ref) for a in self.args):
                raise InvalidFile(f"node '{self.name}': {self.conv} takes x, weight, bias and residual as it says, {wanted} in all")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names this node reads, each once."""
        return tuple(dict.fromkeys(references((*self.args, *self.kwargs.values()))))

    def conv_inputs(self) -> tuple[str, str, str | None, str | None]:
        """x, weight, bias, residual of a conv node."""
        assert self.conv is not None
        rest = iter(a.name for a in self.args[2:])
        bias = next(rest) if "bias" in self.conv.epilogue else None
        residual = next(rest) if "add" in self.conv.epilogue else None
        return self.args[0].name, self.args[1].name, bias, residual


@dataclass(frozen=True)
class Graph:
    """Nodes in an order they can run in; `constants` are named arrays kept beside the graph, `outputs` values or literals."""

    inputs: tuple[str, ...]
    constants: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Argument, ...]

    def __post_init__(self) -> None:
        known = {*self.inputs, *self.constants}
        for node in self.nodes:
            missing = [name for name in node.inputs if name not in known]
            if missing:
                raise InvalidFile(f"node '{node.name}' uses '{missing[0]}', which nothing before it gives")
            if node.name in known:
                raise InvalidFile(f"the name '{node.name}' stands for two values")
            known.add(node.name)
        lost = [name for name in references(self.outputs) if name not in known]
        if lost:
            raise InvalidFile(f"the output '{lost[0]}' is given by no node")

    def users(self) -> dict[str, tuple[str, ...]]:
        """For each value, the nodes that read it; "" stands for the graph's own outputs."""
        users: dict[str, list[str]] = {n: [] for n in (*self.inputs, *self.constants, *(n.name for n in self.nodes))}
        for node in self.nodes:
            for name in node.inputs:
                users[name].append(node.name)
        for name in references(self.outputs):
            users[name].append("")
        return {name: tuple(nodes) for name, nodes in users.items()}

    def to_json(self) -> str:
        nodes = [
            {
                "name": n.name, "op": n.op, "args": _encode(n.args), "kwargs": {k: _encode(v) for k, v in n.kwargs.items()},
                "conv": None if n.conv is None else str(n.conv), "layer": n.layer,
            }
            for n in self.nodes
        ]  # fmt: skip
        raw = {
            "format": FORMAT, "inputs": list(self.inputs), "constants": list(self.constants), "nodes": nodes,
            "outputs": _encode(self.outputs),
        }  # fmt: skip
        return json.dumps(raw, indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Graph:
        """The inverse of `to_json`. Any damage is an InvalidFile."""
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise InvalidFile(f"graph format '{raw['format']}' is not {FORMAT}")
            nodes = tuple(
                Node(
                    _text(n["name"]), _text(n["op"]), _decode(_list(n["args"])),
                    {_text(k): _decode(v) for k, v in dict(n["kwargs"]).items()},
                    None if n["conv"] is None else Conv.parse(_text(n["conv"])), _text(n["layer"]),
                )
                for n in raw["nodes"]
            )  # fmt: skip
            inputs, constants = (tuple(_text(v) for v in _list(raw[k])) for k in ("inputs", "constants"))
            return Graph(inputs, constants, nodes, _decode(_list(raw["outputs"])))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as why:
            raise InvalidFile(f"not a graph: {type(why).__name__} {why}") from None


def _encode(argument: Argument) -> Any:
    if isinstance(argument, Ref):
        return {"ref": argument.name}
    if isinstance(argument, Special):
        return {argument.kind: argument.name}
    if isinstance(argument, tuple):
        return [_encode(item) for item in argument]
    return argument


def _decode(raw: Any) -> Argument:
    if isinstance(raw, list):
        return tuple(_decode(item) for item in raw)
    if isinstance(raw, dict):
        ((kind, name),) = raw.items()
        return Ref(_text(name)) if kind == "ref" else Special(kind, _text(name))
    return raw


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidFile(f"{value!r:.80} should be text")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidFile(f"{value!r:.80} should be a list")
    return value
