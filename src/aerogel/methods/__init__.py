"""The methods, one file each. To add one: write the file, put its name in METHODS. CONTRIBUTING.md walks through it.

A method is a plain module with

    NAME, PAPER, SUMMARY           words for people
    refuse(conv, target, stats)    None, or the sentence that says which property it cannot take
    configs(conv, target, stats)   points of its search space, likely winners first
    pack(weight, conv, config)     weight -> Packed; sees no image size
    unpack(packed, conv)           Packed -> weight: pack's own proof; raises InvalidFile on a damaged Packed
    layouts(conv, config, target, border, pitch, x_pitch)   what it would read and write: the output with at least this border,
                                   rows of output and input at least this far apart
    build(packed, conv, config, target, reads, writes, rows)   Kernels for one concrete Conv, run one after another; with `rows` one
                                   kernel that computes only so many rows of the output, from wherever its x points
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Protocol, cast

from aerogel.candidate import Config, Kernel, Packed, Stats
from aerogel.layout import Array, Layout
from aerogel.problem import Conv
from aerogel.target import Target

METHODS = ("dense", "direct", "stridepack", "tilewise", "blockgemm", "actsparse")


class Method(Protocol):
    """The shape of a method's module, for the type checker."""

    NAME: str
    PAPER: str
    SUMMARY: str

    def refuse(self, conv: Conv, target: Target, stats: Stats) -> str | None: ...
    def configs(self, conv: Conv, target: Target, stats: Stats) -> Iterator[Config]: ...
    def pack(self, weight: Array, conv: Conv, config: Config) -> Packed: ...
    def unpack(self, packed: Packed, conv: Conv) -> Array: ...
    def layouts(
        self, conv: Conv, config: Config, target: Target, border: tuple[int, int, int, int], pitch: int = 0, x_pitch: int = 0
    ) -> tuple[Layout, Layout]: ...
    def build(
        self, packed: Packed, conv: Conv, config: Config, target: Target, reads: Layout, writes: Layout, rows: int | None = None
    ) -> list[Kernel]: ...


def method(name: str) -> Method:
    """The module of a method. Loaded when asked for, so that kernels of ours need no torch."""
    return cast(Method, import_module(f"aerogel.methods.{name}"))
