"""A model of the command line, opened and compiled: what most verbs begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from aerogel.cli.options import effort, half, share, sizes


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
) -> tuple[Any, Any]:
    """The model opened, and as compiled. What is asked for is looked at before anything is read."""
    import torch

    from aerogel.cli.source import from_zoo, pruned, source
    from aerogel.compiler import compile

    stored_as, budget, shapes = half(dtype), effort(tune), sizes(shape)
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
    options: dict[str, Any] = {
        "dtype": stored_as,
        "tune": budget or "fast",
        "store": store,
        "progress": False if quiet else None,
    }
    return opened, compile(plain, *opened.call, **options)
