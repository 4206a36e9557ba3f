"""Locks that a fork cannot leave locked.

A child made by fork has one thread, and copies of locks that other threads of its parent held: waiting for
one would hang. In the child every lock is free again; those that guard a library's own state (LLVM,
torch.export) are also taken before the fork, so that the child does not find it half changed.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType

_every: weakref.WeakSet[Lock] = weakref.WeakSet()
_over_fork: list[Lock] = []


class Lock:
    """A lock for `with`; the thread that has it may take it again. Of those held over forks, none is taken
    within another."""

    def __init__(self, *, over_fork: bool = False) -> None:
        self._lock = threading.RLock()
        _every.add(self)
        if over_fork:
            _over_fork.append(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def _before() -> None:
    for lock in _over_fork:
        lock._lock.acquire()


def _in_parent() -> None:
    for lock in _over_fork:
        lock._lock.release()


def _in_child() -> None:
    for lock in list(_every):
        lock._lock = threading.RLock()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
