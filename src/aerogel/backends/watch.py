"""Never slower when the data changes: layers that skip zeros of their input are left to the next best while
there are too few.

Their kernels count what they look at and what of it is not zero. After a call in which one of them found more
than it was tuned to gain from, the next calls run without skipping; then skipping is tried again, less and
less often while it fails.
"""

from __future__ import annotations

from collections.abc import Mapping

from aerogel.ir import Choice, Config, Plan

FIRST, LAST = 16, 64
"""Calls without skipping after a first failure, and at most: a call in 64 that is a third slower costs half a
percent."""


class Watch:
    """Of one compiled module. Threads may share it: at worst a call or two goes the slower way.

    `every`: one call in so many is looked at, where looking costs time.
    """

    def __init__(self, plan: Plan, every: int = 1) -> None:
        self._limits = {c.node: c.limit for c in plan.choices if c.limit is not None and c.limit < 1}
        self._every = every
        self._calls = 0
        self._paused = 0
        self._rest = FIRST

    def skips(self) -> bool:
        """Whether this call skips zeros."""
        if self._paused > 0:
            self._paused -= 1
            return False
        return True

    def looks(self) -> bool:
        """Whether this call is one of those that are looked at."""
        self._calls += 1
        return bool(self._limits) and self._calls % self._every == 1 % self._every

    def look(self, active: Mapping[str, float]) -> None:
        """After a call that skipped: the share of each layer's input that was not zero."""
        if any(share > self._limits.get(node, 1.0) for node, share in active.items()):
            self._paused = self._rest
            self._rest = min(2 * self._rest, LAST)
        else:
            self._rest = FIRST


def without(choices: Mapping[str, Choice]) -> dict[str, Config]:
    """For layers that skip zeros of their input, the fastest that does not."""
    return {
        node: choice.next_best()
        for node, choice in choices.items()
        if choice.limit is not None and choice.limit < 1
    }
