"""Guards: what must be true of the sizes of a call."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch

from aerogel.capture import interpret
from aerogel.errors import InvalidFile
from aerogel.ir import guards

H, W = sympy.symbols("h w", integer=True, positive=True)
KNOWN = frozenset({"h", "w"})


@pytest.mark.parametrize(
    ("expression", "true", "false", "words"),
    [
        (sympy.Eq(sympy.Mod(H, 2), 0), (4, 1), (5, 1), "(x.shape[2] % 2) == 0"),
        (sympy.Le(W, H + 1), (4, 5), (4, 6), "w <= (1 + x.shape[2])"),
        (sympy.And(H > 3, sympy.Or(W < 2, sympy.Ne(W, 8))), (4, 1), (4, 8), None),
        (sympy.Not(sympy.Eq(H * W, 12)), (4, 1), (4, 3), None),
        (sympy.Ge(sympy.Max(H, W**2), 9), (1, 3), (8, 2), None),
        (sympy.Eq(sympy.floor(H / 2), 2), (5, 1), (6, 1), None),
        (sympy.Lt(H * 1.5, 8), (5, 1), (6, 1), None),
    ],
)
def test_sympys_form_and_back(
    expression: Any, true: tuple[int, int], false: tuple[int, int], words: str | None
) -> None:
    guard = guards.from_sympy(expression)
    assert guard is not None
    assert guards.holds(guard, {"h": true[0], "w": true[1]})
    assert not guards.holds(guard, {"h": false[0], "w": false[1]})
    assert guards.from_json(guards.to_json(guard), KNOWN) == guard
    assert set(guards.names_in(guard)) <= KNOWN
    assert words is None or guards.words(guard, {"h": "x.shape[2]"}) == words


def test_what_has_no_place_is_none() -> None:
    assert guards.from_sympy(sympy.Function("other")(H) > 3) is None
    assert guards.from_sympy(sympy.Eq(H**9, 3)) is None
    assert not guards.holds(("eq", ("mod", "h", "w"), 0), {"h": 4, "w": 0}), "a division by zero is not true"


@pytest.mark.parametrize(
    "raw",
    [
        "n", True, None, {}, [], ["eq"], ["eq", 1], ["eq", 1, 2, 3], ["pow", 2, 3], ["mod", "h"], 2**31,
        ["lt", "h", 2**40], ["eq", "h", "__class__"], [["eq"], 1, 2], ["and", *[["lt", "h", 3]] * 1000],
        float("nan"), float("inf"),
    ],
    ids=lambda raw: str(raw)[:30],
)  # fmt: skip
def test_hostile_guards_are_refused(raw: Any) -> None:
    with pytest.raises(InvalidFile):
        guards.from_json(raw, KNOWN)


def test_a_value_larger_than_memory_is_no_model() -> None:
    with pytest.raises(InvalidFile, match="would take"):
        interpret.fits("huge", [torch.empty(2**45, device="meta")])
    interpret.fits("small", torch.empty(2**10, device="meta"))
