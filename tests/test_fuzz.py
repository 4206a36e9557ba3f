"""Random whole networks against float64 eager (tests/fuzz): none wrong, no untyped error, few refused, most
in one graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("onnxruntime")

from tests import counts
from tests.fuzz.judge import Result
from tests.fuzz.networks import KINDS, Tally, run, spec

PIECES = 3
WHOLE = 0.7
"""Of a piece of CI's: 95 % is the share of the full count, and two of 23 features are state, which stays
torch's. A piece has some ten networks, so two of those in it are 78 %."""
ANSWERED = 0.97
"""The same for calls: a piece of CI has some 130, and one network that is refused is 2 % of them."""


@pytest.mark.parametrize("piece", range(PIECES))
def test_networks(piece: int, ran: Callable[[str, int], None]) -> None:
    """Each piece is judged in a child; every failure comes with the line that repeats it."""
    count = counts.count("fuzz networks", 1 / PIECES)
    ran("fuzz networks", count)
    tally = run(counts.first() + piece * count, count)
    assert len(tally.results) == count
    failures = [
        f"{kind}: {words}; python -m tests.fuzz.networks --seed {r['seed']} --count 1"
        for r, kind, words in tally.failed()
    ]
    assert not failures, "\n".join([*failures, tally.summary()])
    assert tally.answered >= (0.99 if counts.mode() == "nightly" else ANSWERED), tally.summary()
    assert tally.whole >= (0.95 if counts.mode() == "nightly" else WHOLE), tally.summary()


def test_every_feature_is_generated() -> None:
    """A run as long as CI's meets every feature, and the same seed gives the same text."""
    seen = {KINDS[seed % len(KINDS)] for seed in range(counts.FULL["fuzz networks"] // 20)}
    assert seen == set(KINDS)
    assert [spec(seed).source for seed in range(40)] == [spec(seed).source for seed in range(40)]


def test_a_failure_is_seen() -> None:
    """The tally names what failed, once for each kind, and leaves apart what may be refused."""
    one = Result(7, "aliases", how="graph", calls=4, right=3).json()
    one["failures"] = [("wrong", "call 1"), ("wrong", "call 2"), ("follows", "call 2 again")]
    two = {**one, "how": "parts", "refused": ["ShapeError: no"], "failures": [("untyped", "KeyError: 3")]}
    tally = Tally([one, two])
    assert [(kind, words) for _, kind, words in tally.failed()] == [
        ("wrong", "call 1"),
        ("untyped", "KeyError: 3"),
    ]
    assert (tally.answered, tally.whole) == (1 - 1 / 8, 0.5)
