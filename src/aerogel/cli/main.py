"""`aerogel`: the command line's verbs.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 --require missed, 130 interrupted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aerogel import __version__
from aerogel.cli import pruning, records, reporting, timing
from aerogel.cli.batch import batch
from aerogel.cli.compiled import compiled
from aerogel.cli.export import export
from aerogel.cli.options import (
    Batch,
    Calibration,
    Dtype,
    Json,
    Model,
    Quiet,
    Ranges,
    Shapes,
    Stored,
    Threads,
    Trust,
    Tune,
    Weights,
    check_result,
)
from aerogel.cli.serve import serve
from aerogel.cli.slim import slim
from aerogel.cli.warm import warm
from aerogel.cli.words import TRACEBACK, in_shell, in_words, safe_output
from aerogel.errors import printable

app = typer.Typer(
    name="aerogel",
    help="Pruned CNNs, really faster: same answers, never slower on your machine, and it says why.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"aerogel {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show errors as Python does, for a report.")
    ] = False,
) -> None:
    """Pruned CNNs, really faster: same answers, never slower on your machine, and it says why."""
    TRACEBACK[0] = traceback
    safe_output()


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what aerogel finds on this machine: CPU, caches, threads, torch, cache folder, and what is wrong
    with them.

    Exit code 0 if everything works, 1 if something keeps aerogel from working or costs speed. Each finding
    says what to do.
    """
    from aerogel.cli.doctor import examine

    with in_words():
        findings = examine()
    if as_json:
        typer.echo(json.dumps([vars(f) for f in findings], indent=1))
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for finding in findings:
            mark = Text("ok") if finding.good else Text("look", "red")
            table.add_row(mark, finding.what, Text(printable(finding.says)))
        Console().print(table)
    raise typer.Exit(0 if all(f.good for f in findings) else 1)


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods: each way aerogel knows to run a layer, and the paper it comes from.

    For every layer all of them are asked; each refuses in words, or is timed on this machine, and the fastest
    is kept.
    """
    from aerogel.methods import METHODS, method

    rows = [(m.NAME, m.PAPER, m.SUMMARY) for m in map(method, METHODS)]
    if as_json:
        typer.echo(
            json.dumps([dict(zip(("name", "paper", "summary"), row, strict=True)) for row in rows], indent=1)
        )
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("method", "paper", "what it does"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    on_gpus = ", ".join(name for name in METHODS if "gpu" not in method(name).NOT_ON)
    typer.echo(f"\nOn GPUs, never run on a physical one yet: {on_gpus} (docs/gpu.md)")


@app.command("compile")
def compile_(
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", help="The .aero file to write.")],
    shape: Shapes = None,
    batch: Batch = None,
    threads: Threads = None,
    dtype: Dtype = None,
    tune: Tune = None,
    store: Stored = None,
    weights: Weights = None,
    trust_pickle: Trust = False,
    preprocess: Annotated[
        str | None,
        typer.Option(
            help='How an image becomes an input, saved with the model: "resize=256 crop=224 mean=...".'
        ),
    ] = None,
    calibration: Calibration = None,
    ranges: Ranges = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compile a model for this machine and save it as one file.

    Every layer is timed beside dense on this machine, and the fastest kept; the file holds the graph, the
    weights without their zeros, and every decision with its timings. `aerogel.load("model.aero")` gives it
    back in Python, the same answers bit for bit.

    Example:  aerogel compile model.onnx -o model.aero --shape images=1x3x640x640

    --dtype int8 quantizes weights and maps by what 64 real inputs show: --calibration photos --preprocess
    "resize=256 crop=224 mean=..."
    """
    with in_words():
        from aerogel.preprocess import Recipe
        from aerogel.report.explain import explain as report
        from aerogel.saved.file import save

        check_result(out, (".aero",), [model, weights, calibration])
        recipe = None if preprocess is None else str(Recipe.parse(preprocess))
        given = (model, shape, batch, threads, dtype, tune, store, weights, trust_pickle, quiet)
        _, fast = compiled(*given, calibration=calibration, preprocess=recipe, ranges=ranges)
        fast.preprocess = recipe or fast.preprocess
        save(fast, out)
        said, count, timed = in_shell(report(fast).headline), out.stat().st_size, fast.plan.model
    if as_json:
        speedup = None if timed is None else timed.ratio_p50
        typer.echo(
            json.dumps(
                {"file": str(out), "bytes": count, "how": str(fast.how), "speedup": speedup, "says": said}
            )
        )
    else:
        typer.echo(printable(f"{out}, {count / 2**20:.1f} MB: {said}"))


app.command()(timing.bench)
app.command()(reporting.explain)
app.command()(reporting.report)
app.command()(pruning.advise)
app.command()(pruning.prune)
app.command()(slim)
app.command()(warm)
app.command()(batch)
app.command()(serve)
app.command()(export)
app.add_typer(records.app, name="store")
