"""Values and modules beside each other: whether they are the same, copies, and what was changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that compile must leave alone: tensors, modes, hooks, attributes, classes."""
    plain: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = tuple(
            len(v) for k, v in sorted(module.__dict__.items()) if k.endswith("_hooks") and v is not None
        )
        values = {
            k: v
            for k, v in module.__dict__.items()
            if isinstance(v, bool | int | float | str | tuple | type(None))
        }
        plain[name] = (type(module), module.training, hooks, sorted(module.__dict__), values)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    return {
        "modules": plain,
        "tensors": {name: (id(v), v.requires_grad, v.detach().clone()) for name, v in tensors.items()},
        "state": {name: v.detach().clone() for name, v in model.state_dict().items()},
    }


def changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The first difference of two snapshots."""
    for name, value in before["modules"].items():
        if after["modules"].get(name) != value:
            return f"module '{name}'"
    for name, (number, grad, value) in before["tensors"].items():
        other = after["tensors"].get(name)
        if other is None or other[:2] != (number, grad) or not _equal(value, other[2]):
            return f"'{name}'"
    return "" if len(before["tensors"]) == len(after["tensors"]) else "a tensor more or less"


def same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return all(_equal(ours[k], theirs[k]) for k in ours)


def same(a: Any, b: Any) -> bool:
    """Bit for bit, leaf for leaf."""
    one, two = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(one) == len(two) and all(
        _equal(p, q) if isinstance(p, Tensor) else p == q for p, q in zip(one, two, strict=True)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def copied(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), value)


def double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def zeroed(leaf: Tensor) -> None:
    """As a user might; an output in which elements share memory may refuse, as eager's does."""
    try:
        with torch.no_grad():
            leaf.zero_()
    except RuntimeError:
        return
