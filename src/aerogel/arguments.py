"""The arguments of compile(), looked at before anything is done: each mistake is a sentence."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from aerogel.errors import InvalidArgument, ShapeError
from aerogel.ir import Plan
from aerogel.ir.dtypes import suggest_precision
from aerogel.ir.tensors import TORCH
from aerogel.methods import METHODS
from aerogel.runtime.eager import Call, as_call, images
from aerogel.runtime.graphmodel import GraphModel, HasGraph
from aerogel.tune.quantize import RANGES

FEW_IMAGES = 8  # fewer calibration images than these get a warning
Sizes = Mapping[str, tuple[int, ...]]
"""Sizes of inputs by their names."""


def looked_at(plan: Any, store: Any, dynamic_shapes: Any) -> None:
    """Raises AerogelError at one that is not of its kind."""
    if not isinstance(plan, Plan | None) or not isinstance(store, str | Path | None):
        raise InvalidArgument(
            f"plan is the .plan of a compiled model, store a folder; not {plan!r:.60} and {store!r:.60}"
        )
    if not isinstance(dynamic_shapes, Mapping | tuple | list | None):
        raise InvalidArgument(
            "dynamic_shapes are as torch.export takes them, a dict or tuple of dims, not "
            f"{dynamic_shapes!r:.60}"
        )


def dtype_of(dtype: Any) -> Any:
    """torch's half precision or int8, by itself or by its name; None is the model's own."""
    named = {"float16": TORCH["f16"], "bfloat16": TORCH["bf16"], "int8": TORCH["s8"]}
    if dtype is None or dtype in named.values():
        return dtype
    if isinstance(dtype, str) and dtype in named:
        return named[dtype]
    hint = suggest_precision(dtype)
    raise InvalidArgument(
        f'dtype must be None, torch.float16, torch.bfloat16 or "int8"; got {dtype!r}. {hint}'.rstrip()
    )


def names_of(methods: Iterable[str] | None) -> tuple[str, ...]:
    if isinstance(methods, str) or not isinstance(methods, Iterable | None):
        raise InvalidArgument(f"methods is a list of names, as in methods=['direct'], not {methods!r}")
    names = tuple(METHODS) if methods is None else tuple(methods)
    unknown = [n for n in names if n not in METHODS]
    if unknown or not names:
        raise InvalidArgument(
            f"methods are {', '.join(METHODS)}; "
            f"{f'{unknown[0]!r} is none of them' if unknown else 'name one'}"
        )
    return names


def samples_of(calibration: Any) -> list[Call]:
    bare = isinstance(calibration, torch.Tensor | str | bytes | Mapping) or hasattr(calibration, "__array__")
    if bare or not isinstance(calibration, Iterable | None):
        raise InvalidArgument(
            f"calibration must be a list of calls; got a {type(calibration).__name__}. For example "
            "calibration=[tensor] or calibration=[x1, x2]."
        )
    return [
        as_call((), sample) if isinstance(sample, Mapping) else as_call(sample, None)
        for sample in calibration or ()
    ]


def warn_of_few(dtype: Any, samples: Iterable[Call]) -> None:
    """Warn where int8 is calibrated with so few images that ranges of feature maps are guesses."""
    count = sum(images(sample) for sample in samples)
    if dtype == TORCH["s8"] and 0 < count < FEW_IMAGES:
        warnings.warn(
            f"int8 was calibrated with {count} image{'s' if count > 1 else ''}: ranges of feature maps are "
            "guessed from so few, and other images may lose accuracy. Give some dozens of real images as "
            "calibration.",
            stacklevel=3,
        )


def check_call(model: Any, call: Call, function: str) -> None:
    """Raise where an example is missing or the model is in a form whose layers cannot be read, and warn where
    torch alone can run it."""
    if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise InvalidArgument(
            f"{function}() takes a torch.nn.Module, and this is a torch.jit module, whose layers cannot be "
            "read. Pass the nn.Module that it was made from, or export that to ONNX and pass the path."
        )
    if isinstance(model, torch.export.ExportedProgram):
        raise InvalidArgument(
            f"{function}() takes a torch.nn.Module, and this is a torch.export program. Pass its .module()."
        )
    if not isinstance(model, torch.nn.Module):
        return  # refused where the model is copied
    if call == ((), {}) and _needs_input(model):
        example = "model.example" if hasattr(model, "input_names") and hasattr(model, "example") else "(x,)"
        raise InvalidArgument(
            f"{function}() needs an example input, since layers are timed on its sizes. Call "
            f"aerogel.{function}(model, {example})"
            + (", where x is a tensor such as torch.randn(1, 3, 224, 224)." if example == "(x,)" else ".")
        )
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if dtypes == {torch.float64}:
        warnings.warn(
            "The model is float64, which torch alone can run. Call .float() on the model and on its inputs "
            "to use the kernels of aerogel.",
            stacklevel=3,
        )


def _needs_input(model: torch.nn.Module) -> bool:
    """Whether forward() has an argument without a default that nothing else gives."""
    if isinstance(model, HasGraph | GraphModel):
        graph_model = model.as_graph() if isinstance(model, HasGraph) else model
        return bool(graph_model.captured.graph.inputs)
    if model._forward_pre_hooks:
        return False
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return any(p.default is p.empty for p in named)


def check_types(names: Sequence[str], dtypes: Sequence[Any], values: Sequence[Any]) -> None:
    """Raise where an example of a file has another element type than the file's input."""
    for name, dtype, value in zip(names, dtypes, values, strict=False):
        if isinstance(value, torch.Tensor) and dtype is not None and value.dtype != dtype:
            convert = ".float()" if dtype == torch.float32 else f".to({dtype})"
            raise ShapeError(
                f"input '{name}' of the file is {dtype}, and the example is {value.dtype}. Call {convert} on "
                "the example."
            )


def ranges_of(ranges: Any) -> str:
    """How int8 takes the range of a map."""
    if not isinstance(ranges, str) or ranges not in RANGES:
        raise InvalidArgument(f"ranges is one of {', '.join(RANGES)}; not {ranges!r}")
    return ranges


def points_of(shapes: Any) -> list[Sizes]:
    """The sizes of each tuned point."""
    points = [shapes or {}] if shapes is None or isinstance(shapes, Mapping) else list(shapes)
    if not all(isinstance(point, Mapping) for point in points):
        raise InvalidArgument(
            f'sizes have the names of inputs, shapes={{"images": (1, 3, 640, 640)}}, or a list of '
            f"such; not {shapes!r:.80}"
        )
    for name, sizes in (item for point in points for item in point.items()):
        if not isinstance(sizes, tuple | list) or not all(type(n) is int and n > 0 for n in sizes):
            raise ShapeError(
                f"the sizes of input '{name}' are whole numbers such as (1, 3, 640, 640), not {sizes!r:.80}"
            )
    return points
