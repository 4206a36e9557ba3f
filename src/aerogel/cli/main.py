"""`aerogel`: the command line's verbs. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 --require missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aerogel import __version__
from aerogel.cli import pruning
from aerogel.cli.options import (
    Batch,
    Dtype,
    Json,
    Model,
    Quiet,
    Shapes,
    Sparsity,
    Stored,
    Threads,
    Trust,
    Tune,
    Weights,
    above_zero,
    effort,
    half,
    share,
    sizes,
    writable,
)
from aerogel.cli.words import TRACEBACK, in_shell, in_words, safe_output
from aerogel.errors import printable

app = typer.Typer(
    name="aerogel",
    help="Pruned CNNs, really faster: same answers, never slower on your machine, and it says why.",
    no_args_is_help=True,
    add_completion=False,
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
    typer.echo(f"\nOn GPUs, never run on a physical one yet: {', '.join(METHODS)} (docs/gpu.md)")


def _compiled(
    model: str,
    shape: list[str] | None,
    batch: int | None,
    threads: int | None,
    dtype: str | None,
    tune: str | None,
    store: Path | None,
    weights: Path | None,
    trust: bool,
    quiet: bool,
    sparsity: float | None = None,
) -> tuple[Any, Any]:
    """The model opened, and as compiled. What is asked for is looked at before anything is read."""
    import torch

    from aerogel.cli.source import pruned, source
    from aerogel.compiler import compile

    stored_as, budget, shapes = half(dtype), effort(tune), sizes(shape)
    if sparsity is not None:
        share(sparsity, "--sparsity")
    if threads is not None:
        torch.set_num_threads(threads)
    opened = source(model, shapes, batch, weights, trust)
    if opened.ready is not None and dtype is None and sparsity is None and budget is None and batch is None:
        return opened, opened.ready  # tuned when it was saved
    if sparsity is not None:
        pruned(opened.model, sparsity)
    plain = (
        opened.path
        if opened.path is not None and opened.path.suffix == ".onnx" and sparsity is None
        else opened.model
    )
    options: dict[str, Any] = {
        "dtype": stored_as,
        "tune": budget or "fast",
        "store": store,
        "progress": False if quiet else None,
    }
    return opened, compile(plain, *opened.call, **options)


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
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compile a model for this machine and save it as one file.

    Every layer is timed beside dense on this machine, and the fastest kept; the file holds the graph, the
    weights without their zeros, and every decision with its timings. `aerogel.load("model.aero")` gives it
    back in Python, the same answers bit for bit.

    Example:  aerogel compile model.onnx -o model.aero --shape images=1x3x640x640
    """
    with in_words():
        from aerogel.report.explain import explain as report
        from aerogel.saved.file import save

        writable(out)
        _, fast = _compiled(model, shape, batch, threads, dtype, tune, store, weights, trust_pickle, quiet)
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


@app.command()
def bench(
    model: Model,
    against: Annotated[str, typer.Option(help="Any of torch,inductor,onnxruntime,openvino.")] = "torch",
    shape: Shapes = None,
    batch: Annotated[str, typer.Option(help="One or more batches: 1,8.")] = "",
    threads: Threads = None,
    dtype: Dtype = None,
    tune: Tune = None,
    store: Stored = None,
    weights: Weights = None,
    trust_pickle: Trust = False,
    sparsity: Sparsity = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are shown.")] = 30,
    require: Annotated[
        float | None, typer.Option(help="Exit with 3 unless this much faster than the fastest opponent.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time a model as aerogel runs it beside other runtimes, interleaved in one run.

    Ratios are medians of opponent / aerogel, pair by pair, so that a busy minute slows both. An opponent that
    is not installed or does not take the model is named with its reason.

    Example:  aerogel bench model.onnx --sparsity 0.9 --against torch,onnxruntime --require 1.5
    """
    if not all(b.isascii() and b.isdigit() and 0 < int(b) < 2**31 for b in batch.split(",")) and batch:
        raise typer.BadParameter(f"--batch is a list of numbers such as 1,8, not '{printable(batch)}'")
    above_zero(require, "--require")
    opponents = [name for name in against.split(",") if name]
    if require is not None and not opponents:
        raise typer.BadParameter("--require compares with opponents, and --against names none")
    results = {}
    with in_words():
        from aerogel.cli.bench import bench as run
        from aerogel.cli.bench import known

        known(opponents)
        for size in batch.split(","):
            own = int(size) if size else None
            opened, fast = _compiled(
                model, shape, own, threads, dtype, tune, store, weights, trust_pickle, quiet, sparsity
            )
            results[size or "as given"] = run(fast, opened, opponents, rounds)
    if as_json:
        typer.echo(json.dumps(results, indent=1))
    else:
        for size, result in results.items():
            title = Text(printable(f"{model}, batch {size}, {result['threads']} threads"))
            table = Table(title=title, padding=(0, 2, 0, 0), box=None)
            for heading in ("", "min ms", "p50 ms", "over aerogel"):
                table.add_column(heading, justify="right")
            for name, ms in result["ms"].items():
                over = f"{result['ratio'][name]:.2f}x" if name in result["ratio"] else ""
                table.add_row(name, f"{ms['min']:.2f}", f"{ms['p50']:.2f}", over)
            Console().print(table)
            for name, why in result["absent"].items():
                typer.echo(printable(f"absent: {name} ({why})"))
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


@app.command()
def explain(
    model: Model,
    layer: Annotated[str | None, typer.Option(help="Only this layer.")] = None,
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
    """Say layer by layer what was chosen, how fast it is, and why not the others.

    An .aero file tells what was measured when it was compiled; other models are compiled first.

    Example:  aerogel explain model.aero --layer layer1.0.conv2
    """
    from aerogel.report.explain import explain as report

    with in_words():
        _, fast = _compiled(
            model, shape, batch, threads, dtype, tune, store, weights, trust_pickle, quiet, sparsity
        )
        said = report(fast, layer=layer)
    typer.echo(json.dumps(said.to_dict(), indent=1) if as_json else in_shell(str(said)))


app.command()(pruning.advise)
app.command()(pruning.prune)
