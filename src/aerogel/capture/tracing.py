"""How a model is protected and watched while torch.export runs it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from aerogel.errors import UnsupportedModel

MOST_READ = 64
"""Values that a model may read out of a tensor into Python. Each becomes an unknown number: torch takes
minutes over a few hundred, to fail in the end."""


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


@contextmanager
def short_lists() -> Iterator[None]:
    """Ends an export where the model asks for a long tensor's `tolist()`."""
    tolist = FakeTensor.tolist

    def checked(tensor: FakeTensor) -> Any:
        if not all(type(n) is int for n in tensor.shape) or math.prod(tensor.shape) > MOST_READ:
            raise UnsupportedModel("the model reads the values of a tensor into Python: tolist()")
        return tolist(tensor)

    setattr(FakeTensor, "tolist", checked)  # noqa: B010  (assigned, mypy takes it for a mistake)
    try:
        yield
    finally:
        setattr(FakeTensor, "tolist", tolist)  # noqa: B010


class Failures(TorchFunctionMode):
    """Whether a call of torch's failed that the model went on from (`try: x.view(2, -1)`): no guard tells
    when it would not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.seen = True
            raise
