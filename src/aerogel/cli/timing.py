"""The verb `bench`: its options, its table with bars, its plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aerogel.cli.compiled import compiled
from aerogel.cli.options import (
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
    above_zero,
    check_plot,
    numbers,
)
from aerogel.cli.words import in_words
from aerogel.errors import AerogelError, printable
from aerogel.progress import shown


def bench(
    model: OptionalModel = None,
    zoo: Zoo = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Any of torch,inductor,onnxruntime,openvino; by default torch and what is installed of the "
            "last two."
        ),
    ] = None,
    shape: Shapes = None,
    batch: Annotated[str, typer.Option(help="One or more batches: 1,8.")] = "",
    threads: Threads = None,
    dtype: Dtype = None,
    tune: Tune = None,
    store: Stored = None,
    weights: Weights = None,
    trust_pickle: Trust = False,
    sparsity: Sparsity = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; more on a busy machine.")] = 30,
    require: Annotated[
        float | None, typer.Option(help="Exit with 3 unless this much faster than the fastest opponent.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the times into this .png, .svg or .pdf.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time a model as aerogel runs it beside other runtimes, interleaved in one run.

    Ratios are medians of opponent / aerogel, pair by pair, so that a busy minute slows both. Rounds that
    other programs disturbed do not count; where too few are left, ratios are intervals. An opponent that is
    not installed or does not take the model is named with its reason.

    Example:  aerogel bench model.onnx --sparsity 0.9 --against torch,onnxruntime --require 1.5

    Without a model of your own:  aerogel bench --zoo resnet50 --sparsity 0.9
    """
    numbers(batch, "--batch")
    above_zero(require, "--require")
    opponents = None if against is None else [name for name in against.split(",") if name]
    if require is not None and opponents == []:
        raise typer.BadParameter("--require compares with opponents, and --against names none")
    results = {}
    with in_words():
        from aerogel.cli.bench import bench as run
        from aerogel.cli.bench import known

        known(opponents or [])
        check_plot(plot, model, weights)
        for size in batch.split(","):
            own = int(size) if size else None
            opened, fast = compiled(
                model, shape, own, threads, dtype, tune, store, weights, trust_pickle, quiet, sparsity, zoo
            )
            with shown(False if quiet else None) as line:
                results[size or "as given"] = run(fast, opened, opponents, rounds, line)
        if plot is not None:
            _drawn(str(model or zoo), results, plot)
    if as_json:
        typer.echo(json.dumps(results, indent=1))
    else:
        _printed(str(model or zoo), results, zoo is not None)
    _required(results, require)


def _printed(name: str, results: dict[str, Any], seeded: bool) -> None:
    """A table for each batch, with a bar for each time."""
    for size, result in results.items():
        threads = f"{result['threads']} thread{'s' if result['threads'] > 1 else ''}"
        title = Text(printable(f"{name}, batch {size}, {threads}"))
        table = Table(title=title, padding=(0, 2, 0, 0), box=None)
        for heading in ("", "min ms", "p50 ms", "over aerogel"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("", min_width=16, ratio=1)
        longest = max(ms["p50"] for ms in result["ms"].values())
        for opponent, ms in result["ms"].items():
            over = result["over"].get(opponent, "")
            style = "green" if opponent == "aerogel" else "bright_black"
            bar = Bar(longest, 0, ms["p50"], color=style)
            table.add_row(opponent, f"{ms['min']:.2f}", f"{ms['p50']:.2f}", over, bar)
        Console().print(table)
        for opponent, why in result["absent"].items():
            typer.echo(printable(f"not compared: {opponent} ({why})"))
        for line in _verdict(result):
            typer.echo(line)
    if seeded:
        typer.echo("Weights and zeros are seeded, not trained: good for times, not for answers.")


def _verdict(result: dict[str, Any]) -> list[str]:
    """What the table does not say by itself: that another runtime is faster, or that the machine was busy."""
    lines, fastest = [], result["fastest"]
    if fastest is not None and result["speedup"] < 1:
        theirs, ours = result["ms"][fastest]["p50"], result["ms"]["aerogel"]["p50"]
        lines.append(f"{fastest} takes {theirs:.1f} ms, aerogel {ours:.1f} ms: keep {fastest}.")
    if result["busy"]:
        lines.append(
            f"Measured on a busy machine: other work held up {result['disturbed']} of {result['rounds']} "
            "rounds. In brackets: between which ratios eight of ten rounds lie."
        )
    return lines


def _drawn(name: str, results: dict[str, Any], plot: Path) -> None:
    """The same as bars of a picture."""
    from matplotlib.figure import Figure

    from aerogel.report.charts import DENSE, SPARSE

    count = sum(len(result["ms"]) for result in results.values())
    figure = Figure(figsize=(7, 1.2 + 0.35 * count), layout="constrained")
    axes = figure.subplots()
    labels: list[str] = []
    for size, result in results.items():
        for opponent, ms in result["ms"].items():
            place = len(labels)
            colour = SPARSE if opponent == "aerogel" else DENSE
            axes.barh(place, ms["p50"], color=colour)
            over = f"  {result['over'][opponent]}" if opponent in result["over"] else ""
            axes.text(ms["p50"], place, f" {ms['p50']:.1f} ms{over}", va="center", fontsize=8)
            labels.append(f"{opponent}, batch {size}" if len(results) > 1 else opponent)
    target = next(iter(results.values()))["target"]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel("milliseconds, median")
    axes.set_title(printable(f"{name}, measured on {target}"), fontsize=8, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(plot, dpi=120)
    except OSError as why:
        raise AerogelError(f"'{plot}' cannot be written: {why.strerror or why}") from why


def _required(results: dict[str, Any], require: float | None) -> None:
    """Exit with 3 where a model is not as fast as required."""
    if require is None:
        return
    speedups = [result["speedup"] for result in results.values()]
    if None in speedups:
        raise typer.BadParameter(
            "--require compares with opponents, and none of --against ran; the reasons are above"
        )
    if min(speedups) < require:
        typer.echo(f"{min(speedups):.2f}x over the fastest opponent, and {require:g}x are required", err=True)
        raise typer.Exit(3)
