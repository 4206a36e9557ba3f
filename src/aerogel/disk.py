"""What is kept between processes: one folder, files that appear whole or not at all.

Machine code is read only where nobody else could have put it: the file and every folder above it belong to
this user or to root, and neither group nor others may write there. A sticky folder of root's (/tmp) may stand
above. Looking and reading use the same open file: the way down is walked folder by folder, each opened below
the one before, and no link is followed on it.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import logging
import mmap
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

log = logging.getLogger("aerogel")
_said: set[str] = set()

LARGEST = 64 << 20
"""Bytes of compiled code worth reading."""
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def cache_folder() -> Path:
    """Where compiled objects and tuning records are kept: $AEROGEL_CACHE, the user's cache folder, or one for
    this process."""
    chosen = os.environ.get("AEROGEL_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aerogel"
    except RuntimeError:  # no HOME, and a user without a name
        return _for_this_process(os.getpid())


@cache
def _for_this_process(pid: int) -> Path:
    """A folder with a name nobody can foresee, gone with the process."""
    log.warning(
        "this user has no home folder: compiled code is kept for this process only. Set "
        "AEROGEL_CACHE to keep it."
    )
    try:
        made = Path(tempfile.mkdtemp(prefix="aerogel-"))
    except OSError:
        return Path(os.devnull) / "aerogel"  # where nothing can be kept
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == pid else None)
    return made


def private_folder(folder: Path) -> None:
    """Make a folder and what is missing above it, for this user alone."""
    for missing in reversed([f for f in (folder, *folder.parents) if not f.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def compiled(name: str, make: Callable[[], bytes]) -> bytes:
    """Compiled code from the cache, if it is whole and nobody else's; else made, and kept unless others could
    write there."""
    folder = cache_folder() / "objects"
    try:
        with _own(folder) as opened:
            code = _digested(_content(name, opened))
        if code is not None:
            return code
        log.warning("ignoring a damaged cache entry: %s", name)
    except FileNotFoundError:
        pass
    except OSError as why:
        not_kept("compiled code", why)
    code = make()
    try:
        private_folder(folder)
        with _own(folder) as opened:
            if os.fstat(opened).st_uid != os.geteuid():
                raise PermissionError(f"{folder} is root's")
            _write(name, hashlib.sha256(code).digest() + code, opened, 0o644)
    except OSError as why:
        not_kept("compiled code", why)
    return code


def kept(names: Collection[str]) -> Path:
    """The folder of compiled code, which holds all of these and can be read by every user, whoever owns it.
    Raises OSError where it cannot be so."""
    folder = cache_folder() / "objects"
    with _own(folder) as opened:
        for name in names:
            if _digested(_content(name, opened)) is None:
                raise OSError(errno.EIO, f"{name} is damaged")
            os.chmod(name, 0o644, dir_fd=opened, follow_symlinks=True)
    for above in (folder, cache_folder()):
        os.chmod(above, above.stat().st_mode | 0o055)  # noqa: S103 (an image has other users than its build)
    return folder


def _digested(raw: bytes) -> bytes | None:
    return raw[32:] if hashlib.sha256(raw[32:]).digest() == raw[:32] else None


@contextmanager
def _own(folder: Path) -> Iterator[int]:
    """The folder, opened; a PermissionError where somebody else could have written there. Links above it are
    resolved once, and what they lead to is looked at."""
    real = Path(os.path.realpath(folder))
    opened = os.open("/", _READ | os.O_DIRECTORY)
    try:
        for i, part in enumerate(real.parts):
            if i > 0:
                below = os.open(part, _READ | os.O_DIRECTORY, dir_fd=opened)
                os.close(opened)
                opened = below
            _trusted(os.fstat(opened), Path(*real.parts[: i + 1]), last=i + 1 == len(real.parts))
        yield opened
    finally:
        os.close(opened)


def _trusted(found: os.stat_result, path: Path, last: bool) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to another user: set AEROGEL_CACHE to a folder of your own")
    sticky = found.st_uid == 0 and found.st_mode & stat.S_ISVTX and not last
    if found.st_mode & 0o022 and not sticky:
        raise PermissionError(
            f"others can write to {path}: chmod go-w {path}, or set AEROGEL_CACHE to a folder of your own"
        )


def _content(name: str, folder: int) -> bytes:
    opened = os.open(name, _READ | os.O_NONBLOCK, dir_fd=folder)
    with open(opened, "rb") as file:
        found = os.fstat(opened)
        _trusted(found, Path(name), last=True)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{name} is no file")
        return file.read(LARGEST)


def read_small(path: Path, most: int) -> bytes:
    """A file's bytes. An OSError where there is none, it is no plain file, or it has more than `most`."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(opened, "rb") as file:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise PermissionError(f"{path.name} is no file of up to {most} bytes")
        return file.read(most)


def mapped(path: Path) -> Any:
    """A file's bytes. Where nobody else could have written it, a read-only mapping, whose pages the processes
    of a machine share; else a copy, which no later change reaches. Raises OSError."""
    real = Path(os.path.realpath(path))
    opened = os.open(real, _READ | os.O_NONBLOCK)
    with open(opened, "rb") as file:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(errno.EPERM, "it is no file")
        try:
            with _own(real.parent) as folder:
                _trusted(found, real, last=True)
                same = os.stat(real.name, dir_fd=folder, follow_symlinks=False)
            if found.st_size and (same.st_dev, same.st_ino) == (found.st_dev, found.st_ino):
                return mmap.mmap(opened, 0, access=mmap.ACCESS_READ)
        except OSError as why:
            log.info("%s is read into memory, not mapped: %s", path, why)
        return aligned(file, found.st_size)


def aligned(source: BinaryIO, size: int) -> Any:
    """So many bytes of a file, in memory that begins where a cache line does. An OSError where there are
    fewer."""
    room = np.empty(size + 64, np.uint8)
    first = -room.ctypes.data % 64
    held = room[first : first + size]
    if source.readinto(held.data) != size:  # type: ignore[attr-defined]
        raise OSError(errno.EIO, "it became shorter while it was read")
    held.flags.writeable = False
    return held


def read_through(content: Any) -> None:
    """Of a mapping that was read through once, only what is read again counts as this process's memory."""
    if isinstance(content, mmap.mmap):
        content.madvise(mmap.MADV_DONTNEED)


def write_whole(path: Path, content: bytes) -> None:
    """Temporary file, fsync, rename: a reader sees the old file, the new one or none, also after a crash. The
    folder must exist: one that a user mistyped is not created. Raises OSError."""
    opened = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        _write(path.name, content, opened, 0o666)
    finally:
        os.close(opened)


def _write(name: str, content: bytes, folder: int, mode: int) -> None:
    """The scratch file is a new one under a name nobody can foresee: nothing that stands there is written
    to."""
    scratch = f"{name[:40]}.{secrets.token_hex(8)}"
    opened = os.open(scratch, _NEW, mode, dir_fd=folder)
    try:
        with open(opened, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(OSError):
            os.unlink(scratch, dir_fd=folder)
        raise


def not_kept(what: str, why: OSError) -> None:
    """Say that nothing can be kept, once in a process: a full disk costs time, not a line for every
    kernel."""
    if not _said:
        _said.add(what)
        log.warning("%s is not kept, so it is made again: %s. Later failures are not said.", what, why)
