"""The verb `batch`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from aerogel.cli.options import Json, Quiet
from aerogel.cli.words import in_words
from aerogel.errors import printable

Sides = Annotated[str | None, typer.Option(help="Shorter side in pixels, or HEIGHTxWIDTH.")]
Crop = Annotated[str | None, typer.Option(help="Side of the middle that is cut out, or HEIGHTxWIDTH.")]
Mean = Annotated[str | None, typer.Option(help="Taken from values in 0 to 1: 0.485,0.456,0.406.")]
Std = Annotated[str | None, typer.Option(help="What they are divided by: 0.229,0.224,0.225.")]
Bgr = Annotated[bool, typer.Option("--bgr", help="Blue comes first, as OpenCV reads images.")]


def recipe(
    resize: str | None, crop: str | None, mean: str | None, std: str | None, bgr: bool, function: str | None
) -> str | None:
    """What the flags say, as a recipe's text; None where they say nothing."""
    from aerogel.preprocess import Recipe

    flags = {"resize": resize, "crop": crop, "mean": mean, "std": std}
    words = [f"{name}={value}" for name, value in flags.items() if value is not None]
    text = " ".join([*words, *(["bgr"] if bgr else [])])
    if function is None:
        return str(Recipe.parse(text)) if text else None
    if text:
        raise typer.BadParameter("--preprocess takes the place of --resize, --crop, ...: say one of them")
    return function if ":" in function else str(Recipe.parse(function))


def batch(
    model: Annotated[str, typer.Argument(help="The .aero file. On a cluster, a path that every node has.")],
    input: Annotated[
        str, typer.Option(help="Folder, pattern ('s3://bucket/*.jpg') or .parquet file of images.")
    ],
    output: Annotated[str, typer.Option(help="Folder or s3:// address for the results.")],
    workers: Annotated[int, typer.Option(min=1, help="Processes, over all machines.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each.")] = 1,
    images: Annotated[int, typer.Option("--batch", min=1, help="Images that run together.")] = 32,
    rows: Annotated[int, typer.Option(min=1, help="Images in a file of results.")] = 1000,
    resize: Sides = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    bgr: Bgr = False,
    preprocess: Annotated[
        str | None,
        typer.Option(help='"resize=256 crop=224 ...", or module:function, from bytes to an array.'),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a model over many images with Ray Data, into parquet files.

    Each row has the image's id, its outputs, or the error that kept it from having any. A file is whole or
    not there: a command that was killed is given again, and goes on where it was. How an image becomes an
    input is said by the flags, else by what was saved with the model (`aerogel compile --preprocess`). Ray
    starts on this machine, or RAY_ADDRESS names its cluster.

    Example:  aerogel batch model.aero --input photos --output results --resize 256 --crop 224
    """
    with in_words():
        from aerogel.progress import shown
        from aerogel.serving.batch import Job, run

        how = recipe(resize, crop, mean, std, bgr, preprocess)
        job = Job(model, input, output, workers, threads, images, rows, how)
        with shown(False if quiet else None) as progress:
            done = run(job, progress)
    if as_json:
        typer.echo(json.dumps(asdict(done)))
        return
    pace = f", {done.images / done.seconds:.0f} a second with the start" if done.images else ""
    before = f" {done.found} files were there before." if done.found else ""
    skipped = f" {done.skipped} files that are no images were left out." if done.skipped else ""
    errors = f" {done.errors} have an error: their rows say which." if done.errors else ""
    text = f"{done.images} images in {done.files} files, {done.seconds:.0f} s{pace}.{errors}{before}{skipped}"
    typer.echo(printable(f"{output}: {text}"))
