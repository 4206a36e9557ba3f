"""Slimmed.plot: every point has its label, and no label stands on another."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest

from aerogel.pruning.slimmed import LINE, Slimmed, Try, spread


def test_labels_move_as_little_as_they_must() -> None:
    assert spread([], 10) == []
    assert spread([30, 0, 15], 10) == [30, 0, 15]
    assert spread([5, 5], 10) == [0, 10]
    assert spread([100, 4, 2, 0], 10) == [100, 12, 2, -8]
    moved = spread([3, 50, 52, 1, 2, 55], 10)
    assert all(high - low >= 10 - 1e-9 for low, high in pairwise(sorted(moved)))


@pytest.mark.parametrize("chosen", [None, 2])
def test_labels_stand_apart(chosen: int | None) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib.text import Text

    rows = [
        (0.9, 0.62, 8.8),
        (0.8, 0.71, 11.5),
        (0.72, 0.758, 14.2),
        (0.76, 0.752, 12.7),
        (0.74, 0.757, 13.6),
    ]
    tries = tuple(Try(3, 3, zeros, score, 30 / ms, ms * 1e3, 1, {}) for zeros, score, ms in rows)
    nothing: Any = None
    ax = Slimmed(nothing, nothing, tries, chosen, 0.762, 3e4, 0.005, "").plot()
    ax.figure.draw_without_rendering()
    labels = [text for text in ax.texts if "zeros" in text.get_text()]
    assert labels[0].get_text() == "90% zeros, 3.4x"
    assert len(labels) == len(tries)
    lows = [Text.get_window_extent(text).y0 * 72 / ax.figure.dpi for text in labels]
    assert all(abs(a - b) > LINE - 1.5 for a, b in combinations(lows, 2))
    assert ax.get_title() == ("no step kept the score" if chosen is None else "green: the chosen one")
