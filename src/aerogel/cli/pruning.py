"""The verbs before a model is pruned, and for pruning it: `advise`, `prune`."""

from __future__ import annotations

import json
from collections.abc import Iterable
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
    check_plot,
    check_result,
    effort,
    half,
    number,
    share,
    sizes,
)
from aerogel.cli.recipe import read_recipe
from aerogel.cli.words import in_words
from aerogel.errors import AerogelError, printable
from aerogel.outputs import Input


def advise(
    model: Model,
    sparsities: Annotated[str, typer.Option(help="Shares of zeros to measure.")] = "0.5,0.7,0.8,0.9,0.95",
    patterns: Annotated[
        str | None,
        typer.Option(
            help="Any of unstructured,tilewise,tw1d,tew,4x1,1x4.  [default: unstructured,tilewise; in int8 "
            "unstructured,1x4]"
        ),
    ] = None,
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

    --dtype int8 times layers in int8, beside int8 without zeros. Its inputs are made up here, so a layer that
    loses too much on real ones may still stay in floats.

    Example:  aerogel advise model.onnx --shape images=1x3x640x640 --speedup 2
    """
    shares = [share(number(s), "each of --sparsities") for s in sparsities.split(",")]
    above_zero(speedup, "--speedup")
    with in_words():
        from aerogel.pruning.advise import advise as measured

        kinds = None if patterns is None else [a_pattern(p) for p in patterns.split(",")]
        stored_as, budget = half(dtype, "made up"), effort(tune)
        check_plot(plot, model, weights)
        opened = opened_model(model, shape, threads, weights, trust_pickle)
        options: dict[str, Any] = {"speedup": speedup, "dtype": stored_as, "tune": budget or "fast"}
        found = measured(opened.model, *opened.call, sparsities=shares, patterns=kinds, **options)
        if plot is not None:
            drawn(found, plot)
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else found.table)


def a_pattern(text: str) -> str:
    """A pattern's name."""
    from aerogel.pruning.masks import as_block

    try:
        as_block(text)
    except AerogelError as why:
        raise typer.BadParameter(f"--{why}") from None
    return text


def drawn(found: Any, plot: Path) -> None:
    """The figure of what was found, as a file."""
    try:
        found.plot().figure.savefig(plot, dpi=120)
    except OSError as why:
        raise AerogelError(f"'{plot}' cannot be written: {why.strerror or why}") from why


def prune(
    model: Model,
    out: Annotated[
        Path, typer.Option("-o", "--out", help="An .onnx file (from an .onnx file) or .safetensors.")
    ],
    sparsity: Annotated[float | None, typer.Option(help="Share of zeros.  [default: 0.9]")] = None,
    pattern: Annotated[
        str, typer.Option(help="unstructured, tilewise, tw1d, tew, 2:4, or blocks such as 4x1.")
    ] = "unstructured",
    score: Annotated[
        str,
        typer.Option(help="Which weights go: magnitude, or wanda or obs, which look at --calibration."),
    ] = "magnitude",
    scope: Annotated[
        str | None,
        typer.Option(help="How zeros are spread over layers: uniform, global or erk; else as --score does."),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help='In the place of --sparsity: JSON, {"layer": ["pattern", share]}, or of advise.'),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Real inputs: a folder of images, or a .npy or .npz file of arrays.")
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="So many of them at most.")] = 128,
    preprocess: Annotated[
        str | None, typer.Option(help='How an image becomes an input: "resize=256 crop=224 mean=...".')
    ] = None,
    permute: Annotated[
        bool, typer.Option("--permute", help="First put channels in the order in which blocks lose least.")
    ] = False,
    shape: Shapes = None,
    weights: Weights = None,
    trust_pickle: Trust = False,
    as_json: Json = False,
) -> None:
    """Set weights of every convolution and Linear to zero and write the model.

    One shot, without training: by magnitude, a start for fine-tuning and a model to time. With real inputs
    and --score obs the weights that stay make good for those that go. In Python, aerogel.prune and
    aerogel.Schedule prune while you train.

    Example:  aerogel prune model.onnx -o pruned.onnx --sparsity 0.9
    """
    asked = _asked(sparsity, recipe, score, scope, calibration, preprocess)
    with in_words():
        from aerogel.cli.source import write_weights
        from aerogel.preprocess import Recipe
        from aerogel.runtime.onnxmodel import OnnxModel

        a_pattern(pattern)
        check_model_output(out, model, [weights, recipe, calibration])
        how = None if preprocess is None else str(Recipe.parse(preprocess))
        layers = None if recipe is None else read_recipe(recipe)
        opened = opened_model(model, shape, None, weights, trust_pickle, trains=True)
        if calibration is not None:
            from aerogel.cli.calibration import read_calls

            names = getattr(opened.ready or opened.model, "input_names", tuple(sizes(shape)))
            how = how or getattr(opened.ready, "preprocess", None)
            asked["calibration"] = read_calls(calibration, names, opened.call[0], images, how)
        if permute:
            asked["permute"] = opened.call[0]
        before = {name: value.clone() for name, value in state_of(opened.model).items()}
        share_of_zeros = asked.pop("sparsity")
        finished = _pruned(opened.model, layers or share_of_zeros, pattern, asked)
        state = state_of(finished)
        if out.suffix == ".onnx" and isinstance(finished, OnnxModel):
            finished.save(out)
            count = sum(not value.equal(before[name]) for name, value in state.items())
        else:
            write_weights(state, out)
            count = len(state)
    held = [t for t in state.values() if t.dim() > 1 and t.is_floating_point()]
    zeros = 1 - sum(int(t.count_nonzero()) for t in held) / max(1, sum(t.numel() for t in held))
    if as_json:
        typer.echo(json.dumps({"file": str(out), "arrays": count, "zeros": zeros}))
    else:
        typer.echo(printable(f"{out}: {count} arrays written, {zeros:.1%} zeros in the weights"))


def check_model_output(out: Path, model: str, inputs: Iterable[Input], *further: str) -> None:
    """Raise where this model cannot be written to a path, in one of its formats or the `further` ones."""
    suffixes = (".onnx", ".safetensors") if model.endswith(".onnx") else (".safetensors",)
    note = "Only an .onnx file is written as .onnx again." if out.suffix == ".onnx" else ""
    check_result(out, (*suffixes, *further), [model, *inputs], note=note)


SCORES, SCOPES = {"magnitude": False, "wanda": True, "obs": True}, ("uniform", "global", "erk", "error")
"""Scores, and whether they look at real inputs; how a share is spread."""


def _asked(
    sparsity: float | None,
    recipe: Path | None,
    score: str,
    scope: str | None,
    calibration: Path | None,
    preprocess: str | None,
) -> dict[str, Any]:
    """What the flags say, if they go together."""
    if score not in SCORES:
        raise typer.BadParameter(f"--score is one of {', '.join(SCORES)}; not '{printable(score)}'")
    if scope is not None and scope not in SCOPES:
        raise typer.BadParameter(f"--scope is one of {', '.join(SCOPES)}; not '{printable(scope)}'")
    if calibration is None and (SCORES[score] or scope == "error"):
        flag = f"--score {score}" if SCORES[score] else "--scope error"
        raise typer.BadParameter(
            f"{flag} looks at real inputs: say --calibration with a folder of images and --preprocess, or "
            "with a .npz file that has an array for each input"
        )
    if calibration is None and preprocess is not None:
        raise typer.BadParameter("--preprocess goes with --calibration and a folder of images")
    if recipe is not None and (sparsity is not None or scope is not None):
        raise typer.BadParameter("--recipe says the share of each layer: leave --sparsity and --scope out")
    found: dict[str, Any] = {"sparsity": share(0.9 if sparsity is None else sparsity, "--sparsity")}
    if recipe is not None:
        scope = "uniform"  # each layer as the recipe says
    return found | {"score": score} | ({} if scope is None else {"scope": scope})


def _pruned(model: Any, sparsity: Any, pattern: str, more: dict[str, Any]) -> Any:
    """The model pruned, its zeros part of its weights."""
    from aerogel.cli.source import pruned
    from aerogel.pruning.held import finalize
    from aerogel.pruning.layers import prunable
    from aerogel.pruning.prune import prune as prune_layers
    from aerogel.runtime.layers import legal

    layers = dict(prunable(model))
    if not layers:  # a graph: of an .aero or .pt2 file
        if isinstance(sparsity, dict) or more != {"score": "magnitude"}:
            raise AerogelError(
                "the file holds a graph and no layers: --score, --scope, --recipe, --permute and "
                "--calibration take model.onnx or package.module:build"
            )
        return pruned(model, sparsity, pattern)
    if isinstance(sparsity, dict):  # advise names layers as the ONNX file does
        sparsity = {n if n in layers else legal(n): point for n, point in sparsity.items()}
    return finalize(prune_layers(model, sparsity, pattern=pattern, **more))


def state_of(model: Any) -> dict[str, Any]:
    """The weights by name; of an ONNX file by the names they have there."""
    from aerogel.runtime.graphmodel import HasGraph

    state = model.as_graph().state_dict() if isinstance(model, HasGraph) else model.state_dict()
    return {name: value.detach() for name, value in state.items()}


def opened_model(
    model: str,
    shape: list[str] | None,
    threads: int | None,
    weights: Path | None,
    trust: bool,
    trains: bool = False,
) -> Any:
    """The model and an example call of it."""
    import torch

    from aerogel.cli.source import source

    shapes = sizes(shape)
    if threads is not None:
        torch.set_num_threads(threads)
    return source(model, shapes, None, weights, trust, trains)
