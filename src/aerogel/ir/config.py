"""`Config`: one point of a method's search space. `Packed`: a weight as a method stores it.
`Weight`: a layer's weight with what was packed of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from aerogel.errors import InvalidArgument, PlanMismatch
from aerogel.ir.conv import Conv
from aerogel.ir.dtypes import Array
from aerogel.ir.stats import Stats

_CONFIG = re.compile(r"([a-z_]+)(?:/((?:[a-z_]+=\d+)(?:,[a-z_]+=\d+)*))?")


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

    def get(self, name: str, otherwise: int) -> int:
        """Of an option that earlier versions did not have."""
        return dict(self.options).get(name, otherwise)

    def __str__(self) -> str:
        return self.method + ("/" if self.options else "") + ",".join(f"{n}={v}" for n, v in self.options)

    @staticmethod
    def parse(text: str) -> Config:
        """The inverse of `str`."""
        m = _CONFIG.fullmatch(text)
        if m is None:
            raise InvalidArgument(
                f"'{text[:200]}' is not a configuration; one looks like direct/channels=64,vectors=7"
            )
        pairs = (item.split("=") for item in (m[2] or "").split(",") if item)
        return Config.make(m[1], **{name: int(value) for name, value in pairs})


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight as a method stores it: named arrays and small whole numbers. It knows no image size and fits
    every one."""

    format: str
    version: int
    arrays: Mapping[str, Array]
    meta: Mapping[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())


class Weight:
    """A layer's weight, packed when a configuration first asks for it: tuning, running and every image size
    share what was packed. Where kernels have all they need, the array itself is let go; whoever asks for it
    then has it unpacked again, for as long as it is held."""

    def __init__(self, array: Array) -> None:
        self._array: Array | None = array
        self._packed = dict[Config, Packed]()
        self._unpack: Callable[[], Array] | None = None
        self._stats: Stats | None = None

    @staticmethod
    def of(unpack: Callable[[], Array], stats: Stats) -> Weight:
        """A weight that is not there, with what is known of it; `unpack` gives it."""
        made = Weight.__new__(Weight)
        made._array, made._packed, made._unpack, made._stats = None, {}, unpack, stats
        return made

    @property
    def array(self) -> Array:
        held = self._array
        if held is not None:
            return held
        assert self._unpack is not None
        return self._unpack()

    @property
    def held(self) -> bool:
        """Whether the array is there, and not only what was packed of it."""
        return self._array is not None

    def let_go(self, unpack: Callable[[], Array]) -> None:
        """Forget the array; `unpack` gives it again."""
        self._unpack = unpack
        self._array = None

    @property
    def stats(self) -> Stats:
        if self._stats is None:
            self._stats = Stats.of(self.array)
        return self._stats

    def packed(self, pack: Callable[[Array, Conv, Config], Packed], conv: Conv, config: Config) -> Packed:
        if config not in self._packed:
            self._packed[config] = pack(self.array, conv, config)
        return self._packed[config]

    def arrays(self) -> list[Array]:
        """Return every array of what was packed."""
        return [array for packed in list(self._packed.values()) for array in packed.arrays.values()]

    def have(self, config: Config, packed: Packed) -> None:
        """Packed already, as in a file."""
        self._packed[config] = packed

    def keep(self, configs: Collection[Config]) -> None:
        """Forget what was packed for others."""
        self._packed = {config: packed for config, packed in self._packed.items() if config in configs}
