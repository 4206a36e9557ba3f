"""`Graph`: the network as functional nodes. What files, ONNX, torch.export and replicas all speak.

A node is a convolution (op "conv": a Conv, with weight and bias among the graph's constants), one of torch's
`OPS` by name with JSON arguments, arithmetic on sizes ("int.add"), a change from numbers to bytes or back
("quantize", "dequantize": a value, scale and zero point), something done to maps of bytes (`IN_BYTES`, in
bytemaps.py), or a piece of ONNX for onnxruntime ("onnx": its bytes among the constants, and a tuple of
inputs; it gives a list). Nothing is in place: every
node gives a new value with its own name, and uses only names that came before it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aerogel.errors import InvalidFile, UnsupportedModel, printable
from aerogel.ir.bytemaps import IN_BYTES, Add, Average, Table, parsed
from aerogel.ir.conv import Conv
from aerogel.ir.dtypes import INT8
from aerogel.ir.quantized import Quantized

_OPS = """
    _log_softmax _softmax _to_copy _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d abs absolute acos acosh adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d add
    addcdiv addcmul addmm addmv addr affine_grid_generator alias all alpha_dropout amax amin aminmax any
    arange arccos arcsin arctan argmax argmin argsort asin asinh atan atan2 atanh atleast_1d atleast_2d
    atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bilinear bitwise_and bitwise_left_shift
    bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm broadcast_tensors broadcast_to bucketize cat
    cdist ceil celu channel_shuffle chunk clamp clamp_max clamp_min clip clone col2im column_stack concat
    concatenate constant_pad_nd contiguous conv1d conv2d conv3d conv_depthwise3d conv_transpose1d
    conv_transpose2d conv_transpose3d copy copysign cos cosh cosine_similarity count_nonzero cummax cummin
    cumprod cumsum deg2rad detach diag diagonal diagonal_scatter diff digamma div divide dot dropout dstack
    einsum elu embedding eq erf erfc erfinv exp exp2 expand expand_as expand_copy expm1 eye
    feature_alpha_dropout feature_dropout fill flatten flip float_power floor floor_divide fmax fmin fmod frac
    full full_like gather ge gelu glu greater greater_equal grid_sampler grid_sampler_2d grid_sampler_3d
    group_norm gt hardshrink hardsigmoid hardswish hardtanh heaviside hstack hypot im2col index index_add
    index_copy index_fill index_put index_select instance_norm isfinite isinf isnan kthvalue layer_norm ldexp
    le leaky_relu lerp less less_equal lgamma lift_fresh lift_fresh_copy linalg_vector_norm linear linspace
    log log10 log1p log2 log_sigmoid log_softmax logaddexp logical_and logical_not logical_or logical_xor
    logsumexp lt masked_fill masked_scatter matmul max max_pool1d max_pool1d_with_indices max_pool2d
    max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d maximum mean median meshgrid min
    minimum mish mm movedim msort mul multiply mv mvlgamma nan_to_num nanmean nansum narrow
    native_channel_shuffle native_dropout native_group_norm native_layer_norm ne neg negative new_full
    new_ones new_zeros nonzero norm not_equal numpy_T one_hot ones ones_like outer pad pairwise_distance
    permute permute_copy pixel_shuffle pixel_unshuffle polar positive pow prelu prod rad2deg rand_like
    randn_like ravel reciprocal reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 remainder renorm
    repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape rms_norm roll rot90
    round rrelu rsqrt rsub scalar_tensor scaled_dot_product_attention scatter scatter_add scatter_reduce
    select select_copy select_scatter selu sgn sigmoid sign signbit silu sin sinc sinh slice slice_copy
    slice_scatter softmax softplus softshrink sort split split_with_sizes sqrt square squeeze squeeze_copy
    stack std std_mean sub subtract sum swapaxes swapdims sym_size t t_copy take take_along_dim tan tanh
    tensor_split tensordot threshold tile to topk transpose transpose_copy trapezoid tril triu true_divide
    trunc type_as unbind unflatten unfold unsqueeze unsqueeze_copy upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d vander var
    var_mean view view_as view_copy vstack where xlogy zero zeros zeros_like
"""
OPS = frozenset(_OPS.split())
"""Functions of torch a node may call, as "aten.NAME.OVERLOAD". All are pure: none writes to its arguments or
opens a file."""

INTS = (
    "add",
    "sub",
    "mul",
    "floordiv",
    "truediv",
    "mod",
    "neg",
    "min",
    "max",
    "floor",
    "ceil",
    "trunc",
    "float",
)
BYTES = ("quantize", "dequantize")
FORMAT = "aerogel-graph-1"

Argument = Any  # None, bool, int, float, str, Ref, Special, or a tuple of these


@dataclass(frozen=True)
class Ref:
    """A value of the graph, used as an argument."""

    name: str


@dataclass(frozen=True)
class Special:
    """A torch constant in an argument: ("dtype", "float32"), ("memory_format", "channels_last"), ("device",
    "cpu")."""

    kind: str
    name: str

    def __post_init__(self) -> None:
        if (
            self.kind not in ("dtype", "memory_format", "device", "layout", "float")
            or not self.name.isidentifier()
        ):
            raise InvalidFile(f"'{self.kind} {self.name}' is not an argument torch takes")


def references(argument: Argument) -> Iterator[str]:
    """The names an argument uses, nested ones included."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def _trains(base: str, args: tuple[Argument, ...], kwargs: Mapping[str, Argument]) -> bool:
    """Whether a normalisation updates the averages it is given: torch's schema does not say that it writes to
    them."""
    if base not in ("batch_norm", "instance_norm"):
        return False
    named = dict(
        zip(("x", "weight", "bias", "running_mean", "running_var", "now"), args, strict=False)
    ) | dict(kwargs)
    now = named.get("now", named.get("training", named.get("use_input_stats")))
    held = named.get("running_mean") is not None or named.get("running_var") is not None
    return now is not False and held


def _one_of_several(args: tuple[Argument, ...]) -> bool:
    return len(args) == 2 and isinstance(args[0], Ref) and type(args[1]) is int and args[1] >= 0


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
        object.__setattr__(self, "layer", printable(self.layer))
        kind, *rest = self.op.split(".")
        known = self.op in ("conv", "getitem", "onnx", *BYTES, *IN_BYTES) or (
            kind == "int" and len(rest) == 1 and rest[0] in INTS
        )
        torchs = (
            kind == "aten"
            and len(rest) == 2
            and rest[0] in OPS
            and rest[1].isidentifier()
            and not rest[1].startswith("_")
        )
        if not known and not torchs:
            raise UnsupportedModel(f"node '{self.name}': operator '{self.op}' is not one aerogel calls")
        if (self.op == "conv") != (self.conv is not None):
            raise InvalidFile(f"node '{self.name}': a conv node has a Conv; no other node does")
        if kind == "aten" and _trains(rest[0], self.args, self.kwargs):
            raise UnsupportedModel(f"node '{self.name}': {rest[0]} as in training changes what it is given")
        if self.op == "getitem" and not _one_of_several(self.args):
            raise InvalidFile(f"node '{self.name}': getitem takes one of several values, by its number")
        if self.op == "onnx" and not (
            len(self.args) == 2 and isinstance(self.args[0], Ref) and isinstance(self.args[1], tuple)
        ):
            raise InvalidFile(f"node '{self.name}': a piece of ONNX has its bytes and its inputs")
        if self.op in BYTES:
            self.quantized()  # raises
        if self.op in IN_BYTES:
            self.in_bytes()  # raises
        if self.conv is not None and self.conv.dtypes == INT8 and "bias" not in self.conv.epilogue:
            raise InvalidFile(f"node '{self.name}': {self.conv} has no requantisation, which is its bias")
        if self.conv is not None:
            wanted = 2 + ("bias" in self.conv.epilogue) + ("add" in self.conv.epilogue)
            if len(self.args) != wanted or not all(isinstance(a, Ref) for a in self.args):
                raise InvalidFile(
                    f"node '{self.name}': {self.conv} takes x, weight, bias and residual as it "
                    f"says, {wanted} in all"
                )

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names this node reads, each once."""
        return tuple(dict.fromkeys(references((*self.args, *self.kwargs.values()))))

    def with_arguments(self, change: Callable[[Argument], Argument]) -> Node:
        """The node with each of its arguments changed."""
        kwargs = {name: change(value) for name, value in self.kwargs.items()}
        return replace(self, args=tuple(map(change, self.args)), kwargs=kwargs)

    def quantized(self) -> Quantized:
        """What the bytes mean that this node makes or reads."""
        match self.args:
            case (Ref(), float(scale), int(zero)) if 0 < scale < math.inf and 0 <= zero <= 255:
                return Quantized(scale, zero)
        raise InvalidFile(f"node '{self.name}': {self.op} takes a value, a scale and a zero point")

    def in_bytes(self) -> Average | Add | Table:
        """What a node of IN_BYTES does to its maps."""
        maps = 1 if self.op == "u8.average" else 2
        if self.kwargs or not all(isinstance(a, Ref) for a in self.args[:maps]):
            raise InvalidFile(f"node '{self.name}': {self.op} takes its maps, their scales and zero points")
        return parsed(self.op, self.args[maps:])

    def conv_inputs(self) -> tuple[str, str, str | None, str | None]:
        """x, weight, bias, residual of a conv node."""
        assert self.conv is not None
        rest = iter(a.name for a in self.args[2:])
        bias = next(rest) if "bias" in self.conv.epilogue else None
        residual = next(rest) if "add" in self.conv.epilogue else None
        return self.args[0].name, self.args[1].name, bias, residual


@dataclass(frozen=True)
class Graph:
    """Nodes in an order they can run in; `constants` are named arrays kept beside the graph, `outputs` values
    or literals."""

    inputs: tuple[str, ...]
    constants: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Argument, ...]

    def __post_init__(self) -> None:
        known = {*self.inputs, *self.constants}
        if len(known) != len(self.inputs) + len(self.constants):
            raise InvalidFile("two inputs or constants have one name")
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
        users: dict[str, list[str]] = {
            n: [] for n in (*self.inputs, *self.constants, *(n.name for n in self.nodes))
        }
        for node in self.nodes:
            for name in node.inputs:
                users[name].append(node.name)
        for name in references(self.outputs):
            users[name].append("")
        return {name: tuple(nodes) for name, nodes in users.items()}

    def to_json(self) -> str:
        nodes = [
            {
                "name": n.name,
                "op": n.op,
                "args": _encode(n.args),
                "kwargs": {k: _encode(v) for k, v in n.kwargs.items()},
                "conv": None if n.conv is None else str(n.conv),
                "layer": n.layer,
            }
            for n in self.nodes
        ]
        raw = {
            "format": FORMAT,
            "inputs": list(self.inputs),
            "constants": list(self.constants),
            "nodes": nodes,
            "outputs": _encode(self.outputs),
        }
        return json.dumps(raw, indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Graph:
        """The inverse of `to_json`. Any damage is an InvalidFile."""
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise InvalidFile(f"graph format '{str(raw['format'])[:80]}' is not {FORMAT}")
            nodes = tuple(
                Node(
                    _text(n["name"]),
                    _text(n["op"]),
                    _decode(_list(n["args"])),
                    {_text(k): _decode(v) for k, v in dict(n["kwargs"]).items()},
                    None if n["conv"] is None else Conv.parse(_text(n["conv"])),
                    _text(n["layer"]),
                )
                for n in raw["nodes"]
            )
            inputs, constants = (tuple(_text(v) for v in _list(raw[k])) for k in ("inputs", "constants"))
            return Graph(inputs, constants, nodes, _decode(_list(raw["outputs"])))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as why:
            raise InvalidFile(f"not a graph: {type(why).__name__} {str(why)[:200]}") from None


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
        if (kind, name) not in (("device", "cpu"), ("layout", "strided")) and kind in ("device", "layout"):
            raise InvalidFile(f"a graph in a file stays on the CPU; '{str(name)[:80]}' is something else")
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
