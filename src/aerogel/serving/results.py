"""Results of a batch: parquet files that are whole or not there, and a record of what they come from.

Each row has the image's `id`; `outputs`, for each output of the model its `shape` and its `values`; and
`error`, where there is no output. A folder holds the results of one model, one input and one set of options.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from aerogel.addresses import filesystem, is_local
from aerogel.errors import AerogelError, printable
from aerogel.ir import Array
from aerogel.outputs import check_folder, make_folder
from aerogel.preprocess import NoImage

RECORD = "_aerogel-batch.json"
"""Readers of parquet leave names alone that begin so."""
OLD_S = 3600.0
"""Age from which a half written file is nobody's."""
Row = tuple[str, "dict[str, Array] | NoImage"]


def part_name(number: int) -> str:
    return f"part-{number:05}.parquet"


class Folder:
    """Where results go: a folder, or an address."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.fs, self.path = filesystem(url)
        self.path = self.path.rstrip("/")

    def check(self) -> None:
        """Raise where the folder cannot be used, before any work; an address is tried when it is used."""
        if is_local(self.fs):
            check_folder(self.path, "--output")

    def begin(self, said: Mapping[str, Any]) -> None:
        """Write down what is asked for; refuse where the folder has results of something else."""
        place = f"{self.path}/{RECORD}"
        try:
            if is_local(self.fs):
                make_folder(self.path, "--output")
            found = self._names()
            if RECORD not in found and any(name.endswith(".parquet") for name in found):
                raise AerogelError(
                    f"'{printable(self.url)}' has .parquet files that this command did not write: "
                    "say another --output"
                )
            self._first(place, json.dumps(said, indent=1).encode())
            before = json.loads(self.fs.cat_file(place))
        except AerogelError:
            raise
        except Exception as why:  # what S3's packages raise is no OSError
            raise AerogelError(f"'{printable(self.url)}' cannot be used: {printable(why)[:200]}") from why
        if not isinstance(before, dict):
            raise AerogelError(f"'{printable(place)}' is no record of a batch")
        other = [name for name in said if before.get(name) != said[name]]
        if other:
            was, now = (printable(of.get(other[0]))[:80] for of in (before, said))
            known = "" if other[0] in _DIGESTS else f" ('{was}'; now '{now}')"
            raise AerogelError(
                f"'{printable(self.url)}' has results of another {_KINDS[other[0]]}{known}: "
                "say another --output, or go on with what it was begun with"
            )

    def done(self) -> set[str]:
        """Names of the files that are whole. What a process left half written is removed."""
        names = self._names()
        for name in names:
            if name.startswith(".part-") and is_local(self.fs):
                self._without(f"{self.path}/{name}")
        return {name for name in names if name.startswith("part-")}

    def _names(self) -> list[str]:
        self.fs.invalidate_cache()
        try:
            return [str(n).rstrip("/").rpartition("/")[2] for n in self.fs.ls(self.path, detail=False)]
        except FileNotFoundError:
            return []

    @staticmethod
    def _without(path: str) -> None:
        """Remove what nobody has written to for a while."""
        with suppress(FileNotFoundError):
            if time.time() - os.stat(path).st_mtime > OLD_S:
                os.unlink(path)

    def _first(self, place: str, content: bytes) -> None:
        """Write a small file, if there is none yet: of two that try, one does."""
        with suppress(FileExistsError):
            if not is_local(self.fs):
                self.fs.pipe_file(place, content, mode="create")
                return
            beside = f"{self.path}/.{secrets.token_hex(8)}"
            with open(beside, "xb") as raw:
                raw.write(content)
            try:
                os.link(beside, place)
            finally:
                os.unlink(beside)

    @contextmanager
    def _opened(self, place: str) -> Iterator[Any]:
        """A file that appears under its name when everything is in it. An object store does that itself."""
        if not is_local(self.fs):
            raw = self.fs.open(place, "wb")
            try:
                yield raw
            except BaseException:
                raw.discard()
                raise
            raw.close()
            return
        folder, _, name = place.rpartition("/")
        beside = f"{folder}/.{name}.{secrets.token_hex(8)}"
        try:
            with open(beside, "xb") as raw:
                yield raw
                raw.flush()
                os.fsync(raw.fileno())
            os.replace(beside, place)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(beside)
            raise

    def write(
        self, number: int, batches: Iterator[Sequence[Row]], dtypes: Mapping[str, Any]
    ) -> tuple[int, int]:
        """One file of results, batch by batch; how many rows, and how many errors."""
        import pyarrow
        from pyarrow import parquet

        schema = _schema(dtypes)
        count = errors = 0
        with (
            self._opened(f"{self.path}/{part_name(number)}") as raw,
            parquet.ParquetWriter(raw, schema) as writer,
        ):
            for rows in batches:
                writer.write_table(pyarrow.table(_columns(rows, dtypes), schema))
                count += len(rows)
                errors += sum(isinstance(found, NoImage) for _, found in rows)
        return count, errors


_DIGESTS = ("model", "listed")
_KINDS = {
    "model": "model",
    "input": "input",
    "images": "list of images",
    "listed": "list of images",
    "preprocess": "way to preprocess",
    "batch": "batch size",
    "rows": "number of rows a file",
    "aerogel": "version of aerogel",
}


def _schema(dtypes: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    def held(dtype: Any) -> Any:
        values = pa.list_(pa.from_numpy_dtype(dtype))
        return pa.struct([("shape", pa.list_(pa.int32())), ("values", values)])

    outputs = pa.struct([(name, held(dtype)) for name, dtype in dtypes.items()])
    return pa.schema([("id", pa.string()), ("outputs", outputs), ("error", pa.string())])


def _columns(rows: Sequence[Row], dtypes: Mapping[str, Any]) -> dict[str, Any]:
    import pyarrow as pa

    errors = [str(found) if isinstance(found, NoImage) else None for _, found in rows]
    missing = pa.array([error is not None for error in errors])
    fields = []
    for name, dtype in dtypes.items():
        values = [np.empty(0, dtype) if isinstance(f, NoImage) else f[name].reshape(-1) for _, f in rows]
        shapes = [[] if isinstance(f, NoImage) else f[name].shape for _, f in rows]
        offsets = np.concatenate([[0], np.cumsum([len(v) for v in values])]).astype(np.int32)
        flat = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values)))
        fields.append(
            pa.StructArray.from_arrays([pa.array(shapes, pa.list_(pa.int32())), flat], ["shape", "values"])
        )
    outputs = pa.StructArray.from_arrays(fields, list(dtypes), mask=missing)
    return {"id": [name for name, _ in rows], "outputs": outputs, "error": errors}
