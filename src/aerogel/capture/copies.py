"""Copies of a model that share its tensors."""

from __future__ import annotations

import copy

import torch
from torch.utils import _pytree as pytree


def shallow_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Copy a model, but share its tensors.

    torch.export puts stand-ins for tensors into the module that it runs, and leaves them in attributes that
    forward() writes, such as a cached grid. In a copy, neither calls of other threads nor later copies of the
    model meet them.
    """
    tensors = [leaf for module in model.modules() for leaf in tensors_of(module)]
    copied: torch.nn.Module = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    return copied


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors that a module itself holds, also those in lists and dicts."""
    leaves = pytree.tree_leaves(list(vars(module).values()))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
