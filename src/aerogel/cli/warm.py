"""The verb `warm`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from aerogel.cli.options import Json, numbers
from aerogel.cli.words import in_words
from aerogel.errors import printable


def warm(
    model: Annotated[str, typer.Argument(help="The .aero file.")],
    batch: Annotated[str, typer.Option(help="Batches: 1,8. By default those it is tuned for.")] = "",
    threads: Annotated[str, typer.Option(help="Threads: 1,2. By default what it was tuned for.")] = "",
    isa: Annotated[str, typer.Option(help="Any of avx512,avx2,generic. By default its own.")] = "",
    as_json: Json = False,
) -> None:
    """Compile every kernel a model needs into the cache folder, so that a process only links them.

    For the build of an image: nothing runs, so the CPU may be another than that of the machines the image is
    for. The folder is that of AEROGEL_CACHE; it can be read by every user afterwards.

    Example:  AEROGEL_CACHE=/srv/aerogel aerogel warm model.aero --batch 1,8 --threads 1,2
    """
    sizes, counts = numbers(batch, "--batch"), numbers(threads, "--threads")
    with in_words():
        from aerogel.saved.warm import warm as warmed

        folder, found = warmed(model, sizes, counts, [name for name in isa.split(",") if name])
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "isa": [vars(one) for one in found]}))
        return
    for one in found:
        typer.echo(printable(f"{one.isa}: {one.kernels} kernels, {one.compiled} compiled now"))
    typer.echo(printable(f"in {folder}"))
