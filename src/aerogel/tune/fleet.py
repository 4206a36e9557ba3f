"""A fleet's tuning store: a folder behind an address (`s3://bucket/path`, or any of fsspec's).

The folder on this machine stays the only one that is read while a model is compiled. Before, the records of
this world are copied there: one listing, then what is missing. Afterwards new ones are sent, each under a
name of its own and only if it is not there. The first failure ends it for the process, with one sentence.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aerogel import addresses
from aerogel.disk import private_folder, write_whole
from aerogel.errors import InvalidArgument, printable
from aerogel.locks import Lock
from aerogel.optional import install
from aerogel.outputs import check_folder

log = logging.getLogger("aerogel")
PATIENCE = 3.0
"""Seconds that a compile may lose to an address, over all of it."""
LARGEST, CHUNK, ALL = 4 << 20, 16 << 20, 512 << 20
"""Bytes of a record, of what is fetched at once, and of all that is fetched."""
_WORLD = re.compile(r"[0-9a-f]{16}")
_RECORD = re.compile(r"(layers/[0-9a-f]{32}/[0-9a-f]{64}|models/[0-9a-f]{64})/[0-9a-f]{32}\.json")
_S3 = {"connect_timeout": 1, "read_timeout": 2, "retries": {"max_attempts": 1}}
_known: dict[str, Fleet] = {}


class Fleet:
    """One address in one process."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fetched: set[Path] = set()
        self._left = PATIENCE
        self._given_up = False
        self._lock = Lock()

    @staticmethod
    def of(url: str) -> Fleet:
        """The one of this address. An InvalidArgument where nothing here can read such."""
        scheme = url.partition("://")[0]
        if find_spec("fsspec") is None or (scheme in ("s3", "s3a") and find_spec("s3fs") is None):
            raise InvalidArgument(f"A store at {scheme}:// needs packages that are missing: {install('s3')}")
        import fsspec

        try:
            fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError) as why:
            raise InvalidArgument(f"store '{printable(url)[:80]}': {printable(why)[:200]}") from None
        if scheme in ("file", "local"):
            check_folder(addresses.filesystem(url)[1], "store", writable=False)
        return _known.setdefault(url, Fleet(url))

    def fetch(self, folder: Path) -> None:
        """Copy what others measured into `folder`, whose name is the world's; once in a process."""
        with self._lock:
            if folder in self._fetched:
                return
            self._fetched.add(folder)
        self._patiently(lambda until: fetch(self.url, folder, until))

    def send(self, folder: Path, paths: Sequence[Path]) -> None:
        """Put new records there."""
        self._patiently(lambda until: send(self.url, folder, paths, until))

    def _patiently(self, run: Callable[[float], object]) -> None:
        """Run beside this thread, for as long as patience lasts: a dead endpoint may block for minutes."""
        if self._given_up:
            return
        failed: list[BaseException] = []
        began = time.monotonic()

        def guarded() -> None:
            try:
                run(began + self._left)
            except Exception as why:  # a dead endpoint of S3 raises what is no OSError
                failed.append(why)

        beside = threading.Thread(target=guarded, daemon=True)
        beside.start()
        beside.join(max(0.0, self._left))
        self._left -= time.monotonic() - began
        if beside.is_alive() or failed:
            self._given_up = True
            why = printable(failed[0])[:200] if failed else f"no answer within {PATIENCE:g} s"
            log.warning("the store %s is left alone from now on: %s", printable(self.url)[:80], why)


def filesystem(url: str) -> tuple[Any, str]:
    """With an end to waiting; and the path."""
    found, path = addresses.filesystem(url, config_kwargs=_S3)
    return found, path.rstrip("/")


def listed(url: str, world: str) -> dict[str, int]:
    """Records of a world by their names within it, with their sizes; what has no such name is none."""
    fs, path = filesystem(url)
    try:
        found = fs.find(f"{path}/{world}", detail=True)
    except FileNotFoundError:
        return {}
    named = {name.partition(f"/{world}/")[2]: int(said.get("size") or 0) for name, said in found.items()}
    return {name: size for name, size in named.items() if _RECORD.fullmatch(name) and size <= LARGEST}


def fetch(url: str, folder: Path, until: float) -> int:
    """Copy the records of a world that are not in `folder`; how many were. Ends when the time is over."""
    fs, path = filesystem(url)
    wanted = {n: size for n, size in listed(url, folder.name).items() if not (folder / n).exists()}
    count = 0
    for names in _chunks(wanted):
        if time.monotonic() > until:
            break
        places = {f"{path}/{folder.name}/{name}": name for name in names}
        for place, content in fs.cat(list(places), on_error="omit").items():
            name = places.get(place) or places.get(place.lstrip("/"))
            if name is not None and len(content) <= LARGEST:
                private_folder((folder / name).parent)
                write_whole(folder / name, content)
                count += 1
    return count


def _chunks(sizes: dict[str, int]) -> Iterator[list[str]]:
    """Names whose records fit into memory together, and all of them onto the disk."""
    chunk, held, total = list[str](), 0, 0
    for name in sorted(sizes):
        total += sizes[name]
        if total > ALL:
            break
        if chunk and (held + sizes[name] > CHUNK or len(chunk) >= 256):
            yield chunk
            chunk, held = [], 0
        chunk.append(name)
        held += sizes[name]
    if chunk:
        yield chunk


def send(url: str, folder: Path, paths: Sequence[Path], until: float) -> int:
    """Put records of a world there, each only if it is not there yet; how many were put."""
    fs, path = filesystem(url)
    count = 0
    for record in paths:
        if time.monotonic() > until:
            break
        try:
            name = record.relative_to(folder.parent).as_posix()
            if addresses.is_local(fs):
                fs.makedirs(f"{path}/{name}".rpartition("/")[0], exist_ok=True)
            fs.pipe_file(f"{path}/{name}", record.read_bytes(), mode="create")
            count += 1
        except FileExistsError:
            continue
    return count


def worlds(url: str) -> list[str]:
    """The names of the worlds there are."""
    fs, path = filesystem(url)
    try:
        found = (str(name).rstrip("/").rpartition("/")[2] for name in fs.ls(path, detail=False))
    except FileNotFoundError:
        return []
    return sorted(name for name in found if _WORLD.fullmatch(name))


def worlds_of(folder: Path) -> list[Path]:
    """The same of a folder on this machine. What has another name was not put there by aerogel."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_dir() and _WORLD.fullmatch(p.name))


def records_of(world: Path) -> list[Path]:
    """The records of a world, and nothing else that lies there."""
    found = (path for path in world.rglob("*.json") if path.is_file())
    return sorted(p for p in found if _RECORD.fullmatch(p.relative_to(world).as_posix()))
