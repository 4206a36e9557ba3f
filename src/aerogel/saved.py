"""save() and load(): a compiled model as one file, `docs/format.md`.

What is saved is the model's own graph with its weights, zeros left out, and the Plan: what was chosen and measured. Loading folds
and packs again as compiling did, so that the answers are the same bits; on another kind of CPU it chooses by rule, or measures
anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.capture import foreign, interpret
from aerogel.capture.export import Captured
from aerogel.compiler import checked, compile, fused, target, together
from aerogel.disk import write_whole
from aerogel.errors import AerogelError, InvalidFile, UnsupportedModel
from aerogel.graph import Graph, Node, references
from aerogel.methods.dense import TORCH, from_torch
from aerogel.plan import Plan
from aerogel.runtime import container, pooling
from aerogel.runtime.eager import bodies
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.module import Compiled, Network
from aerogel.runtime.points import Several
from aerogel.runtime.stays import problem
from aerogel.tune.choose import Asked, as_planned, tuned
from aerogel.tune.store import Store

FORMAT = "aerogel-model-2"
MOST_FOREIGN = 2**31
"""Bytes of the inputs of a piece of ONNX."""


def save(fast: Compiled, path: str | Path) -> None:
    """Write a compiled model to one file, whole or not at all."""
    captured = fast.captured
    if fast.plan.device is not None:
        raise UnsupportedModel("a model compiled for a GPU is not saved: compile it again where it runs, from the same weights")
    if captured is None:
        raise UnsupportedModel(
            "a model compiled in parts cannot be saved: what runs between the parts is Python code, and a file holds none. "
            "Save the parts, or make the model exportable: explain() says where torch.export stopped."
        )
    points = fast.points if isinstance(fast, Several) else (fast,)
    if any(p.captured is None or p.captured.graph != captured.graph for p in points):
        raise UnsupportedModel("points that run different graphs cannot be saved in one file; save one file for each")
    state = fast.state_dict()
    arrays = {name: _stored(value) for name, value in {**state, **captured.constants}.items()}
    model = {
        "format": FORMAT, "dtype": _half(fast), "state": list(state), "constants": list(captured.constants),
        "points": [{"how": p.how, "notes": list(p.notes), "example": _structure(p.captured.example)} for p in points if p.captured],
        "answer": _structure(pytree.tree_unflatten([0] * captured.out_spec.num_leaves, captured.out_spec)),
        "shapes": {name: list(shape) for name, shape in captured.shapes.items()}, "sizes": [list(s) for s in captured.sizes],
        "dtypes": [_name(d) for d in captured.dtypes], "outputs": list(captured.output_names),
    }  # fmt: skip
    texts = {"model": json.dumps(model, allow_nan=False), "graph": captured.graph.to_json()}
    texts |= {f"plan{i}": point.plan.to_json() for i, point in enumerate(points)}
    try:
        write_whole(Path(path), container.to_bytes(texts, arrays))
    except OSError as why:
        raise AerogelError(f"'{path}' cannot be written: {why.strerror or why}") from why


def load(path: str | Path, *, tune: str | float = "off", store: str | Path | None = None) -> Compiled:
    """A model from its file. `tune` other than "off" measures it anew on this machine, as compile() would."""
    try:
        content = Path(path).read_bytes()
    except OSError as why:
        raise InvalidFile(f"'{path}' cannot be read: {why.strerror or why}") from None
    texts, arrays = container.from_bytes(content)
    try:
        model = json.loads(texts["model"])
        if model["format"] != FORMAT:
            raise InvalidFile(f"model format '{str(model['format'])[:80]}' is not {FORMAT}: saved by another version of aerogel")
        tensors = {name: _tensor(*held) for name, held in arrays.items()}
        graph, state, dtype = Graph.from_json(texts["graph"]), {str(n): tensors[n] for n in model["state"]}, _dtype(model["dtype"])
        points = [
            (
                _captured(model, point["example"], graph, tensors),
                str(point["how"]),
                tuple(map(str, point["notes"])),
                Plan.from_json(texts[f"plan{i}"]),
            )
            for i, point in enumerate(model["points"])
        ]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, IndexError) as why:
        raise InvalidFile(f"not a model saved by aerogel: {type(why).__name__} {str(why)[:200]}") from None
    if not points:
        raise InvalidFile("a model with no point it was tuned at")
    return together([_restored(captured, state, plan, how, notes, dtype, tune, store) for captured, how, notes, plan in points])


def _restored(
    captured: Captured, state: Any, plan: Plan, how: str, notes: tuple[str, ...], dtype: Any, tune: str | float, store: Any
) -> Compiled:
    network, _ = fused(captured)
    _runs(network)
    model, call = GraphModel(captured, state), captured.filled()
    if tune != "off":
        return compile(model, *call, dtype=dtype, tune=tune, store=store)
    if how != "graph":
        forms = bodies(model, dtype)
        if how not in forms:
            raise InvalidFile(f"'{how[:80]}' is no way to run a model")
        return Compiled(model, None, plan, how, notes, forms[how], model.captured)
    here = target()
    asked = Asked("off", None, tuple({c.config.method for c in plan.choices}), Store(store, here), dtype, [])
    if plan.target.isa == here.isa:
        network = as_planned(network, plan, call, asked)
        plan = checked(plan, network)
    else:
        notes = (*notes, f"saved on {plan.target.isa}, chosen by rule for {here.isa}: load(path, tune='fast') measures here")
        network, plan, said = tuned(network, call, asked, lambda _: None)
        notes = (*notes, *said)
    return Compiled(model, network, plan, "graph", notes)


def _captured(model: Any, raw: Any, graph: Graph, tensors: dict[str, torch.Tensor]) -> Captured:
    example = _built(raw)
    sizes = tuple(_sizes(s) for s in model["sizes"])
    dtypes = tuple(_dtype(d) for d in model["dtypes"])
    flat, in_spec = pytree.tree_flatten(example)
    if not len(flat) == len(graph.inputs) == len(sizes) == len(dtypes):
        raise InvalidFile(f"{len(graph.inputs)} inputs, but an example of {len(flat)} with {len(sizes)} sizes")
    if any(isinstance(v, torch.Tensor) and v.dtype != dtype for v, dtype in zip(flat, dtypes, strict=True)):
        raise InvalidFile("the example's element types are not those of the inputs")
    if set(model["constants"]) != set(graph.constants) or len(example) != 2:
        raise InvalidFile("the graph's constants are not those of the file")
    out_spec = pytree.tree_structure(_built(model["answer"]))
    if out_spec.num_leaves != len(graph.outputs):
        raise InvalidFile(f"{len(graph.outputs)} outputs in a structure of {out_spec.num_leaves}")
    constants = {name: tensors[name] for name in graph.constants}
    shapes = {str(name): _sizes(s) for name, s in model["shapes"].items()}
    names = tuple(map(str, model["outputs"]))
    if len(names) != len(graph.outputs):
        raise InvalidFile(f"{len(graph.outputs)} outputs, {len(names)} names for them")
    return Captured(graph, constants, in_spec, out_spec, shapes, sizes, dtypes, example, names)


def _runs(network: Network) -> None:
    """Run the graph on tensors without memory: a graph that fits nothing, or asks for more than there is, is found out here, and
    the network knows its sizes.

    The fused graph, and pooling by ourselves: torch imports half of its compiler, three seconds of it, to say what shape they give.
    """
    graph, captured = network.graph, network.captured
    values: dict[str, Any] = {name: torch.empty_like(value, device="meta") for name, value in network.constants.items()}
    values |= dict(zip(graph.inputs, pytree.tree_leaves(captured.example), strict=True))
    for node in graph.nodes:
        try:
            with torch.no_grad():
                values[node.name] = _blank(node, values, captured)
        except AerogelError:
            raise
        except Exception as why:  # whatever torch raises at a graph that makes no sense
            said = str(why).splitlines()[0][:200] if str(why) else type(why).__name__
            raise InvalidFile(f"node '{node.name}' does not run on the file's own example: {said}") from None
        interpret.fits(node.name, values[node.name])
    if all(node.op != "onnx" for node in graph.nodes):  # those ran on zeros, and what they give may depend on the values
        network.learn(pytree.tree_leaves(captured.example), {n: v for n, v in values.items() if isinstance(v, torch.Tensor)})


def _blank(node: Node, values: dict[str, Any], captured: Captured) -> Any:
    """What a node gives, without memory."""
    if node.op == "onnx":
        return _foreign(node, values, captured)
    if node.conv is None:
        pooled = pooling.read(node)
        shape = None if pooled is None else pooling.out(pooled, tuple(values[node.inputs[0]].shape), node)
        return interpret.call(node, values) if shape is None else values[node.inputs[0]].new_empty(shape)
    x, _, _, residual = node.conv_inputs()
    shape = tuple(values[x].shape)
    conv = problem(node, {x: shape})
    y = conv.y_shape if len(shape) == 4 else (*conv.y_shape[:2], *conv.y_shape[3:])[: len(shape)]
    if shape[1] != conv.c or (residual is not None and tuple(values[residual].shape) != y):
        raise InvalidFile(f"node '{node.name}' does not run on the file's own example: {conv} on {shape}")
    return torch.empty(y, dtype=values[x].dtype, device="meta")


def _foreign(node: Node, values: dict[str, Any], captured: Captured) -> list[torch.Tensor]:
    """A piece of ONNX has no form without memory: it runs on zeros."""
    blank = [values[name] for name in references(node.args[1])]
    if sum(t.numel() * t.element_size() for t in blank) > MOST_FOREIGN:
        raise InvalidFile(f"'{node.name}' takes more than {MOST_FOREIGN} bytes")
    content = captured.constants[node.args[0].name]
    return [t.to("meta") for t in foreign.run(content, [torch.zeros(t.shape, dtype=t.dtype) for t in blank])]


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
        f"a {type(value).__name__} among the model's inputs or outputs cannot be saved; use tuples, lists, dicts"
    )


def _built(raw: Any) -> Any:
    """The inverse of `_structure`; tensors have no memory."""
    match raw:
        case {"tensor": list(shape), "dtype": str(dtype)} if all(type(n) is int and 0 <= n < 2**31 for n in shape):
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
    return fast.how.partition(" ")[2] or None


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
