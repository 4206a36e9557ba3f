"""The verbs before a model is pruned, and for pruning it: `advise`, `prune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from aerogel.cli.options import Dtype, Json, Model, Shapes, Threads, Trust, Weights, in_words
from aerogel.errors import AerogelError


def advise(
    model: Model, sparsities: Annotated[str, typer.Option(help="Shares of zeros to measure.")] = "0.5,0.7,0.8,0.9,0.95",
    patterns: Annotated[str, typer.Option(help="Any of unstructured,tilewise,tw1d,tew,4x1.")] = "unstructured,tilewise",
    speedup: Annotated[float | None, typer.Option(help="Also say which layers to prune how far for this speedup.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw speedup over sparsity into this .png or .svg.")] = None,
    shape: Shapes = None, threads: Threads = None, dtype: Dtype = None,
    tune: Annotated[str, typer.Option(help="fast, or full: every layer tuned at every point.")] = "fast",
    weights: Weights = None, trust_pickle: Trust = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Measure what pruning would gain on this machine, before anything is pruned.

    Every layer is pruned by magnitude to each sparsity in each pattern and timed beside dense, then the whole model beside torch:
    its speedup, the sparsity from which each layer is faster, and for a wanted speedup the layers to prune. Accuracy is not looked
    at.

    Example:  aerogel advise model.onnx --shape images=1x3x640x640 --speedup 2
    """
    with in_words():
        opened = _open(model, shape, threads, weights, trust_pickle)
        import torch

        from aerogel.advice import advise as measured

        if not all(s.replace(".", "", 1).isdigit() for s in sparsities.split(",")):
            raise typer.BadParameter(f"--sparsities are numbers such as 0.8,0.9, not {sparsities}")
        found = measured(
            opened.model, *opened.call, sparsities=[float(s) for s in sparsities.split(",")], patterns=patterns.split(","),
            speedup=speedup, dtype=None if dtype is None else getattr(torch, dtype), tune=tune,
        )  # fmt: skip
    if plot is not None:
        found.plot().figure.savefig(plot, dpi=120)
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else found.table)


def prune(
    model: Model, out: Annotated[Path, typer.Option("-o", "--out", help="An .onnx file (from an .onnx file) or .safetensors.")],
    sparsity: Annotated[float, typer.Option(help="Share of zeros of every layer.")] = 0.9,
    pattern: Annotated[str, typer.Option(help="unstructured, tilewise, tw1d, tew, or blocks such as 4x1.")] = "unstructured",
    shape: Shapes = None, weights: Weights = None, trust_pickle: Trust = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Set the smallest weights of every convolution and Linear to zero and write the model.

    One shot, by magnitude, every layer alike: a start for fine-tuning and a model to time, not a model to ship. In Python,
    aerogel.prune and aerogel.Schedule prune while you train.

    Example:  aerogel prune model.onnx -o pruned.onnx --sparsity 0.9
    """
    from aerogel.cli.source import pruned, write_onnx, write_weights

    if not 0 < sparsity < 1:
        raise typer.BadParameter(f"--sparsity is between 0 and 1, not {sparsity}")
    with in_words():
        opened = _open(model, shape, None, weights, trust_pickle)
        state = pruned(opened.model, sparsity, pattern).state_dict()
        if out.suffix == ".onnx" and opened.path is not None and opened.path.suffix == ".onnx":
            changed = write_onnx(opened.path, state, out)
        elif out.suffix == ".safetensors":
            changed = write_weights(state, out)
        else:
            raise AerogelError(f"'{out}': write an .onnx file from an .onnx file, or the weights as .safetensors")
    held = [t for t in state.values() if t.dim() > 1 and t.is_floating_point()]
    zeros = 1 - sum(int(t.count_nonzero()) for t in held) / max(1, sum(t.numel() for t in held))
    if as_json:
        typer.echo(json.dumps({"file": str(out), "arrays": changed, "zeros": zeros}))
    else:
        typer.echo(f"{out}: {changed} arrays written, {zeros:.1%} zeros in the weights")


def _open(model: str, shape: list[str] | None, threads: int | None, weights: Path | None, trust: bool) -> Any:
    import torch

    from aerogel.cli.source import sizes, source

    if threads is not None:
        torch.set_num_threads(threads)
    return source(model, sizes(shape or []), None, weights, trust)
