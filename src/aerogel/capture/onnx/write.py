"""The same ONNX file again, with other numbers in its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from aerogel.capture.onnx.file import TYPES, File, within
from aerogel.errors import UnsupportedModel

MOST_BYTES = 2**31 - 2**20
"""Of one file: protobuf has no more."""
_NUMBERS = ("raw_data", "float_data", "double_data", "int32_data", "external_data", "data_location")


def emptied(file: File, names: Collection[str]) -> bytes:
    """The file without the numbers of these tensors. What lay beside the file is in it then."""
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(file.model)
    for name, tensor in _named(model.graph):
        if name in names:
            for field in _NUMBERS:
                tensor.ClearField(field)
    for tensor in _all(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.CopyFrom(onnx.numpy_helper.from_array(file.array(tensor), tensor.name))
    return bytes(model.SerializeToString())


def filled(content: bytes, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """What `emptied` left, with these numbers in its tensors, each in its own element type."""
    import onnx

    size = len(content) + sum(t.numel() * t.element_size() for t in tensors.values())
    if size > MOST_BYTES:
        raise UnsupportedModel(
            f"the file would have {size} bytes, more than one ONNX file can: keep the model's state_dict()"
        )
    model = onnx.ModelProto.FromString(content)
    for name, tensor in _named(model.graph):
        if name in tensors:
            numbers = tensors[name].detach().cpu().to(TYPES[tensor.data_type])
            tensor.raw_data = numbers.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return bytes(model.SerializeToString())


def _named(graph: Any) -> Iterator[tuple[str, Any]]:
    """Tensors by the name they have in the graph: initializers, and what Constant nodes give."""
    for tensor in graph.initializer:
        yield tensor.name, tensor
    for node in graph.node:
        if node.op_type == "Constant":
            yield from ((node.output[0], a.t) for a in node.attribute if a.name == "value")


def _all(graph: Any) -> Iterator[Any]:
    """Every tensor, also of graphs within the graph."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from ([attribute.t] if attribute.HasField("t") else ())
            yield from attribute.tensors
        for inner in within(node):
            yield from _all(inner)
