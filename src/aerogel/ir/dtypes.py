"""Element types: their names, sizes and numpy's word for them. torch's are in `tensors`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from aerogel.errors import InvalidFile

ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
NUMPY: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
}
"""bf16 has no numpy type: it travels as its 16 bits."""


@dataclass(frozen=True)
class Dtypes:
    """Element types: of the input, the weights, the sums inside a block of channels, and the output.

    Sums between blocks and the epilogue are always f32.
    """

    input: str = "f32"
    weight: str = "f32"
    accumulator: str = "f32"
    output: str = "f32"

    def __post_init__(self) -> None:
        for name in (self.input, self.weight, self.accumulator, self.output):
            if name not in ITEM_BYTES:
                raise InvalidFile(f"element type '{name}' is unknown; known are {', '.join(ITEM_BYTES)}")

    def __str__(self) -> str:
        four = (self.input, self.weight, self.accumulator, self.output)
        if self == Dtypes.of(self.input):
            return self.input
        return ".".join(four)

    @staticmethod
    def of(name: str) -> Dtypes:
        """All storage in `name`, sums in f32."""
        return Dtypes(name, name, "f32", name)

    @staticmethod
    def parse(text: str) -> Dtypes:
        names = text.split(".")
        if len(names) == 1:
            return Dtypes.of(names[0])
        if len(names) == 4:
            return Dtypes(*names)
        raise InvalidFile(f"'{text}' is not an element type or four of them joined by dots")


F32 = Dtypes()
