"""`aerogel`: the command line's verbs. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 --require missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from aerogel import __version__
from aerogel.cli import pruning
from aerogel.cli.options import Batch, Dtype, Json, Model, Quiet, Shapes, Sparsity, Stored, Threads, Trust, Tune, Weights, in_words

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
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Pruned CNNs, really faster: same answers, never slower on your machine, and it says why."""


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what aerogel finds on this machine: CPU, caches, threads, torch, cache folder, and what is wrong with them.

    Exit code 0 if everything works, 1 if something keeps aerogel from working or costs speed. Each finding says what to do.
    """
    from aerogel.cli.doctor import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps([vars(f) for f in findings], indent=1))
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for finding in findings:
            table.add_row("ok" if finding.good else "[red]look[/]", finding.what, finding.says)
        Console().print(table)
    raise typer.Exit(0 if all(f.good for f in findings) else 1)


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods: each way aerogel knows to run a layer, and the paper it comes from.

    For every layer all of them are asked; each refuses in words, or is timed on this machine, and the fastest is kept.
    """
    from aerogel.methods import METHODS, gpu, method

    rows = [(m.NAME, m.PAPER, m.SUMMARY) for m in map(method, METHODS)]
    if as_json:
        typer.echo(json.dumps([dict(zip(("name", "paper", "summary"), row, strict=True)) for row in rows], indent=1))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("method", "paper", "what it does"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    typer.echo(f"\nOn GPUs, never run on a physical one yet: {', '.join(gpu.METHODS)} (docs/gpu.md)")


def _compiled(
    model: str, shape: list[str] | None, batch: int | None, threads: int | None, dtype: str | None, tune: str, store: Path | None,
    weights: Path | None, trust: bool, quiet: bool, sparsity: float | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """The model opened, and as compiled."""
    import torch

    from aerogel.cli.source import pruned, sizes, source
    from aerogel.compiler import compile

    if dtype not in (None, "float16", "bfloat16"):
        raise typer.BadParameter(f"--dtype is float16 or bfloat16, not {dtype}")
    if sparsity is not None and not 0 < sparsity < 1:
        raise typer.BadParameter(f"--sparsity is between 0 and 1, not {sparsity}")
    if threads is not None:
        torch.set_num_threads(threads)
    opened = source(model, sizes(shape or []), batch, weights, trust)
    if opened.ready is not None and dtype is None and sparsity is None and tune == "fast" and batch is None:
        return opened, opened.ready  # tuned when it was saved
    if sparsity is not None:
        pruned(opened.model, sparsity)
    budget = float(tune) if tune.replace(".", "", 1).isdigit() else tune
    half = None if dtype is None else getattr(torch, dtype)
    plain = opened.path if opened.path is not None and opened.path.suffix == ".onnx" and sparsity is None else opened.model
    return opened, compile(plain, *opened.call, dtype=half, tune=budget, store=store, progress=False if quiet else None)


@app.command("compile")
def compile_(
    model: Model, out: Annotated[Path, typer.Option("-o", "--out", help="The .aero file to write.")], shape: Shapes = None,
    batch: Batch = None, threads: Threads = None, dtype: Dtype = None,
    tune: Tune = "fast", store: Stored = None, weights: Weights = None, trust_pickle: Trust = False, as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Compile a model for this machine and save it as one file.

    Every layer is timed beside dense on this machine, and the fastest kept; the file holds the graph, the weights without their
    zeros, and every decision with its timings. `aerogel.load("model.aero")` gives it back in Python, the same answers bit for bit.

    Example:  aerogel compile model.onnx -o model.aero --shape images=1x3x640x640
    """
    from aerogel.report.explain import explain as report
    from aerogel.saved import save

    with in_words():
        _, fast = _compiled(model, shape, batch, threads, dtype, tune, store, weights, trust_pickle, quiet)
        save(fast, out)
        said = report(fast).headline
    if as_json:
        typer.echo(
            json.dumps({"file": str(out), "bytes": out.stat().st_size, "how": fast.how, "speedup": fast.speedup, "says": said})
        )
    else:
        typer.echo(f"{out}, {out.stat().st_size / 2**20:.1f} MB: {said}")


@app.command()
def bench(
    model: Model, against: Annotated[str, typer.Option(help="Any of torch,inductor,onnxruntime,openvino.")] = "torch",
    shape: Shapes = None, batch: Annotated[str, typer.Option(help="One or more batches: 1,8.")] = "", threads: Threads = None,
    dtype: Dtype = None, tune: Tune = "fast", store: Stored = None, weights: Weights = None, trust_pickle: Trust = False,
    sparsity: Sparsity = None, rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians are shown.")] = 30,
    require: Annotated[float | None, typer.Option(help="Exit with 3 unless this much faster than the fastest opponent.")] = None,
    as_json: Json = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Time a model as aerogel runs it beside other runtimes, interleaved in one run.

    Ratios are medians of opponent / aerogel, pair by pair, so that a busy minute slows both. An opponent that is not installed or
    does not take the model is named with its reason.

    Example:  aerogel bench model.onnx --sparsity 0.9 --against torch,onnxruntime --require 1.5
    """
    from aerogel.cli.bench import bench as run

    if not all(b.isdigit() and int(b) > 0 for b in batch.split(",") if b):
        raise typer.BadParameter(f"--batch is a list of numbers such as 1,8, not {batch}")
    results = {}
    with in_words():
        for size in batch.split(","):
            own = int(size) if size else None
            opened, fast = _compiled(model, shape, own, threads, dtype, tune, store, weights, trust_pickle, quiet, sparsity)
            results[size or "as given"] = run(fast, opened, against.split(","), rounds)
    if as_json:
        typer.echo(json.dumps(results, indent=1))
    else:
        for size, result in results.items():
            table = Table(title=f"{model}, batch {size}, {result['threads']} threads", padding=(0, 2, 0, 0), box=None)
            for heading in ("", "min ms", "p50 ms", "over aerogel"):
                table.add_column(heading, justify="right")
            for name, ms in result["ms"].items():
                over = f"{result['ratio'][name]:.2f}x" if name in result["ratio"] else ""
                table.add_row(name, f"{ms['min']:.2f}", f"{ms['p50']:.2f}", over)
            Console().print(table)
            for name, why in result["absent"].items():
                typer.echo(f"absent: {name} ({why})")
    if require is not None and any((r["speedup"] or 0) < require for r in results.values()):
        typer.echo(f"slower than the required {require}x over the fastest opponent", err=True)
        raise typer.Exit(3)


@app.command()
def explain(
    model: Model, layer: Annotated[str | None, typer.Option(help="Only this layer.")] = None, shape: Shapes = None,
    batch: Batch = None, threads: Threads = None, dtype: Dtype = None,
    tune: Tune = "fast", store: Stored = None, weights: Weights = None, trust_pickle: Trust = False, sparsity: Sparsity = None,
    as_json: Json = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Say layer by layer what was chosen, how fast it is, and why not the others.

    An .aero file tells what was measured when it was compiled; other models are compiled first.

    Example:  aerogel explain model.aero --layer layer1.0.conv2
    """
    from aerogel.report.explain import explain as report

    with in_words():
        _, fast = _compiled(model, shape, batch, threads, dtype, tune, store, weights, trust_pickle, quiet, sparsity)
        said = report(fast, layer=layer)
    typer.echo(json.dumps(said.to_dict(), indent=1) if as_json else str(said))


app.command()(pruning.advise)
app.command()(pruning.prune)
