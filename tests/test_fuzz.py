"""Random whole networks against float64 eager (tests/fuzz): none wrong, no untyped error, few refused, most
in one graph.

By day the networks are those of `seeds.json`, and what comes of each is written beside its seed: a share of
so few would rise and fall with the draw. A change that compiles more of them whole changes that file. A night
draws others and looks at shares.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("onnxruntime")

from tests import counts
from tests.fuzz.judge import Result
from tests.fuzz.networks import KINDS, Tally, judged, outcome, spec

PIECES = 3
MIN_WHOLE = 0.95
"""Share of a night's networks that compile into one graph: two of 23 features are state, which is torch's."""
MIN_ANSWERED = 0.99
"""Share of a night's calls that are not refused."""
BY_DAY: dict[str, str] = counts.FIXED["networks"]


@pytest.mark.parametrize("piece", range(PIECES))
def test_networks(piece: int, ran: Callable[[str, int], None]) -> None:
    """Each piece is judged in a child; every failure comes with the line that repeats it."""
    count = counts.count("fuzz networks", 1 / PIECES)
    night = counts.mode() == "nightly"
    start = counts.first() + piece * count
    seeds = list(range(start, start + count)) if night else [int(seed) for seed in BY_DAY][piece::PIECES]
    ran("fuzz networks", len(seeds))
    tally = Tally(list(judged(seeds)))
    assert len(tally.results) == len(seeds)
    failures = [
        f"{kind}: {words}; python -m tests.fuzz.networks --seed {r['seed']} --count 1"
        for r, kind, words in tally.failed()
    ]
    assert not failures, "\n".join([*failures, tally.summary()])
    if night:
        assert tally.answered >= MIN_ANSWERED, tally.summary()
        assert tally.whole >= MIN_WHOLE, tally.summary()
    else:
        assert {str(r["seed"]): outcome(r) for r in tally.results} == {str(s): BY_DAY[str(s)] for s in seeds}


def test_a_days_networks_have_every_feature() -> None:
    assert len(BY_DAY) == counts.CI["fuzz networks"]
    assert {KINDS[int(seed) % len(KINDS)] for seed in BY_DAY} == set(KINDS)


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
