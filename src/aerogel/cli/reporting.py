"""The verbs that say what was chosen and why: `explain`, `report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from aerogel.cli.compiled import compiled
from aerogel.cli.options import (
    Batch,
    Dtype,
    Json,
    OptionalModel,
    Quiet,
    Shapes,
    Sparsity,
    Stored,
    Threads,
    Trust,
    Tune,
    Weights,
    Zoo,
    check_result,
)
from aerogel.cli.words import in_shell, in_words
from aerogel.errors import printable


def explain(
    model: OptionalModel = None,
    layer: Annotated[str | None, typer.Option(help="Only this layer, with every detail.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Every detail of every layer.")] = False,
    zoo: Zoo = None,
    shape: Shapes = None,
    batch: Batch = None,
    threads: Threads = None,
    dtype: Dtype = None,
    tune: Tune = None,
    store: Stored = None,
    weights: Weights = None,
    trust_pickle: Trust = False,
    sparsity: Sparsity = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say layer by layer what was chosen and how fast it is; with --verbose, why not the others.

    An .aero file tells what was measured when it was compiled; other models are compiled first.

    Example:  aerogel explain model.aero --layer layer1.0.conv2
    """
    from aerogel.report.explain import explain as explained

    with in_words():
        _, fast = compiled(
            model, shape, batch, threads, dtype, tune, store, weights, trust_pickle, quiet, sparsity, zoo
        )
        said = explained(fast, layer=layer, verbose=verbose)
    typer.echo(json.dumps(said.to_dict(), indent=1) if as_json else in_shell(str(said)))


def report(
    out: Annotated[Path, typer.Option("-o", "--out", help="The .html file to write.")],
    model: OptionalModel = None,
    zoo: Zoo = None,
    shape: Shapes = None,
    batch: Batch = None,
    threads: Threads = None,
    dtype: Dtype = None,
    tune: Tune = None,
    store: Stored = None,
    weights: Weights = None,
    trust_pickle: Trust = False,
    sparsity: Sparsity = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write what `explain` says as one HTML page: charts, and a table to sort and search.

    The page needs no network and no other file. Charts need matplotlib: pip install "aerogel[plot]".

    Example:  aerogel report model.aero -o report.html
    """
    from aerogel.report.explain import explain as explained

    with in_words():
        check_result(out, (".html", ".htm"), [model, weights])
        _, fast = compiled(
            model, shape, batch, threads, dtype, tune, store, weights, trust_pickle, quiet, sparsity, zoo
        )
        said = explained(fast)
        said.save(out)
    size = out.stat().st_size
    if as_json:
        typer.echo(json.dumps({"file": str(out), "bytes": size, "says": said.headline}))
    else:
        typer.echo(printable(f"{out}, {size / 2**10:.0f} kB: {in_shell(said.headline)}"))
