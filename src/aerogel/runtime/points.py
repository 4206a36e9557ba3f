"""`Several`: one model tuned at several sizes. A call goes to the point of its own sizes, else to the
nearest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.backends.cpu.runner import pieces
from aerogel.capture.separate import separate
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
        self._apart = all(p.captured is not None and separate(p.captured) for p in points)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        asked = sizes((args, kwargs))
        if asked not in self.sizes and (places := self._cut(asked)):
            return self._in_pieces(args, kwargs, places)
        return self.points[self.nearest(asked)](*args, **kwargs)

    def _cut(self, asked: tuple[tuple[int, ...], ...]) -> dict[int, int]:
        """Points by their number of images, where a batch may be cut and only that number is another."""
        if not self._apart or not asked or not all(asked):
            return {}
        rest, images = [shape[1:] for shape in asked], {shape[0] for shape in asked}
        found = {own[0][0]: i for i, own in enumerate(self.sizes) if [s[1:] for s in own] == rest}
        usable = {n: i for n, i in found.items() if 0 < n < max(images)}
        return usable if len(images) == 1 else {}

    def _in_pieces(self, args: Any, kwargs: Any, places: Mapping[int, int]) -> Any:
        """The largest tuned batches that fit, then smaller ones; what is left goes to the smallest."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        images = next(len(v) for v in leaves if isinstance(v, torch.Tensor))
        counts = list(pieces(images, sorted(places, reverse=True)))
        if (left := images - sum(counts)) > 0:
            counts.append(left)
        done, each = 0, []
        for count in counts:
            cut = [v[done : done + count] if isinstance(v, torch.Tensor) else v for v in leaves]
            own_args, own_kwargs = pytree.tree_unflatten(cut, spec)
            point = places.get(count, places[min(places)])
            each.append(pytree.tree_leaves(self.points[point](*own_args, **own_kwargs)))
            done += count
        assert self.captured is not None
        joined = [torch.cat(parts) for parts in zip(*each, strict=True)]
        return pytree.tree_unflatten(joined, self.captured.out_spec)

    def nearest(self, asked: tuple[tuple[int, ...], ...]) -> int:
        """The number of the point whose inputs are these, or have about as many elements."""
        if asked in self.sizes:
            return self.sizes.index(asked)
        apart = [abs(math.log((_elements(asked) + 1) / (_elements(own) + 1))) for own in self.sizes]
        return apart.index(min(apart))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for other in self.points[1:]:  # each came with a model of its own
            _share(self.points[0], other)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        answers = [point.load_state_dict(state_dict, strict, assign) for point in self.points]
        for other in self.points[1:]:
            _share(self.points[0], other)
        return answers[0]

    def workspace_bytes(self) -> int:
        return sum(point.workspace_bytes() for point in self.points)

    @property
    def workspace_limit(self) -> int:
        """Of each point."""
        return self.points[0].workspace_limit

    @workspace_limit.setter
    def workspace_limit(self, most: int) -> None:
        for point in self.points:
            point.workspace_limit = most


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
