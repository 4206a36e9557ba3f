"""`aerogel store`: the tuning records of this machine and of a fleet."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from aerogel.cli.options import Json
from aerogel.cli.words import in_words
from aerogel.disk import cache_folder, read_small
from aerogel.errors import AerogelError, printable
from aerogel.outputs import check_folder

app = typer.Typer(help="The tuning records of this machine, and of a fleet's store.", no_args_is_help=True)
Address = Annotated[str, typer.Argument(help="The fleet's store: s3://bucket/path, or any fsspec address.")]
Folder = Annotated[
    Path | None, typer.Option("--folder", help="Folder of records; the user's own if not given.")
]


def _own(folder: Path | None) -> Path:
    return cache_folder() / "tuning" if folder is None else folder


def _said(world: Path) -> dict[str, Any]:
    """What a world's records say they were measured on."""
    from aerogel.tune.fleet import records_of
    from aerogel.tune.store import LARGEST

    for record in records_of(world):
        try:
            key = json.loads(read_small(record, LARGEST))["body"]["key"]
            return {name: str(key[name]) for name in ("target", "torch", "aerogel")}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {"target": "?", "torch": "?", "aerogel": ""}


def _current(said: dict[str, Any]) -> bool:
    """Whether this version of aerogel and torch could read them."""
    from importlib.metadata import version

    from aerogel.tune.store import timed_digest

    return bool((said["aerogel"], said["torch"]) == (timed_digest(), version("torch")))


@app.command()
def ls(folder: Folder = None, as_json: Json = False) -> None:
    """List the records of this machine, by what they were measured on.

    Example:  aerogel store ls
    """
    from aerogel.tune.fleet import records_of, worlds_of

    with in_words():
        rows = []
        for world in worlds_of(_own(folder)):
            said, records = _said(world), records_of(world)
            size = sum(r.stat().st_size for r in records)
            kinds = {kind: sum(kind in r.parts for r in records) for kind in ("layers", "models")}
            rows.append({"folder": world.name, **said, **kinds, "bytes": size, "current": _current(said)})
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        old = "" if row["current"] else ", of another version: aerogel store prune removes them"
        counts = f"{row['layers']} layers, {row['models']} models, {row['bytes'] / 2**20:.1f} MB"
        typer.echo(printable(f"{row['folder']}  {row['target']}, torch {row['torch']}: {counts}{old}"))
    if not rows:
        typer.echo(printable(f"no records in {_own(folder)}"))


@app.command()
def pull(store: Address, folder: Folder = None, as_json: Json = False) -> None:
    """Copy a fleet's records to this machine.

    Example:  aerogel store pull s3://bucket/tuning
    """
    from aerogel.tune import fleet

    with in_words():
        fleet.Fleet.of(store)
        if folder is not None:
            check_folder(folder, "--folder")
        count = _tried(store, lambda: _pulled(store, _own(folder)))
    _counted(count, "copied here", as_json)


def _pulled(store: str, folder: Path) -> int:
    from aerogel.tune import fleet

    return sum(fleet.fetch(store, folder / world, math.inf) for world in fleet.worlds(store))


@app.command()
def push(store: Address, folder: Folder = None, as_json: Json = False) -> None:
    """Send this machine's records to a fleet's store; what is there already stays.

    Example:  aerogel store push s3://bucket/tuning
    """
    from aerogel.tune import fleet

    with in_words():
        fleet.Fleet.of(store)
        worlds = {world: fleet.records_of(world) for world in fleet.worlds_of(_own(folder))}
        count = _tried(store, lambda: sum(fleet.send(store, w, own, math.inf) for w, own in worlds.items()))
    _counted(count, "sent", as_json)


@app.command()
def prune(folder: Folder = None, as_json: Json = False) -> None:
    """Remove this machine's records of other versions of aerogel and torch, which nothing reads any more.

    Example:  aerogel store prune
    """
    from aerogel.tune.fleet import records_of, worlds_of

    with in_words():
        old = [world for world in worlds_of(_own(folder)) if not _current(_said(world))]
        records = {record: world for world in old for record in records_of(world)}
        for record, world in records.items():
            record.unlink(missing_ok=True)
            _without_empty(record.parent, world)
    _counted(len(records), "removed", as_json)


def _without_empty(folder: Path, last: Path) -> None:
    """Remove a folder and those above it up to the last, as long as they are empty."""
    while folder != last.parent:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def _tried(store: str, run: Any) -> int:
    try:
        return int(run())
    except AerogelError:
        raise
    except Exception as why:  # a dead endpoint of S3 raises what is no OSError
        raise AerogelError(f"the store {printable(store)[:80]}: {printable(why)[:300]}") from why


def _counted(count: int, what: str, as_json: bool) -> None:
    typer.echo(json.dumps({"records": count}) if as_json else f"{count} records {what}")
