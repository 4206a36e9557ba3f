"""The verbs before a model is pruned, and for pruning it: `advise`, `prune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from aerogel.cli.options import (
    Dtype,
    Json,
    Model,
    Shapes,
    Threads,
    Trust,
    Weights,
    above_zero,
    drawable,
    effort,
    half,
    number,
    share,
    sizes,
    writable,
)
from aerogel.cli.words import in_words
from aerogel.errors import AerogelError, printable


def advise(
    model: Model,
    sparsities: Annotated[str, typer.Option(help="Shares of zeros to measure.")] = "0.5,0.7,0.8,0.9,0.95",
    patterns: Annotated[
        str, typer.Option(help="Any of unstructured,tilewise,tw1d,tew,4x1.")
    ] = "unstructured,tilewise",
    speedup: Annotated[
        float | None, typer.Option(help="Also say which layers to prune how far for this speedup.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw speedup over sparsity into this .png or .svg.")
    ] = None,
    shape: Shapes = None,
    threads: Threads = None,
    dtype: Dtype = None,
    tune: Annotated[str | None, typer.Option(help="fast, or full: every layer tuned at every point.")] = None,
    weights: Weights = None,
    trust_pickle: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure what pruning would gain on this machine, before anything is pruned.

    Every layer is pruned by magnitude to each sparsity in each pattern and timed beside dense, then the whole
    model beside torch: its speedup, the sparsity from which each layer is faster, and for a wanted speedup
    the layers to prune. Accuracy is not looked at.

    Example:  aerogel advise model.onnx --shape images=1x3x640x640 --speedup 2
    """
    shares = [share(number(s), "each of --sparsities") for s in sparsities.split(",")]
    above_zero(speedup, "--speedup")
    with in_words():
        from aerogel.pruning.advise import advise as measured

        kinds, stored_as, budget = [a_pattern(p) for p in patterns.split(",")], half(dtype), effort(tune)
        if plot is not None:
            drawable(plot)
        opened = _open(model, shape, threads, weights, trust_pickle)
        options: dict[str, Any] = {"speedup": speedup, "dtype": stored_as, "tune": budget or "fast"}
        found = measured(opened.model, *opened.call, sparsities=shares, patterns=kinds, **options)
        if plot is not None:
            _drawn(found, plot)
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else found.table)


def a_pattern(text: str) -> str:
    """A pattern's name."""
    from aerogel.pruning.masks import as_block

    try:
        as_block(text)
    except AerogelError as why:
        raise typer.BadParameter(f"--{why}") from None
    return text


def _drawn(found: Any, plot: Path) -> None:
    try:
        found.plot().figure.savefig(plot, dpi=120)
    except OSError as why:
        raise AerogelError(f"'{plot}' cannot be written: {why.strerror or why}") from why


def prune(
    model: Model,
    out: Annotated[
        Path, typer.Option("-o", "--out", help="An .onnx file (from an .onnx file) or .safetensors.")
    ],
    sparsity: Annotated[float, typer.Option(help="Share of zeros of every layer.")] = 0.9,
    pattern: Annotated[
        str, typer.Option(help="unstructured, tilewise, tw1d, tew, or blocks such as 4x1.")
    ] = "unstructured",
    shape: Shapes = None,
    weights: Weights = None,
    trust_pickle: Trust = False,
    as_json: Json = False,
) -> None:
    """Set the smallest weights of every convolution and Linear to zero and write the model.

    One shot, by magnitude, every layer alike: a start for fine-tuning and a model to time, not a model to
    ship. In Python, aerogel.prune and aerogel.Schedule prune while you train.

    Example:  aerogel prune model.onnx -o pruned.onnx --sparsity 0.9
    """
    share(sparsity, "--sparsity")
    with in_words():
        from aerogel.cli.source import pruned, write_onnx, write_weights

        a_pattern(pattern)
        writable(out)
        if out.suffix not in (".onnx", ".safetensors") or (
            out.suffix == ".onnx" and not model.endswith(".onnx")
        ):
            raise typer.BadParameter(
                f"'{printable(str(out))}': -o is an .onnx file from an .onnx file, or the weights "
                "as .safetensors"
            )
        opened = _open(model, shape, None, weights, trust_pickle)
        state = pruned(opened.model, sparsity, pattern).state_dict()
        changed = (
            write_weights(state, out) if out.suffix == ".safetensors" else write_onnx(opened.path, state, out)
        )
    held = [t for t in state.values() if t.dim() > 1 and t.is_floating_point()]
    zeros = 1 - sum(int(t.count_nonzero()) for t in held) / max(1, sum(t.numel() for t in held))
    if as_json:
        typer.echo(json.dumps({"file": str(out), "arrays": changed, "zeros": zeros}))
    else:
        typer.echo(printable(f"{out}: {changed} arrays written, {zeros:.1%} zeros in the weights"))


def _open(model: str, shape: list[str] | None, threads: int | None, weights: Path | None, trust: bool) -> Any:
    import torch

    from aerogel.cli.source import source

    shapes = sizes(shape)
    if threads is not None:
        torch.set_num_threads(threads)
    return source(model, shapes, None, weights, trust)
