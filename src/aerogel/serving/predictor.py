"""A saved model as engines call it: arrays in by name, arrays out by name, one row an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from aerogel.capture.separate import separate
from aerogel.errors import AerogelError, InvalidArgument, ShapeError, UnsupportedModel, printable
from aerogel.ir import Array
from aerogel.preprocess import Recipe
from aerogel.runtime.points import Several
from aerogel.saved.file import load

Rows = dict[str, Array]
"""Arrays by their names, each with as many rows."""
TOGETHER = 64 << 20
"""Bytes of inputs that run in one call, at most; a call of its own may have more."""


class Predictor:
    """Loaded from a path, in this process, with so many threads; called once, so that it is ready."""

    def __init__(self, path: str | Path, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.fast = load(path)
        captured = self.fast.captured
        assert captured is not None
        if any(
            dtype is None or not sizes for dtype, sizes in zip(captured.dtypes, captured.sizes, strict=True)
        ):
            raise UnsupportedModel("a model with an input that is no tensor, or has no batch, has no rows")
        self.inputs = dict(zip(self.fast.input_names, captured.sizes, strict=True))
        fixed = {sizes[0] for sizes in captured.sizes if isinstance(sizes[0], int)}
        self.fixed = fixed.pop() if fixed else None
        self._apart = separate(captured)
        example = pytree.tree_leaves(captured.filled())
        self.example = {n: v.numpy() for n, v in zip(self.fast.input_names, example, strict=True)}
        self.answer = self(self.example)
        self.outputs = {name: value.dtype for name, value in self.answer.items()}
        points = self.fast.points if isinstance(self.fast, Several) else (self.fast,)
        self.largest = max(len(pytree.tree_leaves(p.captured.example)[0]) for p in points if p.captured)

    @property
    def recipe(self) -> Recipe | None:
        """The one saved with the model."""
        return None if self.fast.preprocess is None else Recipe.parse(self.fast.preprocess)

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """One row of each output for each row of the inputs."""
        rows = len(next(iter(arrays.values())))
        if self.fixed in (None, rows):
            return self._run(arrays)
        each = [self._padded(arrays, at, rows) for at in range(0, rows, self.fixed)]
        return {name: np.concatenate([one[name] for one in each]) for name in self.fast.output_names}

    def _run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        rows = {len(value) for value in arrays.values()}
        found = dict(zip(self.fast.output_names, self.fast.run(None, arrays), strict=True))
        wrong = [name for name, value in found.items() if not value.ndim or {len(value)} != rows]
        if wrong:
            raise UnsupportedModel(f"output '{wrong[0]}' has no row for each image: {found[wrong[0]].shape}")
        return found

    def _padded(self, arrays: Mapping[str, Array], at: int, rows: int) -> dict[str, Array]:
        """A model of one batch size only: the last piece is filled up with its last image."""
        assert self.fixed is not None
        places = np.minimum(np.arange(at, at + self.fixed), rows - 1)
        answer = self._run({name: value[places] for name, value in arrays.items()})
        return {name: value[: rows - at] for name, value in answer.items()}

    def alone(self) -> str:
        """The name of the only input."""
        if len(self.inputs) != 1:
            raise InvalidArgument(
                f"an image is one input, and the model takes {len(self.inputs)}: {[*self.inputs]}"
            )
        return next(iter(self.inputs))

    def misfit(self, arrays: Mapping[str, Array]) -> str | None:
        """Why the model does not take these arrays, or None. Nothing is computed."""
        if set(arrays) != set(self.inputs):
            return f"the model takes {[*self.inputs]}, not {sorted(arrays)}"
        if len({value.shape[:1] for value in arrays.values()}) != 1:
            return "inputs of one call have as many rows"
        assert self.fast.captured is not None
        try:
            tensors = [self._blank(arrays[name]) for name in self.inputs]
        except TypeError as why:
            return str(why)
        return self.fast.captured.misfit(tensors)

    def _blank(self, array: Array) -> torch.Tensor:
        """A tensor of that size and type, as the model would meet it."""
        shape = array.shape if self.fixed is None or not array.ndim else (self.fixed, *array.shape[1:])
        return torch.empty(shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype)

    def together(self, asked: Sequence[Rows]) -> list[Rows | AerogelError]:
        """Answers to several calls, in their order; those of one size run in one, if the model answers each
        image by itself. What it does not take is its own call's error."""
        found: dict[int, Rows | AerogelError] = {}
        alike: dict[Any, list[int]] = {}
        for i, rows in enumerate(asked):
            if (why := self.misfit(rows)) is not None:
                found[i] = ShapeError(why)
                continue
            size = tuple((n, rows[n].dtype, rows[n].shape[1:]) for n in sorted(rows))
            alike.setdefault(size if self._apart else i, []).append(i)
        for places in alike.values():
            for some in _cut(places, asked):
                found |= dict(zip(some, self._one([asked[i] for i in some]), strict=True))
        return [found[i] for i in range(len(asked))]

    def _one(self, asked: Sequence[Rows]) -> Sequence[Rows | AerogelError]:
        joined = {n: np.concatenate([rows[n] for rows in asked]) for n in asked[0]}
        try:
            answer = self(joined)
        except AerogelError as why:
            return [why] * len(asked)
        except (MemoryError, RuntimeError) as why:
            return [AerogelError(f"not computed: {type(why).__name__} {printable(why)[:200]}")] * len(asked)
        ends = np.cumsum([len(next(iter(rows.values()))) for rows in asked])[:-1]
        cut = {name: np.split(value, ends) for name, value in answer.items()}
        return [{name: pieces[i] for name, pieces in cut.items()} for i in range(len(asked))]


def _cut(places: Sequence[int], asked: Sequence[Rows]) -> Iterator[list[int]]:
    """Calls in groups that fit together."""
    some, held = list[int](), 0
    for i in places:
        size = sum(value.nbytes for value in asked[i].values())
        if some and held + size > TOGETHER:
            yield some
            some, held = [], 0
        some.append(i)
        held += size
    if some:
        yield some
