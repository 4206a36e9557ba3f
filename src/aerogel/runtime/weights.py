"""Weights that a module computes from others (masks of ours, torch's parametrizations and pruning), as they
are now."""

from __future__ import annotations

import copy
import sys
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from aerogel.ir.tensors import flushed, subnormal


def as_weights(model: nn.Module) -> nn.Module:
    """The model, or where weights are computed from others (masks of ours, torch's parametrizations and
    pruning) a copy that has them as they are now."""
    if not any(parametrize.is_parametrized(m) or hooks(m) for m in model.modules()):
        return model
    for module in model.modules():
        # what it computed is no leaf, and only leaves can be copied; the next call computes it again
        for hook in hooks(module):
            setattr(module, hook._tensor_name, getattr(module, hook._tensor_name).detach())
    copied = copy.deepcopy(model)
    for module in list(copied.modules()):
        for hook in hooks(module):
            sys.modules["torch.nn.utils.prune"].remove(module, hook._tensor_name)
        if parametrize.is_parametrized(module):
            bake(module)
    return copied


def flush(model: nn.Module) -> nn.Module:
    """Zeros for what is subnormal, in place: in a copy of ours."""
    for one in (*model.parameters(), *model.buffers()):
        if subnormal(one.detach()) is not None:
            one.data = flushed(one.detach())
    return model


def hooks(module: nn.Module) -> list[Any]:
    """torch's own pruning of a module. Whoever used it has imported it; importing it here would take a tenth
    of a second."""
    torchs = sys.modules.get("torch.nn.utils.prune")
    return (
        []
        if torchs is None
        else [h for h in module._forward_pre_hooks.values() if isinstance(h, torchs.BasePruningMethod)]
    )


def bake(module: nn.Module) -> None:
    """Parametrized weights become plain ones. Not by torch's own remove_parametrizations: that takes the
    property from a class which copies of the module share."""
    held: Any = module.parametrizations
    values = {
        name: nn.Parameter(
            getattr(module, name).detach().clone(), any(p.requires_grad for p in held[name].parameters())
        )
        for name in held
    }
    del module.parametrizations
    module.__class__ = type(module).__mro__[1]
    for name, value in values.items():
        module.register_parameter(name, value)
