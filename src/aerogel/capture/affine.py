"""What scales and shifts channels by constants: batch norm, and a sum or a product with a number for each
channel, as files write the bias of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from aerogel.ir import Node, Ref

_SHIFTS = {"aten.add.Tensor": 1.0, "aten.sub.Tensor": -1.0}
_SCALES = ("aten.mul.Tensor", "aten.div.Tensor")
Constants = Mapping[str, torch.Tensor]


class Affine(NamedTuple):
    """`x * scale + shift`, float64, a number for each channel; a scale of None is one."""

    x: Ref
    scale: torch.Tensor | None
    shift: torch.Tensor

    def spread(self, times: int) -> Affine:
        """The same where each channel is so many."""
        scale = None if self.scale is None else self.scale.repeat_interleave(times)
        return Affine(self.x, scale, self.shift.repeat_interleave(times))


def affine(node: Node, constants: Constants, sizes: tuple[int | str, ...]) -> Affine | None:
    """What a node does to the channels of its input, None where it is something else or not known now.
    `sizes` are those of its answer."""
    if node.op.startswith("aten.batch_norm."):
        return _batch_norm(node, constants)
    if node.kwargs or len(node.args) != 2 or node.op not in (*_SHIFTS, *_SCALES):
        return None
    x, by = node.args
    if node.op in ("aten.add.Tensor", "aten.mul.Tensor") and _held(x, constants) is not None:
        x, by = by, x
    numbers = _numbers(_held(by, constants), sizes)
    if numbers is None or not isinstance(x, Ref) or x.name in constants:
        return None
    if node.op in _SHIFTS:
        return Affine(x, None, _SHIFTS[node.op] * numbers)
    scale = numbers if node.op == "aten.mul.Tensor" else 1 / numbers
    return Affine(x, scale, torch.zeros_like(scale)) if scale.isfinite().all() else None


def _held(argument: Any, constants: Constants) -> torch.Tensor | None:
    """A constant, or a number as one."""
    if type(argument) in (int, float):
        return torch.tensor([float(argument)], dtype=torch.float32)
    return constants.get(argument.name) if isinstance(argument, Ref) else None


def _numbers(held: torch.Tensor | None, sizes: tuple[int | str, ...]) -> torch.Tensor | None:
    """A constant as one number for each channel, where it is that."""
    if held is None or not held.is_floating_point() or not len(sizes) >= max(2, held.dim()):
        return None
    channels = sizes[1]
    shape = (1,) * (len(sizes) - held.dim()) + tuple(held.shape)
    if not isinstance(channels, int) or shape[1] not in (1, channels) or shape[1] != held.numel():
        return None
    numbers = held.double().reshape(-1).expand(channels)
    return numbers if numbers.isfinite().all() else None


def _batch_norm(node: Node, constants: Constants) -> Affine | None:
    given = node.args[1:5]
    scale, shift, mean, var = (_held(a, constants) for a in given)
    known = all(
        a is None or held is not None for a, held in zip(given, (scale, shift, mean, var), strict=True)
    )
    if not known or mean is None or var is None or node.args[5] is True or not isinstance(node.args[0], Ref):
        return None
    factor = torch.rsqrt(var.double() + float(node.args[7]))
    if scale is not None:
        factor = factor * scale.double()
    moved = -mean.double() * factor
    return Affine(node.args[0], factor, moved if shift is None else moved + shift.double())
