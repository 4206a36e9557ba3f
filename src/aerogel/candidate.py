"""The nouns between a method and the tuner: `Stats`, `Config`, `Packed`, `Kernel`.

A method turns a weight into `Packed` under a `Config`, and that into `Kernel`s for one concrete Conv. `Stats` is what the method
may look at before any work is done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aerogel.errors import InvalidFile, PlanMismatch
from aerogel.layout import Array, Layout

_CONFIG = re.compile(r"([a-z_]+)(?:/((?:[a-z_]+=\d+)(?:,[a-z_]+=\d+)*))?")


@dataclass(frozen=True)
class Stats:
    """What is known of a layer's weights."""

    weights: int
    nonzeros: int
    empty_filters: int = 0
    longest_filter: int = 0

    @property
    def sparsity(self) -> float:
        """Share of zeros, 0 to 1."""
        return 1 - self.nonzeros / self.weights if self.weights else 0.0

    @staticmethod
    def of(weight: Array) -> Stats:
        kept = np.count_nonzero(weight.reshape(weight.shape[0], -1), axis=1)
        return Stats(weight.size, int(kept.sum()), int((kept == 0).sum()), int(kept.max(initial=0)))

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Stats:
        try:
            values = json.loads(text)
            return Stats(**{name: int(values[name]) for name in ("weights", "nonzeros", "empty_filters", "longest_filter")})
        except (ValueError, KeyError, TypeError) as why:
            raise InvalidFile(f"not the statistics of a layer: {why}") from None


@dataclass(frozen=True)
class Config:
    """One point of a method's search space: names and whole numbers, e.g. `direct/channels=64,vectors=7`."""

    method: str
    options: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def make(method: str, **options: int) -> Config:
        return Config(method, tuple(sorted(options.items())))

    def __getitem__(self, name: str) -> int:
        options = dict(self.options)
        if name not in options:
            raise PlanMismatch(f"'{self}' does not say '{name}': it is from another version. Compile again.")
        return options[name]

    def __str__(self) -> str:
        return self.method + ("/" if self.options else "") + ",".join(f"{n}={v}" for n, v in self.options)

    @staticmethod
    def parse(text: str) -> Config:
        """The inverse of `str`."""
        m = _CONFIG.fullmatch(text)
        if m is None:
            raise InvalidFile(f"'{text[:200]}' is not a configuration; one looks like direct/channels=64,vectors=7")
        pairs = (item.split("=") for item in (m[2] or "").split(",") if item)
        return Config.make(m[1], **{name: int(value) for name, value in pairs})


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight as a method stores it: named arrays and small whole numbers. It knows no image size and fits every one."""

    format: str
    version: int
    arrays: Mapping[str, Array]
    meta: Mapping[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())


POINTERS = ("x", "y", "residual", "bias", "scratch")
"""The first slots of every native kernel's arguments; the rest is the kernel's own."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """Code for one concrete Conv and the Layouts it reads and writes; a residual has the layout it writes, and may be y itself.

    Native kernels have an `entry`: void entry(int64 *arguments, int64 thread, int64 threads), safe to run on any number of
    threads at once. Library kernels (dense) have a `call` on tensors (x, bias, residual) -> y instead.
    """

    name: str
    reads: Layout
    writes: Layout
    entry: int = 0
    arguments: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    scratch_bytes: int = 0
    owned: tuple[Array, ...] = ()
    call: Callable[[Any, Any, Any], Any] | None = None

    def bind(self, *, x: int, y: int, residual: int = 0, bias: int = 0, scratch: int = 0) -> NDArray[np.int64]:
        """The argument block for buffers at these addresses: a copy, so that two workspaces never share one."""
        bound = self.arguments.copy()
        x_front = self.reads.front * self.reads.item_bytes
        y_front = self.writes.front * self.writes.item_bytes
        bound[: len(POINTERS)] = (x + x_front, y + y_front, residual + y_front if residual else 0, bias, scratch)
        return bound
