"""From a model and an example call to a Network, and what is to be said of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.capture.captured import Captured
from aerogel.capture.fuse import fuse, random
from aerogel.capture.integers import integers
from aerogel.capture.network import Network
from aerogel.errors import AerogelError, UnsupportedModel
from aerogel.ir.tensors import subnormal
from aerogel.progress import Progress
from aerogel.runtime.eager import Call
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.private import lasting


def network_of(
    model: Any, call: Call, dynamic_shapes: Any, progress: Progress | None = None
) -> tuple[Network, tuple[str, ...]]:
    """Capture and fuse. Raises UnsupportedModel where the model does not export."""
    if progress is not None:
        progress.begin("reading the model", 0.05)
    if isinstance(model, GraphModel):
        return fused(model.now())
    from aerogel.capture.export import capture  # costs a second that a loaded model never needs

    return fused(capture(model, *call, dynamic_shapes))


def fused(captured: Captured) -> tuple[Network, tuple[str, ...]]:
    """A captured model as a network, and what is to be said of it."""
    graph, constants, left = fuse(captured.graph, captured.constants, captured.shapes, captured.types)
    graph, constants, said = integers(graph, constants, captured.shapes, captured.steps)
    network = Network(captured, graph, constants)
    notes = [*said, *_too_small(captured)]
    notes += [f"{layer}: {reason}" for layer, reason in left.items()]
    notes += [f"{n.layer or n.name} runs in onnxruntime" for n in captured.graph.nodes if n.op == "onnx"]
    notes += [f"{n.layer or n.name} is random: dropout stays on" for n in captured.graph.nodes if random(n)]
    notes += [
        f"input '{n}' was captured at {s}; calls at other sizes become programs of their own"
        for n, s in _fixed(network)
    ]
    return network, tuple(notes)


def _too_small(captured: Captured) -> list[str]:
    """What is said of weights that count as zeros though they are none."""
    found = [small for value in captured.constants.values() if (small := subnormal(value)) is not None]
    many = sum(int(small.sum()) for small in found)
    return [f"{many:,} weights are below 1.2e-38 (subnormal), slow to multiply: they count as zeros"] * bool(
        many
    )


def steady(model: Any, call: Call) -> None:
    """Raises UnsupportedModel where the model's answer depends on more than its arguments."""
    if isinstance(model, GraphModel):
        return
    try:
        why = lasting(model, call)
    except Exception as error:
        raise does_not_run(model, call, error) from error
    if why is not None:
        raise UnsupportedModel(why)


def does_not_run(
    model: Any, call: Call, error: Exception, kind: type[AerogelError] = AerogelError
) -> AerogelError:
    """Return the error for a model that refuses a call, with a remedy where element types differ."""
    text = f"the model does not run on the example: {first_line(error)}"
    remedy = type_remedy(model, call, "the example")
    return kind(f"{text.rstrip('.')}. {remedy}" if remedy else text)


def type_remedy(model: Any, call: Call, what: str) -> str:
    """Return what to convert where no floating tensor of a call has the model's element type, else ""."""
    weights = {p.dtype for p in model.parameters() if p.is_floating_point()}
    tensors = [t for t in pytree.tree_leaves(call) if isinstance(t, torch.Tensor)]
    floats = {t.dtype for t in tensors if t.is_floating_point()}
    whole = {t.dtype for t in tensors if t.dim() > 2 and not t.is_floating_point()}
    given = floats or whole
    if len(weights) != 1 or not given or floats & weights:
        return ""
    (weight,) = weights
    both = f"The model is {weight} and {what} {', '.join(map(str, given))}"
    if weight == torch.float64:
        return f"{both}: call .float() on the model."
    convert = ".float()" if weight == torch.float32 else f".to({weight})"
    return f"{both}: call {convert} on {what}."


def first_line(why: BaseException) -> str:
    return next((line.strip() for line in str(why).splitlines() if line.strip()), type(why).__name__)[:300]


def _fixed(network: Network) -> list[tuple[str, str]]:
    """Image inputs whose batch or image sizes the model forbids to change."""
    found = []
    for name, sizes in zip(network.graph.inputs, network.captured.sizes, strict=True):
        if len(sizes) in (3, 4) and any(isinstance(s, int) for i, s in enumerate(sizes) if i != 1):
            found.append((name, "x".join(str(s) if isinstance(s, int) else "any" for s in sizes)))
    return found
