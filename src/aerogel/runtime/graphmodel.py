"""`GraphModel`: a model that is only its graph, as read from a file: torch runs it, under the names its state
had."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.capture import interpret
from aerogel.capture.captured import Captured
from aerogel.errors import InvalidArgument, ShapeError


class GraphModel(torch.nn.Module):
    """`state` is what state_dict() gives: at least the graph's constants that are in it by name."""

    def __init__(self, captured: Captured, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.captured, self._names, self._state = captured, tuple(captured.constants), tuple(state)
        for name, value in {**captured.constants, **state}.items():
            self.register_parameter(_held(name), torch.nn.Parameter(value, requires_grad=False))
        super().train(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.captured.in_spec:
            raise ShapeError(
                f"called with arguments of another structure than the model's: {spec}, not "
                f"{self.captured.in_spec}"
            )
        graph = self.captured.graph
        values = interpret.run(graph, self.constants(), given)
        return pytree.tree_unflatten(
            [interpret.argument(o, values) for o in graph.outputs], self.captured.out_spec
        )

    def now(self) -> Captured:
        """The graph with its weights as they are now."""
        return replace(
            self.captured, constants={name: value.detach() for name, value in self.constants().items()}
        )

    def constants(self) -> dict[str, torch.Tensor]:
        """The graph's constants by name."""
        return {name: self.get_parameter(_held(name)) for name in self._names}

    def state_dict(self, *_: Any, prefix: str = "", **__: Any) -> Any:
        return OrderedDict((prefix + name, self._parameters[_held(name)]) for name in self._state)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        unknown = [name for name in state_dict if name not in self._state]
        if strict and (unknown or len(state_dict) < len(self._state)):
            missing = [name for name in self._state if name not in state_dict]
            raise InvalidArgument(f"state of another model: '{(unknown + missing)[0]}' is not in both")
        for name, value in state_dict.items():
            if name in self._state:
                self.get_parameter(_held(name)).data.copy_(value)
        return torch.nn.modules.module._IncompatibleKeys([], unknown)


class HasGraph(torch.nn.Module):
    """A module that knows its own graph: compile() takes that, and exports nothing."""

    def as_graph(self) -> GraphModel:
        """The graph with the weights as they are now; they are shared, not copied, where nothing computes
        them."""
        raise NotImplementedError


@dataclass(frozen=True)
class Later:
    """A GraphModel that is not there yet: of a file, whose weights are dense only where torch runs them."""

    captured: Captured
    state: Mapping[str, torch.Tensor]
    look: Callable[[], object]
    """Raises where the graph does not run on its own example; torch imports seconds' worth of itself for it,
    so it is called when somebody asks for the model."""

    def made(self) -> GraphModel:
        self.look()
        return GraphModel(self.captured, self.state)


def _held(name: str) -> str:
    """torch allows no dots in a parameter's own name."""
    return name.replace("_", "__").replace(".", "_d")
