"""The methods, one folder each. To add one: make the folder, put its name in METHODS. CONTRIBUTING.md walks
through it.

A method is a folder

    __init__.py    NAME, PAPER, SUMMARY: words for people; its docstring is the method's page
                   SKIPS_INPUT: whether its time depends on the zeros of its input
                   RANK: where it stands when layers are given out by rule;
                         None where only a measurement can tell
                   DEMANDS: the option by which a configuration asks something of all maps of its image size
                   ROUNDING: the option that its rounding depends on
                   NOT_ON: for "cpu" or "gpu" why the folder has no such file, as a sentence
    cpu.py         how it runs on CPUs
    gpu.py         how it runs on GPUs

and each of the last two is a Form:

    refuse(conv, target, stats)    None, or the sentence that says which property it cannot take
    configs(conv, target, stats)   points of its search space, likely winners first
    pack(weight, conv, config)     weight -> Packed; sees no image size
    unpack(packed, conv)           Packed -> weight: pack's own proof; raises InvalidFile on a damaged Packed
    check(packed, conv)            on a CPU: raises InvalidFile unless kernels stay within their memory
    build(packed, conv, config, ...)   what runs: Kernels or a LibraryCall on a CPU, Launches on a GPU
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Protocol, cast

from aerogel.codegen.cpu.abi import Kernel, LibraryCall
from aerogel.errors import InvalidArgument
from aerogel.ir import ALONE, Array, Config, Conv, Layout, Packed, Place, Pool, Stats
from aerogel.methods.absent import Absent

METHODS = (
    "dense",
    "direct",
    "stridepack",
    "baked",
    "tilewise",
    "blockgemm",
    "actsparse",
    "semistructured",
    "quads",
    "depthwise",
)
BASELINE = METHODS[0]
"""Whom all others are compared with: the strongest dense convolution there is."""


class Method(Protocol):
    """A method's folder: what people and the tuner are told of it."""

    NAME: str
    PAPER: str
    SUMMARY: str
    SKIPS_INPUT: bool
    RANK: int | None
    DEMANDS: str | None
    ROUNDING: str | None
    NOT_ON: Mapping[str, str]


class Form(Protocol):
    """How a method runs on one kind of machine: what the tuner knows of it."""

    NAME: str

    def refuse(self, conv: Conv, target: Any, stats: Stats) -> str | None: ...
    def configs(self, conv: Conv, target: Any, stats: Stats) -> Iterator[Config]: ...
    def pack(self, weight: Array, conv: Conv, config: Config) -> Packed: ...
    def unpack(self, packed: Packed, conv: Conv) -> Array: ...


class CpuForm(Form, Protocol):
    """`check` raises unless a weight from a file is such that kernels stay within their memory. `layouts`
    says what would be read and written where maps stand at least so wide. `build` gives kernels that run one
    after another; with `rows` one that computes only so many rows of the output, from wherever its x points.
    """

    def check(self, packed: Packed, conv: Conv) -> None: ...
    def layouts(
        self,
        conv: Conv,
        config: Config,
        target: Any,
        place: Place = ALONE,
    ) -> tuple[Layout, Layout]: ...
    def pixels(self, conv: Conv, config: Config, target: Any, pitch: int, rows: int) -> int: ...
    def build(
        self,
        packed: Packed,
        conv: Conv,
        config: Config,
        target: Any,
        reads: Layout,
        writes: Layout,
        rows: int | None = None,
    ) -> list[Kernel] | LibraryCall: ...


class GpuForm(Form, Protocol):
    """`layout` is that of x, y and the residual: "contiguous" (n, c, h, w) or "channels_last". `build` gives
    Launches or TritonLaunches; with `pool`, where the configuration takes it, the result is pooled."""

    def layout(self, config: Config) -> str: ...
    def takes_pool(self, conv: Conv, config: Config, pool: Pool) -> bool: ...
    def build(self, packed: Packed, conv: Conv, config: Config, pool: Pool | None = None) -> list[Any]: ...


def _room(name: str, part: str = "") -> Any:
    """A method's folder or a file of it. Names come from files too: no other module is ever imported."""
    if name not in METHODS:
        raise InvalidArgument(f"'{name[:80]}' is no method: {', '.join(METHODS)} are")
    return import_module(f"aerogel.methods.{name}{part}")


def method(name: str) -> Method:
    return cast(Method, _room(name))


def demands(config: Config) -> int:
    """What a configuration asks of all maps of its image size; 0 for nothing."""
    return config.get(method(config.method).DEMANDS or "", 0)


def rounding(config: Config) -> tuple[str, int]:
    """What configurations that round alike have in common."""
    return config.method, config.get(method(config.method).ROUNDING or "", 0)


def ranked() -> list[str]:
    """Methods in the order in which the rule asks them."""
    known = ((method(name).RANK, name) for name in METHODS)
    return [name for _, name in sorted((rank, name) for rank, name in known if rank is not None)]


def cpu_form(name: str) -> CpuForm:
    """Loaded when asked for, so that kernels of ours need no torch."""
    return cast(CpuForm, _form(name, "cpu"))


def gpu_form(name: str) -> GpuForm:
    return cast(GpuForm, _form(name, "gpu"))


def _form(name: str, kind: str) -> Any:
    why = method(name).NOT_ON.get(kind)
    return _room(name, f".{kind}") if why is None else Absent(name, why)
