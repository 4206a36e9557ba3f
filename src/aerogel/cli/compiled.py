"""A model of the command line, opened and compiled: what most verbs begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from aerogel.cli.options import effort, half, reach, share, sizes

IMAGES = 64
"""Of a calibration folder that are looked at."""


def compiled(
    model: str | None,
    shape: list[str] | None,
    batch: int | None,
    threads: int | None,
    dtype: str | None,
    tune: str | None,
    store: str | None,
    weights: Path | None,
    trust: bool,
    quiet: bool,
    sparsity: float | None = None,
    zoo: str | None = None,
    calibration: Path | None = None,
    preprocess: str | None = None,
    ranges: str | None = None,
) -> tuple[Any, Any]:
    """The model opened, and as compiled. What is asked for is looked at before anything is read."""
    import torch

    from aerogel.cli.source import from_zoo, pruned, source
    from aerogel.compiler import compile

    stored_as, budget, shapes = half(dtype, calibration), effort(tune), sizes(shape)
    options: dict[str, Any] = {"dtype": stored_as, "tune": budget or "fast", "store": store}
    options["progress"] = False if quiet else None
    if ranges is not None:
        options["ranges"] = reach(ranges)
    if sparsity is not None:
        share(sparsity, "--sparsity")
    if threads is not None:
        torch.set_num_threads(threads)
    if (model is None) == (zoo is None):
        raise typer.BadParameter("name a model, or one of the zoo's: --zoo resnet50")
    if zoo is not None:
        opened = from_zoo(zoo, batch)
    else:
        assert model is not None
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
    if calibration is not None:
        from aerogel.cli.calibration import read_calls

        names = getattr(getattr(opened.model, "captured", None), "graph", None)
        inputs = tuple(shapes) if names is None else names.inputs
        options["calibration"] = read_calls(calibration, inputs, opened.call[0], IMAGES, preprocess)
    return opened, compile(plain, *opened.call, **options)
