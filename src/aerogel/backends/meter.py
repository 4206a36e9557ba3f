"""Wall time beside CPU time: what tells a run that other work held up from one that is slow by itself.

A thread that computes without a pause has as much CPU time as wall time. Where another program took its core,
wall time goes on and CPU time does not:

    quiet     wall 10 ms, CPU 10 ms
    busy      wall 19 ms, CPU 10 ms     for 9 ms the core did something else
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

FEWEST_STEPS = 20
"""Steps of the CPU clock that a measurement must span: Windows counts CPU time in steps of 16 ms."""
STEPS_SEEN = 20
"""Steps of the CPU clock that are looked at: the thread may lose its core between two readings."""
LONGEST_STEP_NS = 50_000_000
"""A CPU clock that does not move within this time measures nothing."""


class Sample(NamedTuple):
    """One measurement of a call: wall time, and CPU time for each of `threads` threads, in microseconds.

    `cpu_us` is None where CPU time says nothing: on a GPU, or with a clock too coarse for so short a call.
    """

    wall_us: float
    cpu_us: float | None = None
    threads: int = 1


@cache
def measure_clock_step_ns() -> int:
    """Return the smallest step in which this machine counts a thread's CPU time, in nanoseconds."""
    steps: list[int] = []
    before, began = time.thread_time_ns(), time.perf_counter_ns()
    while len(steps) < STEPS_SEEN and time.perf_counter_ns() - began < LONGEST_STEP_NS:
        if (now := time.thread_time_ns()) > before:
            steps.append(now - before)
            before = now
    return min(steps, default=LONGEST_STEP_NS)


def meter_host(run: Callable[[], object], repeats: int, threads: int = 1) -> Sample:
    """Measure one of several repeats by the host's clocks.

    A call on one thread is measured by that thread's CPU time, or by the process's where a runtime computes
    in a thread of its own. A call on several threads is measured by the process's, evenly shared.
    """
    step_ns = measure_clock_step_ns()
    thread_ns, process_ns = time.thread_time_ns(), time.process_time_ns()
    began = time.perf_counter_ns()
    for _ in range(repeats):
        run()
    wall_ns = time.perf_counter_ns() - began
    process_ns, thread_ns = time.process_time_ns() - process_ns, time.thread_time_ns() - thread_ns
    runs_here = threads == 1 and 2 * thread_ns >= process_ns
    cpu_ns = thread_ns if runs_here else process_ns / threads
    wall_us = wall_ns / 1000 / repeats
    if wall_ns < FEWEST_STEPS * step_ns or cpu_ns <= 0:
        return Sample(wall_us, None, threads)
    return Sample(wall_us, cpu_ns / 1000 / repeats, threads)
