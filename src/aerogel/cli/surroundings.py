"""What surrounds a process and may work against it: folders that others can write, a folder called triton."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

TRITON = ("compiler", "language", "runtime")
"""Folders that the package of that name has."""


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
