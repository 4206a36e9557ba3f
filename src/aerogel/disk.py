"""What is kept between processes: one folder, files that appear whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("aerogel")
_said: set[str] = set()


def cache_folder() -> Path:
    """Where compiled objects and tuning records are kept: $AEROGEL_CACHE, else the user's cache folder."""
    chosen = os.environ.get("AEROGEL_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aerogel"


def private_folder(folder: Path) -> None:
    """Make a folder and what is missing above it, for this user alone."""
    for missing in reversed([f for f in (folder, *folder.parents) if not f.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def compiled(name: str, make: Callable[[], bytes]) -> bytes:
    """Compiled code from the cache, if it is whole; else made, and kept unless others could write there."""
    path = cache_folder() / "objects" / name
    try:
        raw = path.read_bytes()
        if hashlib.sha256(raw[32:]).digest() == raw[:32]:
            return raw[32:]
        log.warning("ignoring a damaged cache entry: %s", path.name)
    except OSError:
        pass
    code = make()
    try:
        private_folder(path.parent)
        if path.parent.stat().st_uid != os.getuid() or path.parent.stat().st_mode & 0o022:
            raise PermissionError(f"{path.parent} can be written by others")
        write_whole(path, hashlib.sha256(code).digest() + code)
    except OSError as why:
        not_kept("compiled code", why)
    return code


def write_whole(path: Path, content: bytes) -> None:
    """Temporary file, fsync, rename: a reader sees the old file, the new one or none, also after a crash. Raises OSError."""
    private_folder(path.parent)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(scratch, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def not_kept(what: str, why: OSError) -> None:
    """Say that nothing can be kept, once in a process: a full disk costs time, not a line for every kernel."""
    if not _said:
        _said.add(what)
        log.warning("%s is not kept, so it is made again: %s. Later failures are not said.", what, why)
