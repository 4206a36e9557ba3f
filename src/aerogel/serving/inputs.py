"""Images to run a model over: files by a pattern or below a folder, or the rows of parquet files.

They are listed once, in a fixed order, and cut into parts; a part is what one file of results comes from.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aerogel.addresses import filesystem, is_local
from aerogel.errors import AerogelError, printable
from aerogel.preprocess import MOST_BYTES, NoImage

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


@dataclass(frozen=True)
class Part:
    """Of files: their paths and sizes. Of parquet: one path and its row groups, from row `first` on."""

    number: int
    root: str
    paths: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    first: int = 0
    count: int = 0


@dataclass(frozen=True)
class Inputs:
    """All parts, the number of images, a digest of what was listed, and the names that are no images."""

    parts: tuple[Part, ...]
    count: int
    digest: str
    skipped: int


def listed(url: str, rows: int) -> Inputs:
    """What an address means: a pattern, a folder, or a file. An error in words where there is nothing."""
    fs, path = filesystem(url)
    root = path
    try:
        if any(c in path for c in "*?["):
            found = fs.glob(path, detail=True)
            root = path[: min(path.index(c) for c in "*?[" if c in path)].rpartition("/")[0]
        else:
            found = fs.find(path, detail=True)
    except FileNotFoundError:
        found = {}
    except Exception as why:  # botocore's errors are no OSErrors
        raise AerogelError(f"'{printable(url)[:120]}' cannot be listed: {printable(why)[:200]}") from why
    there = {n: said for n, said in sorted(found.items()) if said.get("type") != "directory"}
    names = {n: int(s.get("size") or 0) for n, s in there.items() if not is_local(fs) or os.path.isfile(n)}
    tables = [n for n in names if n.lower().endswith(".parquet")]
    images = {n: size for n, size in names.items() if n.lower().endswith(IMAGES)}
    if not tables and not images:
        raise AerogelError(
            f"no images in '{printable(url)[:120]}': say a folder, a pattern such as 's3://bucket/*.jpg', or "
            f"a .parquet file. Images end in {', '.join(IMAGES)}."
        )
    if tables and images:
        raise AerogelError(
            f"'{printable(url)[:120]}' has images and .parquet files: say a pattern of one kind"
        )
    try:
        parts = list(_tables(fs, root, tables, rows) if tables else _files(root, images, rows))
    except Exception as why:  # a file that is no parquet, or cannot be read
        raise AerogelError(f"'{printable(url)[:120]}' cannot be read: {printable(why)[:200]}") from why
    digest = hashlib.sha256(repr(sorted((names if tables else images).items())).encode()).hexdigest()
    skipped = len(there) - len(tables) - len(images)
    return Inputs(tuple(parts), sum(p.count for p in parts), digest, skipped)


def _files(root: str, sizes: dict[str, int], rows: int) -> Iterator[Part]:
    names = list(sizes)
    for at in range(0, len(names), rows):
        paths = tuple(names[at : at + rows])
        yield Part(at // rows, root, paths, tuple(sizes[p] for p in paths), count=len(paths))


def _tables(fs: Any, root: str, paths: Sequence[str], rows: int) -> Iterator[Part]:
    """Whole row groups, as many as make a part: parquet is read group by group."""
    from pyarrow import parquet

    number = 0
    for path in paths:
        with fs.open(path) as raw:
            said = parquet.ParquetFile(raw).metadata
            counts = [said.row_group(i).num_rows for i in range(said.num_row_groups)]
        groups, held, first = list[int](), 0, 0
        for i, count in enumerate(counts):
            groups.append(i)
            held += count
            if held and (held >= rows or i == len(counts) - 1):
                yield Part(number, root, (path,), groups=tuple(groups), first=first, count=held)
                number, first, groups, held = number + 1, first + held, [], 0


def read(fs: Any, part: Part, batch: int) -> Iterator[list[tuple[str, bytes | NoImage]]]:
    """The images of a part, `batch` at a time, each with its name. A file that is gone or too large is said
    so; one that cannot be reached now is an error, and the part is tried again."""
    if part.groups:
        yield from _rows(fs, part, batch)
        return
    for at in range(0, part.count, batch):
        paths = part.paths[at : at + batch]
        small = [p for p, size in zip(paths, part.sizes[at : at + batch], strict=True) if size <= MOST_BYTES]
        found = fs.cat(small, on_error="return") if small else {}
        yield [(_name(part.root, p), _content(found, p)) for p in paths]


def _content(found: dict[str, Any], path: str) -> bytes | NoImage:
    content = found.get(path, found.get(path.lstrip("/")))
    if isinstance(content, FileNotFoundError | PermissionError):
        return NoImage(f"the file cannot be read: {content.strerror or 'it is not there any more'}")
    if isinstance(content, BaseException):
        raise content
    return NoImage(f"more than {MOST_BYTES} bytes") if content is None else bytes(content)


def _name(root: str, path: str) -> str:
    """A file's name below what was asked for; the file's own where that is one file."""
    name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
    return name.encode("utf-8", "backslashreplace").decode()


def _rows(fs: Any, part: Part, batch: int) -> Iterator[list[tuple[str, bytes | NoImage]]]:
    from pyarrow import parquet

    (path,) = part.paths
    with fs.open(path) as raw:
        file = parquet.ParquetFile(raw)
        image, name = columns(file.schema_arrow, path)
        wanted, at = [image.partition(".")[0], *([name] if name else [])], part.first
        for rows in file.iter_batches(batch, row_groups=list(part.groups), columns=wanted):
            held = rows.column(wanted[0])
            encoded = (held.field("bytes") if "." in image else held).to_pylist()
            ids = rows.column(name).to_pylist() if name else range(at, at + len(rows))
            own = [str(i) if name else f"{_name(part.root, path)}:{i}" for i in ids]
            yield [(i, _small(e)) for i, e in zip(own, encoded, strict=True)]
            at += len(rows)


def _small(encoded: bytes | None) -> bytes | NoImage:
    if encoded is None:
        return NoImage("there is no image in this row")
    return encoded if len(encoded) <= MOST_BYTES else NoImage(f"more than {MOST_BYTES} bytes")


def columns(schema: Any, path: str) -> tuple[str, str | None]:
    """The column of encoded images (or its `bytes` field, as datasets are stored), and that of names."""
    from pyarrow import types

    name = next((n for n in ("id", "path", "name") if n in schema.names), None)
    binary = [f.name for f in schema if types.is_binary(f.type) or types.is_large_binary(f.type)]
    nested = [
        f"{f.name}.bytes"
        for f in schema
        if types.is_struct(f.type) and f.type.get_field_index("bytes") >= 0 and "." not in f.name
    ]
    able = [n for n in (*binary, *nested) if n != name]
    found = sorted(able, key=lambda n: n.partition(".")[0] not in ("image", "bytes"))
    if not found:
        raise AerogelError(f"'{printable(path)}' has no column of bytes: {printable(schema.names)[:200]}")
    return found[0], name
