"""`aerogel`: the command line's verbs."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from aerogel import __version__

app = typer.Typer(
    name="aerogel",
    help="Pruned CNNs, really faster: same answers, never slower on your machine, and it says why.",
    no_args_is_help=True,
    add_completion=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


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
    from aerogel.methods import METHODS, method

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
