"""Open sizes as sums in one normal form: two that are written alike are equal whatever the sizes are.

A residual is added to what a convolution gives only where both surely have the same sizes, and a file says
nothing of sizes inside it. So they are computed along: h + 2, (h - 1)//2 + 1, 3*c.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

Both = tuple[float, float]
"""A number in each of a reader's two examples."""


class Term(NamedTuple):
    """An open number times a factor. It is `whole` if it surely has no fraction."""

    times: Fraction
    both: Both
    whole: bool = True


@dataclass(frozen=True)
class Expression:
    """Open sizes times their factors, and a number. `both` is its value in the two examples."""

    terms: Mapping[str, Term]
    rest: Fraction = Fraction(0)

    @staticmethod
    def of(value: float) -> Expression:
        return Expression({}, Fraction(value))

    @staticmethod
    def open(name: str, both: Both, whole: bool = True) -> Expression:
        """A size, or with fractions a number, of which only this is known."""
        return Expression({name: Term(Fraction(1), both, whole)})

    @property
    def number(self) -> int | None:
        """The number that it is at all sizes."""
        return int(self.rest) if not self.terms and self.rest.denominator == 1 else None

    @property
    def whole(self) -> bool:
        """Whether it is a whole number because all of its parts are."""
        parts = all(t.whole and t.times.denominator == 1 for t in self.terms.values())
        return parts and self.rest.denominator == 1

    @property
    def both(self) -> Both:
        first, second = (
            float(self.rest + sum(t.times * Fraction(t.both[e]) for t in self.terms.values()))
            for e in range(2)
        )
        return first, second

    def __str__(self) -> str:
        parts = [name if t.times == 1 else f"{t.times}*{name}" for name, t in sorted(self.terms.items())]
        parts += [str(self.rest)] * bool(self.rest or not parts)
        return " + ".join(parts).replace("+ -", "- ")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __add__(self, other: Expression) -> Expression:
        terms = dict(self.terms)
        for name, term in other.terms.items():
            more = terms[name].times if name in terms else 0
            terms[name] = term._replace(times=term.times + more)
        return Expression({n: t for n, t in terms.items() if t.times}, self.rest + other.rest)

    def __sub__(self, other: Expression) -> Expression:
        return self + other.times(Fraction(-1))

    def times(self, factor: Fraction) -> Expression:
        terms = {name: t._replace(times=t.times * factor) for name, t in self.terms.items() if factor}
        return Expression(terms, self.rest * factor)

    def floor(self) -> Expression:
        """The largest whole number that is no larger; whole parts come out of it."""
        if self.whole:
            return self
        by = math.lcm(self.rest.denominator, *(t.times.denominator for t in self.terms.values()))
        out = {
            name: t._replace(times=Fraction(math.floor(t.times)))
            for name, t in self.terms.items()
            if t.whole and math.floor(t.times)
        }
        outside = Expression(out, Fraction(math.floor(self.rest)))
        inner = (self - outside).times(Fraction(by))
        first, second = (math.floor(v / by) for v in inner.both)
        rounded = Expression.open(f"({inner})//{by}", (first, second))
        return outside + rounded if inner.terms else outside


def joined(op: str, values: list[Any], nonnegative: bool) -> Expression | None:
    """What arithmetic on sizes gives, or None where it has no such form. `nonnegative`: none of the values is
    below zero."""
    if not all(isinstance(v, Expression) or math.isfinite(v) for v in values):
        return None
    found = [v if isinstance(v, Expression) else Expression.of(v) for v in values]
    if op == "add":
        return found[0] + found[1]
    if op == "sub":
        return found[0] - found[1]
    if op == "neg":
        return found[0].times(Fraction(-1))
    if op == "mul":
        constant, other = sorted(found, key=lambda e: bool(e.terms))
        return None if constant.terms or not _exact(constant.rest) else other.times(constant.rest)
    if op in ("truediv", "floordiv"):
        if found[1].terms or found[1].rest <= 0 or not _exact(found[1].rest):
            return None
        quotient = found[0].times(1 / found[1].rest)
        return quotient if op == "truediv" else quotient.floor()
    if op == "floor" or (op in ("ceil", "trunc") and found[0].whole) or (op == "trunc" and nonnegative):
        return found[0].floor()
    if op == "ceil":
        return found[0].times(Fraction(-1)).floor().times(Fraction(-1))
    return None


def _exact(factor: Fraction) -> bool:
    """Whether sizes times this, or divided by it, lose nothing in Python's numbers."""
    return factor.denominator * abs(factor.numerator) <= 1 << 20
