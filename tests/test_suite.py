"""The shared suite, in pieces that run side by side. A new method or ISA joins by being listed; nothing here changes."""

from __future__ import annotations

import pytest

from aerogel.methods import METHODS
from aerogel.target import here_levels
from aerogel.tune.search import SKIPPING
from tests.suite.cases import edges
from tests.suite.sweep import LIBRARY, sweep

PIECE = 500
COUNTS = {
    "exact": 20_000,
    "real": 20_000,
    "edges": 3_000,
    "special": 2_000,
    "half": 2_000,
    "half-edges": 2_000,
    "half-special": 1_000,
}
LIBRARY_COUNTS = {"exact": 20_000}
IDLE_COUNTS = {"idle": 2_000, "idle-special": 1_000}
"""For methods that look at what x holds."""
FEWER = {"tilewise": 0.25, "blockgemm": 0.1, "actsparse": 0.15}
"""For CI's sake: what tiles leave over is `direct`'s own code, and blockgemm's format and kernel are tilewise's."""
THREADED = 1_000


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "piece" not in metafunc.fixturenames:
        return
    config = metafunc.config
    scale = 0.02 if config.getoption("--quick") else 10 if config.getoption("--nightly") else 1
    cases: list[tuple[str, str, range, tuple[int, ...]]] = []
    for name in METHODS:
        counts = LIBRARY_COUNTS if name in LIBRARY else COUNTS | IDLE_COUNTS if name in SKIPPING else COUNTS
        for kind, count in counts.items():
            wanted = max(1, int(count * scale * (1 if kind in IDLE_COUNTS else FEWER.get(name, 1))))
            cases += [(name, kind, range(s, min(s + PIECE, wanted)), (1,)) for s in range(0, wanted, PIECE)]
        if name not in LIBRARY:
            wanted = max(1, int(THREADED * scale * FEWER.get(name, 1)))
            cases += [(name, "real", range(s, min(s + 250, wanted)), (1, 2, 3, 8)) for s in range(0, wanted, 250)]
    ids = [f"{n}-{k}-{'x'.join(map(str, t))}-{s.start}" for n, k, s, t in cases]
    metafunc.parametrize(("name", "kind", "piece", "threads"), cases, ids=ids)


def test_suite(name: str, kind: str, piece: range, threads: tuple[int, ...]) -> None:
    done = sweep(name, kind, piece, threads)
    assert not done.failures, "\n" + "\n".join(done.failures)
    assert done.ran > 0
    if not kind.startswith("half"):
        levels = here_levels()[:1] if name in LIBRARY else here_levels()
        assert done.refused == 0
        assert done.by_isa == dict.fromkeys(levels, len(piece)), "every case ran on every ISA"


def test_edges_cover_all_pairs() -> None:
    """The count of edge cases is at least the cover, so every pair of awkward values is met."""
    assert 1_000 <= len(edges()) <= COUNTS["edges"]
