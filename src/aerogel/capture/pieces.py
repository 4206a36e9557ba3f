"""Pieces of ONNX in a graph: what is let through to onnxruntime, and the sizes they give, told without
running them.

A piece is one operator, as the reader of ONNX files cuts them. Loops may never end and data outside may be
anybody's file: neither is let through. Sizes come from onnx's own rules; what depends on data is not known
before it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from aerogel.capture.onnx.file import MOST_DEPTH, TYPES, within
from aerogel.errors import InvalidFile, UnsupportedModel
from aerogel.optional import import_optional

_ENDLESS = ("Loop", "Scan", "SequenceMap")
FEW = 64
"""Numbers of a constant that may be sizes, and are told to onnx."""


def check(content: torch.Tensor) -> None:
    """Refuse what is no piece."""
    if content.dtype != torch.uint8 or content.dim() != 1:
        raise InvalidFile("a piece of ONNX is bytes")
    _parsed(content.numpy().tobytes())


@lru_cache(64)
def _parsed(raw: bytes) -> Any:
    onnx = import_optional("onnx", "onnx", "Reading a model with parts of an ONNX file", UnsupportedModel)
    try:
        model = onnx.load_model_from_string(raw)
    except Exception as why:  # protobuf's own types
        raise InvalidFile(f"a piece of ONNX does not parse: {type(why).__name__}") from None
    if len(model.graph.node) != 1 or len(model.functions) or len(model.training_info):
        raise InvalidFile(
            f"a piece of ONNX is one operator, not {len(model.graph.node)} with functions and "
            "training of their own"
        )
    for graph in _graphs(model.graph):
        for node in graph.node:
            if node.op_type in _ENDLESS:
                raise UnsupportedModel(f"a piece of ONNX has a {node.op_type}, which may never end")
        for tensor in _tensors(graph):
            if tensor.data_location == onnx.TensorProto.EXTERNAL or len(tensor.external_data):
                raise InvalidFile(f"a piece of ONNX has its constant '{tensor.name[:80]}' in another file")
    return model


def _graphs(graph: Any, deep: int = 0) -> Iterator[Any]:
    if deep > MOST_DEPTH:
        raise InvalidFile(f"a piece of ONNX has graphs within graphs, more than {MOST_DEPTH} deep")
    yield graph
    for node in graph.node:
        for inner in within(node):
            yield from _graphs(inner, deep + 1)


def _tensors(graph: Any) -> Iterator[Any]:
    sparse = list(graph.sparse_initializer)
    yield from graph.initializer
    for node in graph.node:
        for a in node.attribute:
            yield from ([a.t] if a.HasField("t") else ())
            yield from a.tensors
            sparse += [*([a.sparse_tensor] if a.HasField("sparse_tensor") else ()), *a.sparse_tensors]
    for held in sparse:
        yield held.values
        yield held.indices


def outputs(
    content: torch.Tensor, blanks: Sequence[Any], known: Sequence[torch.Tensor | None]
) -> list[torch.Tensor] | None:
    """What the piece gives for tensors like `blanks`, without memory; None where that depends on data.
    `known` are the constants among the inputs."""
    import onnx

    check(content)
    model = onnx.ModelProto()
    model.CopyFrom(_parsed(content.numpy().tobytes()))
    if len(model.graph.input) != len(blanks) or not all(isinstance(b, torch.Tensor) for b in blanks):
        raise InvalidFile(
            f"a piece of ONNX takes {len(model.graph.input)} tensors, the graph gives it {len(blanks)}"
        )
    numbers = {dtype: number for number, dtype in TYPES.items()}
    for info, blank, held in zip(model.graph.input, blanks, known, strict=True):
        if blank.dtype not in numbers:
            raise InvalidFile(f"a piece of ONNX takes no {blank.dtype}")
        info.CopyFrom(onnx.helper.make_tensor_value_info(info.name, numbers[blank.dtype], list(blank.shape)))
        if held is not None and held.numel() <= FEW and held.dtype in (torch.int64, torch.int32):
            model.graph.initializer.append(onnx.numpy_helper.from_array(held.numpy(), info.name))
    for info in model.graph.output:
        info.ClearField("type")
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as why:  # onnx's own types
        raise InvalidFile(
            f"a piece of ONNX does not fit its inputs: {str(why).strip().splitlines()[0][:200]}"
        ) from None
    found = [_blank(info) for info in inferred.graph.output]
    return None if any(blank is None for blank in found) else [blank for blank in found if blank is not None]


def _blank(info: Any) -> torch.Tensor | None:
    declared = info.type.tensor_type
    if (
        not info.type.HasField("tensor_type")
        or not declared.HasField("shape")
        or declared.elem_type not in TYPES
    ):
        return None
    dims = [d.dim_value if d.HasField("dim_value") else -1 for d in declared.shape.dim]
    if any(d < 0 for d in dims):
        return None
    if math.prod(dims) >= 2**62:
        raise InvalidFile(f"a piece of ONNX gives sizes of {dims}")
    return torch.empty(dims, dtype=TYPES[declared.elem_type], device="meta")
