"""An ONNX file -> Graph. Constants are folded, open sizes stay open, what no operator of torch covers runs in
onnxruntime."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aerogel.capture import foreign
from aerogel.capture.captured import Captured
from aerogel.capture.onnx.file import TYPES, Attributes, File, within
from aerogel.capture.onnx.operators import build
from aerogel.capture.onnx.origins import Origin
from aerogel.capture.onnx.qlinear import MICROSOFT, MOVES, moved
from aerogel.capture.onnx.quantized import dequantized
from aerogel.capture.onnx.sizes import Size, array_of, divided, larger, smaller
from aerogel.capture.onnx.values import MOST_FOLDED, Reader, Value
from aerogel.capture.onnx.write import emptied
from aerogel.errors import AerogelError, InvalidArgument, InvalidFile, UnsupportedModel
from aerogel.ir import Node, Ref

_HERE = ("", "ai.onnx")
FEW = 16
"""Elements of a constant that is an option of its node rather than a weight."""


def _rounded(how: str) -> Callable[[Any], Any]:
    return lambda x: x.rounded(how) if isinstance(x, Size) else getattr(math, how)(x)


def _alike(x: Any, y: Any) -> bool:
    """Whether two sizes are one at all sizes; what both examples agree on is no proof."""
    if isinstance(x, Size) and isinstance(y, Size) and x.name == y.name:
        return True
    for one, other in ((x, y), (y, x)):
        if isinstance(one, Size) and (isinstance(other, Size) or other >= one.least):
            raise _Undecided
    return bool(x == y) if not isinstance(x, Size) and not isinstance(y, Size) else False


class _Undecided(Exception):
    """A comparison of sizes that depends on them."""


def _product(a: Attributes, x: Any, axes: Any = None) -> Any:
    if np.asarray(x).ndim != 1:
        return None
    whole = functools.reduce(operator.mul, np.asarray(x), 1)
    return array_of([whole]) if a.get("keepdims", 1) else array_of([whole], ())


def _each(function: Callable[..., Any], *arrays: Any) -> Any:
    count = len(arrays)
    return np.frompyfunc(function, count, 1)(*(np.asarray(v, object) for v in arrays))


_SIZES: dict[str, Callable[..., Any]] = {
    "Add": lambda a, x, y: _each(operator.add, x, y),
    "Sub": lambda a, x, y: _each(operator.sub, x, y),
    "Mul": lambda a, x, y: _each(operator.mul, x, y),
    "Div": lambda a, x, y: _each(divided, x, y),
    "Mod": lambda a, x, y: None if a.get("fmod") else _each(operator.mod, x, y),
    "Neg": lambda a, x: _each(operator.neg, x),
    "Min": lambda a, *values: functools.reduce(lambda x, y: _each(smaller, x, y), values),
    "Max": lambda a, *values: functools.reduce(lambda x, y: _each(larger, x, y), values),
    "Floor": lambda a, x: _each(_rounded("floor"), x),
    "Ceil": lambda a, x: _each(_rounded("ceil"), x),
    "Equal": lambda a, x, y: np.asarray(_each(_alike, x, y)).astype(bool),
    "Where": lambda a, c, x, y: np.where(c, x, y),
    "Identity": lambda a, x: x,
    "ReduceProd": _product,
}
"""What is computed with sizes while the file is read, element by element; None where it cannot be."""


def read(
    path: str | Path, shapes: Mapping[str, tuple[int, ...]], given: Sequence[tuple[int, ...]] = ()
) -> Captured:
    """The file's graph at these sizes of its open inputs, by name or (`given`) in order."""
    return _read(File(path), shapes, given)[0]


def read_to_write(
    path: str | Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Captured, dict[str, Origin], bytes]:
    """The file's graph, where those of its constants stand in the file that may change, and the file without
    their numbers."""
    file = File(path)
    captured, reader = _read(file, shapes, trains=True)
    origins = {
        name: origin
        for name, origin in reader.origins.constants().items()
        if name in captured.constants and captured.constants[name].is_floating_point()
    }
    return captured, origins, emptied(file, {origin.tensor for origin in origins.values()})


def _read(
    file: File,
    shapes: Mapping[str, tuple[int, ...]],
    given: Sequence[tuple[int, ...]] = (),
    trains: bool = False,
) -> tuple[Captured, Reader]:
    shapes = {**dict(zip(file.inputs, given, strict=False)), **shapes}
    unknown = [name for name in shapes if name not in file.inputs]
    if unknown:
        raise InvalidFile(f"'{file.path}' has no input '{unknown[0]}'; it has {', '.join(file.inputs)}")
    try:
        return _graph(file, shapes, trains)
    except (InvalidFile, UnsupportedModel):
        if all(isinstance(d, int) for name in file.inputs for d in file.dims(name)):
            raise
    file.widen()  # the file may take only some sizes
    try:
        return _graph(file, shapes, trains)
    except (InvalidFile, UnsupportedModel):
        file.fixed = {name: file.examples(name, shapes)[0] for name in file.inputs}
        return _graph(file, shapes, trains)  # the file leaves sizes open that its nodes do not


def _graph(file: File, shapes: Mapping[str, tuple[int, ...]], trains: bool) -> tuple[Captured, Reader]:
    reader = Reader(file, shapes, trains)
    reader.values |= file.arrays
    for proto in file.nodes:
        _translate(reader, proto)
    missing = [name for name in file.outputs if name not in reader.values]
    if missing:
        raise InvalidFile(f"the output '{missing[0]}' is given by no node")
    return reader.captured(), reader


def _translate(r: Reader, proto: Any) -> None:
    a = r.file.attributes(proto)
    label = proto.name or f"{proto.op_type}_{proto.output[0] if proto.output else ''}"
    lost = [name for name in proto.input if name and name not in r.values]
    if lost:
        raise InvalidFile(f"node '{label}' uses '{lost[0]}', which nothing before it gives")
    twice = [name for name in proto.output if name and name in r.values]
    if twice:
        raise InvalidFile(f"node '{label}' gives '{twice[0]}', which is there already")
    inputs = [r.values[name] if name else None for name in proto.input]
    while inputs and inputs[-1] is None:
        inputs.pop()
    a |= {
        "op": proto.op_type,
        "layer": label,
        "outputs": len(proto.output),
        "first": proto.output[0] if proto.output else "",
    }
    r.origins.begin()
    try:
        given = _known(r, proto, a, inputs)
        if given is None:
            given = _called(r, proto, a, inputs)
    except InvalidArgument as why:
        raise InvalidFile(f"node '{label}': {why}") from None
    except AerogelError:
        raise
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        OverflowError,
        ZeroDivisionError,
        MemoryError,
    ) as why:
        raise InvalidFile(
            f"node '{label}' ({proto.op_type}) makes no sense: {type(why).__name__} {str(why)[:120]}"
        ) from None
    outputs = given if isinstance(given, list) else [given]
    r.origins.end([*inputs, *(r.values[n] for n in _captures(proto, r))], outputs)
    for name, value in zip(proto.output, outputs, strict=False):
        r.values[name] = value


def _known(r: Reader, proto: Any, a: Attributes, inputs: list[Value]) -> Any:
    """What a node gives whose inputs are all known now, or None."""
    if proto.op_type == "Constant":
        value = next(
            (a[k] for k in ("value", "value_float", "value_floats", "value_int", "value_ints") if k in a),
            None,
        )
        if value is None:
            raise UnsupportedModel(f"constant '{a['layer']}' is no tensor")
        if "value" in a:
            r.origins.add(value, Origin(proto.output[0], tuple(range(value.ndim))))
        whole = "value_int" in a or "value_ints" in a
        return value if isinstance(value, np.ndarray) else np.array(value, np.int64 if whole else np.float32)
    arrays = [v for v in inputs if v is not None]
    if not arrays or any(isinstance(v, Ref) for v in arrays):
        return None
    if any(np.asarray(v).dtype == object for v in arrays):
        return _of_sizes(r, proto, a, inputs)
    if proto.op_type in (
        "ConstantOfShape",
        "Shape",
        "Reshape",
        "Squeeze",
        "Unsqueeze",
        "Concat",
        "Gather",
        "Slice",
    ):
        return None  # ours: they fold themselves
    if (
        proto.domain not in _HERE
        or list(within(proto))
        or sum(np.asarray(v).size for v in arrays) > MOST_FOLDED
    ):
        return None
    if proto.op_type in (
        "Expand",
        "Tile",
        "Range",
        "RandomNormal",
        "RandomUniform",
        "EyeLike",
        "Pad",
        "Resize",
        "OneHot",
    ):
        return None  # these can ask for any amount of memory
    if proto.op_type == "Identity":
        return inputs[0]
    if proto.op_type == "Transpose" and r.origins.of(inputs[0]) is not None:
        rank = np.asarray(inputs[0]).ndim
        return r.origins.turned(inputs[0], a.get("perm") or range(rank)[::-1])
    if proto.op_type == "DequantizeLinear" and (made := dequantized(r, a, *inputs)) is not None:
        return made
    return _folded(r, proto, inputs)


def _of_sizes(r: Reader, proto: Any, a: Attributes, inputs: list[Value]) -> Any:
    """Arithmetic on sizes, or None where it has to be done on tensors."""
    kinds = {r.dtype(v) for v in inputs if v is not None and np.asarray(v).dtype != bool}
    whole = kinds <= {torch.int64, torch.int32}
    if proto.op_type == "Cast":
        to = TYPES.get(a["to"])
        if to not in (torch.int64, torch.int32, torch.float32) or not (whole or kinds == {torch.float32}):
            return None
        cut = not to.is_floating_point
        return _each(
            lambda v: v.cast(to) if isinstance(v, Size) else math.trunc(v) if cut else float(v), inputs[0]
        )
    if proto.op_type not in _SIZES or not (whole or kinds == {torch.float32}):
        return None
    try:
        made = _SIZES[proto.op_type](a, *inputs)
    except _Undecided:
        return None
    if (
        made is None
        or np.asarray(made).dtype != object
        or any(isinstance(v, Size) for v in np.asarray(made).flat)
    ):
        return made
    return np.asarray(made).astype(np.int64 if whole else np.float32)


def _folded(r: Reader, proto: Any, inputs: list[Value]) -> Any:
    """One node of constants, computed by onnx's own reference."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    names = list(proto.input)
    infos = [onnx.helper.make_empty_tensor_value_info(n) for n in dict.fromkeys(n for n in names if n)]
    outputs = [onnx.helper.make_empty_tensor_value_info(n) for n in proto.output if n]
    graph = onnx.helper.make_graph([proto], "one", infos, outputs)
    model = onnx.helper.make_model(graph, opset_imports=r.file.model.opset_import)
    try:
        results = ReferenceEvaluator(model).run(
            None, {n: np.asarray(v) for n, v in zip(names, inputs, strict=False) if n}
        )
    except Exception:  # the reference lacks an operator or a form of it: torch or onnxruntime may have it
        return None
    return [np.asarray(v) for v in results]


def _called(r: Reader, proto: Any, a: Attributes, inputs: list[Value]) -> Any:
    """A node of the graph: torch's, or onnxruntime's where torch has none like it."""
    ours = proto.domain in _HERE or (proto.domain == "com.microsoft" and proto.op_type in MICROSOFT)
    function, why = build(proto.op_type) if ours else None, "torch has no such operator"
    if function is not None and proto.op_type in MOVES and getattr(inputs[0], "name", "") in r.bytes:
        function = functools.partial(moved, function)
    if function is not None:
        before = len(r.nodes)
        try:
            given = function(r, a, *inputs)
            if len(given if isinstance(given, list) else [given]) >= sum(map(bool, proto.output)):
                return given
            raise UnsupportedModel(f"it gives {len(proto.output)} outputs here")
        except UnsupportedModel as reason:
            del r.nodes[before:]
            why = str(reason)
    if proto.op_type in ("Loop", "Scan"):
        raise UnsupportedModel(
            f"node '{a['layer']}': a {proto.op_type} may never end; export the model with its loop unrolled"
        )
    if not foreign.available():
        raise UnsupportedModel(
            f"node '{a['layer']}': operator "
            f"{proto.domain + '.' if proto.domain else ''}{proto.op_type} is not one aerogel calls "
            f"({why}). With onnxruntime installed it runs there: pip install onnxruntime"
        )
    return _outer(r, proto, a)


def _outer(r: Reader, proto: Any, a: Attributes) -> list[Ref | None]:
    """The node as a model of its own for onnxruntime."""
    import onnx

    r.origins.begin()
    names = list(dict.fromkeys([*(n for n in proto.input if n), *_captures(proto, r)]))
    few = [n for n in names if _is_option(r.values[n])]
    held = [onnx.numpy_helper.from_array(np.asarray(r.values[n]), n) for n in few]
    names = [n for n in names if n not in few]
    tensors = [r.tensor(r.values[n]) for n in names]
    numbers = {dtype: number for number, dtype in TYPES.items()}
    dims = [r.seen[t.name][0].shape if t.name in r.seen else [None] * r.rank(t) for t in tensors]
    infos = [
        onnx.helper.make_tensor_value_info(n, numbers[r.dtype(t)], d)
        for n, t, d in zip(names, tensors, dims, strict=True)
    ]
    outputs = [onnx.helper.make_empty_tensor_value_info(n) for n in proto.output if n]
    graph = onnx.helper.make_graph([proto], "one", infos, outputs, held)
    model = onnx.helper.make_model(
        graph, opset_imports=r.file.model.opset_import, ir_version=min(r.file.model.ir_version, 10)
    )
    content = torch.frombuffer(bytearray(model.SerializeToString()), dtype=torch.uint8)
    kept = r.fresh(f"{a['layer']}.onnx")
    r.constants[kept] = content
    for blank in r.blank:
        blank[kept] = content
        if sum(blank[t.name].numel() for t in tensors) > MOST_FOLDED:
            raise UnsupportedModel(
                f"node '{a['layer']}' ({proto.op_type}) takes too much to be run while the file is read"
            )
    try:
        first, second = (foreign.run(content, [_example(r, t, e) for t in tensors]) for e in range(2))
    except InvalidFile:  # zeros may be no lengths
        first, second = (foreign.run(content, [_example(r, t, e, 1) for t in tensors]) for e in range(2))
    if proto.op_type in _COUNTED:
        second = [_longer(t, _COUNTED[proto.op_type]) for t in first]
    name = r.fresh(a["layer"])
    several = r.outer(Node(name, "onnx", (Ref(kept), tuple(tensors)), layer=a["layer"]), (first, second))
    places = iter(range(len(outputs)))
    return [r.item(several, next(places)) if n else None for n in proto.output]


_COUNTED = {"NonZero": 1, "NonMaxSuppression": 0}
"""Operators that give as many things as they find, and the dimension that counts them."""


def _longer(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """A size that depends on the data differs between the examples."""
    shape = list(tensor.shape)
    shape[axis] += 7
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _is_option(value: Value) -> bool:
    """Numbers known now and few: onnxruntime may ask for them as constants."""
    return not isinstance(value, Ref) and np.asarray(value).dtype != object and np.asarray(value).size <= FEW


def _captures(proto: Any, r: Reader) -> list[str]:
    """Values of ours that graphs within a node use."""
    found: list[str] = []
    for graph in within(proto):
        own = {*(i.name for i in graph.input), *(t.name for t in graph.initializer)}
        for node in graph.node:
            found += [n for n in (*node.input, *_captures(node, r)) if n and n not in own and n in r.values]
            own |= set(node.output)
        found += [o.name for o in graph.output if o.name not in own and o.name in r.values]
    return found


def _example(r: Reader, tensor: Ref, e: int, whole: int = 0) -> torch.Tensor:
    """A tensor as it may be in one of the examples: its own numbers where they are known."""
    if tensor.name in r.seen:
        return r.seen[tensor.name][e]
    blank = r.blank[e][tensor.name]
    return (
        torch.rand(blank.shape).to(blank.dtype)
        if blank.is_floating_point()
        else torch.full(blank.shape, whole).to(blank.dtype)
    )
