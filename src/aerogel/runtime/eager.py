"""The model as torch runs it: the baseline of every comparison, and what is fed to its parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.capture.captured import Captured
from aerogel.errors import InvalidArgument
from aerogel.ir import GRAPH, LAYOUTS, Way

Call = tuple[tuple[Any, ...], dict[str, Any]]
DOUBTFUL = 0.01
"""Share of the whole numbers of an answer that may differ: a largest of many is decided by rounding where two
are alike."""


def as_call(args: Any, kwargs: Mapping[str, Any] | None) -> Call:
    """An example call, its tensors copied: the user's stay as they are. A bare tensor counts as the only
    argument."""
    if isinstance(args, Mapping):
        raise InvalidArgument(
            "args are in order; a dict of arguments by name is kwargs: compile(model, kwargs={...})"
        )
    if any(
        hasattr(v, "__array__") and not isinstance(v, torch.Tensor)
        for v in pytree.tree_leaves((args, kwargs))
    ):
        raise InvalidArgument(
            "an argument of the example is a numpy array: torch.from_numpy(array) makes a tensor of it"
        )
    if not isinstance(args, torch.Tensor | tuple | list):
        raise InvalidArgument(
            f"args are a tensor or a tuple of the model's arguments, not a {type(args).__name__}"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidArgument(
            f"kwargs are a dict of the model's arguments by name, not a {type(kwargs).__name__}"
        )
    call = (args,) if isinstance(args, torch.Tensor) else tuple(args), dict(kwargs or {})
    copied: Call = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), call)
    return copied


def images(call: Any) -> int:
    """Images of a call, or of what will be one: rows of its first tensor that has any dimension."""
    return next((t.shape[0] for t in pytree.tree_leaves(call) if isinstance(t, torch.Tensor) and t.dim()), 1)


def first_image(call: Call) -> Call:
    """The call with the first image of every batch: of tensors with as many rows as the call has images."""
    many = images(call)

    def first(t: torch.Tensor) -> torch.Tensor:
        return t[:1] if t.dim() and t.shape[0] == many else t

    args, kwargs = pytree.tree_map_only(torch.Tensor, first, call)
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


def ways(model: torch.nn.Module, dtype: torch.dtype | None) -> tuple[Way, ...]:
    """How torch can run the model: in both layouts, and with `dtype` in both again in that type."""
    own = dtype is None or all(p.dtype == dtype for p in model.parameters())
    dtypes = ("",) if own else ("", str(dtype).removeprefix("torch."))
    return tuple(Way("torch", layout, name) for name in dtypes for layout in LAYOUTS)


def body(model: torch.nn.Module, way: Way) -> torch.nn.Module:
    """The model as torch runs it this way: itself, or a copy."""
    made = InType(model, getattr(torch, way.dtype)) if way.dtype else model
    if way.layout == LAYOUTS[0]:
        return made
    other = copy.deepcopy(made)
    for parameter in other.parameters():  # only images have a layout: `to(memory_format=)` raises on a Conv3d
        parameter.data = channels_last(parameter.data)
    return other


def bodies(model: torch.nn.Module, dtype: torch.dtype | None) -> dict[Way, torch.nn.Module]:
    return {way: body(model, way) for way in ways(model, dtype)}


def runner(model: torch.nn.Module, call: Call, way: Way = GRAPH) -> Callable[[], Any]:
    """A function that runs the model on the example. Every candidate is given the same tensors: a change of
    layout is its own."""

    def run() -> Any:
        with torch.no_grad():
            args, kwargs = (
                pytree.tree_map_only(torch.Tensor, channels_last, call)
                if way.layout == "channels_last"
                else call
            )
            return model(*args, **kwargs)

    return run


def answer(model: torch.nn.Module, call: Call, way: Way = GRAPH) -> Any:
    """What a model answers, from the same random numbers each time."""
    seed(call)
    return runner(model, call, way)()


def seed(call: Any) -> None:
    """The same random numbers from here on, on the call's devices: those of others are the user's."""
    tensors = [t for t in pytree.tree_leaves(call) if isinstance(t, torch.Tensor)]
    if all(t.device.type == "cpu" for t in tensors):
        torch.default_generator.manual_seed(0)
    else:
        torch.manual_seed(0)


def memory_of(model: torch.nn.Module) -> frozenset[int]:
    """Where a model's parameters and buffers are."""
    return frozenset(t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers()))


def unshared(given: Any, memory: frozenset[int]) -> Any:
    """An answer in which what is a model's own memory is copied: a user may write to it."""

    def own(t: torch.Tensor) -> torch.Tensor:
        return t.clone() if t.layout == torch.strided and t.untyped_storage().data_ptr() in memory else t

    return on_tensors(own, given)


def on_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A value with each of its tensors changed. One that is a tensor, the usual case, takes the short way:
    after a call has filled the caches, a walk over the structure costs a tenth of a millisecond."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return pytree.tree_map_only(torch.Tensor, change, value)


def agree(model: torch.nn.Module, other: torch.nn.Module, call: Call, within: float | None = None) -> bool:
    """Whether two models answer alike: a last look before one replaces the other, far wider than rounding."""
    return alike(answer(model, call), answer(other, call), within)


def alike(wanted: Any, got: Any, within: float | None = None) -> bool:
    """Whether two answers are the same but for rounding. `within` is a share of the largest number, by
    default what an element type may lose in a deep network."""
    (wants, spec), (gots, other) = (pytree.tree_flatten(v) for v in (wanted, got))
    return spec == other and all(_near(w, g, within) for w, g in zip(wants, gots, strict=True))


def _near(wanted: Any, got: Any, within: float | None) -> bool:
    if not isinstance(wanted, torch.Tensor) or not isinstance(got, torch.Tensor):
        return type(wanted) is type(got) and (wanted == got or wanted != wanted)
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return False
    if not wanted.is_floating_point():  # the largest of two near ones may be the other
        return wanted.numel() == 0 or float((wanted != got).float().mean()) <= DOUBTFUL
    finite = wanted.isfinite()
    if not finite.any():
        return True
    w, g = wanted[finite].double(), got[finite].double()
    share = (1e-3 if wanted.dtype in (torch.float32, torch.float64) else 1e-1) if within is None else within
    return bool((g - w).abs().max() <= share * w.abs().max() + 1e-6)


def nearby(captured: Captured, call: Call) -> list[Call]:
    """Calls like this one at other sizes: the batch one and two, then one other size of image (odd, or else
    much larger)."""
    tensors, spec = pytree.tree_flatten(call)
    batch = next((s[0] for s in captured.sizes if s and isinstance(s[0], str)), None)
    images = [s for sizes in captured.sizes for s in sizes[2:] if isinstance(s, str) and s != batch]
    now = {
        name: size
        for sizes, value in zip(captured.sizes, tensors, strict=True)
        for name, size in zip(sizes, getattr(value, "shape", ()), strict=False)
        if isinstance(name, str)
    }
    wanted: list[dict[str, int]] = [] if batch is None else [{batch: n} for n in (1, 2) if now[batch] != n]
    if images:
        wanted += [
            {s: now[s] + 1 + i for i, s in enumerate(dict.fromkeys(images))},
            {s: now[s] + 32 for s in images},
        ]

    def resized(value: Any, sizes: tuple[int | str, ...], other: dict[str, int]) -> Any:
        for i, name in enumerate(sizes):
            if name in other:
                rows = torch.arange(other[str(name)], device=value.device) % value.shape[i]
                value = value.index_select(i, rows)
        return value

    if any(isinstance(v, torch.Tensor) and v.numel() == 0 for v in tensors):
        return []
    calls = [[resized(v, s, other) for v, s in zip(tensors, captured.sizes, strict=True)] for other in wanted]
    return [pytree.tree_unflatten(values, spec) for values in calls]


def record(model: torch.nn.Module, call: Call) -> dict[str, Call]:
    """What the example feeds each submodule, the first time it is called."""
    fed: dict[str, Call] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue

        def keep(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
            fed.setdefault(name, (args, kwargs))

        hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        runner(model, call)()
    finally:
        for hook in hooks:
            hook.remove()
    return fed


def with_convolutions(parent: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Children that hold a convolution somewhere. What torch.jit made has no children of its own."""
    kinds = (torch.nn.Conv1d, torch.nn.Conv2d)
    if isinstance(parent, torch.jit.ScriptModule):
        return []
    return [(n, c) for n, c in parent.named_children() if any(isinstance(m, kinds) for m in c.modules())]
