"""What the verbs of the command line share: their options, and how they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from aerogel.errors import AerogelError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Model = Annotated[str, typer.Argument(help="model.onnx, model.aero, package.module:build, or model.pt2 with --trust-pickle.")]
Shapes = Annotated[
    list[str] | None, typer.Option("--shape", help="NAME=1x3x640x640, once for each input whose sizes the model leaves open.")
]
Threads = Annotated[int | None, typer.Option(help="Threads to run and tune with; torch's own number if not given.")]
Dtype = Annotated[str | None, typer.Option(help="float16 or bfloat16: weights and maps in 16 bits. Never changed unasked.")]
Tune = Annotated[str, typer.Option(help="off (rules, no timing), fast, full, or seconds to spend on timing layers.")]
Stored = Annotated[Path | None, typer.Option("--store", help="Folder of tuning records; the user's own if not given.")]
Weights = Annotated[Path | None, typer.Option(help="A .safetensors file with the state of package.module:build's module.")]
Trust = Annotated[bool, typer.Option("--trust-pickle", help="Read a .pt2, which may run Python code of whoever made it.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on the terminal.")]
Sparsity = Annotated[
    float | None, typer.Option(help="Prune every layer by magnitude first: the speed it would have, not the accuracy.")
]
Batch = Annotated[int | None, typer.Option(help="Batch to tune for.")]


@contextmanager
def in_words() -> Iterator[None]:
    """What aerogel refuses is a sentence on stderr and exit code 1, not a traceback."""
    try:
        yield
    except AerogelError as why:
        typer.echo(f"{type(why).__name__}: {why}", err=True)
        raise typer.Exit(1) from None
