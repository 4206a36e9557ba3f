"""The form of a method on a kind of machine that it is not written for: it refuses every layer, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from aerogel.errors import InvalidFile
from aerogel.ir import Config, Conv, Pool, Stats


class Absent:
    """`why` is the sentence that explain shows."""

    def __init__(self, name: str, why: str) -> None:
        self.NAME, self.why = name, why

    def refuse(self, conv: Conv, target: Any, stats: Stats) -> str:
        return self.why

    def configs(self, conv: Conv, target: Any, stats: Stats) -> Iterator[Config]:
        return iter(())

    def layout(self, config: Config) -> str:
        return "contiguous"

    def takes_pool(self, conv: Conv, config: Config, pool: Pool) -> bool:
        return False

    def pack(self, *what: Any) -> NoReturn:
        """A file may name such a layer all the same."""
        raise InvalidFile(f"{self.NAME}: {self.why}")

    unpack = check = layouts = pixels = pack

    def build(self, *what: Any, **more: Any) -> NoReturn:
        self.pack()
