"""Whole models beside each other in rounds, without the rounds that other work disturbed.

Other programs on the machine lengthen some rounds and not others, and then the median of few rounds says
little: 13.2x, 8.5x and 2.7x were measured of one model. Each round is therefore judged by the CPU time beside
its wall time (backends/meter.py). Disturbed rounds do not count, and more are measured; where too few are
left, all of them count and the result says that the machine was busy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aerogel.backends import Trial
from aerogel.backends.meter import Sample
from aerogel.ir import Timing
from aerogel.progress import Progress
from aerogel.tune.measure import ROUND_US

Meter = Callable[[Trial, int], Sample]
"""Measures one of several repeats of a call."""
Times = list[list[float]]
"""Microseconds, index [candidate][round]."""

DISTURBED_RATIO = 1.1
"""A run on one thread was disturbed where its wall time is more than this times its CPU time."""
DISTURBED_RATIO_THREADS = 1.25
"""The same on several threads, whose waiting for each other varies from round to round."""
FEW_ROUNDS = 5
"""Rounds after which a comparison may stop early, and by which it is prolonged."""
PROLONGED = 3
"""A disturbed comparison takes up to this times the rounds that were requested."""
MAX_EXTRA_S = 20.0
"""Seconds that it may take longer for that."""


@dataclass(frozen=True)
class Comparison:
    """Samples of several candidates in the same rounds, index [candidate][round]; `needed` undisturbed rounds
    are enough."""

    samples: Sequence[Sequence[Sample]]
    needed: int

    @property
    def disturbed(self) -> list[bool]:
        """Return for each round whether other work held up any of the candidates in it."""
        each = [find_disturbed(samples) for samples in self.samples]
        return [any(flags) for flags in zip(*each, strict=True)]

    @property
    def busy(self) -> bool:
        """Whether too few rounds were undisturbed."""
        return self.disturbed.count(False) < self.needed

    @property
    def all_times(self) -> Times:
        return [[sample.wall_us for sample in samples] for samples in self.samples]

    @property
    def times(self) -> Times:
        """Return the times that count: of undisturbed rounds, or of all where those are too few."""
        if self.busy:
            return self.all_times
        rounds = [number for number, flag in enumerate(self.disturbed) if not flag]
        return [[samples[number].wall_us for number in rounds] for samples in self.samples]

    def timing(self, candidate: int, baseline: int) -> Timing:
        """Return the timing of one candidate beside another, with the range of their ratios."""
        times = self.times
        pair = times[candidate], times[baseline]
        return Timing.of(*pair).ranged(*pair, self.busy)


def find_disturbed(samples: Sequence[Sample]) -> list[bool]:
    """Return for each measurement of one candidate whether other work held it up.

    On one thread wall time is CPU time, unless another program had the core. On several threads a run also
    waits where it has no work for all of them, so what its best round shows of that is usual.
    """
    ratios = [1.0 if s.cpu_us is None else s.wall_us / s.cpu_us for s in samples]
    limit = DISTURBED_RATIO
    if any(s.threads > 1 for s in samples):
        limit = DISTURBED_RATIO_THREADS * max(1.0, min(ratios))
    return [ratio > limit for ratio in ratios]


def compare(
    candidates: Sequence[Trial],
    rounds: int,
    meter: Meter,
    progress: Progress,
    is_clear: Callable[[Times], bool] | None = None,
    until: float | None = None,
) -> Comparison:
    """Measure candidates in turn, and longer where other work disturbs them.

    Args:
        candidates: Calls to measure.
        rounds: Rounds on a quiet machine; up to PROLONGED times as many on a busy one.
        meter: Measures a call, with its CPU time where the backend knows it.
        progress: Is told of every round.
        is_clear: Whether the times of a few undisturbed rounds say enough.
        until: The end of a budget by `time.monotonic`: from then on no round is added to those requested.
    """
    repeats = []
    for candidate in candidates:
        meter(candidate, 1)
        repeats.append(max(1, int(ROUND_US / max(meter(candidate, 1).wall_us, 0.1))))
    samples: list[list[Sample]] = [[] for _ in candidates]

    def measure(count: int) -> Comparison:
        """Measure until there are so many rounds."""
        for number in range(len(samples[0]) + 1, count + 1):
            progress.step("round", number, max(count, rounds))
            for i, candidate in enumerate(candidates):
                samples[i].append(meter(candidate, repeats[i]))
        return Comparison(samples, math.ceil(min(count, rounds) / 2))

    if is_clear is not None:
        result = measure(min(FEW_ROUNDS, rounds))
        if not any(result.disturbed) and is_clear(result.times):
            return result
    result = measure(rounds)
    latest = time.monotonic() + MAX_EXTRA_S
    latest = latest if until is None else min(latest, until)
    while result.busy and len(samples[0]) < PROLONGED * rounds and time.monotonic() < latest:
        result = measure(min(len(samples[0]) + FEW_ROUNDS, PROLONGED * rounds))
    return result
