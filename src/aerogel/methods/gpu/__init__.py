"""The methods on GPUs, one file each. As on the CPU (methods/__init__.py), with launches in the place of kernels:

NAME, PAPER, SUMMARY           words for people
LAYOUT                         of x, y and the residual: "contiguous" (n, c, h, w) or "channels_last"
refuse(conv, target, stats)    None, or the sentence that says which property it cannot take
configs(conv, target, stats)   points of its search space, likely winners first
pack(weight, conv, config)     weight -> Packed; sees no image size
unpack(packed, conv)           Packed -> weight: pack's own proof
build(packed, conv, config)    Launches for one concrete Conv, one after another
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Protocol, cast

from aerogel.candidate import Config, Packed, Stats
from aerogel.layout import Array
from aerogel.problem import Conv
from aerogel.target import Gpu

METHODS = ("dense", "direct", "stridepack", "tilewise", "blockgemm", "actsparse")
"""dense is torch's and has no launches: refuse and configs only."""


class Method(Protocol):
    """The shape of a method's module, for the type checker."""

    NAME: str
    PAPER: str
    SUMMARY: str
    LAYOUT: str

    def refuse(self, conv: Conv, target: Gpu, stats: Stats) -> str | None: ...
    def configs(self, conv: Conv, target: Gpu, stats: Stats) -> Iterator[Config]: ...
    def pack(self, weight: Array, conv: Conv, config: Config) -> Packed: ...
    def unpack(self, packed: Packed, conv: Conv) -> Array: ...
    def build(self, packed: Packed, conv: Conv, config: Config) -> list[Any]: ...  # Launch, or TritonLaunch


def method(name: str) -> Method:
    return cast(Method, import_module(f"aerogel.methods.gpu.{name}"))
