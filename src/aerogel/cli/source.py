"""What a model is on the command line: a file, or a function that builds a module; and an example call for
it."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch.utils import _pytree as pytree

from aerogel.cli.words import first_line
from aerogel.disk import write_whole
from aerogel.errors import AerogelError, InvalidFile, ShapeError, printable
from aerogel.pruning.masks import masks
from aerogel.runtime.eager import Call
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.module import Compiled
from aerogel.saved.file import load

FORMS = "model.onnx, model.aero, model.pt2 (with --trust-pickle) or package.module:build"
FILES, PICKLES = (".onnx", ".aero", ".pt2"), (".pth", ".pt", ".pkl", ".pickle", ".ckpt", ".bin")


@dataclass(frozen=True)
class Source:
    """A model and an example call. `path` is the file it came from, `ready` what an .aero file holds."""

    model: torch.nn.Module
    call: Call
    path: Path | None = None
    ready: Compiled | None = None


def source(
    text: str,
    shapes: dict[str, tuple[int, ...]],
    batch: int | None = None,
    weights: Path | None = None,
    trust: bool = False,
    trains: bool = False,
) -> Source:
    """Open a model. `batch` takes the place of every input's first size. `trains`: an ONNX file with layers,
    which can be pruned."""
    suffix = Path(text).suffix
    if weights is not None and (suffix in FILES or ":" not in text):
        raise typer.BadParameter(f"--weights goes with package.module:build; '{printable(text)}' has its own")
    if suffix in FILES and Path(text).is_dir():
        raise InvalidFile(f"'{text}' is a folder; name the file in it")
    if suffix == ".onnx" and trains:
        from aerogel.runtime.onnxmodel import OnnxModel

        layered = OnnxModel(text, shapes)
        return Source(layered, (layered.example, {}), Path(text))
    if suffix == ".onnx":
        return _onnx(Path(text), shapes, batch)
    if suffix == ".aero":
        return _runs(_saved(text, shapes, batch), text)
    if suffix == ".pt2":
        return _runs(_exported(text, shapes, batch, trust), text)
    if ":" not in text:
        raise AerogelError(f"'{text}' is none of {FORMS}{_instead(Path(text))}")
    model = _built(text, weights)
    return _runs(Source(model, (_batched([torch.rand(s) for s in shapes.values()], batch), {})), text)


def from_zoo(name: str, batch: int | None) -> Source:
    """An architecture of the zoo at its usual size, with seeded weights."""
    from aerogel.zoo.models import MODELS, example, make

    if name not in MODELS:
        raise typer.BadParameter(f"--zoo is one of {', '.join(MODELS)}; not '{printable(name)}'")
    return Source(make(name), example(name, batch or 1))


def _instead(path: Path) -> str:
    """What to do with what people have instead."""
    if path.suffix in PICKLES:
        return (
            ". A pickle is not read: write a function that builds the module, save its state as .safetensors "
            "(safetensors.torch.save_file), and say package.module:build --weights FILE"
        )
    if path.is_dir():
        return ": it is a folder. Name the file in it"
    return "" if path.exists() else ": there is no such file either"


def _saved(text: str, shapes: Mapping[str, tuple[int, ...]], batch: int | None) -> Source:
    """An .aero file; `shapes` take the place of its inputs' own."""
    ready = load(text)
    assert ready.captured is not None
    for name in shapes:
        if name not in ready.input_names:
            raise ShapeError(
                f"'{text}' has no input '{name}'; say --shape with one of {', '.join(ready.input_names)}"
            )
    leaves, spec = pytree.tree_flatten(ready.captured.filled())
    named = zip(ready.input_names, leaves, strict=True)
    given = [
        torch.rand(shapes[n]).to(v.dtype) if n in shapes and isinstance(v, torch.Tensor) else v
        for n, v in named
    ]
    args, kwargs = pytree.tree_unflatten(given, spec)
    return Source(ready.original, (_batched(args, batch), kwargs), Path(text), ready)


def _exported(text: str, shapes: Mapping[str, tuple[int, ...]], batch: int | None, trust: bool) -> Source:
    """A .pt2 file, if it is trusted; `shapes` take the place of its inputs' own, in order."""
    if not Path(text).exists():
        raise InvalidFile(f"'{text}' cannot be read: there is no such file")
    if not trust:
        raise AerogelError(
            f"'{text}' may hold pickled Python, which can run anything when it is read. If you "
            "made it, or trust who did, say "
            "--trust-pickle; else export the model to ONNX."
        )
    try:
        program = torch.export.load(text)
        model, (args, kwargs) = program.module(), program.example_inputs
    except Exception as why:  # torch raises what its unpickler, its archive and its schema raise
        raise InvalidFile(
            f"'{text}' cannot be read: {type(why).__name__} {first_line(why)}. Export it again."
        ) from None
    given = [torch.rand(s) for s in shapes.values()]
    return Source(model, (_batched((*given, *args[len(given) :]), batch), dict(kwargs)), Path(text))


def _runs(source: Source, text: str) -> Source:
    """The source, if its model takes the example: what it does not take is said here, and not by whoever
    looks into it."""
    try:
        with torch.no_grad():
            (source.ready or source.model)(*source.call[0], **source.call[1])
    except AerogelError:
        raise
    except Exception as why:  # whatever the model's own code raises
        given = ", ".join("x".join(map(str, a.shape)) for a in source.call[0] if isinstance(a, torch.Tensor))
        raise ShapeError(
            f"'{text}' does not run on inputs of {given}: {type(why).__name__} {first_line(why)}. "
            "Say --shape NAME=1x3x224x224 "
            "with sizes that it takes, once for each input in order."
        ) from why
    return source


def _onnx(path: Path, shapes: dict[str, tuple[int, ...]], batch: int | None) -> Source:
    from aerogel.capture.onnx.read import read

    captured = read(path, shapes)
    if batch is not None:
        both = {
            name: (batch, *blank.shape[1:])
            for name, blank in zip(captured.graph.inputs, captured.example[0], strict=True)
        }
        captured = read(path, both)
    return Source(GraphModel(captured, captured.constants), captured.filled(), path)


def _built(text: str, weights: Path | None) -> torch.nn.Module:
    """`package.module:build` called, and its weights from a safetensors file."""
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as why:
        raise AerogelError(
            f"'{text}' names no function: {first_line(why)}. Say package.module:build, a function "
            "without arguments."
        ) from why
    except (Exception, SystemExit) as why:  # whatever that module's own code does when it is imported
        raise AerogelError(
            f"importing '{module}' fails in {_where(why)}: {type(why).__name__} {first_line(why)}"
        ) from why
    if not callable(found):
        raise AerogelError(
            f"'{text}' is a {type(found).__name__}; name a function that builds a torch.nn.Module"
        )
    try:
        model: Any = found if isinstance(found, torch.nn.Module) else found()
    except (Exception, SystemExit) as why:  # whatever that function does
        raise AerogelError(
            f"'{text}' fails in {_where(why)}: {type(why).__name__} {first_line(why)}. It is "
            "called without arguments."
        ) from why
    if not isinstance(model, torch.nn.Module):
        raise AerogelError(f"'{text}' gave a {type(model).__name__}; it must return a torch.nn.Module")
    if weights is not None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            model.load_state_dict(load_file(weights))
        except (SafetensorError, OSError, RuntimeError) as why:
            raise InvalidFile(
                f"'{weights}' holds no weights for '{text}': {printable(str(why)[:500])}"
            ) from None
    return model.eval()


def _where(why: BaseException) -> str:
    """The file and line of the user's that raised."""
    last = traceback.extract_tb(why.__traceback__)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}"


def _batched(inputs: Any, batch: int | None) -> tuple[Any, ...]:
    if not inputs:
        raise ShapeError(
            "the model's inputs are not known. Say --shape x=1x3x224x224, once for each input in order."
        )
    if batch is None:
        return tuple(inputs)
    return tuple(
        torch.rand(batch, *t.shape[1:]).to(t.dtype) if isinstance(t, torch.Tensor) and t.dim() else t
        for t in inputs
    )


def pruned(model: torch.nn.Module, sparsity: float, pattern: str = "unstructured") -> torch.nn.Module:
    """The smallest weights of each convolution and Linear set to zero, uniformly: what the speed would be,
    not the accuracy."""
    found = {
        n: p for n, p in model.named_parameters() if p.dim() > 1 and p.is_floating_point() and p.numel() > 1
    }
    for name, kept in masks(
        {n: p.abs() for n, p in found.items()}, dict.fromkeys(found, sparsity), pattern
    ).items():
        found[name].data = found[name].data * kept
    if isinstance(model, GraphModel):
        model.captured = model.now()
    return model


def write_weights(state: Mapping[str, torch.Tensor], out: Path) -> None:
    """The state as a safetensors file."""
    from safetensors.torch import save

    try:
        write_whole(out, save({name: value.detach().contiguous() for name, value in state.items()}))
    except OSError as why:
        raise AerogelError(f"'{out}' cannot be written: {why.strerror or why}") from why
