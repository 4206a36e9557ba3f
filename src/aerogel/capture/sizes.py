"""Sizes and element types of every value, computed and not run: nodes are called on tensors without memory.

That is how a module learns the sizes of a new input. And it is how a file is looked at before anything of it
runs: a graph that fits nothing, or asks for more than there is, is found out here.

Convolutions and pooling have formulas of their own: to say what they give torch imports half of its compiler,
for seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from aerogel.capture import interpret, pieces
from aerogel.capture.nodes import RANKS, pooled_shape, pooling_of, problem
from aerogel.errors import AerogelError, InvalidFile, ShapeError
from aerogel.ir import IN_BYTES, INT8, QUAD, Average, Graph, Node, Ref, ceil_div, references, round_up
from aerogel.ir.quantized import HEADER
from aerogel.ir.tensors import TORCH

META = torch.device("meta")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CUTS = {"unbind": None, "split": 1, "chunk": 1, "tensor_split": 1}
MOST_PIECES = 1 << 16
"""Values that one node may cut another into."""
_GROWS = """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d affine_grid_generator arange broadcast_to cdist col2im
    constant_pad_nd conv_transpose1d conv_transpose2d conv_transpose3d diag einsum expand expand_copy eye full
    im2col linspace max_unpool2d meshgrid new_full new_ones new_zeros one_hot ones outer pad reflection_pad1d
    reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d
    replication_pad3d scalar_tensor tensordot tile unfold upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d vander
    zeros
"""
_WORDS = {"ScalarType": torch.dtype, "Layout": torch.layout, "MemoryFormat": torch.memory_format}
"""Arguments that torch's schema calls so, and what they are in Python."""
GROWS = frozenset(_GROWS.split())
"""Operators whose result is as large as a number says. What others give is paid for with inputs or weights of
its size."""
FREE_BYTES, TIMES = 64 << 20, 64


class Unknown:
    """A value whose size only its data says."""


@dataclass(frozen=True)
class Budget:
    """What a graph from a file may ask for, where its inputs and constants have so many bytes. A value whose
    size is just a number in the file has at most FREE_BYTES, or TIMES those; and what is alive at once fits
    into the memory of this process."""

    given_bytes: int

    @staticmethod
    def of(constants: Mapping[str, torch.Tensor], inputs: list[Any]) -> Budget:
        return Budget(sum(_bytes(v) for v in (*constants.values(), *inputs)))

    def check(self, node: Node, value: Any) -> None:
        interpret.fits(node.name, value)
        most = max(FREE_BYTES, TIMES * self.given_bytes)
        if node.op.partition(".")[2].partition(".")[0] in GROWS or node.op == "onnx":
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if _bytes(tensor) > most:
                    raise InvalidFile(
                        f"'{node.name}' ({node.op}) would take {_bytes(tensor)} bytes, but a file "
                        "with so few inputs and constants "
                        f"may ask for {most} by a number alone"
                    )


def _bytes(value: Any) -> int:
    return math.prod(value.shape) * value.element_size() if isinstance(value, torch.Tensor) else 0


def computed(
    graph: Graph, constants: Mapping[str, torch.Tensor], inputs: list[Any], bounded: bool = False
) -> dict[str, torch.Tensor] | None:
    """Every tensor of the graph without memory, or None where one run must tell, as where sizes depend on
    data. A graph from a file is `bounded`: what does not fit, or more than its budget, is an error here."""
    try:
        return _computed(graph, constants, inputs, Budget.of(constants, inputs) if bounded else None)
    except AerogelError:
        if bounded:
            raise
        return None


def _computed(
    graph: Graph, constants: Mapping[str, torch.Tensor], inputs: list[Any], budget: Budget | None
) -> dict[str, torch.Tensor] | None:
    values: dict[str, Any] = {name: blank(value) for name, value in constants.items()}
    values |= {name: blank(value) for name, value in zip(graph.inputs, inputs, strict=True)}
    if budget is not None:
        interpret.fits("the example", list(values.values()))
    with torch.no_grad():
        for node in graph.nodes:
            found = values[node.name] = _given(node, values, constants)
            if budget is not None:
                budget.check(node, found)
    if budget is not None:
        _fits_together(graph, values)
    if any(isinstance(v, Unknown) for v in values.values()):
        return None
    return {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}


def understood(
    graph: Graph, constants: Mapping[str, torch.Tensor], inputs: list[Any]
) -> dict[str, torch.Tensor] | None:
    """`computed` for a graph from a file, within its budget: whatever does not fit is an InvalidFile."""
    for node in graph.nodes:
        if node.conv is None and node.op != "onnx":
            interpret.function(node)
    try:
        return computed(graph, constants, inputs, bounded=True)
    except ShapeError as why:
        raise InvalidFile(str(why).replace("on these sizes", "on the file's own example")) from None
    except AerogelError:
        raise
    except Exception as why:  # whatever torch raises at a graph that makes no sense
        said = str(why).strip().splitlines()[0][:200] if str(why).strip() else type(why).__name__
        raise InvalidFile(f"the graph does not run on the file's own example: {said}") from None


def blank(value: Any) -> Any:
    """A tensor of the same shape and type without memory; any other value as it is."""
    return (
        torch.empty(value.shape, dtype=value.dtype, device=META) if isinstance(value, torch.Tensor) else value
    )


def _given(node: Node, values: Mapping[str, Any], constants: Mapping[str, torch.Tensor]) -> Any:
    try:
        return _sized(node, values, constants)
    except AerogelError:
        raise
    except NotImplementedError:  # torch says no size without data
        return Unknown()
    except Exception as why:
        said = str(why).strip().splitlines()[0][:200] if str(why).strip() else type(why).__name__
        raise ShapeError(f"node '{node.name}' does not run on these sizes: {said}") from why


def _sized(node: Node, values: Mapping[str, Any], constants: Mapping[str, torch.Tensor]) -> Any:
    """What a node gives, without memory."""
    if any(isinstance(values[name], Unknown) for name in node.inputs):
        return Unknown()
    if node.op == "onnx":
        names = list(references(node.args[1]))
        held = constants.get(node.args[0].name)
        if held is None:
            raise InvalidFile(f"node '{node.name}': a piece of ONNX is a constant")
        found = pieces.outputs(held, [values[n] for n in names], [constants.get(n) for n in names])
        return Unknown() if found is None else found
    if node.conv is not None:
        return _convolved(node, values, constants)
    if node.op in IN_BYTES:
        return _of_bytes(node, values)
    if _keeps_sizes(node, values):
        return torch.empty_like(values[node.inputs[0]])
    pooled = pooling_of(node)
    shape = None if pooled is None else pooled_shape(pooled, tuple(values[node.inputs[0]].shape), node)
    return _called(node, values) if shape is None else values[node.inputs[0]].new_empty(shape)


def _keeps_sizes(node: Node, values: Mapping[str, Any]) -> bool:
    """Whether this is a batch norm of f32 that fits its map. torch's own word on it would import the whole of
    dynamo, seconds of a process's life."""
    if node.op != "aten.batch_norm.default" or len(node.args) != 9 or node.args[5] is not False:
        return False
    x, *others = (interpret.argument(a, values) for a in node.args[:5])
    if node.kwargs or not isinstance(x, torch.Tensor) or x.dim() < 2 or x.dtype != torch.float32:
        return False
    return all(isinstance(t, torch.Tensor) and t.shape == x.shape[1:2] and t.dtype == x.dtype for t in others)


def _convolved(node: Node, values: Mapping[str, Any], constants: Mapping[str, torch.Tensor]) -> torch.Tensor:
    x, weight, bias, residual = node.conv_inputs()
    image, shape = values[x], tuple(values[x].shape)
    if not 2 <= len(shape) <= 4:
        raise ShapeError(f"node '{node.name}': {node.conv} takes images, not {shape}")
    conv = problem(node, {x: shape})
    y = conv.y_shape if len(shape) == 4 else (*conv.y_shape[:2], *conv.y_shape[3:])[: len(shape)]
    held = [constants.get(name) for name in (weight, bias) if name is not None]
    wanted = [
        conv.weight_shape,
        (len(HEADER) + 2 * round_up(conv.k, QUAD),) if conv.dtypes == INT8 else (conv.k,),
    ]
    types = [(torch.int8,), (torch.int32,)] if conv.dtypes == INT8 else [_FLOATS, _FLOATS]
    if any(
        t is None or tuple(t.shape) != w or t.dtype not in own
        for t, w, own in zip(held, wanted, types, strict=False)
    ):
        raise ShapeError(f"node '{node.name}': {conv} has weights of another shape")
    if (image.dtype == torch.uint8) != (conv.dtypes == INT8):
        raise ShapeError(f"node '{node.name}': {conv} on {image.dtype}")
    fits = residual is None or (tuple(values[residual].shape) == y and values[residual].dtype == image.dtype)
    if shape[1] != conv.c or not fits or image.dtype not in TORCH.values():
        raise ShapeError(f"node '{node.name}': {conv} on {image.dtype} {shape}")
    return torch.empty(y, dtype=image.dtype, device=META)


def _of_bytes(node: Node, values: Mapping[str, Any]) -> torch.Tensor:
    """What is done to maps of bytes: none of it makes them larger."""
    maps, how = [values[name.name] for name in node.args if isinstance(name, Ref)], node.in_bytes()
    shape: tuple[int, ...] | None = tuple(maps[0].shape)
    if isinstance(how, Average):
        shape = how.shape(maps[0].shape)
    wanted = {"u8.add": [tuple(maps[0].shape)], "u8.table": [(256,)], "u8.average": []}[node.op]
    if [tuple(m.shape) for m in maps[1:]] != wanted or any(m.dtype != torch.uint8 for m in maps):
        shape = None
    if shape is None or len(maps[0].shape) not in RANKS:
        raise ShapeError(f"node '{node.name}': {node.op} on {[tuple(m.shape) for m in maps]}")
    numbers = isinstance(how, Average) and how.y is None
    return torch.empty(shape, dtype=torch.float32 if numbers else torch.uint8, device=META)


def _called(node: Node, values: Mapping[str, Any]) -> Any:
    """torch's own answer; what it would make on a device it makes without memory."""
    function = interpret.function(node)
    args = [interpret.argument(a, values) for a in node.args]
    kwargs = {k: interpret.argument(v, values) for k, v in node.kwargs.items()}
    if not isinstance(function, torch._ops.OpOverload):
        return function(*args, **kwargs)
    for i, wanted in enumerate(function._schema.arguments):
        if "Device" in str(wanted.type):
            if i < len(args):
                args[i] = META
            else:
                kwargs["device"] = META
    _in_words(node, function, args, kwargs)
    base = node.op.split(".")[1]
    if base in _CUTS and not _few(base, args, kwargs):
        raise InvalidFile(f"'{node.name}' ({node.op}) cuts a value into more than {MOST_PIECES}")
    return function(*args, **kwargs)


def _in_words(node: Node, function: Any, args: list[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise where an element type or a layout is a number: torch takes it for one of its own without looking,
    and crashes."""
    for i, wanted in enumerate(function._schema.arguments):
        said = str(getattr(wanted, "real_type", wanted.type))
        value = args[i] if i < len(args) else kwargs.get(wanted.name)
        if value is not None and any(w in said and not isinstance(value, t) for w, t in _WORDS.items()):
            raise InvalidFile(f"'{node.name}' ({node.op}): {wanted.name} is {value!r:.40}")


def _few(base: str, args: list[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a value is cut into few enough pieces: a dimension costs nothing, but each piece does."""
    sizes, by = args[0].shape, args[1] if len(args) > 1 else next(iter(kwargs.values()), 1)
    longest = max(sizes, default=0)
    if base == "unbind":
        return longest <= MOST_PIECES
    if not isinstance(by, int):
        return True
    return (ceil_div(longest, max(by, 1)) if base == "split" else by) <= MOST_PIECES


def _fits_together(graph: Graph, values: Mapping[str, Any]) -> None:
    """Whether what is alive at once fits into memory."""
    last = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    last |= dict.fromkeys(references(graph.outputs), len(graph.nodes))
    alive: dict[int, tuple[int, int]] = {}
    most, memory = 0, interpret.memory()
    for i, node in enumerate(graph.nodes):
        for tensor in _tensors(values[node.name]):
            storage = tensor.untyped_storage()
            until = max(last.get(node.name, i), alive.get(storage._cdata, (0, 0))[1])
            alive[storage._cdata] = (storage.nbytes(), until)
        most = max(most, sum(size for size, _ in alive.values()))
        alive = {key: held for key, held in alive.items() if held[1] > i}
    if most > memory:
        raise InvalidFile(f"the model would take {most} bytes on its example; this process may have {memory}")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, torch.Tensor):
            yield item
