"""Guards: what must be true of the sizes of a call for a captured graph to be its answer.

A model's Python may look at sizes (`if x.shape[2] % 2: pad`), and a graph holds only the side that the
example took. torch.export says which comparisons it went by; they are kept as expressions and checked on each
call.

    17, 0.5         a number
    "s53"           an open size, by the name it has in Captured.sizes
    ("mod", "s53", 2), ("le", "s0", ("add", "s53", 1))      an operation of OPS on such

An expression is data: it travels in files as lists, and reading one checks every part of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any, cast

from aerogel.errors import InvalidFile

Expression = int | float | str | tuple[Any, ...]

OPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "add": (" + ", lambda *v: sum(v)),
    "mul": (" * ", lambda *v: math.prod(v)),
    "floordiv": (" // ", operator.floordiv),
    "truediv": (" / ", operator.truediv),
    "mod": (" % ", operator.mod),
    "min": (", ", min),
    "max": (", ", max),
    "floor": ("", math.floor),
    "ceil": ("", math.ceil),
    "trunc": ("", math.trunc),
    "eq": (" == ", operator.eq),
    "ne": (" != ", operator.ne),
    "lt": (" < ", operator.lt),
    "le": (" <= ", operator.le),
    "and": (" and ", lambda *v: all(v)),
    "or": (" or ", lambda *v: any(v)),
    "not": ("not ", operator.not_),
}
"""What an expression may compute: how it is written, and the function."""

_PARTS = {
    "floordiv": 2,
    "truediv": 2,
    "mod": 2,
    "eq": 2,
    "ne": 2,
    "lt": 2,
    "le": 2,
    "floor": 1,
    "ceil": 1,
    "trunc": 1,
    "not": 1,
}
LARGEST = 2**31
MOST_PARTS = 2000
"""Bounds on what a file may ask for: numbers, and operations in one expression."""


def evaluate(expression: Expression, sizes: Mapping[str, int]) -> Any:
    """The value of an expression for these sizes."""
    if isinstance(expression, str):
        return sizes[expression]
    if not isinstance(expression, tuple):
        return expression
    return OPS[expression[0]][1](*(evaluate(part, sizes) for part in expression[1:]))


def holds(guard: Expression, sizes: Mapping[str, int]) -> bool:
    """Whether a guard is true of these sizes. What cannot be computed (a division by a size of zero) is
    not."""
    try:
        return bool(evaluate(guard, sizes))
    except (ArithmeticError, KeyError):
        return False


def words(expression: Expression, names: Mapping[str, str]) -> str:
    """An expression as people write it, sizes by the names they have in `names`."""
    if isinstance(expression, str):
        return names.get(expression, expression)
    if not isinstance(expression, tuple):
        return str(expression)
    parts = [words(part, names) for part in expression[1:]]
    sign = OPS[expression[0]][0]
    if expression[0] in ("min", "max", "floor", "ceil", "trunc"):
        return f"{expression[0]}({', '.join(parts)})"
    nested = [
        f"({p})" if isinstance(e, tuple) and len(e) > 2 else p
        for e, p in zip(expression[1:], parts, strict=True)
    ]
    return sign + nested[0] if len(nested) == 1 else sign.join(nested)


def names_in(expression: Expression) -> Iterator[str]:
    """The open sizes an expression uses."""
    if isinstance(expression, str):
        yield expression
    elif isinstance(expression, tuple):
        for part in expression[1:]:
            yield from names_in(part)


def to_json(expression: Expression) -> Any:
    return [expression[0], *map(to_json, expression[1:])] if isinstance(expression, tuple) else expression


def from_json(raw: Any, known: frozenset[str]) -> Expression:
    """The inverse of `to_json`, for sizes of these names. Any damage is an InvalidFile."""
    count = [0]

    def part(raw: Any) -> Expression:
        count[0] += 1
        if count[0] > MOST_PARTS:
            raise InvalidFile("a guard of too many parts")
        if isinstance(raw, str) and raw in known:
            return raw
        if type(raw) in (int, float) and -LARGEST < raw < LARGEST:
            return cast(Expression, raw)
        if isinstance(raw, list) and len(raw) > 1 and isinstance(raw[0], str) and raw[0] in OPS:
            if len(raw) - 1 != _PARTS.get(raw[0], len(raw) - 1):
                raise InvalidFile(f"'{raw[0]}' in a guard takes {_PARTS[raw[0]]} parts, not {len(raw) - 1}")
            return (raw[0], *map(part, raw[1:]))
        raise InvalidFile(f"'{str(raw)[:80]}' is no guard")

    return part(raw)


def from_sympy(expression: Any) -> Expression | None:
    """torch.export's own form, or None where it holds something that has no place here."""
    import sympy

    if expression is sympy.true or expression is sympy.false:
        return ("eq", 0, 0 if expression is sympy.true else 1)
    if isinstance(expression, sympy.Symbol):
        return str(expression.name)
    if isinstance(expression, sympy.Integer):
        return int(expression) if abs(int(expression)) < LARGEST else None
    if isinstance(expression, sympy.Rational):
        return ("truediv", int(expression.p), int(expression.q))
    if isinstance(expression, sympy.Float):
        return float(expression) if abs(float(expression)) < LARGEST else None
    parts = [from_sympy(part) for part in expression.args]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not parts:
        return None
    name = type(expression).__name__
    if name == "Pow" and isinstance(known[1], int) and 1 <= known[1] <= 4:
        return ("mul", *[known[0]] * known[1])
    if name in ("GreaterThan", "StrictGreaterThan"):
        return (_SYMPY[name], known[1], known[0])
    if name in ("Identity", "ToFloat"):
        return known[0]
    if name == "Xor":
        return reduce(lambda a, b: ("ne", ("not", a), ("not", b)), known)
    if name not in _SYMPY or len(known) != _PARTS.get(_SYMPY[name], len(known)):
        return None
    return (_SYMPY[name], *known)


_SYMPY = {
    "Add": "add",
    "Mul": "mul",
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "Mod": "mod",
    "PythonMod": "mod",
    "Min": "min",
    "Max": "max",
    "floor": "floor",
    "FloorToInt": "floor",
    "CeilToInt": "ceil",
    "ceiling": "ceil",
    "TruncToInt": "trunc",
    "IntTrueDiv": "truediv",
    "FloatTrueDiv": "truediv",
    "Equality": "eq",
    "Unequality": "ne",
    "LessThan": "le",
    "StrictLessThan": "lt",
    "GreaterThan": "le",
    "StrictGreaterThan": "lt",
    "And": "and",
    "Or": "or",
    "Not": "not",
}
"""sympy's and torch's classes by the operation they are."""
