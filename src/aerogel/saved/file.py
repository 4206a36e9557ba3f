"""save() and load(): a compiled model as one file, `docs/format.md`.

What is saved is the model's own graph with its weights, zeros left out, and the Plan: what was chosen and
measured. Loading folds and packs again as compiling did, so that the answers are the same bits; on another
kind of CPU it chooses by rule, or measures anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.backends import backend_of
from aerogel.capture.captured import Captured
from aerogel.capture.sizes import understood
from aerogel.compiler import checked, compile, together
from aerogel.disk import write_whole
from aerogel.errors import AerogelError, InvalidArgument, InvalidFile, UnsupportedModel, printable
from aerogel.ir import GRAPH, Gpu, Graph, Plan, Way, guards, short
from aerogel.ir.tensors import TORCH, from_torch
from aerogel.methods import method
from aerogel.progress import Progress
from aerogel.runtime.eager import body, ways
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.module import Compiled
from aerogel.runtime.points import Several
from aerogel.runtime.reading import fused
from aerogel.saved import container
from aerogel.tune.choose import Asked, as_planned, tuned
from aerogel.tune.store import Store

FORMAT, FORMATS = "aerogel-model-3", ("aerogel-model-2", "aerogel-model-3")
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
        path: The file; by habit it ends in `.aero`.
    """
    if not isinstance(fast, Compiled) or not isinstance(path, str | Path):
        raise InvalidArgument(
            f"save() takes what compile() gave and a path, not a {type(fast).__name__} and a "
            f"{type(path).__name__}"
        )
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
    arrays = {name: _stored(value) for name, value in {**state, **captured.constants}.items()}
    model = {
        "format": FORMAT,
        "dtype": _half(fast),
        "state": list(state),
        "constants": list(captured.constants),
        "points": [
            {"how": str(p.how), "notes": list(p.notes), "example": _structure(p.captured.example)}
            for p in points
            if p.captured
        ],
        "answer": _structure(pytree.tree_unflatten([0] * captured.out_spec.num_leaves, captured.out_spec)),
        "shapes": {name: list(shape) for name, shape in captured.shapes.items()},
        "sizes": [list(s) for s in captured.sizes],
        "dtypes": [_name(d) for d in captured.dtypes],
        "outputs": list(captured.output_names),
        "guards": [guards.to_json(guard) for guard in captured.guards],
        "types": {
            name: _name(dtype) for name, dtype in captured.types.items() if _name(dtype) in container.DTYPES
        },
    }
    texts = {"model": json.dumps(model, allow_nan=False), "graph": captured.graph.to_json()}
    texts |= {f"plan{i}": point.plan.to_json() for i, point in enumerate(points)}
    try:
        write_whole(Path(path), container.to_bytes(texts, arrays))
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
    if not isinstance(path, str | Path):
        raise InvalidArgument(f"load() takes the path of a file, not a {type(path).__name__}")
    try:
        content = Path(path).read_bytes()
    except OSError as why:
        raise InvalidFile(f"'{path}' cannot be read: {why.strerror or why}") from None
    texts, arrays = container.from_bytes(content)
    try:
        model = json.loads(texts["model"])
        if model["format"] not in FORMATS:
            raise InvalidFile(
                f"model format '{str(model['format'])[:80]}' is not {FORMAT}: saved by another "
                "version of aerogel"
            )
        tensors = {name: _tensor(*held) for name, held in arrays.items()}
        graph, state, dtype = (
            Graph.from_json(texts["graph"]),
            {str(n): tensors[n] for n in model["state"]},
            _dtype(model["dtype"]),
        )
        if dtype not in (None, torch.float16, torch.bfloat16):
            raise InvalidFile(f"a model in {dtype}")
        points = [
            (
                _captured(model, point["example"], graph, tensors),
                Way.parse(str(point["how"])),
                tuple(map(printable, point["notes"])),
                Plan.from_json(texts[f"plan{i}"]),
            )
            for i, point in enumerate(model["points"])
        ]
    except _DAMAGE as why:
        raise InvalidFile(f"not a model saved by aerogel: {type(why).__name__} {str(why)[:200]}") from None
    if not points:
        raise InvalidFile("a model with no point it was tuned at")
    try:
        return together(
            [
                _restored(captured, state, plan, how, notes, dtype, tune, store)
                for captured, how, notes, plan in points
            ]
        )
    except (*_DAMAGE, ZeroDivisionError, MemoryError) as why:
        # whatever numpy and torch raise at numbers that fit nothing
        raise InvalidFile(
            f"the file's graph, weights and plan do not fit each other: {type(why).__name__} {str(why)[:200]}"
        ) from why


def _restored(
    captured: Captured,
    state: Any,
    plan: Plan,
    how: Way,
    notes: tuple[str, ...],
    dtype: Any,
    tune: str | float,
    store: Any,
) -> Compiled:
    example = pytree.tree_leaves(captured.example)
    names = tuple({method(choice.config.method).NAME for choice in plan.choices})
    network, _ = fused(captured)
    found = understood(network.graph, network.constants, example)
    if found is not None:
        network.learn(example, found)
    if how != GRAPH or tune != "off":  # the graph as it was saved runs too
        understood(captured.graph, captured.constants, example)
    model = GraphModel(captured, state)
    if tune != "off":
        return compile(model, *captured.filled(), dtype=dtype, tune=tune, store=store)
    if how != GRAPH:
        if how not in ways(model, dtype):
            raise InvalidFile(f"'{str(how)[:80]}' is no way to run this model")
        return Compiled(model, None, plan, how, notes, body(model, how), model.captured)
    backend = backend_of()
    asked = Asked("off", None, names, backend, Store(store, backend), dtype, [])
    same = backend.suits(plan.target)
    if found is None and (dtype is not None or not same):
        raise UnsupportedModel(
            "a piece of ONNX gives sizes that depend on data, and nothing of a "
            "file runs while "
            "it is loaded: "
            "compile the ONNX file again on this machine"
        )
    if same:
        network = as_planned(network, plan, captured.example, asked)
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
    return Compiled(model, network, plan, GRAPH, notes, backend=backend)


def _captured(model: Any, raw: Any, graph: Graph, tensors: dict[str, torch.Tensor]) -> Captured:
    example = _built(raw)
    sizes = tuple(_sizes(s) for s in model["sizes"])
    dtypes = tuple(_dtype(d) for d in model["dtypes"])
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
    out_spec = pytree.tree_structure(_built(model["answer"]))
    if out_spec.num_leaves != len(graph.outputs):
        raise InvalidFile(f"{len(graph.outputs)} outputs in a structure of {out_spec.num_leaves}")
    constants = {name: tensors[name] for name in graph.constants}
    shapes = {str(name): _sizes(s) for name, s in model["shapes"].items()}
    names = tuple(map(str, model["outputs"]))
    if len(names) != len(graph.outputs):
        raise InvalidFile(f"{len(graph.outputs)} outputs, {len(names)} names for them")
    open_sizes = frozenset(n for s in sizes for n in s if isinstance(n, str))
    asked = tuple(guards.from_json(raw, open_sizes) for raw in model.get("guards", []))
    types = model.get("types")
    if types is None:
        known = _told(graph, constants, flat)
    else:
        known = {str(name): dtype for name, raw in types.items() if (dtype := _dtype(raw)) is not None}
    return Captured(
        graph, constants, in_spec, out_spec, shapes, sizes, dtypes, example, names, asked, known, bounded=True
    )


_KEEP = "conv2d batch_norm relu relu_ relu6 hardtanh hardtanh_ silu silu_ hardswish hardswish_ leaky_relu "
_KEEP += "leaky_relu_ add add_ cat max_pool2d avg_pool2d adaptive_avg_pool2d mean flatten linear dropout"
KEEP_TYPE = frozenset(_KEEP.split())
"""Operators that give what they take: of one floating type, that type."""


def _told(graph: Graph, constants: dict[str, torch.Tensor], inputs: list[Any]) -> dict[str, torch.dtype]:
    """Element types for a file of the version before, which holds none. Where all that operators take has one
    type and each of them keeps it, that one; else the graph is run without memory, for which torch imports
    seconds' worth of itself."""
    used = {name for node in graph.nodes for name in node.inputs}
    known = {name: value for name, value in constants.items() if name in used}
    known |= dict(zip(graph.inputs, inputs, strict=True))
    types = {value.dtype for value in known.values() if isinstance(value, torch.Tensor)}
    kept = (not n.kwargs and "." in n.op and n.op.split(".")[1] in KEEP_TYPE for n in graph.nodes)
    if len(types) == 1 and all(t.is_floating_point for t in types) and all(kept):
        return dict.fromkeys((*known, *(node.name for node in graph.nodes)), types.pop())
    return {name: value.dtype for name, value in (understood(graph, constants, inputs) or {}).items()}


def _structure(value: Any) -> Any:
    """An example as JSON: tensors as shape and type, the containers around them by name."""
    match value:
        case torch.Tensor():
            return {"tensor": list(value.shape), "dtype": _name(value.dtype)}
        case tuple() | list() if type(value) in (tuple, list):
            return {type(value).__name__: [_structure(v) for v in value]}
        case dict() if type(value) is dict and all(isinstance(k, str) for k in value):
            return {"dict": [[k, _structure(v)] for k, v in value.items()]}
        case None | bool() | int() | float() | str():
            return {"value": value}
    raise UnsupportedModel(
        f"a {type(value).__name__} among the model's inputs or outputs cannot be saved; use "
        "tuples, lists, dicts"
    )


def _built(raw: Any) -> Any:
    """The inverse of `_structure`; tensors have no memory."""
    match raw:
        case {"tensor": list(shape), "dtype": str(dtype)} if all(
            type(n) is int and 0 <= n < 2**31 for n in shape
        ):
            return torch.empty(shape, dtype=_dtype(dtype), device="meta")
        case {"tuple": list(items)}:
            return tuple(_built(v) for v in items)
        case {"list": list(items)}:
            return [_built(v) for v in items]
        case {"dict": list(items)}:
            return {str(k): _built(v) for k, v in items}
        case {"value": None | bool() | int() | float() | str() as value}:
            return value
    raise InvalidFile(f"'{str(raw)[:80]}' is no structure of inputs")


def _sizes(raw: Any) -> tuple[int | str, ...]:
    if not isinstance(raw, list) or not all(type(n) in (int, str) for n in raw):
        raise InvalidFile(f"'{str(raw)[:80]}' are no sizes")
    return tuple(raw)


def _half(fast: Compiled) -> str | None:
    """The precision that was asked for."""
    if fast.network is not None:
        half = fast.network.half
        return None if half is None else _name(TORCH[half.dtypes.input])
    return fast.how.dtype or None


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype | None:
    if name is None:
        return None
    if name not in container.DTYPES:
        raise InvalidFile(f"'{str(name)[:80]}' is no element type")
    found: torch.dtype = getattr(torch, name)
    return found


def _stored(value: torch.Tensor) -> tuple[str, Any]:
    name = _name(value.dtype)
    if name not in container.DTYPES:
        raise UnsupportedModel(f"a constant of type {value.dtype} cannot be saved")
    return name, from_torch(value.detach().cpu().contiguous())


def _tensor(dtype: str, array: Any) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
