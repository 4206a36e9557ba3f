"""The shared suite, in pieces that run side by side. A new method or ISA joins by being listed; nothing here
changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aerogel.methods import METHODS, method
from tests import counts
from tests.suite import cases
from tests.suite.cases import case, edges
from tests.suite.sweep import BYTES, LIBRARY, ON_GPUS, ONE_ISA, levels, sweep

PIECE = 500
KINDS = ("exact", "real", "edges", "special", "half", "half-edges", "half-special")
IDLE = ("idle", "idle-special")
"""For methods that look at what x holds."""
KINDS_OF = {"quads": cases.BYTES, "depthwise": cases.DEPTHWISE}
THREADS = (1, 2, 3, 8)

Piece = tuple[str, str, range, tuple[int, ...]]


def pieces() -> dict[str, Piece]:
    """Method, kind, seeds and thread counts, under a name that does not change with the seed.

    Each method goes on where the one before it ends, so that in any run they meet every row of the pairwise
    cover between them.
    """
    found: dict[str, Piece] = {}
    for number, name in enumerate(name for name in METHODS if name not in ON_GPUS):
        kinds = ("exact",) if name in LIBRARY else KINDS + (IDLE if method(name).SKIPS_INPUT else ())
        kinds = tuple(kind for kind in kinds if name not in ONE_ISA or not kind.startswith("half"))
        kinds = KINDS_OF.get(name, kinds)
        wanted: list[tuple[str, str, tuple[int, ...], int]] = [(kind, kind, (1,), PIECE) for kind in kinds]
        real = kinds[0] if name in BYTES else "real"
        wanted += [("threads", real, THREADS, PIECE // 2)] if name not in LIBRARY else []
        for what, kind, threads, size in wanted:
            seeds = counts.seeds(what, skip=number * counts.count(what))
            for i in range(0, len(seeds), size):
                found[f"{name}-{what}-{i}"] = name, kind, seeds[i : i + size], threads
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "piece" in metafunc.fixturenames:
        found = pieces()
        metafunc.parametrize(("name", "kind", "piece", "threads"), list(found.values()), ids=list(found))


def test_suite(
    name: str, kind: str, piece: range, threads: tuple[int, ...], ran: Callable[[str, int], None]
) -> None:
    ran(f"{'threads' if len(threads) > 1 else kind}: {name}", len(piece))
    done = sweep(name, kind, piece, threads, few=counts.mode() == "ci")
    assert not done.failures, "\n" + "\n".join(done.failures)
    assert done.ran > 0 or not levels(name)
    if not kind.startswith("half"):
        assert done.refused == 0
        # two thirds of all edge cases, and up to 73 % of 300 in a row, have fewer filters than baked takes
        assert done.few < 0.75 * len(piece)
        many = len(piece) - done.few
        assert done.by_isa == dict.fromkeys(levels(name), many), "every case ran on every ISA"


def test_edges_cover_all_pairs() -> None:
    """The full count of edge cases is at least the cover, so a night meets every pair of awkward values with
    each method; a plain run meets every pair with some method."""
    assert 1_000 <= len(edges()) <= counts.FULL["edges"]
    if counts.mode() != "quick":
        met = {
            seed % len(edges())
            for _, kind, seeds, _ in pieces().values()
            if kind == "edges"
            for seed in seeds
        }
        assert met == set(range(len(edges())))


def test_another_seed_is_other_cases() -> None:
    """Of the same kinds: shapes, weights and, where code depends on them, families differ from seed to
    seed."""
    here, there = (range(first, first + 40) for first in (3 * counts.APART, 4 * counts.APART))
    for kind, families in (("exact", 0), ("exact", 40), ("edges", 0), ("half", 12)):
        convs = [{str(case(kind, seed, families).conv.layer()) for seed in seeds} for seeds in (here, there)]
        assert len(convs[0] & convs[1]) <= 4, kind
