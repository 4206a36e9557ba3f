"""An ONNX file -> Graph. Constants are folded, open sizes stay open, what no operator of torch covers runs in onnxruntime."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aerogel.capture import foreign
from aerogel.capture.export import Captured
from aerogel.capture.onnx_file import TYPES, Attributes, File, within
from aerogel.capture.onnx_operators import build
from aerogel.capture.onnx_values import MOST_FOLDED, Reader, Size, Value
from aerogel.errors import AerogelError, InvalidFile, UnsupportedModel
from aerogel.graph import Node, Ref

_HERE = ("", "ai.onnx")


def _divided(x: Any, y: Any) -> Any:
    whole = all(isinstance(v, int | np.integer) or (isinstance(v, Size) and isinstance(v.both[0], int)) for v in (x, y))
    return x // y if whole else x / y


def _rounded(how: str) -> Callable[[Any], Any]:
    return lambda x: x.rounded(how) if isinstance(x, Size) else getattr(math, how)(x)


def _alike(x: Any, y: Any) -> bool:
    shown = [v.both if isinstance(v, Size) else (v, v) for v in (x, y)]
    return bool(shown[0] == shown[1])


_SIZES: dict[str, Any] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.frompyfunc(_divided, 2, 1), "Neg": np.negative,
    "Floor": np.frompyfunc(_rounded("floor"), 1, 1), "Ceil": np.frompyfunc(_rounded("ceil"), 1, 1),
    "Equal": lambda x, y: np.frompyfunc(_alike, 2, 1)(x, y).astype(bool), "Where": lambda c, x, y: np.where(c, x, y),
    "Identity": lambda x: x, "ReduceProd": lambda x, *_: np.multiply.reduce(x, keepdims=True),
}  # fmt: skip
"""What is computed with sizes while the file is read, element by element."""


def read(path: str | Path, shapes: Mapping[str, tuple[int, ...]], given: Sequence[tuple[int, ...]] = ()) -> Captured:
    """The file's graph at these sizes of its open inputs, by name or (`given`) in order."""
    file = File(path)
    shapes = {**dict(zip(file.inputs, given, strict=False)), **shapes}
    unknown = [name for name in shapes if name not in file.inputs]
    if unknown:
        raise InvalidFile(f"'{path}' has no input '{unknown[0]}'; it has {', '.join(file.inputs)}")
    try:
        return _graph(file, shapes)
    except (InvalidFile, UnsupportedModel):
        if all(isinstance(d, int) for name in file.inputs for d in file.dims(name)):
            raise
        file.fixed = {name: file.examples(name, shapes)[0] for name in file.inputs}
        return _graph(file, shapes)  # the file leaves sizes open that its nodes do not


def _graph(file: File, shapes: Mapping[str, tuple[int, ...]]) -> Captured:
    reader = Reader(file, shapes)
    reader.values |= file.arrays
    for proto in file.nodes:
        _translate(reader, proto)
    missing = [name for name in file.outputs if name not in reader.values]
    if missing:
        raise InvalidFile(f"the output '{missing[0]}' is given by no node")
    return reader.captured()


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
    a |= {"op": proto.op_type, "layer": label, "outputs": len(proto.output), "first": proto.output[0] if proto.output else ""}
    try:
        given = _known(r, proto, a, inputs)
        if given is None:
            given = _called(r, proto, a, inputs)
    except AerogelError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, ZeroDivisionError, MemoryError) as why:
        raise InvalidFile(f"node '{label}' ({proto.op_type}) makes no sense: {type(why).__name__} {str(why)[:120]}") from None
    for name, value in zip(proto.output, given if isinstance(given, list) else [given], strict=False):
        r.values[name] = value


def _known(r: Reader, proto: Any, a: Attributes, inputs: list[Value]) -> Any:
    """What a node gives whose inputs are all known now, or None."""
    if proto.op_type == "Constant":
        value = next((a[k] for k in ("value", "value_float", "value_floats", "value_int", "value_ints") if k in a), None)
        if value is None:
            raise UnsupportedModel(f"constant '{a['layer']}' is no tensor")
        whole = "value_int" in a or "value_ints" in a
        return value if isinstance(value, np.ndarray) else np.array(value, np.int64 if whole else np.float32)
    arrays = [v for v in inputs if v is not None]
    if not arrays or any(isinstance(v, Ref) for v in arrays):
        return None
    if any(np.asarray(v).dtype == object for v in arrays):
        if proto.op_type == "Cast":
            whole = not TYPES.get(a["to"], torch.int64).is_floating_point
            return _each(lambda v: _rounded("trunc")(v) if whole and _is_float(v) else v, inputs[0])
        return _SIZES[proto.op_type](*inputs) if proto.op_type in _SIZES else None
    if proto.op_type in ("ConstantOfShape", "Shape", "Reshape", "Squeeze", "Unsqueeze", "Concat", "Gather", "Slice"):
        return None  # ours: they fold themselves
    if proto.domain not in _HERE or list(within(proto)) or sum(np.asarray(v).size for v in arrays) > MOST_FOLDED:
        return None
    if proto.op_type in ("Expand", "Tile", "Range", "RandomNormal", "RandomUniform", "EyeLike", "Pad", "Resize", "OneHot"):
        return None  # these can ask for any amount of memory
    return _folded(r, proto, inputs)


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Size) and isinstance(value.both[0], float))


def _each(function: Callable[[Any], Any], array: Any) -> Any:
    made = np.empty(np.asarray(array).shape, object)
    for i, v in np.ndenumerate(np.asarray(array, object)):
        made[i] = function(v)
    return made


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
        results = ReferenceEvaluator(model).run(None, {n: np.asarray(v) for n, v in zip(names, inputs, strict=False) if n})
    except Exception:  # the reference lacks an operator or a form of it: torch or onnxruntime may have it
        return None
    return [np.asarray(v) for v in results]


def _called(r: Reader, proto: Any, a: Attributes, inputs: list[Value]) -> Any:
    """A node of the graph: torch's, or onnxruntime's where torch has none like it."""
    function, why = build(proto.op_type) if proto.domain in _HERE else None, "torch has no such operator"
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
        raise UnsupportedModel(f"node '{a['layer']}': a {proto.op_type} may never end; export the model with its loop unrolled")
    if not foreign.available():
        raise UnsupportedModel(
            f"node '{a['layer']}': operator {proto.domain + '.' if proto.domain else ''}{proto.op_type} is not one aerogel calls "
            f"({why}). With onnxruntime installed it runs there: pip install onnxruntime"
        )
    return _outer(r, proto, a)


def _outer(r: Reader, proto: Any, a: Attributes) -> list[Ref | None]:
    """The node as a model of its own for onnxruntime."""
    import onnx

    names = list(dict.fromkeys([*(n for n in proto.input if n), *_captures(proto, r)]))
    tensors = [r.tensor(r.values[n]) for n in names]
    numbers = {dtype: number for number, dtype in TYPES.items()}
    infos = [
        onnx.helper.make_tensor_value_info(n, numbers[r.dtype(t)], [None] * r.rank(t)) for n, t in zip(names, tensors, strict=True)
    ]
    outputs = [onnx.helper.make_empty_tensor_value_info(n) for n in proto.output if n]
    graph = onnx.helper.make_graph([proto], "one", infos, outputs)
    model = onnx.helper.make_model(graph, opset_imports=r.file.model.opset_import, ir_version=min(r.file.model.ir_version, 10))
    content = torch.frombuffer(bytearray(model.SerializeToString()), dtype=torch.uint8)
    held = r.fresh(f"{a['layer']}.onnx")
    r.constants[held] = content
    for blank in r.blank:
        blank[held] = content
    for blank in r.blank:
        if sum(blank[t.name].numel() for t in tensors) > MOST_FOLDED:
            raise UnsupportedModel(f"node '{a['layer']}' ({proto.op_type}) takes too much to be run while the file is read")
    first, second = (foreign.run(content, [_example(blank[t.name]) for t in tensors]) for blank in r.blank)
    name = r.fresh(a["layer"])
    several = r.outer(Node(name, "onnx", (Ref(held), tuple(tensors)), layer=a["layer"]), (first, second))
    places = iter(range(len(outputs)))
    return [r.item(several, next(places)) if n else None for n in proto.output]


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


def _example(blank: torch.Tensor) -> torch.Tensor:
    if blank.device.type != "meta":
        return blank
    return torch.rand(blank.shape).to(blank.dtype) if blank.is_floating_point() else torch.zeros(blank.shape, dtype=blank.dtype)
