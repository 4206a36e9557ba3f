"""Processes of this machine, and which of them a test began itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def descendants(pid: int, command: str) -> set[int]:
    """Return the processes below `pid` whose command contains a word, and nobody else's."""
    found = set[int]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if command.encode() in text.partition(b"\0")[0] and pid in ancestors(int(path.parent.name)):
            found.add(int(path.parent.name))
    return found


def ancestors(pid: int) -> Iterator[int]:
    """Yield a process's parent, that one's parent and so on, as long as they run."""
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return
        pid = int(stat.rpartition(")")[2].split()[1])  # a command's name may hold anything
        yield pid
