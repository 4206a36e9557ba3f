"""save() and load(): a compiled model as one file, `docs/format.md`.

A file holds the model's own graph with its weights, zeros left out; the Plan: what was chosen and measured;
and the network as it runs, each weight as its kernel reads it, so that the processes of a machine share them.
On another kind of CPU the model is folded and packed again, and chosen by rule, or measured anew.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel import disk, fileformats
from aerogel.backends import backend_of
from aerogel.capture.captured import Captured
from aerogel.capture.network import Network
from aerogel.capture.sizes import understood
from aerogel.compiler import checked, compile, together
from aerogel.errors import AerogelError, InvalidArgument, InvalidFile, UnsupportedModel, printable
from aerogel.ir import GRAPH, Gpu, Graph, Plan, Way, guards, short
from aerogel.ir.tensors import TORCH
from aerogel.methods import METHODS, method
from aerogel.outputs import check_output
from aerogel.preprocess import Recipe
from aerogel.progress import Progress
from aerogel.runtime.eager import body, ways
from aerogel.runtime.graphmodel import GraphModel, Later
from aerogel.runtime.module import Compiled
from aerogel.runtime.points import Several
from aerogel.runtime.reading import fused
from aerogel.saved import container, packed
from aerogel.saved.structure import built, dtype_name, dtype_of, sizes_of, stored, structure, tensor, told
from aerogel.torch_versions import warn_if_untested
from aerogel.tune.choose import Asked, as_planned, tuned
from aerogel.tune.search import effort
from aerogel.tune.store import Store

FORMAT, FORMATS = "aerogel-model-4", ("aerogel-model-2", "aerogel-model-3", "aerogel-model-4")
"""What is written, and what is read."""
_DAMAGE = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    IndexError,
    OverflowError,
    RuntimeError,
)


def save(fast: Compiled, path: str | Path) -> None:
    """Write a compiled model to one file, whole or not at all.

    The file holds the graph, the weights without their zeros and every decision; no pickle and no code.

    Example:
        >>> fast = aerogel.compile(model, (x,), tune="off")
        >>> aerogel.save(fast, "model.aero")

    Args:
        fast: What `compile` gave.
        path: The file, in a folder that exists; by habit it ends in `.aero`, and never in the suffix of
            another format.
    """
    if not isinstance(fast, Compiled) or not isinstance(path, str | Path):
        raise InvalidArgument(
            f"save() takes what compile() gave and a path, not a {type(fast).__name__} and a "
            f"{type(path).__name__}"
        )
    check_output(path, (".aero",), strict=False)
    captured = fast.captured
    if isinstance(fast.plan.target, Gpu):
        raise UnsupportedModel(
            "a model compiled for a GPU is not saved: compile it again where it runs, from the same weights"
        )
    if captured is None:
        raise UnsupportedModel(
            "a model compiled in parts cannot be saved: what runs between the parts is Python "
            "code, and a file holds none. "
            "Save the parts, or make the model exportable: explain() says where torch.export stopped."
        )
    points = fast.points if isinstance(fast, Several) else (fast,)
    if any(p.captured is None or p.captured.graph != captured.graph for p in points):
        raise UnsupportedModel(
            "points that run different graphs cannot be saved in one file; save one file for each"
        )
    state = fast.state_dict()
    known = {**state, **captured.constants}
    network, graph, arrays = packed.described(points, known)
    arrays |= {name: stored(value) for name, value in known.items()}
    model = {
        "format": FORMAT,
        "dtype": _half(fast),
        "state": list(state),
        "constants": list(captured.constants),
        "network": network,
        "points": [
            {"how": str(p.how), "notes": list(p.notes), "example": structure(p.captured.example)}
            for p in points
            if p.captured
        ],
        "answer": structure(pytree.tree_unflatten([0] * captured.out_spec.num_leaves, captured.out_spec)),
        "shapes": {name: list(shape) for name, shape in captured.shapes.items()},
        "sizes": [list(s) for s in captured.sizes],
        "dtypes": [dtype_name(d) for d in captured.dtypes],
        "outputs": list(captured.output_names),
        "guards": [guards.to_json(guard) for guard in captured.guards],
        "preprocess": None if fast.preprocess is None else str(Recipe.parse(fast.preprocess)),
        "types": {
            name: dtype_name(dtype)
            for name, dtype in captured.types.items()
            if dtype_name(dtype) in container.DTYPES
        },
    }
    texts = {"model": json.dumps(model, allow_nan=False), "graph": captured.graph.to_json()}
    texts |= {} if network is None else {"network": graph}
    texts |= {f"plan{i}": point.plan.to_json() for i, point in enumerate(points)}
    try:
        disk.write_whole(Path(path), container.to_bytes(texts, arrays))
    except OSError as why:
        raise AerogelError(f"'{path}' cannot be written: {why.strerror or why}") from why


def load(path: str | Path, *, tune: str | float = "off", store: str | Path | None = None) -> Compiled:
    """A compiled model from its file: the same bits on the same kind of CPU.

    Example:
        >>> aerogel.save(aerogel.compile(model, (x,), tune="off"), "model.aero")
        >>> fast = aerogel.load("model.aero")

    Args:
        path: The file. It is data: reading it runs nothing of it, and a damaged one is an `InvalidFile`
            error.
        tune: "off" keeps the choices it was saved with; on another kind of CPU they go by rule. Anything
            else measures anew here, as `compile` does.
        store: As for `compile`.
    """
    warn_if_untested(torch.__version__)
    if not isinstance(path, str | Path):
        raise InvalidArgument(f"load() takes the path of a file, not a {type(path).__name__}")
    try:
        content = disk.mapped(Path(path))
    except OSError as why:
        raise InvalidFile(f"'{path}' cannot be read: {_reason(why, path)}") from None
    try:
        return _opened(content, tune, store)
    except InvalidFile as error:
        kind, remedy = fileformats.describe(path) or ("", "")
        if kind in ("", fileformats.FORMATS[".aero"]):
            raise InvalidFile(f"'{path}': {error}") from error
        raise InvalidFile(f"'{path}' is {kind}, not a model saved by aerogel. {remedy}") from None


def _reason(error: OSError, path: str | Path) -> str:
    """Return why a file cannot be opened, and what to do where it is missing or a folder."""
    if isinstance(error, FileNotFoundError):
        return f"{error.strerror}. Check the path; relative ones begin in '{os.getcwd()}'."
    if Path(path).is_dir():
        return "it is a folder. Name the .aero file in it."
    return error.strerror or str(error)


@dataclass(frozen=True)
class _File:
    """What a module was loaded from, as copies of it are made again."""

    content: Any

    def open(self) -> Compiled:
        return _opened(self.content, "off", None)

    def __reduce__(self) -> Any:
        return _file, (bytes(self.content),)


def _file(content: bytes) -> _File:
    return _File(disk.aligned(io.BytesIO(content), len(content)))


class Tensors(Mapping[str, torch.Tensor]):
    """Some of a file's arrays as tensors, each made when it is asked for."""

    def __init__(self, names: Iterator[str], arrays: container.Arrays) -> None:
        self._names, self._arrays = dict.fromkeys(names), arrays
        for name in self._names:
            arrays.shape(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return tensor(*self._arrays[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def blank(self, graph: Graph) -> dict[str, torch.Tensor]:
        """The same without memory, but for what pieces of ONNX read."""
        said = {name: self._arrays.shape(name) for name in self._names}
        read = {name for node in graph.nodes if node.op == "onnx" for name in node.inputs}
        return {
            n: self[n] if n in read else torch.empty(s, dtype=dtype_of(d), device="meta")
            for n, (d, s) in said.items()
        }

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _opened(content: Any, tune: str | float, store: str | Path | None) -> Compiled:
    """The model of a file's bytes."""
    texts, arrays = container.from_bytes(content)
    try:
        model = json.loads(texts["model"])
        if model["format"] not in FORMATS:
            raise InvalidFile(
                f"model format '{str(model['format'])[:80]}' is not {FORMAT}: saved by another "
                "version of aerogel"
            )
        state, dtype = Tensors(map(str, model["state"]), arrays), dtype_of(model["dtype"])
        if dtype not in (None, torch.float16, torch.bfloat16):
            raise InvalidFile(f"a model in {dtype}")
        preprocess = model.get("preprocess")
        if preprocess is not None:
            preprocess = str(Recipe.parse(preprocess))
        graph = Graph.from_json(texts["graph"])
        network, said = None, model.get("network")
        if said is not None:
            running = Graph.from_json(texts["network"])
            weights = packed.weights_of(said, running, arrays)
        points = []
        for i, point in enumerate(model["points"]):
            captured = _captured(model, point["example"], graph, arrays)
            if said is not None:
                network = packed.network_of(said, running, weights, arrays, captured)
            how, notes = Way.parse(str(point["how"])), tuple(map(printable, point["notes"]))
            points.append((captured, network, how, notes, Plan.from_json(texts[f"plan{i}"])))
    except _DAMAGE as why:
        raise InvalidFile(f"not a model saved by aerogel: {type(why).__name__} {str(why)[:200]}") from None
    if not points:
        raise InvalidFile("a model with no point it was tuned at")
    try:
        made = together([_restored(*point, state, dtype, tune, store) for point in points])
    except (*_DAMAGE, ZeroDivisionError, MemoryError) as why:
        # whatever numpy and torch raise at numbers that fit nothing
        raise InvalidFile(
            f"the file's graph, weights and plan do not fit each other: {type(why).__name__} {str(why)[:200]}"
        ) from why
    made.preprocess = preprocess
    if tune == "off":
        made.source = _File(content)
    disk.read_through(content)
    return made


def _restored(
    captured: Captured,
    network: Network | None,
    how: Way,
    notes: tuple[str, ...],
    plan: Plan,
    state: Mapping[str, torch.Tensor],
    dtype: Any,
    tune: str | float,
    store: Any,
) -> Compiled:
    example = pytree.tree_leaves(captured.example)
    assert isinstance(captured.constants, Tensors)
    backend = backend_of()
    same = backend.suits(plan.target)
    as_saved = network is not None and same and tune == "off" and how == GRAPH
    look = partial(understood, captured.graph, captured.constants.blank(captured.graph), example)
    if how != GRAPH or tune != "off":  # the graph as it was captured runs too
        look()
    held = network if network is not None and network.meanings and how == GRAPH else None
    if network is None or not (as_saved or held):
        network, _ = fused(captured)
    found = understood(network.graph, network.constants, example)
    if found is not None:
        network.learn(example, found)
    if tune != "off" and held is None:
        return compile(GraphModel(captured, state), *captured.filled(), dtype=dtype, tune=tune, store=store)
    if how != GRAPH:
        model = GraphModel(captured, state)
        if how not in ways(model, dtype):
            raise InvalidFile(f"'{str(how)[:80]}' is no way to run this model")
        return Compiled(model, None, plan, how, notes, body(model, how), model.captured)
    if held is not None and not as_saved:
        return _in_int8(captured, state, look, held, notes, tune, store)
    names = tuple({method(choice.config.method).NAME for choice in plan.choices})
    asked = Asked("off", None, names, backend, Store(store, backend), dtype, [])
    if found is None and (dtype is not None or not same):
        raise UnsupportedModel(
            "a piece of ONNX gives sizes that depend on data, and nothing of a "
            "file runs while "
            "it is loaded: "
            "compile the ONNX file again on this machine"
        )
    if same:
        network = network if as_saved else as_planned(network, plan, captured.example, asked)
        plan = checked(plan, network, asked)
    else:
        notes = (
            *notes,
            f"saved on {short(plan.target)}, chosen by rule for {short(backend.target)}: "
            "load(path, tune='fast') measures here",
        )
        # what rounding costs is seen on numbers
        call = captured.example if dtype is None else captured.filled()
        network, plan, said = tuned(network, call, asked, Progress())
        notes = (*notes, *said)
    return Compiled(Later(captured, state, look), network, plan, GRAPH, notes, backend=backend)


def _in_int8(
    captured: Captured,
    state: Mapping[str, torch.Tensor],
    look: Callable[[], Any],
    network: Network,
    notes: tuple[str, ...],
    tune: str | float,
    store: Any,
) -> Compiled:
    """A network in int8 on another machine, or to be tuned again: its bytes mean what they meant, kernels are
    chosen anew."""
    backend = backend_of()
    asked = Asked(tune, effort(tune), METHODS, backend, Store(store, backend), None, [])
    network, plan, said = tuned(network, captured.filled(), asked, Progress())
    how = "measured" if asked.effort else "chosen by rule; load(path, tune='fast') measures"
    told = (*notes, *said, f"int8 as it was saved; kernels {how} for {short(backend.target)}")
    return Compiled(Later(captured, state, look), network, plan, GRAPH, told, backend=backend)


def _captured(model: Any, raw: Any, graph: Graph, arrays: container.Arrays) -> Captured:
    example = built(raw)
    sizes = tuple(sizes_of(s) for s in model["sizes"])
    dtypes = tuple(dtype_of(d) for d in model["dtypes"])
    flat, in_spec = pytree.tree_flatten(example)
    if not len(flat) == len(graph.inputs) == len(sizes) == len(dtypes):
        raise InvalidFile(
            f"{len(graph.inputs)} inputs, but an example of {len(flat)} with {len(sizes)} sizes"
        )
    if any(isinstance(v, torch.Tensor) and v.dtype != dtype for v, dtype in zip(flat, dtypes, strict=True)):
        raise InvalidFile("the example's element types are not those of the inputs")
    match example:
        case (tuple(), dict()):
            pass
        case _:
            raise InvalidFile("an example is a call's arguments, in order and by name")
    if set(model["constants"]) != set(graph.constants):
        raise InvalidFile("the graph's constants are not those of the file")
    out_spec = pytree.tree_structure(built(model["answer"]))
    if out_spec.num_leaves != len(graph.outputs):
        raise InvalidFile(f"{len(graph.outputs)} outputs in a structure of {out_spec.num_leaves}")
    constants = Tensors(iter(graph.constants), arrays)
    shapes = {str(name): sizes_of(s) for name, s in model["shapes"].items()}
    names = tuple(map(str, model["outputs"]))
    if len(names) != len(graph.outputs):
        raise InvalidFile(f"{len(graph.outputs)} outputs, {len(names)} names for them")
    open_sizes = frozenset(n for s in sizes for n in s if isinstance(n, str))
    asked = tuple(guards.from_json(raw, open_sizes) for raw in model.get("guards", []))
    types = model.get("types")
    if types is None:
        known = told(graph, constants, flat)
    else:
        known = {str(name): dtype for name, raw in types.items() if (dtype := dtype_of(raw)) is not None}
    return Captured(
        graph, constants, in_spec, out_spec, shapes, sizes, dtypes, example, names, asked, known, bounded=True
    )


def _half(fast: Compiled) -> str | None:
    """The precision that was asked for."""
    if fast.network is not None:
        half = fast.network.half
        return None if half is None else dtype_name(TORCH[half.dtypes.input])
    return fast.how.dtype or None
