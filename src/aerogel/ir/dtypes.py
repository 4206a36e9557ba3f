"""Element types: what is known of each, and numbers as stored elements. torch's own are in `tensors`.

Floats are numbers as they stand. Integers are quantised numbers: what they mean is said beside them
(quantized.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aerogel.errors import InvalidArgument

Array = NDArray[Any]


@dataclass(frozen=True)
class Element:
    """An element type: numpy's type of it (bf16 has none and travels as its 16 bits), torch's and Triton's
    names, half the distance from 1 to the next number, the smallest number above zero."""

    numpy: np.dtype[Any]
    torch: str
    triton: str
    unit: float
    tiny: float


ELEMENTS = {
    "f32": Element(np.dtype(np.float32), "float32", "fp32", 2.0**-24, 2.0**-149),
    "f16": Element(np.dtype(np.float16), "float16", "fp16", 2.0**-11, 2.0**-24),
    "bf16": Element(np.dtype(np.uint16), "bfloat16", "bf16", 2.0**-8, 2.0**-133),
}
INTEGERS: dict[str, np.dtype[Any]] = {
    "u8": np.dtype(np.uint8),
    "s8": np.dtype(np.int8),
    "s32": np.dtype(np.int32),
}
NUMPY: dict[str, np.dtype[Any]] = {name: element.numpy for name, element in ELEMENTS.items()} | INTEGERS
ITEM_BYTES = {name: dtype.itemsize for name, dtype in NUMPY.items()}


def to_float64(array: Array, dtype: str) -> NDArray[np.float64]:
    """Stored elements as numbers."""
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def from_float64(array: Array, dtype: str) -> Array:
    """Numbers as stored elements, to nearest even; what is too large is infinite, or the largest integer."""
    if dtype in INTEGERS:
        limits = np.iinfo(INTEGERS[dtype])
        return np.clip(np.rint(array), limits.min, limits.max).astype(INTEGERS[dtype])
    with np.errstate(over="ignore"):
        if dtype != "bf16":
            return array.astype(NUMPY[dtype])
        bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def nonzero(array: Array, dtype: str) -> NDArray[np.bool_]:
    """Which stored elements are not zero, minus zero among the zeros."""
    return np.asarray((array & 0x7FFF if dtype == "bf16" else array) != 0)


_INT8 = ("u8", "s8", "s32", "u8")


@dataclass(frozen=True)
class Dtypes:
    """Element types: of the input, the weights, the sums inside a block of channels, and the output.

    Sums between blocks and the epilogue are f32; in INT8, whose text is "int8", sums are s32.
    """

    input: str = "f32"
    weight: str = "f32"
    accumulator: str = "f32"
    output: str = "f32"

    def __post_init__(self) -> None:
        for name in (self.input, self.weight, self.accumulator, self.output):
            if name not in ITEM_BYTES:
                raise InvalidArgument(f"element type '{name}' is unknown; known are {', '.join(ITEM_BYTES)}")
        four = (self.input, self.weight, self.accumulator, self.output)
        if set(four) & set(INTEGERS) and four != _INT8:
            raise InvalidArgument(f"integers go together as {'.'.join(_INT8)}, not as {'.'.join(four)}")

    def __str__(self) -> str:
        four = (self.input, self.weight, self.accumulator, self.output)
        if four == _INT8:
            return "int8"
        if four == (self.input, self.input, "f32", self.input):
            return self.input
        return ".".join(four)

    @staticmethod
    def of(name: str) -> Dtypes:
        """All storage in `name`, sums in f32."""
        return Dtypes(name, name, "f32", name)

    @staticmethod
    def parse(text: str) -> Dtypes:
        names = text.split(".") if text != "int8" else list(_INT8)
        if len(names) == 1:
            return Dtypes.of(names[0])
        if len(names) == 4:
            return Dtypes(*names)
        raise InvalidArgument(f"'{text}' is not an element type or four of them joined by dots")


F32 = Dtypes()
INT8 = Dtypes(*_INT8)


_SPELLINGS = {
    "float16": ["fp16", "f16", "half", "float16", "16"],
    "bfloat16": ["bf16", "bfloat", "bfloat16"],
    "int8": ["i8", "s8", "u8", "int8", "uint8", "qint8", "quint8", "8"],
    "": [
        "fp32",
        "f32",
        "float32",
        "float",
        "single",
        "full",
        "none",
        "32",
        "fp64",
        "f64",
        "float64",
        "double",
    ],
}
"""What people call a precision elsewhere; "" is the model's own."""


def suggest_precision(dtype: object) -> str:
    """Return what was probably meant by a precision that is not accepted, as a question, or ""."""
    text = str(getattr(dtype, "__name__", dtype)).lower().rpartition(".")[2].replace("_", "").replace("-", "")
    name = next((name for name, spellings in _SPELLINGS.items() if text in spellings), None)
    if name is None:
        return ""
    return f'Did you mean "{name}"?' if name else "Leave dtype out to keep the model's own precision."
