"""`Captured`: a model as a graph, and which calls the graph answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.errors import ShapeError
from aerogel.ir import Graph
from aerogel.ir.guards import Expression, holds, words

SAME_NAME = "#"
"""After the name of a constant that an input is called by too."""


@dataclass(frozen=True)
class Captured:
    """A graph with its constants, how a call's arguments map to its inputs, and which sizes stay open.

    `sizes` holds for each input its dimensions: a number (fixed) or a name (open; the same name means the
    same size); `dtypes` its element type, None where it is no tensor. `guards` must hold of the open sizes.
    `example` is the call it was captured with, its tensors without memory. `shapes` and `types` are sizes and
    element types of all values.
    """

    graph: Graph
    constants: Mapping[str, torch.Tensor]
    in_spec: Any
    out_spec: Any
    shapes: dict[str, tuple[int | str, ...]]
    sizes: tuple[tuple[int | str, ...], ...]
    dtypes: tuple[torch.dtype | None, ...]
    example: tuple[tuple[Any, ...], dict[str, Any]]
    output_names: tuple[str, ...]
    guards: tuple[Expression, ...] = ()
    types: dict[str, torch.dtype] = field(default_factory=dict)
    bounded: bool = False
    """From a model file: what it asks for is measured before it runs."""
    steps: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Of constants that are integers times a scale: the scale of each filter."""

    def flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """A call's arguments in the order of the graph's inputs. Raises ShapeError where they are others."""
        given, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.in_spec:
            names = self.in_spec.child(1).context
            ordered = {k: kwargs[k] for k in names or () if k in kwargs}
            given, spec = pytree.tree_flatten((tuple(args), ordered))
            if spec != self.in_spec or len(ordered) != len(kwargs):
                named = ", ".join(f"'{name}'" for name in self.graph.inputs) or "nothing"
                raise ShapeError(
                    f"called as f({drawn(args, kwargs)}); the model takes {named}, as in "
                    f"f({drawn(*self.example)})"
                )
        return given

    def sample(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The same of a call that may also name every input, or give all in order, whatever the example
        names."""
        try:
            return self.flat(args, kwargs)
        except ShapeError:
            names = self.graph.inputs
            if not args and kwargs.keys() == {*names}:
                return [kwargs[name] for name in names]
            if not kwargs and len(args) == len(names):
                return list(args)
            raise

    def misfit(self, inputs: list[Any], where: str = "cpu") -> str | None:
        """None where the graph answers a call with these inputs, else why not. `where` is the device of its
        tensors as torch writes it: "cpu", "cuda:1"."""
        seen: dict[str, int] = {}
        known = zip(
            self.graph.inputs, inputs, self.sizes, self.dtypes, pytree.tree_leaves(self.example), strict=True
        )
        for name, value, sizes, dtype, example in known:
            if dtype is None:
                same = value == example or (value != value and example != example)
                if type(value) is not type(example) or not same:
                    return f"input '{name}' is {_short(value)}; the model was compiled for {_short(example)}"
                continue
            if not isinstance(value, torch.Tensor):
                return f"input '{name}' is {drawn((value,), {})}, not a tensor{_numpy(value)}"
            if value.layout != torch.strided:
                return (
                    f"input '{name}' is a sparse tensor ({value.layout}); its to_dense() is what the "
                    "model was compiled for"
                )
            if value.dtype != dtype or str(value.device) != where:
                there = "the CPU" if where == "cpu" else where
                return (
                    f"input '{name}' is {value.dtype} on {value.device}; the model was compiled for "
                    f"{dtype} on {there}"
                )
            if len(value.shape) != len(sizes):
                return (
                    f"input '{name}' has {len(value.shape)} dimensions; the model was compiled for "
                    f"{len(sizes)}"
                )
            for i, (have, size) in enumerate(zip(value.shape, sizes, strict=True)):
                wanted = size if isinstance(size, int) else seen.setdefault(size, have)
                if have != wanted:
                    return f"input '{name}' has {have} in dimension {i}; the model takes {wanted} there"
        for guard in self.guards:
            if not holds(guard, seen):
                return f"the model was compiled for sizes of which {words(guard, self._names())}"
        return None

    def _names(self) -> dict[str, str]:
        """Open sizes as people call them."""
        named: dict[str, str] = {}
        for name, sizes in zip(self.graph.inputs, self.sizes, strict=True):
            for i, size in enumerate(sizes):
                if isinstance(size, str):
                    named.setdefault(size, f"{name}.shape[{i}]")
        return named

    def fixed(self) -> Captured:
        """The same graph, for calls of the example's sizes only."""
        leaves = pytree.tree_leaves(self.example)
        sizes = tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else () for v in leaves)
        return replace(self, sizes=sizes, guards=())

    def filled(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call like the example, with random numbers (no integer but zero is always right)."""

        def fill(blank: torch.Tensor) -> torch.Tensor:
            made = torch.rand(blank.shape) if blank.is_floating_point() else torch.zeros(blank.shape)
            return made.to(blank.dtype)

        args, kwargs = pytree.tree_map_only(torch.Tensor, fill, self.example)
        return args, kwargs

    def __reduce__(self) -> Any:
        """Structures travel as a call and an answer that have them: torch warns where its own objects are
        copied, and has no text for some (`torch.return_types`, classes that users register)."""
        specs = _like(self.in_spec), _like(self.out_spec)
        rest = (
            self.shapes,
            self.sizes,
            self.dtypes,
            self.example,
            self.output_names,
            self.guards,
            self.types,
            self.bounded,
            self.steps,
        )
        return _captured, (self.graph, self.constants, *specs, *rest)


def _like(spec: pytree.TreeSpec) -> Any:
    return pytree.tree_unflatten(range(spec.num_leaves), spec)


def _captured(graph: Graph, constants: Any, inputs: Any, outputs: Any, *rest: Any) -> Captured:
    return Captured(graph, constants, pytree.tree_structure(inputs), pytree.tree_structure(outputs), *rest)


def _short(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else f"{value!r:.60}"


def _numpy(value: Any) -> str:
    return (
        ": torch.from_numpy(array) makes one, and run(None, {name: array}) takes arrays"
        if hasattr(value, "__array__")
        else ""
    )


def drawn(args: Any, kwargs: Any) -> str:
    """The arguments of a call as people write them, tensors as the word."""
    named = [f"{k}={_drawn(v)}" for k, v in kwargs.items()]
    return ", ".join([*map(_drawn, args), *named])[:200]


def _drawn(value: Any) -> str:
    match value:
        case torch.Tensor():
            return "tensor"
        case tuple() | list():
            inside = ", ".join(map(_drawn, value))
            return (
                f"[{inside}]"
                if isinstance(value, list)
                else f"({inside},)"
                if len(value) == 1
                else f"({inside})"
            )
        case dict():
            return "{" + ", ".join(f"{k!r}: {_drawn(v)}" for k, v in value.items()) + "}"
    return (
        f"{value!r:.40}" if isinstance(value, str | int | float | NoneType) else f"a {type(value).__name__}"
    )
