"""What a model is on the command line: a file, or a function that builds a module; and an example call for it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aerogel.disk import write_whole
from aerogel.errors import AerogelError, InvalidFile, ShapeError
from aerogel.pruning.masks import masks
from aerogel.runtime.eager import Call
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.module import Compiled
from aerogel.saved import load

FORMS = "model.onnx, model.aero, model.pt2 (with --trust-pickle) or package.module:build"


@dataclass(frozen=True)
class Source:
    """A model and an example call. `path` is the file it came from, `ready` what an .aero file holds."""

    model: torch.nn.Module
    call: Call
    path: Path | None = None
    ready: Compiled | None = None


def sizes(given: list[str]) -> dict[str, tuple[int, ...]]:
    """`NAME=1x3x640x640`, several of them, as a dict."""
    found = {}
    for text in given:
        name, _, numbers = text.rpartition("=")
        parts = numbers.split("x")
        if not name or not all(p.isdigit() and int(p) > 0 for p in parts):
            raise ShapeError(f"'{text}' is no shape; one looks like images=1x3x640x640")
        found[name] = tuple(map(int, parts))
    return found


def source(
    text: str, shapes: dict[str, tuple[int, ...]], batch: int | None = None, weights: Path | None = None, trust: bool = False
) -> Source:
    """Open a model. `batch` takes the place of every input's first size."""
    kind = Path(text).suffix
    if kind == ".onnx":
        return _onnx(Path(text), shapes, batch)
    if kind == ".aero":
        ready = load(text)
        assert ready.captured is not None
        args, kwargs = ready.captured.filled()
        return Source(ready.original, (_batched(args, batch), kwargs), Path(text), ready)
    if kind == ".pt2":
        if not trust:
            raise AerogelError(
                f"'{text}' may hold pickled Python, which can run anything when it is read. If you made it, or trust who did, say "
                "--trust-pickle; else export the model to ONNX."
            )
        try:
            program = torch.export.load(text)
        except Exception as why:  # torch raises what its unpickler, its archive and its schema raise
            raise InvalidFile(f"'{text}' cannot be read: {type(why).__name__} {str(why).splitlines()[:1]}") from None
        return Source(program.module(), (_batched(program.example_inputs[0], batch), dict(program.example_inputs[1])), Path(text))
    if ":" not in text:
        raise AerogelError(f"'{text}' is none of {FORMS}")
    return Source(_built(text, weights), (_batched([torch.rand(s) for s in shapes.values()], batch), {}))


def _onnx(path: Path, shapes: dict[str, tuple[int, ...]], batch: int | None) -> Source:
    from aerogel.capture.onnx import read

    captured = read(path, shapes)
    if batch is not None:
        both = {name: (batch, *blank.shape[1:]) for name, blank in zip(captured.graph.inputs, captured.example[0], strict=True)}
        captured = read(path, both)
    return Source(GraphModel(captured, captured.constants), captured.filled(), path)


def _built(text: str, weights: Path | None) -> torch.nn.Module:
    """`package.module:build` called, and its weights from a safetensors file."""
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as why:
        raise AerogelError(f"'{text}' names no function: {why}") from None
    model: Any = build()
    if not isinstance(model, torch.nn.Module):
        raise AerogelError(f"'{text}' gave a {type(model).__name__}, not a torch.nn.Module")
    if weights is not None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            model.load_state_dict(load_file(weights))
        except (SafetensorError, OSError, RuntimeError) as why:
            raise InvalidFile(f"'{weights}' holds no weights for '{text}': {str(why)[:500]}") from None
    return model.eval()


def _batched(inputs: Any, batch: int | None) -> tuple[Any, ...]:
    if not inputs:
        raise ShapeError("the model's inputs are not known. Say --shape x=1x3x224x224, once for each input in order.")
    if batch is None:
        return tuple(inputs)
    return tuple(torch.rand(batch, *t.shape[1:]).to(t.dtype) if isinstance(t, torch.Tensor) and t.dim() else t for t in inputs)


def pruned(model: torch.nn.Module, sparsity: float, pattern: str = "unstructured") -> torch.nn.Module:
    """The smallest weights of each convolution and Linear set to zero, uniformly: what the speed would be, not the accuracy."""
    found = {n: p for n, p in model.named_parameters() if p.dim() > 1 and p.is_floating_point() and p.numel() > 1}
    for name, kept in masks({n: p.abs() for n, p in found.items()}, dict.fromkeys(found, sparsity), pattern).items():
        found[name].data = found[name].data * kept
    if isinstance(model, GraphModel):
        model.captured.constants.update(model.constants())
    return model


def write_weights(state: Mapping[str, torch.Tensor], out: Path) -> int:
    """The state as a safetensors file; how many arrays it holds."""
    from safetensors.torch import save

    _write(out, save({name: value.detach().contiguous() for name, value in state.items()}))
    return len(state)


def write_onnx(path: Path, state: Mapping[str, torch.Tensor], out: Path) -> int:
    """The ONNX file again with these weights, one file; how many of its arrays changed."""
    import onnx
    from onnx import numpy_helper

    file, changed = onnx.load(str(path)), 0
    for held in file.graph.initializer:
        value = state.get(held.name)
        old = numpy_helper.to_array(held)
        if value is not None and tuple(value.shape) == old.shape and (new := value.detach().numpy()).dtype == old.dtype:
            changed += bool((new != old).any())
            held.CopyFrom(numpy_helper.from_array(new, held.name))
    _write(out, file.SerializeToString())
    return changed


def _write(out: Path, content: bytes) -> None:
    try:
        write_whole(out, content)
    except OSError as why:
        raise AerogelError(f"'{out}' cannot be written: {why.strerror or why}") from why
