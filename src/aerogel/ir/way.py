"""`Way`: who answers the calls of a compiled module."""

from __future__ import annotations

from dataclasses import dataclass

from aerogel.errors import InvalidArgument

LAYOUTS = ("contiguous", "channels_last")


@dataclass(frozen=True)
class Way:
    """`by` is "graph" (the network under its plan), "parts" (torch, with parts of the model compiled) or
    "torch", which runs the model in one of its layouts and, with `dtype`, a copy in that element type."""

    by: str
    layout: str = LAYOUTS[0]
    dtype: str = ""

    def __str__(self) -> str:
        return f"{self.layout} {self.dtype}".rstrip() if self.by == "torch" else self.by

    @staticmethod
    def parse(text: str) -> Way:
        if text in ("graph", "parts"):
            return Way(text)
        layout, _, dtype = text.partition(" ")
        if layout not in LAYOUTS:
            raise InvalidArgument(f"'{text[:80]}' is no way to run a model")
        return Way("torch", layout, dtype)


GRAPH, PARTS, EAGER = Way("graph"), Way("parts"), Way("torch")
