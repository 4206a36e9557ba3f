"""Calls, answers and element types of a model file: as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aerogel.capture.sizes import understood
from aerogel.errors import InvalidFile, UnsupportedModel
from aerogel.ir import Graph
from aerogel.ir.tensors import from_torch
from aerogel.saved import container

_KEEP = "conv2d batch_norm relu relu_ relu6 hardtanh hardtanh_ silu silu_ hardswish hardswish_ leaky_relu "
_KEEP += "leaky_relu_ add add_ cat max_pool2d avg_pool2d adaptive_avg_pool2d mean flatten linear dropout"
KEEP_TYPE = frozenset(_KEEP.split())
"""Operators that give what they take: of one floating type, that type."""


def told(graph: Graph, constants: Mapping[str, torch.Tensor], inputs: list[Any]) -> dict[str, torch.dtype]:
    """Element types for a file of the version before, which holds none. Where all that operators take has one
    type and each of them keeps it, that one; else the graph is run without memory, for which torch imports
    seconds' worth of itself."""
    used = {name for node in graph.nodes for name in node.inputs}
    known = {name: value for name, value in constants.items() if name in used}
    known |= dict(zip(graph.inputs, inputs, strict=True))
    types = {value.dtype for value in known.values() if isinstance(value, torch.Tensor)}
    kept = (not n.kwargs and "." in n.op and n.op.split(".")[1] in KEEP_TYPE for n in graph.nodes)
    if len(types) == 1 and all(t.is_floating_point for t in types) and all(kept):
        return dict.fromkeys((*known, *(node.name for node in graph.nodes)), types.pop())
    return {name: value.dtype for name, value in (understood(graph, constants, inputs) or {}).items()}


def structure(value: Any) -> Any:
    """An example as JSON: tensors as shape and type, the containers around them by name."""
    match value:
        case torch.Tensor():
            return {"tensor": list(value.shape), "dtype": dtype_name(value.dtype)}
        case tuple() | list() if type(value) in (tuple, list):
            return {type(value).__name__: [structure(v) for v in value]}
        case dict() if type(value) is dict and all(isinstance(k, str) for k in value):
            return {"dict": [[k, structure(v)] for k, v in value.items()]}
        case None | bool() | int() | float() | str():
            return {"value": value}
    raise UnsupportedModel(
        f"a {type(value).__name__} among the model's inputs or outputs cannot be saved; use "
        "tuples, lists, dicts"
    )


def built(raw: Any) -> Any:
    """The inverse of `structure`; tensors have no memory."""
    match raw:
        case {"tensor": list(shape), "dtype": str(dtype)} if all(
            type(n) is int and 0 <= n < 2**31 for n in shape
        ):
            return torch.empty(shape, dtype=dtype_of(dtype), device="meta")
        case {"tuple": list(items)}:
            return tuple(built(v) for v in items)
        case {"list": list(items)}:
            return [built(v) for v in items]
        case {"dict": list(items)}:
            return {str(k): built(v) for k, v in items}
        case {"value": None | bool() | int() | float() | str() as value}:
            return value
    raise InvalidFile(f"'{str(raw)[:80]}' is no structure of inputs")


def sizes_of(raw: Any) -> tuple[int | str, ...]:
    if not isinstance(raw, list) or not all(type(n) in (int, str) for n in raw):
        raise InvalidFile(f"'{str(raw)[:80]}' are no sizes")
    return tuple(raw)


def dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def dtype_of(name: Any) -> torch.dtype | None:
    if name is None:
        return None
    if name not in container.DTYPES:
        raise InvalidFile(f"'{str(name)[:80]}' is no element type")
    found: torch.dtype = getattr(torch, name)
    return found


def stored(value: torch.Tensor) -> tuple[str, Any]:
    name = dtype_name(value.dtype)
    if name not in container.DTYPES:
        raise UnsupportedModel(f"a constant of type {value.dtype} cannot be saved")
    return name, from_torch(value.detach().cpu().contiguous())


def tensor(dtype: str, array: Any) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
