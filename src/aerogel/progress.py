"""How far a long call is: a line in a terminal or a notebook, lines of the log where there is neither.

    aerogel: layer 12 of 54, 0:31, about 0:40 left (layer2.0.conv1)

The time left is weighted by what was measured: each phase takes about a known share of the whole, and the
pace is that of phases long enough to show one. Reading a model does not: it is short here and long there.
Nothing is said before there is a pace, nor more than is left of the budget.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import AbstractContextManager
from typing import Any

from aerogel.errors import printable

log = logging.getLogger("aerogel")
MIN_MEASURED_SHARE = 0.08
"""Share of the whole that must have been measured before its pace says anything."""
MIN_PHASE_SHARE = 0.2
"""A phase without steps counts for the pace from this share of the whole on."""
_EVERY_S = {"notebook": 0.5, "lines": 5.0}
"""Seconds between two updates, at least."""


class Progress(AbstractContextManager["Progress"]):
    """One long call: phases, and steps of a phase. This one only counts; its subclasses show."""

    def __init__(self) -> None:
        self._began = self._phase = time.monotonic()
        self._done = self._share = self._planned_share = self._within = 0.0
        self._measured_s = self._measured_share = 0.0
        self._stepped_at: float | None = None
        self._ends: float | None = None
        self._what = "starting"
        self._detail = ""
        self._parts = 1

    def split(self, parts: int) -> None:
        """The phases that follow come this many times."""
        self._parts = parts

    def limit(self, seconds: float) -> None:
        """End by a budget: never claim that more than its rest is left."""
        self._ends = time.monotonic() + seconds

    def begin(self, what: str, share: float = 0.0) -> None:
        """A phase that takes about this share of the whole."""
        now = time.monotonic()
        if self._counts():
            self._measured_s += now - self._phase
            self._measured_share += self._share
        self._phase = now
        self._done += self._share
        self._planned_share, self._share, self._within = share, share / self._parts, 0.0
        self._stepped_at = None
        self._what, self._detail = what, ""
        self._show(True)

    def step(self, what: str, number: int, total: int, detail: str = "") -> None:
        """Begin a step of the phase: the `number`-th of `total`, from 1."""
        self._within, self._stepped_at = (number - 1) / total, time.monotonic()
        self._what, self._detail = f"{what} {number} of {total}", detail
        self._show(False)

    def _counts(self) -> bool:
        """Whether the phase says something of the pace: it counts steps, or is a large part of the whole."""
        return self._share > 0 and (self._stepped_at is not None or self._planned_share >= MIN_PHASE_SHARE)

    def line(self) -> str:
        """What is shown."""
        spent, left = time.monotonic() - self._began, self.left()
        about = "" if left is None else f", about {_minutes(left)} left"
        detail = f" ({self._detail})" if self._detail else ""
        return printable(f"aerogel: {self._what}, {_minutes(spent)}{about}{detail}")

    def left(self) -> float | None:
        """Seconds, at the pace that was measured; None while there is none, or where it was wrong. Between
        two steps it counts down."""
        now, seconds, share = time.monotonic(), self._measured_s, self._measured_share
        latest = self._phase if self._stepped_at is None else self._stepped_at
        if self._counts():
            seconds += latest - self._phase
            share += self._share * self._within
        rest = 1 - self._done - self._share * self._within
        if share < MIN_MEASURED_SHARE or rest <= 0:
            return None
        left = seconds / share * rest - (now - latest)
        if self._ends is not None:
            left = min(left, self._ends - now)
        return left if left > 0 else None

    def _show(self, phase: bool) -> None:
        """Show the line; `phase` where a phase begins."""

    def __exit__(self, *_: object) -> None:
        return None


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def shown(wanted: bool | None) -> Progress:
    """Progress as it can be seen here; `wanted` False shows none, True also where nobody seems to look."""
    if wanted is False:
        return Progress()
    if _in_notebook():
        return _Notebook()
    if sys.stderr is not None and sys.stderr.isatty():
        return _Terminal()
    return _Lines(bool(wanted))


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class _Terminal(Progress):
    """One line that is drawn again, twice a second: more would be time taken from what is measured."""

    def __enter__(self) -> Progress:
        from rich.console import Console

        self._status = Console(stderr=True).status(self, refresh_per_second=2)
        self._status.start()
        return self

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(self.line(), overflow="ellipsis", no_wrap=True)

    def __exit__(self, *_: object) -> None:
        self._status.stop()


class _Notebook(Progress):
    """One line under the cell that is replaced, and stays with the time it took."""

    def __enter__(self) -> Progress:
        from IPython.display import display

        self._shown_at = 0.0
        show: Any = display
        self._handle: Any = show(self._text(self.line()), display_id=True)
        return self

    def _show(self, phase: bool) -> None:
        now = time.monotonic()
        if phase or now - self._shown_at > _EVERY_S["notebook"]:
            self._shown_at = now
            self._handle.update(self._text(self.line()))

    def __exit__(self, *raised: object) -> None:
        word = "stopped" if any(raised) else "done"
        spent = time.monotonic() - self._began
        self._handle.update(self._text(f"aerogel: {word}, {_minutes(spent)}"))

    @staticmethod
    def _text(line: str) -> Any:
        """Plain text, which a notebook never takes for HTML."""
        from IPython.display import Pretty

        text: Any = Pretty
        return text(line)


class _Lines(Progress):
    """Lines of the log `aerogel`, level INFO; on stderr too where that was asked for."""

    def __init__(self, printed: bool) -> None:
        super().__init__()
        self._printed, self._shown_at = printed, 0.0

    def _show(self, phase: bool) -> None:
        now = time.monotonic()
        if phase or now - self._shown_at > _EVERY_S["lines"]:
            self._shown_at = now
            line = self.line()
            log.info("%s", line.removeprefix("aerogel: "))
            if self._printed:
                print(line, file=sys.stderr, flush=True)
