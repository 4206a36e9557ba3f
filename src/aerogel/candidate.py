"""The nouns between a method and the tuner: `Stats`, `Config`, `Packed`, `Kernel`.

A method turns a weight into `Packed` under a `Config`, and that into `Kernel`s for one concrete Conv. `Stats` is what the method
may look at before any work is done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from aerogel.errors import InvalidFile, PlanMismatch
from aerogel.layout import Array, Layout

_CONFIG = re.compile(r"([a-z_]+)(?:/((?:[a-z_]+=\d+)(?:,[a-z_]+=\d+)*))?")


RUN, MOST, FEW = 32, 0.6, 64
"""Filters in a run; the share of them that makes a position theirs; filters that are compared with each other."""


def runs_of(kept: Array) -> list[Array]:
    """Filters with more than a few nonzeros, RUN after RUN, by the number each keeps: TEW gives dropped filters a few back."""
    some = np.flatnonzero(4 * kept > kept.max(initial=0))
    return [some[i : i + RUN] for i in range(0, len(some), RUN)]


def majority(mask: Array) -> Array:
    """How many filters keep each position, where most of them do; else 0. `mask` is filters x positions."""
    counts = mask.view(np.uint8).sum(0, dtype=np.uint16)
    return np.where(counts >= MOST * len(mask), counts, 0)


def _alike(mask: Array, kept: Array) -> int:
    """See Stats.alike; at most FEW filters and 1024 positions are looked at."""
    some = np.flatnonzero(kept)
    some = some[np.linspace(0, len(some) - 1, min(FEW, len(some))).astype(int)] if len(some) > 1 else some[:0]
    seen = mask[some][:, :: max(1, mask.shape[1] // 1024)].astype(np.float32)
    own = seen.sum(1)
    if not own.any():
        return 0
    both = seen @ seen.T
    np.fill_diagonal(both, 0)
    return int(100 * both.max(1)[own > 0].sum() / own.sum())


@dataclass(frozen=True)
class Idle:
    """Percent of a layer's input that is zero on the calibration inputs: of its elements, of its vectors of VECTOR pixels (of rows
    that follow each other), and of its channels within tiles of TILE x TILE pixels."""

    elements: int
    vectors: int
    tiles: int

    VECTOR: ClassVar[int] = 16
    TILE: ClassVar[int] = 8

    @staticmethod
    def of(x: Array) -> Idle:
        """Of images (n, c, h, w)."""
        n, c, h, w = x.shape
        if not x.size:
            return Idle(0, 0, 0)
        zero = x == 0
        flat = zero.reshape(n * c, h * w)
        rows, columns = range(0, h, Idle.TILE), range(0, w, Idle.TILE)
        vectors = np.logical_and.reduceat(flat, range(0, h * w, Idle.VECTOR), axis=1)
        tiles = np.logical_and.reduceat(np.logical_and.reduceat(zero, rows, axis=2), columns, axis=3)
        return Idle(*(round(100 * float(part.mean())) for part in (zero, vectors, tiles)))

    def __str__(self) -> str:
        return (
            f"{self.elements} % of its input's elements, {self.vectors} % of vectors of pixels, {self.tiles} % of channels in tiles"
        )


@dataclass(frozen=True)
class Stats:
    """What is known of a layer: of its weights, and with calibration inputs of its own input."""

    weights: int
    nonzeros: int
    empty_filters: int = 0
    longest_filter: int = 0
    shared: int = 0
    """Nonzeros at positions that most of a run of RUN filters keep: what tile-wise pruning leaves."""
    alike: int = 0
    """Percent of a filter's nonzeros that the filter most like it, of FEW looked at, keeps too; the average."""
    idle: Idle | None = None
    """Zeros of its input; None without calibration inputs."""

    @property
    def sparsity(self) -> float:
        """Share of zeros, 0 to 1."""
        return 1 - self.nonzeros / self.weights if self.weights else 0.0

    @staticmethod
    def of(weight: Array, idle: Idle | None = None) -> Stats:
        mask = weight.reshape(weight.shape[0], -1) != 0
        kept = np.count_nonzero(mask, axis=1)
        runs = [majority(mask[filters]).sum() for filters in runs_of(kept)]
        return Stats(
            weight.size, int(kept.sum()), int((kept == 0).sum()), int(kept.max(initial=0)), int(sum(runs)), _alike(mask, kept), idle
        )  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Stats:
        try:
            values = json.loads(text)
            idle = values["idle"]
            known = None if idle is None else Idle(*(int(idle[n]) for n in ("elements", "vectors", "tiles")))
            return Stats(**{name: int(values[name]) for name in Stats.__annotations__ if name != "idle"}, idle=known)
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
    counts: NDArray[np.int64] | None = None
    """Of a kernel that skips what is zero in x: for each thread what it found active, and of how many; it only adds to them."""

    def bind(self, *, x: int, y: int, residual: int = 0, bias: int = 0, scratch: int = 0) -> NDArray[np.int64]:
        """The argument block for buffers at these addresses: a copy, so that two workspaces never share one."""
        bound = self.arguments.copy()
        x_front = self.reads.front * self.reads.item_bytes
        y_front = self.writes.front * self.writes.item_bytes
        bound[: len(POINTERS)] = (x + x_front, y + y_front, residual + y_front if residual else 0, bias, scratch)
        return bound
