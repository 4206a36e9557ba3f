"""Timing, and nothing else: interleaved rounds, so that whatever slows the machine slows every candidate
alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aerogel.backends import Trial, host_clock

ROUND_US = 300.0
"""A round repeats a candidate until it takes about this long: shorter ones measure the clock."""


Clock = Callable[[Trial, int], float]
"""Microseconds of one of several repeats of a call."""


def interleaved(
    candidates: Sequence[Trial], rounds: int, warm: int = 2, clock: Clock = host_clock
) -> list[list[float]]:
    """Microseconds of each candidate in each round, taken in turn: index [candidate][round]."""
    repeats = []
    for candidate in candidates:
        for _ in range(warm):
            once_us = clock(candidate, 1)
        repeats.append(max(1, int(ROUND_US / max(once_us, 0.1))))
    times: list[list[float]] = [[] for _ in candidates]
    for _ in range(rounds):
        for i, candidate in enumerate(candidates):
            times[i].append(clock(candidate, repeats[i]))
    return times
