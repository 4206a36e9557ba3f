"""Never slower when the data changes: layers that skip zeros of their input are left to the next best while there are too few.

Their kernels count the windows they look at and those that are not zero. After a call in which one of them found more than it was
tuned to gain from, the next calls run without skipping; then skipping is tried again, less and less often while it fails.
"""

from __future__ import annotations

from collections.abc import Mapping

from aerogel.candidate import Config
from aerogel.plan import Choice, Plan
from aerogel.runtime.program import Program

FIRST, LAST = 16, 64
"""Calls without skipping after a first failure, and at most: a call in 64 that is a third slower costs half a percent."""


class Watch:
    """Of one compiled module. Threads may share it: at worst a call or two goes the slower way."""

    def __init__(self, plan: Plan) -> None:
        self._limits = {c.node: c.most for c in plan.choices if c.most is not None and c.most < 1}
        self._left, self._rest, self._before = 0, FIRST, dict[int, tuple[int, int]]()

    def skips(self) -> bool:
        """Whether this call skips zeros."""
        if self._left > 0:
            self._left -= 1
            return False
        return True

    def look(self, program: Program) -> None:
        """After a call that skipped."""
        if not self._limits:
            return
        failed = False
        for step in (native for part in program.parts for native in part.natives if native.kernel.counts is not None):
            counts = step.kernel.counts
            assert counts is not None
            active, seen = (int(n) for n in counts.reshape(-1, 8)[:, :2].sum(0))
            old_active, old_seen = self._before.get(id(counts), (0, 0))
            self._before[id(counts)] = active, seen
            failed |= active - old_active > self._limits.get(step.conv, 1.0) * (seen - old_seen)
        if failed:
            self._left, self._rest = self._rest, min(2 * self._rest, LAST)
        else:
            self._rest = FIRST


def without(choices: Mapping[str, Choice]) -> dict[str, Config]:
    """For layers that skip zeros of their input, the fastest that does not."""
    return {
        node: next(config for config, _ in choice.tried if config.method != choice.config.method)
        for node, choice in choices.items()
        if choice.most is not None and choice.most < 1
    }
