"""The arguments of compile(), looked at before anything is done: each mistake is a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from aerogel.errors import InvalidArgument, ShapeError
from aerogel.ir import Plan
from aerogel.ir.tensors import TORCH
from aerogel.methods import METHODS
from aerogel.runtime.eager import Call, as_call
from aerogel.tune.quantize import RANGES

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
    raise InvalidArgument(f'dtype is None, torch.float16, torch.bfloat16 or "int8", not {dtype!r}')


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
    if isinstance(calibration, torch.Tensor) or not isinstance(calibration, Iterable | None):
        raise InvalidArgument(
            f"calibration is several calls, as in calibration=[x1, x2], not a {type(calibration).__name__}"
        )
    return [
        as_call((), sample) if isinstance(sample, Mapping) else as_call(sample, None)
        for sample in calibration or ()
    ]


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
