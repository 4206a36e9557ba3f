"""What a model is watched for while torch.export runs it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from aerogel.errors import UnsupportedModel

MOST_READ = 64
"""Values that a model may read out of a tensor into Python. Each becomes an unknown number: torch takes
minutes over a few hundred, to fail in the end."""


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
