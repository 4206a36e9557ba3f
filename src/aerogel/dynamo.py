"""`torch.compile(model, backend="aerogel")`: each graph that dynamo finds, compiled as aerogel.compile()
would.

Parameters become constants, so this is for inference: call the model under torch.no_grad() or
torch.inference_mode(). A graph that aerogel leaves to torch goes to inductor where a C++ compiler is there
for it, else it stays eager. `options={"tune": "off"}` and the other keywords of compile() are passed on.
"""

from __future__ import annotations

import inspect
import logging
import shutil
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, cast

import torch

from aerogel.compiler import compile
from aerogel.errors import AerogelError, InvalidArgument, UnsupportedModel
from aerogel.tune.search import effort

_LOG = logging.getLogger("aerogel")
_OPTIONS = [
    name
    for name, parameter in inspect.signature(compile).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
    and name not in ("dynamic_shapes", "shapes", "calibration", "plan")
]
"""Keywords of compile() that are about each graph, and not about one model or file."""


class _Fixed(torch.nn.Module):
    """A graph with its parameters held: what is left are the inputs that change from call to call."""

    def __init__(self, graph: torch.fx.GraphModule, given: Sequence[Any], free: list[int]) -> None:
        super().__init__()
        self.graph, self.free, self.count = graph, free, len(given)
        for i, value in enumerate(given):
            if i not in free:
                self.register_buffer(f"p{i}", value.detach())

    def forward(self, *args: Any) -> Any:
        changing = dict(zip(self.free, args, strict=True))
        every = [changing[i] if i in changing else getattr(self, f"p{i}") for i in range(self.count)]
        return self.graph(*every)


def backend(
    graph: torch.fx.GraphModule, given: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """What torch.compile calls, once for each graph. The graph is compiled at its first call: within dynamo's
    own work exporting it would upset dynamo's guards."""
    _known(options or {})
    if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in given):
        _LOG.warning("gradients are on, so torch runs this graph. Call the model under torch.no_grad().")
        return graph.forward
    free = [
        i
        for i, value in enumerate(given)
        if not isinstance(value, torch.nn.Parameter) and not _held(graph, i)
    ]
    if not all(isinstance(given[i], torch.Tensor) for i in free):
        _LOG.info(
            "left to torch: a graph for any size. torch.compile(dynamic=False) gives aerogel one "
            "for each size."
        )
        return _others(graph, given)
    chosen: list[Callable[..., Any]] = []

    def run(*args: Any) -> Any:
        if not chosen:
            chosen.append(_chosen(graph, args, free, options or {}))
        return chosen[0](*args)

    return run


def _chosen(
    graph: torch.fx.GraphModule, given: Sequence[Any], free: list[int], options: dict[str, Any]
) -> Callable[..., Any]:
    """The graph by aerogel, or by whoever is next."""
    why = "nothing in it has weights of ours"
    if any(isinstance(m, torch.Tensor) and m.dim() > 2 for i, m in enumerate(given) if i not in free):
        try:
            fast = compile(_Fixed(graph, given, free).eval(), tuple(given[i] for i in free), **options)
            if fast.how.by == "graph":
                return lambda *args: fast(*(args[i] for i in free))
            why = "; ".join(fast.notes)
        except UnsupportedModel as reason:
            why = str(reason)
        except AerogelError as reason:  # not the model: what was asked for
            _LOG.warning("torch runs this graph, for aerogel.compile() refuses its options: %s", reason)
            return _others(graph, given)
    _LOG.info("left to torch: %s", why)
    return _others(graph, given)


def _known(options: dict[str, Any]) -> None:
    """Whether these are options, and `tune` one it takes: said when torch.compile's module is first called,
    not after."""
    for name in options:
        if name not in _OPTIONS:
            near = get_close_matches(str(name), _OPTIONS, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(_OPTIONS)}"
            raise InvalidArgument(f"torch.compile(backend='aerogel') has no option '{name}'; {hint}")
    effort(options.get("tune", "fast"))


def _held(graph: torch.fx.GraphModule, i: int) -> bool:
    """Whether input i is a buffer of the model: dynamo marks what lives as long as the module does."""
    node = [n for n in graph.graph.nodes if n.op == "placeholder"][i]
    return bool((node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"))


def _others(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
    """inductor where it can build its code, else the graph as it is."""
    if shutil.which("g++") or shutil.which("clang++"):
        try:
            from torch._inductor.compile_fx import compile_fx

            return cast(Callable[..., Any], compile_fx(graph, list(given)))
        except Exception as why:  # whatever inductor lacks here
            _LOG.info("inductor cannot take it either: %s", why)
    return graph.forward
