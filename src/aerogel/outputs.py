"""One rule for every path that a result is written to, checked before any work is done.

A result never replaces a file it was made from, its suffix never names another format than the one that is
written, and a folder that does not exist is an error and not a folder to create: most such paths are typing
mistakes. A folder that is itself the result (of `export`, `batch`, a tuning store) is created, but nothing
above it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from aerogel.errors import AerogelError, InvalidArgument
from aerogel.fileformats import FORMATS

Input = str | os.PathLike[str] | None


def check_output(
    path: str | Path,
    suffixes: Sequence[str],
    *,
    option: str = "",
    inputs: Iterable[Input] = (),
    strict: bool = True,
    note: str = "",
) -> Path:
    """Return the path if a result may be written there; nothing is created.

    Args:
        path: The file to write.
        suffixes: The suffixes of the format that is written, the usual one first.
        option: The flag or argument that gave the path, for messages.
        inputs: Paths that the result is made from; those that are None or name no file are skipped.
        strict: False also accepts no suffix, and suffixes that name no format.
        note: A sentence that says when each suffix applies.

    Raises:
        InvalidArgument: The suffix names another format, or the path is one of the inputs.
        AerogelError: The path is a folder, or the folder around it does not exist or cannot be written to.
    """
    out = Path(path)
    name = f"{option} '{out}'".strip()
    if os.path.isdir(out):
        raise AerogelError(f"{name} cannot be written: it is a folder. Name a file in it.")
    _check_suffix(out, name, suffixes, strict, note)
    source = next((source for source in inputs if source is not None and _is_input(out, source)), None)
    if source is not None:
        same = "" if str(source) == str(out) else f" ('{os.fspath(source)}')"
        raise InvalidArgument(f"{name} is the input{same}, which would be lost. Choose another path.")
    _check_parent(out, name, "written")
    return out


def check_folder(path: str | Path, option: str = "", writable: bool = True) -> Path:
    """Return the path if it is a folder, or one that may be created in a folder that exists.

    Raises:
        AerogelError: The path is a file, the folder around it does not exist, or nothing can be written.
    """
    folder = Path(path)
    name = f"{option} '{folder}'".strip()
    if not os.path.lexists(folder):
        _check_parent(folder, name, "created", writable)
    elif not os.path.isdir(folder):
        raise AerogelError(f"{name} cannot be used as a folder: it is a file. Choose another path.")
    elif writable and not os.access(folder, os.W_OK | os.X_OK):
        raise AerogelError(f"{name} cannot be written to: you have no permission. Choose another folder.")
    return folder


def make_folder(path: str | Path, option: str = "") -> Path:
    """Create a folder that is itself a result, but nothing above it."""
    folder = check_folder(path, option)
    folder.mkdir(exist_ok=True)
    return folder


def _check_suffix(out: Path, name: str, suffixes: Sequence[str], strict: bool, note: str) -> None:
    """Raise where the suffix denies the format that is written."""
    known = out.suffix.lower() in FORMATS
    if out.suffix in suffixes or not (strict or (known and out.suffix.lower() not in suffixes)):
        return
    other = FORMATS.get(out.suffix.lower())
    reason = "" if other is None or out.suffix.lower() in suffixes else f": {out.suffix} names {other}"
    *first, last = suffixes
    choice = f"{', '.join(first)} or {last}" if first else last
    example = out.with_suffix(suffixes[0]) if other else Path(f"{out}{suffixes[0]}")
    raise InvalidArgument(f"{name} must end in {choice}{reason}. For example '{example}'. {note}".rstrip())


def _is_input(out: Path, source: str | os.PathLike[str]) -> bool:
    """Whether writing `out` would replace this input, also through a link; of a folder, a picture in it."""
    if not os.path.exists(out) or not os.path.exists(source):
        return False
    if not os.path.isdir(source):
        return os.path.samefile(out, source)
    pictures = FORMATS.get(out.suffix.lower()) == "a picture"
    return pictures and Path(os.path.realpath(source)) in Path(os.path.realpath(out)).parents


def _check_parent(path: Path, name: str, verb: str, writable: bool = True) -> None:
    """Raise unless the folder around a path exists and can be written to."""
    folder = path.parent
    if not os.path.lexists(folder):
        raise AerogelError(
            f"{name} cannot be {verb}: the folder '{folder}' does not exist. Create it first, or correct the "
            "path."
        )
    if not os.path.isdir(folder):
        raise AerogelError(f"{name} cannot be {verb}: '{folder}' is not a folder. Correct the path.")
    if writable and not os.access(folder, os.W_OK | os.X_OK):
        raise AerogelError(
            f"{name} cannot be {verb}: you have no permission to write to the folder '{folder}'. Choose "
            "another path."
        )
