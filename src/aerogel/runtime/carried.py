"""A model on its way to another process: tensors travel without their zeros, and once.

A stand-in without memory takes the place of each tensor that is mostly zeros; what is kept of it stands
beside. The constants of the model's graph are tensors of the model, and travel as such.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from aerogel.ir import Array
from aerogel.ir.tensors import from_torch
from aerogel.ir.zeros import left_out, put_back
from aerogel.runtime.graphmodel import Later


class Carried:
    """A model and its graph's constants, as they are pickled; `unpacked` gives both again."""

    def __init__(self, model: nn.Module, constants: Mapping[str, torch.Tensor]) -> None:
        tensors = {id(tensor): tensor for _, _, tensor in _tensors(model)}
        coded = {key: found for key, own in tensors.items() if (found := _coded(own)) is not None}
        stands = {key: _stand_in(own) if key in coded else own for key, own in tensors.items()}
        by_memory = {_place(own): stands[key] for key, own in tensors.items()}
        self.constants = {name: by_memory.get(_place(held), held) for name, held in constants.items()}
        memo: dict[int, Any] = dict(stands)
        memo |= {id(held): self.constants[name] for name, held in constants.items()}
        self.model = copy.deepcopy(model, memo)
        self.kept = [(stands[key], *found) for key, found in coded.items()]

    def unpacked(self) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        real = {id(stand): _whole(stand, bits, kept) for stand, bits, kept in self.kept}
        for held, name, tensor in list(_tensors(self.model)):
            held[name] = real.get(id(tensor), tensor)
        return self.model, {name: real.get(id(held), held).detach() for name, held in self.constants.items()}


def sent(state: dict[str, Any]) -> dict[str, Any]:
    """What a compiled module holds, as it is pickled: its weights are in its network, as they were packed."""
    network, captured = state["network"], state["captured"]
    if network is None or captured is None or state["_body"] is not None:
        return state
    original = state["_original"]
    model = original.made() if isinstance(original, Later) else original
    bare = copy.copy(network)
    bare.captured = replace(captured, constants={})
    carried = Carried(model, captured.constants)
    return {**state, "_original": carried, "captured": bare.captured, "network": bare}


def received(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse."""
    carried, network = state["_original"], state["network"]
    if not isinstance(carried, Carried):
        return state
    model, constants = carried.unpacked()
    network.captured = replace(state["captured"], constants=constants)
    return {**state, "_original": model, "captured": network.captured}


def _tensors(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Every tensor of a model, with the dictionary and the name it has there."""
    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, value in list(held.items()):
                if isinstance(value, torch.Tensor):
                    yield held, name, value


def _place(tensor: torch.Tensor) -> tuple[int, Any, Any]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _coded(tensor: torch.Tensor) -> tuple[Array, Array] | None:
    """Bits and nonzeros of a plain tensor of floats; None of another, or where it has few zeros."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu"
    plain = plain and tensor.layout == torch.strided and tensor.is_contiguous() and tensor.is_leaf
    if not plain or not tensor.is_floating_point() or not tensor.numel():
        return None
    flat = from_torch(tensor.detach().reshape(-1))
    return left_out(flat, "bf16" if tensor.dtype == torch.bfloat16 else "")


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    return _like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def _whole(stand: torch.Tensor, bits: Array, kept: Array) -> torch.Tensor:
    flat = torch.from_numpy(put_back(bits, kept, stand.numel())).view(stand.dtype)
    return _like(stand, flat.reshape(stand.shape))


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A parameter where the tensor is one."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, requires_grad=tensor.requires_grad)
    return value.requires_grad_(tensor.requires_grad)
