"""What an ONNX file says, read with suspicion: weights from the model's own folder only, sizes compared with
the bytes there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aerogel.errors import AerogelError, InvalidFile, ShapeError
from aerogel.fileformats import FORMATS, describe
from aerogel.optional import import_optional

MOST_DEPTH = 8
"""Graphs within graphs."""
_TYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}
TYPES = _TYPES
"""Element types by ONNX's number."""


class Attributes(dict[str, Any]):
    """A node's attributes by name."""


def _no_onnx(path: str | Path, reason: str) -> InvalidFile:
    """Return the error for a file that is not ONNX: what it is instead, where that can be told."""
    kind, remedy = describe(path) or ("", "")
    if kind in ("", FORMATS[".onnx"]):
        return InvalidFile(f"'{path}' is no ONNX file: {reason}. Export the model again.")
    return InvalidFile(f"'{path}' is no ONNX file: it is {kind}. {remedy}")


class File:
    """One model. `arrays` are its initializers."""

    def __init__(self, path: str | Path) -> None:
        onnx = import_optional("onnx", "onnx", "Reading ONNX files")
        self.path = Path(path)
        try:
            self.model = onnx.load(str(self.path), load_external_data=False)
        except OSError as why:
            raise InvalidFile(f"'{path}' cannot be read: {why.strerror or why}") from None
        except Exception as why:  # protobuf's own
            raise _no_onnx(path, f"it does not parse ({type(why).__name__})") from None
        graph = self.model.graph
        if not graph.node and not graph.output:
            raise _no_onnx(path, "it has no graph")
        if _depth(graph) > MOST_DEPTH:
            raise InvalidFile(f"'{path}' has graphs within graphs, more than {MOST_DEPTH} deep")
        self.opset = next((o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx")), 1)
        if self.opset < 9:
            raise InvalidFile(
                f"opset {self.opset} is older than 9; convert the file with onnx.version_converter"
            )
        self.arrays = {t.name: self.array(t) for t in graph.initializer}
        self._named = {id(a): n for n, a in self.arrays.items()}
        self.given = {i.name: i for i in graph.input if i.name not in self.arrays}
        self.inputs, self.outputs = tuple(self.given), tuple(o.name for o in graph.output)
        self.nodes, self.fixed = list(graph.node), dict[str, tuple[int, ...]]()
        self._by, self._steps = (1, 32, 96, 192, 32), dict[str, int]()

    def widen(self) -> None:
        """Take the second example's sizes far from the first's, by what most numbers divide."""
        self._by, self._steps = (1, 480, 480, 960, 480), {}

    def named(self, array: Any) -> str | None:
        """The name of an initializer."""
        return self._named.get(id(array))

    def readers(self, name: str) -> set[str]:
        """Operators that read a value; "" stands for the model's own outputs."""
        found = {node.op_type for node in self.nodes if name in node.input}
        return found | {""} if name in self.outputs else found

    def dtype(self, name: str) -> torch.dtype:
        elem_type = self.given[name].type.tensor_type.elem_type
        if elem_type not in _TYPES:
            raise InvalidFile(f"input '{name}' has element type {elem_type}, which torch has not")
        return _TYPES[elem_type]

    def examples(
        self, name: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The input's sizes, and others in the open dimensions."""
        dims = self.dims(name)
        given = shapes.get(name)
        if given is None and all(isinstance(d, int) for d in dims):
            given = tuple(d for d in dims if isinstance(d, int))
        if given is None:
            missing = ", ".join(str(d) for d in dims if not isinstance(d, int))
            example = tuple(
                d if isinstance(d, int) else (1 if i == 0 else 3 if i == 1 else 640)
                for i, d in enumerate(dims)
            )
            raise ShapeError(
                f"input '{name}' has open sizes ({missing}). Call aerogel.compile(path, "
                f'shapes={{"{name}": {example}}}).'
            )
        if len(given) != len(dims) or any(
            isinstance(d, int) and d != g for d, g in zip(dims, given, strict=True)
        ):
            raise ShapeError(f"input '{name}' takes {tuple(dims)}, not {tuple(given)}")
        if not all(type(g) is int and 0 <= g < 2**31 for g in given):
            raise ShapeError(f"input '{name}': {tuple(given)} are no sizes")
        second = list(given)
        for i, d in enumerate(dims):
            if isinstance(d, str):
                second[i] += self._steps.setdefault(d, self._by[min(i, 4)])  # sizes of one name are alike
        return tuple(given), tuple(second)

    def dims(self, name: str) -> list[int | str]:
        """An input's sizes: numbers, or names of open ones."""
        if name in self.fixed:
            return list(self.fixed[name])
        declared = self.given[name].type
        if not declared.HasField("tensor_type") or not declared.tensor_type.HasField("shape"):
            raise InvalidFile(f"input '{name}' is no tensor of a known number of dimensions")
        return [
            d.dim_value
            if d.HasField("dim_value") and d.dim_value > 0
            else _dim_name(d.dim_param, f"{name}.{i}")
            for i, d in enumerate(declared.tensor_type.shape.dim)
        ]

    def attributes(self, node: Any) -> Attributes:
        """Numbers, texts and arrays of a node; graphs within it as they are."""
        import onnx

        found = Attributes()
        for a in node.attribute:
            value = onnx.helper.get_attribute_value(a)
            if a.type == onnx.AttributeProto.TENSOR:
                value = self.array(value)
            elif isinstance(value, bytes):
                value = value.decode("utf-8", "replace")
            elif a.type == onnx.AttributeProto.STRINGS:
                value = [v.decode("utf-8", "replace") for v in value]
            elif not isinstance(value, int | float | str):
                value = (
                    list(value) if a.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS) else value
                )
            found[a.name] = value
        return found

    def array(self, tensor: Any) -> Any:
        """An initializer's numbers. A name that leads out of the model's folder, or too few bytes, is an
        InvalidFile."""
        import onnx

        dims = tuple(tensor.dims)
        if tensor.data_type not in _TYPES and tensor.data_type not in (4, 8, 12, 13):
            raise InvalidFile(
                f"constant '{tensor.name}' has element type {tensor.data_type}, which aerogel does not read"
            )
        if any(d < 0 for d in dims) or math.prod(dims) > 2**34:
            raise InvalidFile(f"constant '{tensor.name}' has the shape {dims}")
        try:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
                return (
                    np.frombuffer(self._outside(tensor, math.prod(dims) * dtype.itemsize), dtype)
                    .reshape(dims)
                    .copy()
                )
            return onnx.numpy_helper.to_array(tensor)
        except AerogelError:
            raise
        except Exception as why:
            raise InvalidFile(
                f"constant '{tensor.name}' of shape {dims} does not fit its bytes: {type(why).__name__}"
            ) from None

    def _outside(self, tensor: Any, size: int) -> bytes:
        said = {e.key: e.value for e in tensor.external_data}
        folder = self.path.parent.resolve()
        path = (folder / said.get("location", "")).resolve()
        inside = (
            Path(said.get("location", "/")).parts
            and not Path(said["location"]).is_absolute()
            and path.is_relative_to(folder)
        )
        if not inside or ".." in Path(said["location"]).parts or not path.is_file():
            raise InvalidFile(
                f"constant '{tensor.name}' lies in '{said.get('location', '')[:80]}', which is no "
                "file in the model's folder"
            )
        offset, length = int(said.get("offset", 0)), int(said.get("length", size))
        if offset < 0 or length != size or offset + size > path.stat().st_size:
            raise InvalidFile(
                f"constant '{tensor.name}' needs {size} bytes at {offset} of '{path.name}', which "
                f"has {path.stat().st_size}"
            )
        with path.open("rb") as file:
            file.seek(offset)
            return bytes(file.read(size))


def _dim_name(said: str, own: str) -> str:
    """Sizes of one name are alike; "?" and numbers are no names."""
    return said if any(c.isalpha() for c in said) else own


def _depth(graph: Any, deep: int = 1) -> int:
    if deep > MOST_DEPTH:
        return deep
    return max((_depth(g, deep + 1) for node in graph.node for g in within(node)), default=deep)


def within(node: Any) -> Iterator[Any]:
    """Graphs in the attributes of a node."""
    for a in node.attribute:
        yield from ([a.g] if a.HasField("g") else ())
        yield from a.graphs
