"""What surrounds a process and may work against it: limits on cores, folders that others can write, a folder
called triton."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath

TRITON = ("compiler", "language", "runtime")
"""Folders that the package of that name has."""


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


def written(folder: Path) -> OSError | None:
    """Write a file there and remove it: what only trying can tell (a full disk, a quota, a read-only mount).
    None if it worked."""
    probe = folder / f".doctor.{os.getpid()}"
    try:
        number = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            os.write(number, bytes(4096))
            os.fsync(number)
        finally:
            os.close(number)
            probe.unlink()
    except OSError as why:
        return why
    return None


def unsafe(folder: Path, user: int | None = None) -> str | None:
    """Why machine code is not read from this folder, with the remedy; None if only this user and root can
    change what is there.

    The folder and all above it belong to the user or to root, and neither group nor others may write to them,
    but for root's sticky ones (/tmp), where nobody can remove or replace another's.
    """
    user = os.getuid() if user is None else user
    whole = folder.resolve()
    for place in (whole, *whole.parents):
        seen = place.stat()
        sticky = seen.st_uid == 0 and bool(seen.st_mode & stat.S_ISVTX)
        if seen.st_uid not in (user, 0):
            return f"'{place}' belongs to user {seen.st_uid}: set AEROGEL_CACHE to a folder of yours"
        if seen.st_mode & 0o022 and not sticky:
            return f"'{place}' can be written by others: chmod go-w '{place}'"
    return None


def false_triton(path: Sequence[str]) -> Path | None:
    """What Python finds as `triton` on this path, if it is not the package: a folder of that name, or a
    file."""
    spec = PathFinder.find_spec("triton", list(path))
    if spec is None:
        return None
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if any(all((place / part / "__init__.py").is_file() for part in TRITON) for place in places):
        return None
    return places[0] if places else Path(spec.origin or "triton")
