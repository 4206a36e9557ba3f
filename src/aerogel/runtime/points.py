"""`Several`: one model tuned at several sizes. A call goes to the point of its own sizes, else to the
nearest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.errors import InvalidArgument
from aerogel.runtime.module import Compiled


class Several(Compiled):
    """The first of `points` is what the module itself looks like; they share weights where they run the same
    graph."""

    def __init__(self, points: Sequence[Compiled]) -> None:
        first = points[0]
        super().__init__(
            first.__dict__["_original"],
            first.network,
            first.plan,
            first.how,
            first.notes,
            first.__dict__["_body"],
            first.captured,
        )
        for other in points[1:]:
            _share(first, other)
        self.points = tuple(points)
        self.sizes = [sizes(p.captured.example) for p in points if p.captured is not None]
        if len(self.sizes) < len(points) or len(set(self.sizes)) < len(points):
            raise InvalidArgument("several points need a model that is captured whole, and sizes that differ")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.points[self.nearest(sizes((args, kwargs)))](*args, **kwargs)

    def nearest(self, asked: tuple[tuple[int, ...], ...]) -> int:
        """The number of the point whose inputs are these, or have about as many elements."""
        if asked in self.sizes:
            return self.sizes.index(asked)
        apart = [abs(math.log((_elements(asked) + 1) / (_elements(own) + 1))) for own in self.sizes]
        return apart.index(min(apart))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        answers = [point.load_state_dict(state_dict, strict, assign) for point in self.points]
        for other in self.points[1:]:
            _share(self.points[0], other)
        return answers[0]

    def workspace_bytes(self) -> int:
        return sum(point.workspace_bytes() for point in self.points)


def sizes(call: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of a call's tensors, in order."""
    return tuple(tuple(t.shape) for t in pytree.tree_leaves(call) if isinstance(t, torch.Tensor))


def _elements(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _share(first: Compiled, other: Compiled) -> None:
    """One copy of the weights for both, where both run the same graph in the same precision."""
    if first.network is None or other.network is None or other.captured is None:
        return
    if first.network.graph == other.network.graph and first.network.half == other.network.half:
        other.captured = replace(other.captured, constants=first.network.captured.constants)
        other.network = first.network
        other.__dict__["_original"], other.__dict__["_body"] = first.__dict__["_original"], None
