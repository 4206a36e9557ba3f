"""What a compiled module answers for attributes and conversions that are meant for its original.

Data is passed on: names, strides, configurations. Methods are not: they would run or change the original in
torch, and the compiled module would not know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from aerogel.errors import AerogelError

_NOTHING_TO_DO = frozenset({"fuse", "fuse_model"})
"""Methods that fold batch norm into convolutions, which compiling has done."""


def forward_attribute(compiled: torch.nn.Module, original: torch.nn.Module, name: str) -> Any:
    """Return the original's attribute `name`; a method of the original becomes a function that refuses."""
    value = getattr(original, name)
    if not inspect.ismethod(value) or value.__self__ is not original:
        return value
    if name in _NOTHING_TO_DO:
        return lambda *args, **kwargs: compiled
    return _refusal(name)


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AerogelError(
            f"{name}() is a method of the original model; a compiled module only runs forward(). Call "
            f"compiled.original.{name}() to run it in torch, or call it before you compile."
        )

    return refuse


def unchanged(
    compiled: torch.nn.Module, convert: Callable[[torch.Tensor], Any], device: str
) -> torch.nn.Module:
    """Return the module itself where `convert`, as `.to()` and `.float()` hand it over, would change nothing.

    Raises:
        AerogelError: Tensors would move to another device or become another element type.
    """
    tensor = torch.empty(0, device=device)
    converted = convert(tensor)
    if (
        isinstance(converted, torch.Tensor)
        and converted.device.type == tensor.device.type
        and converted.dtype == tensor.dtype
    ):
        return compiled
    raise AerogelError(
        "a compiled module stays where it was compiled. Move or convert the original, then compile again."
    )
