"""The verb `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aerogel.cli.words import in_words
from aerogel.errors import printable


def export(
    model: Annotated[Path, typer.Argument(help="The .aero file.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The repository's folder.")],
    kind: Annotated[str, typer.Option("--format", help="triton: NVIDIA's inference server.")] = "triton",
    name: Annotated[str | None, typer.Option(help="The model's name there; by default the file's.")] = None,
    instances: Annotated[int, typer.Option(min=1, help="Processes that answer.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each.")] = 1,
    images: Annotated[
        int | None, typer.Option("--batch", min=1, help="Largest batch the server may put together.")
    ] = None,
    wait_us: Annotated[int, typer.Option(min=0, help="Microseconds a request waits for others.")] = 2000,
) -> None:
    """Write a model repository for Triton's inference server (Python backend, CPU).

    The server's Python needs aerogel: pip install aerogel in its image. It batches requests up to the sizes
    the model was tuned for, runs several instances, and is ready when each has answered once.

    Example:  aerogel export model.aero --format triton -o repository
    """
    if kind != "triton":
        raise typer.BadParameter(f"--format is triton, not '{printable(kind)}'")
    with in_words():
        from aerogel.serving.triton import export as exported

        folder = exported(model, out, name, instances, threads, images, wait_us)
    typer.echo(printable(f"{folder}: tritonserver --model-repository={out}"))
