"""The cores a process may use: its affinity and its control groups' quota, and whether the user said so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ASKED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""How users say a number of threads, beside torch.set_num_threads."""


def usable() -> int:
    """Cores that threads of this process can really have: more threads would wait for each other."""
    quota = cpu_quota()
    return cores() if quota is None else min(cores(), max(1, int(quota)))


def by_default(threads: int) -> bool:
    """Whether this number is what torch takes where nobody has said one: all cores, or one of each pair."""
    if any(os.environ.get(name) for name in ASKED):
        return False
    every = {cores(), os.cpu_count() or 1}
    return threads in every | {-(-count // 2) for count in every}


def cores() -> int:
    """Cores this process may run on: its affinity, where the system has one."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores that the process's control groups allow, the least of its own and those around it; None where
    none limits them.

    cgroup v2 has cpu.max in each folder; v1 two files in a tree for the cpu alone.
    """
    found = [_quota(folder) for folder in _groups(root, process)]
    limits = [quota for quota in found if quota is not None]
    return min(limits) if limits else None


def _groups(root: Path, process: Path) -> Iterator[Path]:
    """The folders of the process's control groups, and those above them; the roots where the process does not
    say."""
    try:
        lines = process.read_text().splitlines()
    except OSError:
        lines = []
    for line in ["0::/", "1:cpu:/", *lines]:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        own = [part for part in PurePosixPath(group).parts if part not in ("/", "..")]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for tree in (root,) if not controllers else (root / controllers, root / "cpu"):
            yield from (tree.joinpath(*own[:deep]) for deep in range(len(own) + 1))


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        quota_us, period_us = (
            int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
        )
        return None if quota_us <= 0 else quota_us / period_us
    except (OSError, ValueError, ZeroDivisionError):
        return None
