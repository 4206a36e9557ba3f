"""`ProgramMemory`: the programs of one model, and the memory that they run in, bounded by bytes.

Each set of input sizes has a program: argument tables for its kernels, megabytes for a large model. What a
program computes in lies in an `Arena`, which calls take and give back. An arena fits any program that is not
larger, so a model that meets twenty sizes has one arena for each call at a time, not twenty.

When programs and idle arenas take more than the limit, arenas go first, which are cheap to make again, then
the programs that were used longest ago. The program used last always stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from aerogel.ir import LINE_BYTES
from aerogel.locks import Lock

if TYPE_CHECKING:
    from aerogel.backends.cpu.lower.program import Program
    from aerogel.backends.cpu.workspace import Workspace

DEFAULT_LIMIT = 1 << 30  # bytes of programs and idle arenas


class Arena:
    """A block of memory that begins at a cache line."""

    def __init__(self, size: int) -> None:
        self.buffer = np.empty(size + LINE_BYTES, np.uint8)
        self.start = -self.buffer.ctypes.data % LINE_BYTES
        self.size = size

    @property
    def address(self) -> int:
        """The address of the first usable byte."""
        return self.buffer.ctypes.data + self.start


@dataclass
class Entry:
    """One program, its size, and the workspaces bound to it that no call is using."""

    program: Program
    table_bytes: int
    idle: list[Workspace] = field(default_factory=list)


class ProgramMemory:
    """Safe to use from any number of threads; the runners of a model's specializations share one."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self.limit = limit
        self.entries: OrderedDict[Hashable, Entry] = OrderedDict()  # the one used last stands last
        self.arenas: list[Arena] = []  # idle ones
        self._lock = Lock()

    def find(self, key: Hashable) -> Program | None:
        """Return the program of this key and count it as used, or None."""
        with self._lock:
            entry = self.entries.get(key)
            if entry is None:
                return None
            self.entries.move_to_end(key)
            return entry.program

    def add(self, key: Hashable, program: Program, table_bytes: int) -> None:
        """Keep a new program, and drop those used longest ago where they no longer fit."""
        with self._lock:
            self.entries[key] = Entry(program, table_bytes)
            self.entries.move_to_end(key)
            self._shrink()

    def take(self, key: Hashable) -> Workspace | None:
        """Return an idle workspace of a program, or None if it has none."""
        with self._lock:
            entry = self.entries.get(key)
            return entry.idle.pop() if entry is not None and entry.idle else None

    def arena(self, size: int) -> Arena:
        """Return an arena of at least this size: the smallest idle one that fits, or a new one in place of
        an idle one that is too small."""
        with self._lock:
            fitting = [arena for arena in self.arenas if arena.size >= size]
            chosen = min(fitting or self.arenas, key=lambda arena: arena.size, default=None)
            if chosen is not None:
                self.arenas.remove(chosen)
        return chosen if chosen is not None and chosen.size >= size else Arena(size)

    def give_back(self, key: Hashable, workspace: Workspace) -> None:
        """Keep a workspace and its arena for later calls, as far as the limit allows."""
        with self._lock:
            self.arenas.append(workspace.release())
            entry = self.entries.get(key)
            if entry is not None:
                entry.idle.append(workspace)
                self.entries.move_to_end(key)
            self._shrink(workspace.size)

    def clear(self, owner: Hashable) -> None:
        """Drop the programs whose keys begin with `owner`, and every idle arena."""
        with self._lock:
            for key in [key for key in self.entries if isinstance(key, tuple) and key[0] == owner]:
                del self.entries[key]
            self.arenas.clear()

    def bytes(self) -> int:
        """Return the bytes of all programs and idle arenas."""
        with self._lock:
            return self._bytes()

    def _bytes(self) -> int:
        tables = sum(entry.table_bytes for entry in self.entries.values())
        return tables + sum(arena.size for arena in self.arenas)

    def _shrink(self, needed: int = 0) -> None:
        """Drop what exceeds the limit: idle arenas but for one, then programs, then the last arena, unless
        the last call needed one of that size."""
        excess = self._bytes() - self.limit
        self.arenas.sort(key=lambda arena: arena.size)
        while excess > 0 and len(self.arenas) > 1:
            excess -= self.arenas.pop(0).size
        while excess > 0 and len(self.entries) > 1:
            excess -= self.entries.popitem(last=False)[1].table_bytes
        if excess > 0 and self.arenas and self.arenas[0].size > needed:
            self.arenas.clear()
