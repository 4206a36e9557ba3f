"""`Config`: one point of a method's search space. `Packed`: a weight as a method stores it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from aerogel.errors import InvalidArgument, PlanMismatch
from aerogel.ir.dtypes import Array

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
