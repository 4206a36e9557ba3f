"""Whole numbers that depend on open sizes, with the arithmetic ONNX does on them while a file is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aerogel.capture.onnx.expressions import Expression, joined

if TYPE_CHECKING:
    from aerogel.capture.onnx.values import Reader

Operator = Callable[[Any, Any], Any]
ROUNDS = ("add", "sub", "mul", "truediv")
"""Arithmetic that rounds in float32."""


def _operator(op: str) -> tuple[Operator, Operator]:
    """One of Python's operators, with the size on its left and on its right."""
    return lambda size, other: size._join(op, other), lambda size, other: size._join(op, other, swap=True)


class Size:
    """A whole number (or a quotient of some) that depends on open sizes: a node of the graph, and its value
    in both examples.

    `dtype` is what ONNX computes it in: sums, products and quotients of float32 are rounded to that. `least`:
    it is never smaller.
    """

    def __init__(
        self,
        reader: Reader,
        name: str,
        both: tuple[float, float],
        dtype: torch.dtype,
        least: float = -math.inf,
    ) -> None:
        self.reader, self.name, self.both, self.dtype, self.least = reader, name, both, dtype, least

    @property
    def expression(self) -> Expression:
        """What it is of the sizes of the inputs."""
        (found,) = self.reader.sized[self.name]
        assert found is not None
        return found

    def _join(self, op: str, *others: Any, swap: bool = False) -> Any:
        """A Size, or the number that it is at all sizes."""
        made = self.reader.size(op, *((*others, self) if swap else (self, *others)), dtype=self.dtype)
        number = made.expression.number
        if number is not None:
            return float(number) if self.dtype.is_floating_point else number
        return made._single() if self.dtype == torch.float32 and op in ROUNDS else made

    def _single(self) -> Size:
        """Rounded to 24 bits (Veltkamp's splitting), as float32 is and Python's numbers are not."""
        wide = self.reader.size("mul", self, 2.0**29 + 1, dtype=self.dtype)
        low = self.reader.size("sub", wide, self, dtype=self.dtype)
        single = self.reader.size("sub", wide, low, dtype=self.dtype)
        self.reader.sized[single.name] = self.reader.sized[self.name]
        return single

    __add__, __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("sub")
    __mul__, __rmul__ = _operator("mul")
    __mod__, __rmod__ = _operator("mod")
    __floordiv__, __rfloordiv__ = _operator("floordiv")
    __truediv__, __rtruediv__ = _operator("truediv")

    def __neg__(self) -> Any:
        return self._join("neg")

    def rounded(self, how: str) -> Any:
        """`how`: floor, ceil or trunc."""
        return self._join(how)

    def cast(self, dtype: torch.dtype) -> Any:
        """The same number in another type; fractions are cut off."""
        whole = (
            self.rounded("trunc") if self.dtype.is_floating_point and not dtype.is_floating_point else self
        )
        if not isinstance(whole, Size):
            return whole
        return Size(self.reader, whole.name, whole.both, dtype, whole.least)


def smaller(x: Any, y: Any) -> Any:
    """The smaller of two sizes."""
    return _either("min", x, y)


def larger(x: Any, y: Any) -> Any:
    """The larger of two sizes."""
    return _either("max", x, y)


def _either(op: str, x: Any, y: Any) -> Any:
    first = next((v for v in (x, y) if isinstance(v, Size)), None)
    if first is None:
        return min(x, y) if op == "min" else max(x, y)
    return first._join(op, y) if first is x else first._join(op, x, swap=True)


def divided(x: Any, y: Any) -> Any:
    """x / y in whole numbers, towards zero."""
    sizes = [v for v in (x, y) if isinstance(v, Size)]
    if any(s.dtype.is_floating_point for s in sizes) or (
        not sizes and any(isinstance(v, float | np.floating) for v in (x, y))
    ):
        return x / y
    if all((v.least if isinstance(v, Size) else v) >= 0 for v in (x, y)):
        return x // y
    if not sizes:
        return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
    return (x / y).rounded("trunc")


def array_of(values: Any, shape: tuple[int, ...] | None = None) -> Any:
    """Whole numbers as an array: of objects where some are Sizes."""
    values = list(values)
    if any(isinstance(v, Size) for v in values):
        made = np.empty(len(values), object)
        made[:] = values
    else:
        fractions = any(isinstance(v, float | np.floating) for v in values)
        made = np.array(values, np.float32 if fractions else np.int64)
    return made if shape is None else made.reshape(shape)


def least(op: str, args: tuple[Any, ...]) -> float:
    """A bound below what arithmetic on sizes gives."""
    low = [v.least if isinstance(v, Size) else v for v in args]
    if op in ("add", "min"):
        return float(sum(low) if op == "add" else min(low))
    if op == "max":
        return float(max(low))
    if op in ("mul", "floordiv", "truediv", "mod", "floor", "ceil", "trunc") and min(low) >= 0:
        return float(low[0] * low[1]) if op == "mul" else 0.0
    return -math.inf


def in_form(op: str, args: tuple[Any, ...], dtype: torch.dtype) -> Expression | None:
    """What arithmetic on sizes gives as an expression. In float32 only powers of two change nothing."""
    numbers = [v for v in args if not isinstance(v, Size)]
    if dtype == torch.float32 and op in ROUNDS:
        doubles = op in ("mul", "truediv") and all(math.frexp(v)[0] == 0.5 for v in numbers)
        if not doubles or (op == "truediv" and isinstance(args[-1], Size)):
            return None
    values = [v.expression if isinstance(v, Size) else v for v in args]
    return joined(op, values, min((v.least if isinstance(v, Size) else v) for v in args) >= 0)
