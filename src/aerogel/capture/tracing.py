"""What a model is watched for while torch.export runs it, and what is cleared away afterwards."""

from __future__ import annotations

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


def symbols_in(value: Any) -> list[Any]:
    """Return the open sizes of a value of an exported graph."""
    values = value if isinstance(value, list | tuple) else [value]
    sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else [v])]
    return [s for s in sizes if isinstance(s, torch.SymInt)]


def forget_export(program: torch.export.ExportedProgram | None) -> None:
    """Let go of an export: torch caches methods of its ShapeEnv for good with the environment as a key, and
    an environment holds tensors whose sizes hold it, where Python's collector does not see them."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    for method in vars(ShapeEnv).values():
        if (clear := getattr(method, "cache_clear", None)) is not None:
            clear()
    nodes = () if program is None else program.graph.nodes
    for environment in {
        id(s.node.shape_env): s.node.shape_env for n in nodes for s in symbols_in(n.meta.get("val"))
    }.values():
        environment.tracked_fakes = None
        getattr(environment, "fake_tensor_cache", {}).clear()
