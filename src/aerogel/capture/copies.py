"""Copies of a model that share its tensors."""

from __future__ import annotations

import copy

import torch


def shallow_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Copy a model, but share its tensors.

    torch.export puts stand-ins for tensors into the module that it runs, and leaves them in attributes that
    forward() writes, such as a cached grid. In a copy, neither calls of other threads nor later copies of the
    model meet them.
    """
    tensors = [
        value
        for module in model.modules()
        for part in (module._parameters, module._buffers, vars(module))
        for value in list(part.values())
        if isinstance(value, torch.Tensor)
    ]
    copied: torch.nn.Module = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    return copied
