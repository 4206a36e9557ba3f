"""The model as torch runs it: the baseline of every comparison, and what is fed to its parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

Call = tuple[tuple[Any, ...], dict[str, Any]]


def as_call(args: Any, kwargs: Mapping[str, Any] | None) -> Call:
    """An example call; a bare tensor counts as the only argument."""
    return (args,) if isinstance(args, torch.Tensor) else tuple(args), dict(kwargs or {})


def first_image(call: Call) -> Call:
    """The call with the first image of every batch."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t[:1], call)
    return args, kwargs


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


class InType(torch.nn.Module):
    """A copy of the model in another element type that takes and gives the model's own."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.dtype = copy.deepcopy(model).to(dtype), dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def there(t: torch.Tensor) -> torch.Tensor:
            return t.to(self.dtype) if t.is_floating_point() else t

        def back(t: torch.Tensor) -> torch.Tensor:
            return t.float() if t.dtype == self.dtype else t

        args, kwargs = pytree.tree_map_only(torch.Tensor, there, (args, kwargs))
        return pytree.tree_map_only(torch.Tensor, back, self.body(*args, **kwargs))


def bodies(model: torch.nn.Module, dtype: torch.dtype | None) -> dict[str, torch.nn.Module]:
    """The forms in which torch can run the model: both layouts, and with `dtype` both again in that type."""
    found = in_both_layouts(model)
    if dtype is None or all(p.dtype == dtype for p in model.parameters()):
        return found
    name = str(dtype).removeprefix("torch.")
    return found | {f"{layout} {name}": m for layout, m in in_both_layouts(InType(model, dtype)).items()}


def in_both_layouts(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The model, and a copy of it in torch's other layout. Only images have one: `to(memory_format=)` raises on a Conv3d."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data = channels_last(parameter.data)
    return {"contiguous": model, "channels_last": other}


def runner(model: torch.nn.Module, call: Call, layout: str) -> Callable[[], Any]:
    """A function that runs the model on the example. Every candidate is given the same tensors: a change of layout is its own."""

    def run() -> Any:
        with torch.no_grad():
            args, kwargs = pytree.tree_map_only(torch.Tensor, channels_last, call) if layout.startswith("channels_last") else call
            return model(*args, **kwargs)

    return run


def agree(model: torch.nn.Module, other: torch.nn.Module, call: Call, within: float = 1e-2) -> bool:
    """Whether two models answer alike on the example: a last look before one replaces the other, far wider than rounding."""
    wanted, got = (pytree.tree_leaves(runner(m, call, "contiguous")()) for m in (model, other))
    for w, g in zip(wanted, got, strict=True):
        judged = isinstance(w, torch.Tensor) and w.is_floating_point() and w.shape == g.shape and w.numel() > 0
        if judged and w.isfinite().all() and not (g - w).abs().max() <= within * w.abs().max() + 1e-6:
            return False
    return True


def record(model: torch.nn.Module, call: Call) -> dict[str, Call]:
    """What the example feeds each submodule, the first time it is called."""
    fed: dict[str, Call] = {}
    hooks = []
    for name, module in model.named_modules():

        def keep(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
            fed.setdefault(name, (args, kwargs))

        hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        runner(model, call, "contiguous")()
    finally:
        for hook in hooks:
            hook.remove()
    return fed


def with_convolutions(parent: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Children that hold a convolution somewhere."""
    kinds = (torch.nn.Conv1d, torch.nn.Conv2d)
    return [(n, c) for n, c in parent.named_children() if any(isinstance(m, kinds) for m in c.modules())]
