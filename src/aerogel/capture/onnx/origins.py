"""Where a graph's constants stand in the ONNX file they come from, so that changed weights can be written
back.

A constant of the graph is a tensor of the file, or one with its dimensions in another order (MatMul holds a
Linear's weight turned around), or something computed from tensors while the file was read. Only the first two
can be written back, and only where nothing was computed from the tensor as well: that would go on with the
old numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Origin:
    """A tensor of the file (an initializer, or what a Constant node gives) and the order of its dimensions:
    `constant = tensor.transpose(axes)`."""

    tensor: str
    axes: tuple[int, ...]


class Origins:
    """What is known of them while a file is read. Arrays are told from each other by who they are, so each is
    kept."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._known: dict[int, tuple[Any, Origin]] = {}
        self._constants: dict[str, Origin] = {}
        self._taken: set[str] = set()
        self._used_up: set[str] = set()
        for name, array in arrays.items():
            self.add(array, Origin(name, tuple(range(np.asarray(array).ndim))))

    def add(self, array: Any, origin: Origin) -> None:
        """An array that is this tensor of the file."""
        self._known[id(array)] = array, origin

    def of(self, value: Any) -> Origin | None:
        found = self._known.get(id(value))
        return None if found is None else found[1]

    def turned(self, array: Any, axes: Sequence[int]) -> Any:
        """The array with its dimensions in another order; its origin comes along."""
        made = np.ascontiguousarray(np.asarray(array).transpose(tuple(axes)))
        origin = self.of(array)
        if origin is not None:
            self.add(made, Origin(origin.tensor, tuple(origin.axes[a] for a in axes)))
        return made

    def becomes(self, array: Any, constant: str) -> None:
        """An array is a constant of the graph from now on."""
        origin = self.of(array)
        if origin is not None:
            self._constants[constant] = origin
            self._taken.add(origin.tensor)

    def begin(self) -> None:
        """A node is about to be read."""
        self._taken = set()

    def end(self, inputs: Iterable[Any], outputs: Iterable[Any]) -> None:
        """A node was read. A tensor that is neither a constant of the graph now nor handed on as it is was
        used to compute something."""
        handed_on = {origin.tensor for v in outputs if (origin := self.of(v)) is not None}
        for value in inputs:
            origin = self.of(value)
            if origin is not None and origin.tensor not in self._taken | handed_on:
                self._used_up.add(origin.tensor)

    def constants(self) -> dict[str, Origin]:
        """The graph's constants that can be written back."""
        return {name: own for name, own in self._constants.items() if own.tensor not in self._used_up}
