"""What is said of a compiled model in one line: how fast, on which kernels, and who would be faster.

Every place that says it (`repr`, `explain`, the report, the command line, the benchmarks) asks here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aerogel.ir import Beside, Choice, Plan, Timing, Way
from aerogel.methods import BASELINE, method

MAX_SPARSE_WORK = 0.95
"""A kernel that does more than this share of the dense multiplications skips no zeros worth the name."""


def estimate_work(choice: Choice) -> float:
    """Return the multiplications of a layer's kernel as a share of the dense layer's.

    A plan of an earlier version does not say what its kernels store: then a method is taken to skip every
    zero.
    """
    work = 1 - choice.sparsity if choice.work is None else choice.work
    if choice.idle is not None and method(choice.config.method).SKIPS_INPUT:
        work *= 1 - choice.idle.vectors / 100
    return work


def skips_zeros(choice: Choice) -> bool:
    """Return whether a layer is on a sparse kernel: one that leaves out multiplications by zero."""
    return choice.config.method != BASELINE and estimate_work(choice) < MAX_SPARSE_WORK


def describe_kernels(choices: Sequence[Choice]) -> str:
    """Return how many layers run on which kernels; kernels of ours that skip nothing are named as such."""
    sparse = sum(map(skips_zeros, choices))
    dense = sum(choice.config.method != BASELINE for choice in choices) - sparse
    layers = f"of {len(choices)} layers on"
    if not dense:
        return f"{sparse} {layers} sparse kernels"
    if not sparse:
        return f"{dense} {layers} aerogel's dense-weight kernels"
    return f"{sparse} {layers} sparse kernels, {dense} on aerogel's dense-weight kernels"


def describe_ratio(timing: Timing) -> str:
    """Return how many times as fast: one number, or an interval where one would promise too much."""
    if timing.ratio_range is None or not timing.doubt:
        return f"{timing.ratio_p50:.2f}x"
    low, high = timing.ratio_range
    return f"{timing.ratio_p50:.1f}x ({low:.1f}x to {high:.1f}x)"


def describe_speedup(timing: Timing, baseline: str) -> str:
    """Return the speedup over a baseline, and what casts doubt on it."""
    doubt = f", {timing.doubt}" if timing.doubt else ""
    return f"{describe_ratio(timing)} over {baseline}{doubt}"


def find_fastest_peer(plan: Plan) -> tuple[str, Beside] | None:
    """Return the fastest runtime that runs the same file faster than aerogel, or None."""
    faster = [(name, b) for name, b in plan.peers().items() if b.theirs_us < b.ours_us]
    return min(faster, key=lambda peer: peer[1].theirs_us / peer[1].ours_us, default=None)


def describe_peers(plan: Plan) -> str:
    """Return the times of other runtimes for the same file and which to use; "" where none was timed."""
    peers = plan.peers()
    if not peers:
        return ""
    times = [f"{name} takes {beside.theirs_us / 1e3:.1f} ms" for name, beside in peers.items()]
    ours_us = next(iter(peers.values())).ours_us
    fastest = find_fastest_peer(plan)
    advice = "aerogel is faster" if fastest is None else f"keep {fastest[0]}"
    busy = " (measured on a busy machine)" if any(b.disturbed for b in peers.values()) else ""
    return f"{', '.join(times)}, aerogel {ours_us / 1e3:.1f} ms: {advice}{busy}"


def represent(model: str, plan: Plan, how: Way) -> str:
    """Return `repr` of a compiled model."""
    parts = [model]
    if (fastest := find_fastest_peer(plan)) is not None:
        name, beside = fastest
        parts.append(
            f"{name} is faster: {beside.theirs_us / 1e3:.1f} ms, aerogel {beside.ours_us / 1e3:.1f} ms"
        )
    parts.append("not timed" if plan.model is None else describe_speedup(plan.model, "torch"))
    parts.append(f"torch ({how}) runs it" if how.by == "torch" else describe_kernels(plan.choices))
    return f"Compiled({', '.join((*parts, str(plan.target)))})"


def count_sparse_flops(choices: Iterable[Choice]) -> float:
    """Return the share of the dense convolutions' operations that are in layers on sparse kernels."""
    choices = tuple(choices)
    total = sum(choice.conv.dense_flops for choice in choices)
    sparse = sum(choice.conv.dense_flops for choice in choices if skips_zeros(choice))
    return sparse / total if total else 0.0
