"""`aerogel slim`: from a dense model to a fast one in one call."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from aerogel.cli.options import (
    Dtype,
    Json,
    Model,
    Quiet,
    Shapes,
    Threads,
    Weights,
    above_zero,
    check_plot,
    check_result,
    half,
    share,
    sizes,
)
from aerogel.cli.pruning import a_pattern, check_model_output, drawn, opened_model, state_of
from aerogel.cli.words import in_shell, in_words
from aerogel.errors import AerogelError, printable
from aerogel.outputs import check_folder

NOTHING = "Nothing was written. Allow more with --max-drop, or ask for less with --speedup or --sparsity."


def slim(
    model: Model,
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", help="An .onnx file (from an .onnx file), .aero (compiled), or .safetensors."
        ),
    ],
    speedup: Annotated[
        float | None, typer.Option(help="How many times as fast as torch, measured here.  [default: 3]")
    ] = None,
    sparsity: Annotated[
        float | None, typer.Option(help="In its place: the share of zeros in all layers together.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Real inputs: a folder of images, or a .npy or .npz file of arrays.")
    ] = None,
    preprocess: Annotated[
        str | None, typer.Option(help='How an image becomes an input: "resize=256 crop=224 mean=...".')
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="So many of them at most.")] = 256,
    max_drop: Annotated[
        float, typer.Option(help="How much of the agreement with the dense model may go.")
    ] = 0.005,
    pattern: Annotated[
        str,
        typer.Option(
            help="auto: each layer's own (with --sparsity, unstructured); or one of "
            "unstructured,tilewise,tw1d,tew,2:4,4x1."
        ),
    ] = "auto",
    exclude: Annotated[list[str] | None, typer.Option(help="A layer to leave alone; once for each.")] = None,
    minutes: Annotated[float, typer.Option(help="When no further step is begun.")] = 30.0,
    state: Annotated[
        Path | None, typer.Option(help="A folder to keep what is done in; a killed call goes on from there.")
    ] = None,
    recipe_out: Annotated[
        Path | None, typer.Option(help="Write each layer's pattern and share here, for prune --recipe.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw score over latency into this .png or .svg.")] = None,
    shape: Shapes = None,
    dtype: Dtype = None,
    threads: Threads = None,
    weights: Weights = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prune, repair, heal and compile a dense model, and write it.

    Every layer is timed on this machine and its error looked at on real inputs; layers are pruned where that
    saves most time for the least error. No labels: the score is how often the answers are the dense model's,
    on inputs that are kept for it. Where it drops too far, less is tried; where every step drops too far,
    nothing is written and the exit code is 1.

    --shape names the batch in which calibration runs, best 16 or more; the speedup is measured on one image.

    Example:  aerogel slim model.onnx -o slim.onnx --calibration photos --preprocess "mean=0.5 std=0.5"
    """
    asked = _asked(speedup, sparsity, calibration, max_drop, minutes)
    with in_words():
        from aerogel.cli.calibration import read_calls
        from aerogel.preprocess import Recipe
        from aerogel.pruning.layers import prunable
        from aerogel.pruning.slim import slim as slimmed

        assert calibration is not None
        asked |= {
            "pattern": pattern if pattern == "auto" else a_pattern(pattern),
            "dtype": half(dtype, calibration),
        }
        asked |= {"exclude": exclude or [], "state": state, "progress": False if quiet else None}
        inputs = [model, weights, calibration]
        check_model_output(out, model, inputs, ".aero")
        if recipe_out is not None:
            check_result(recipe_out, (".json",), inputs, "--recipe-out", strict=False)
        check_plot(plot, *inputs)
        if state is not None:
            check_folder(state, "--state")
        how = None if preprocess is None else str(Recipe.parse(preprocess))
        opened = opened_model(model, shape, threads, weights, False, trains=True)
        if not any(True for _ in prunable(opened.model)):
            raise AerogelError(
                f"'{model}' has no layers to prune: slim takes model.onnx or package.module:build"
            )
        names = getattr(opened.model, "input_names", tuple(sizes(shape)))
        found = slimmed(opened.model, read_calls(calibration, names, opened.call[0], images, how), **asked)
        kept = found.chosen is not None
        if kept:
            _written(found, out, how)
        if kept and recipe_out is not None:
            _text(recipe_out, json.dumps({n: list(point) for n, point in found.recipe.items()}, indent=1))
        if plot is not None:
            drawn(found, plot)
    if as_json:
        typer.echo(json.dumps({"file": str(out) if kept else None, **found.to_dict()}, indent=1))
    else:
        said = f"{printable(str(out))}: written" if kept else NOTHING
        typer.echo(f"{in_shell(found.table)}\n\n{said}")
    if not kept:
        raise typer.Exit(1)


def _asked(
    speedup: float | None,
    sparsity: float | None,
    calibration: Path | None,
    max_drop: float,
    minutes: float,
) -> dict[str, Any]:
    """What the flags say, if they go together."""
    if speedup is not None and sparsity is not None:
        raise typer.BadParameter("say --speedup or --sparsity, not both")
    above_zero(speedup, "--speedup")
    if speedup is not None and speedup <= 1:
        raise typer.BadParameter(f"--speedup is more than 1, such as 3; not {speedup:g}")
    if sparsity is not None:
        share(sparsity, "--sparsity")
    if not 0 <= max_drop < 1:
        raise typer.BadParameter(f"--max-drop is between 0 and 1, such as 0.005; not {max_drop:g}")
    if not 0 < minutes < math.inf:
        raise typer.BadParameter(f"--minutes is a number above 0 such as 30, not {minutes:g}")
    if calibration is None:
        raise typer.BadParameter(
            "slim looks at real inputs: say --calibration with a folder of images and --preprocess, or with "
            "a .npz file that has an array for each input"
        )
    return {"speedup": speedup, "sparsity": sparsity, "max_drop": max_drop, "budget_minutes": minutes}


def _written(found: Any, out: Path, how: str | None) -> None:
    """The model, in the form that the file's name says."""
    from aerogel.cli.source import write_weights
    from aerogel.saved.file import save

    if out.suffix == ".onnx":
        found.model.save(out)
    elif out.suffix == ".aero":
        found.fast.preprocess = how or found.fast.preprocess
        save(found.fast, out)
    else:
        write_weights(state_of(found.model), out)


def _text(path: Path, text: str) -> None:
    from aerogel.disk import write_whole

    try:
        write_whole(path, text.encode())
    except OSError as why:
        raise AerogelError(f"'{path}' cannot be written: {why.strerror or why}") from why
