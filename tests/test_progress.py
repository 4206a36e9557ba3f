"""Progress: what it says, where it says it, and how long it thinks it will take."""

from __future__ import annotations

import io
import logging
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

import aerogel
from aerogel import progress
from aerogel.progress import Progress, shown


class Clock:
    """Time that a test moves."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    own = Clock()
    monkeypatch.setattr(progress, "time", own)
    return own


def test_time_left_goes_by_the_pace_so_far(clock: Clock) -> None:
    line = Progress()
    line.begin("reading the model", 0.1)
    assert line.left() is None, "nothing is done yet"
    line.begin("timing layers", 0.5)
    clock.now += 31
    line.step("layer", 3, 5, "layer2.0.conv1")
    # two fifths of a half took 31 s, and 0.7 of the whole are left
    assert line.left() == pytest.approx(31 * 0.7 / 0.2)
    assert line.line() == "aerogel: layer 3 of 5, 0:31, about 1:48 left (layer2.0.conv1)"
    clock.now += 10
    assert line.left() == pytest.approx(31 * 0.7 / 0.2 - 10), "between two steps it counts down"


def test_a_slow_start_is_no_pace(clock: Clock) -> None:
    """Reading a model took 13 s of a call of 89: by its share of the whole that was 4:07 left."""
    line = Progress()
    line.begin("reading the model", 0.05)
    clock.now += 13
    line.begin("timing layers", 0.5)
    line.step("layer", 1, 54)
    assert line.left() is None, "nothing is said until it can be"
    clock.now += 1
    line.step("layer", 2, 54)
    assert line.left() is None
    clock.now += 11
    line.step("layer", 14, 54)
    left = line.left()
    assert left is not None
    assert 60 < left < 90


def test_no_more_than_the_budget_is_claimed(clock: Clock) -> None:
    line = Progress()
    line.limit(30)
    line.begin("timing layers", 0.5)
    clock.now += 20
    line.step("layer", 5, 10)
    assert line.left() == pytest.approx(10), "at this pace it would be 80"
    clock.now += 11
    assert line.left() is None, "the budget is over and the call is not: nobody knows"


def test_a_phase_without_a_share_is_no_pace(clock: Clock) -> None:
    line = Progress()
    line.begin("starting Ray")
    clock.now += 25
    line.begin("images", 1.0)
    clock.now += 10
    line.step("image", 101, 1000)
    assert line.left() == pytest.approx(90)


def test_hours_are_hours(clock: Clock) -> None:
    line = Progress()
    clock.now += 3725
    assert "1:02:05" in line.line()


def test_points_share_the_time(clock: Clock) -> None:
    line = Progress()
    line.split(2)
    line.begin("timing layers", 1.0)
    clock.now += 10
    line.begin("timing layers", 1.0)
    assert line.left() == pytest.approx(10), "the second of two"


def test_a_name_cannot_write_to_the_terminal(clock: Clock) -> None:
    line = Progress()
    line.step("layer", 1, 2, "a\x1b[2Jb\nc")
    assert line.line().isprintable()


def test_lines_of_the_log_where_nobody_looks(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    with caplog.at_level(logging.INFO, "aerogel"), shown(None) as line:
        line.begin("timing layers", 0.5)
        line.step("layer", 1, 50, "a")
        clock.now += 6
        line.step("layer", 2, 50, "b")
    said = [record.message for record in caplog.records]
    assert said == ["timing layers, 0:00", "layer 2 of 50, 0:06 (b)"], "not every step: one in five seconds"


def test_asked_for_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(True) as line:
        line.begin("timing layers", 0.5)
    assert capsys.readouterr().err == "aerogel: timing layers, 0:00\n"


def test_not_wanted_it_is_silent(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "aerogel"), shown(False) as line:
        line.begin("timing layers", 0.5)
    assert capsys.readouterr().err == ""
    assert not caplog.records


def test_a_terminal_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("TERM", "xterm")
    with shown(None) as line:
        line.begin("timing layers", 0.5)
        line.step("layer", 1, 2, "conv1")
    assert type(line).__name__ == "_Terminal"


def test_a_notebook_has_a_line_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    class Handle:
        def update(self, text: str) -> None:
            texts.append(text)

    def display(text: str, display_id: bool) -> Handle:
        assert display_id
        texts.append(text)
        return Handle()

    shell: Any = types.SimpleNamespace(kernel=object())
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    module = types.ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    module.Pretty = str  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    with shown(None) as line:
        line.begin("timing layers", 0.5)
    assert [text.split(",")[0] for text in texts] == [
        "aerogel: starting",
        "aerogel: timing layers",
        "aerogel: done",
    ]
    with pytest.raises(ZeroDivisionError), shown(None):
        raise ZeroDivisionError
    assert texts[-1].startswith("aerogel: stopped")


def test_compile_counts_its_layers(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    with caplog.at_level(logging.INFO, "aerogel"):
        aerogel.compile(model, torch.randn(1, 4, 12, 12), store=tmp_path)
    said = " ".join(record.message for record in caplog.records)
    for phase in ("reading the model", "timing layers", "choosing layouts", "whole model"):
        assert phase in said
