"""`Compiled`: what compile() gives back. Called like the model it came from; for inference only."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils import _pytree as pytree

from aerogel.backends import Backend, Runner, backend_of
from aerogel.backends.cpu import threads
from aerogel.capture import interpret
from aerogel.capture.captured import Captured, drawn
from aerogel.capture.network import Network
from aerogel.errors import AerogelError, InvalidArgument, ShapeError
from aerogel.ir import GRAPH, Plan, Timing, Way
from aerogel.locks import Lock
from aerogel.runtime import operator, others
from aerogel.runtime.carried import received, sent
from aerogel.runtime.eager import channels_last, memory_of, on_tensors, unshared
from aerogel.runtime.forwarded import forward_attribute, unchanged
from aerogel.runtime.graphmodel import GraphModel, Later
from aerogel.runtime.headline import represent
from aerogel.runtime.state import new_values

MOST_ACCEPTED = 1024
"""Kinds of calls remembered as looked at: sizes, element types and values that are no tensors."""


class Source(Protocol):
    """The file that a module was loaded from."""

    def open(self) -> Compiled: ...


def opened(source: Source) -> Compiled:
    """A module in another process."""
    return source.open()


class Compiled(torch.nn.Module):
    """A model compiled for inference: what `compile` and `load` give. Call it as the model it came from.

    Threads may share it. `deepcopy`, `state_dict`, `torch.compile`, `torch.export` and `torch.profiler` work
    on it; `train()`, `.to(dtype)` and an input that requires grad raise, with what to do instead.

    `preprocess` says how an image becomes an input, such as "resize=256 crop=224 mean=0.5 std=0.5", or None.
    `save` keeps it; `aerogel batch` and `aerogel serve` go by it, a call does not.

    Example:
        >>> fast = aerogel.compile(model, (x,), tune="off")
        >>> answer = fast(x)
        >>> several = fast(torch.randn(4, 3, 48, 48))    # batch, height and width stay open
    """

    def __init__(
        self,
        original: torch.nn.Module | Later,
        network: Network | None,
        plan: Plan,
        how: Way,
        notes: tuple[str, ...] = (),
        body: torch.nn.Module | None = None,
        captured: Captured | None = None,
        backend: Backend | None = None,
    ) -> None:
        """GRAPH runs the network under the plan on `backend`, by default the CPU; every other way calls
        `body`.

        `captured` is what save() writes: the network's own, or given where torch runs a model that was
        captured whole.
        """
        super().__init__()
        self.__dict__["_original"], self.__dict__["_body"] = original, body
        self.source: Source | None = None
        self.preprocess: str | None = None
        self.network, self.plan, self.how, self.notes = network, plan, how, notes
        self.captured = captured if network is None else network.captured
        self.backend = backend or backend_of()
        self._limit = Runner.limit
        self._fresh()
        super().train(False)

    def _fresh(self) -> None:
        self._lock = Lock()
        self._others = others.Others(Compiled)
        self._accepted = set[Any]()
        self._memory: frozenset[int] | None = None
        self._runner: Runner | None = None
        self._number = operator.register(self)

    def ready(self) -> Runner:
        """The network as something that runs, made when it is first asked for."""
        made = self._runner
        if made is None:
            assert self.network is not None
            made = self.backend.runner(self.network, self.plan)
            made.limit = self.workspace_limit
            with self._lock:
                made = self._runner = self._runner or made
        return made

    def runs(self, inputs: list[Any]) -> bool:
        """Whether the graph itself takes these inputs: sizes that torch wrote into it as numbers may not fit
        them."""
        try:
            with torch.no_grad():
                self.ready()(inputs)
        except ShapeError:
            return False
        return True

    @property
    def original(self) -> torch.nn.Module:
        """A copy of the model this came from, as it was then: what torch runs. No submodule: weights are not
        counted twice."""
        held: torch.nn.Module | Later = self.__dict__["_original"]
        if isinstance(held, Later):
            held = self.__dict__["_original"] = held.made()
        return held

    @property
    def is_graph(self) -> bool:
        """Whether the original is only its graph, as read from a file."""
        return isinstance(self.__dict__["_original"], Later | GraphModel)

    def __getattr__(self, name: str) -> Any:
        """What the original has (a weight that Python between parts reads), this has too, except methods."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original" not in self.__dict__ or name.startswith("_"):
                raise
            return forward_attribute(self, self.original, name)

    @property
    def body(self) -> torch.nn.Module:
        """What torch runs where no graph of ours does."""
        held: torch.nn.Module | None = self.__dict__["_body"]
        return self.original if held is None else held

    def judged(self, timing: Timing, said: str) -> Compiled:
        """This module with the whole model's timing added to its plan and notes."""
        self.plan, self.notes = replace(self.plan, model=timing), (*self.notes, said)
        return self

    def __repr__(self) -> str:
        name = "GraphModel" if self.is_graph else type(self.original).__name__
        return represent(name, self.plan, self.how)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The inputs of the model, in order: an ONNX file's own names, else those of the arguments."""
        return () if self.captured is None else self.captured.graph.inputs

    @property
    def output_names(self) -> tuple[str, ...]:
        return () if self.captured is None else self.captured.output_names

    def run(self, names: Sequence[str] | None, feed: Mapping[str, Any]) -> list[Any]:
        """As onnxruntime's sessions are called: arrays in by name, arrays out, all of them or those named."""
        if self.captured is None:
            raise AerogelError("run() needs a model that was captured whole; call the module instead")
        if not isinstance(feed, Mapping):
            raise ShapeError(
                f"run() takes a dict of arrays by the names {self.input_names}, not a {type(feed).__name__}"
            )
        missing = [n for n in (*self.input_names, *feed) if (n in feed) != (n in self.input_names)]
        wrong = [n for n in names or () if n not in self.output_names]
        if missing or wrong:
            raise ShapeError(
                f"'{(missing or wrong)[0]}': the model takes {self.input_names} and gives {self.output_names}"
            )
        given = {name: _tensor(name, feed[name]) for name in self.input_names}
        args, kwargs = pytree.tree_unflatten(list(given.values()), self.captured.in_spec)
        found = dict(zip(self.output_names, pytree.tree_leaves(self(*args, **kwargs)), strict=True))
        return [found[n].numpy() for n in (self.output_names if names is None else names)]

    @property
    def speedup(self) -> float | None:
        """Measured over the faster of torch's two layouts, median of paired rounds; None where nothing was
        timed. `plan.model.doubt` says where the machine was busy."""
        return None if self.plan.model is None else self.plan.model.ratio_p50

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and torch._C._is_tracing():
            raise AerogelError(
                "a compiled module cannot be traced by torch.jit or the old ONNX exporter: its "
                "answer would become a constant. "
                "Trace or export the original."
            )
        if self.how != GRAPH or self.network is None or torch.is_autocast_enabled(self.backend.device_type):
            return self._eager(args, kwargs)
        try:
            inputs = self._flat(args, kwargs)
        except ShapeError as other:
            return self._others.answer(self, args, kwargs, str(other))
        out_spec = self.network.captured.out_spec
        if torch.compiler.is_dynamo_compiling() or any(_traced(v) for v in inputs):
            return pytree.tree_unflatten(torch.ops.aerogel.run(inputs, self._number), out_spec)
        if (why := self.misfit(inputs)) is not None:
            return self._others.answer(self, args, kwargs, why)
        if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs):
            raise AerogelError(others.NO_TRAINING)
        try:
            return pytree.tree_unflatten(self.ready()(inputs), out_spec)
        except ShapeError as why:  # a node of the graph does not take these sizes; the model may
            return self._others.answer(self, args, kwargs, str(why))

    def _flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """A call's arguments in the order of the graph's inputs, whether given by place or by name."""
        assert self.captured is not None
        try:
            return self.captured.flat(args, kwargs)
        except ShapeError as other:
            if self.is_graph:
                raise
            try:
                given = inspect.signature(self.original.forward).bind(*args, **kwargs).arguments
            except (TypeError, ValueError) as why:
                raise ShapeError(f"{other} ({why})") from None
            places = self.captured.in_spec.child(0).num_children
            by_place = [given.pop(name) for name in list(given)[:places]]
            return self.captured.flat(tuple(by_place), given)

    def misfit(self, inputs: list[Any]) -> str | None:
        """Why the graph does not answer a call with these inputs, or None. Calls alike are looked at once."""
        assert self.network is not None
        key = tuple(
            (v.shape, v.dtype, v.device, v.layout) if isinstance(v, torch.Tensor) else (type(v), v)
            for v in inputs
        )
        try:
            if key in self._accepted:
                return None
        except TypeError:  # something that cannot be looked up
            return self.network.captured.misfit(inputs, self.backend.device)
        why = self.network.captured.misfit(inputs, self.backend.device)
        if why is None:
            if len(self._accepted) >= MOST_ACCEPTED:
                self._accepted.clear()
            self._accepted.add(key)
        return why

    def fake_flat(self, inputs: list[Any]) -> list[Any]:
        """Outputs without values, for tracing: the graph on tensors that have only a shape."""
        assert self.network is not None
        if self.network.captured.misfit(inputs, self.backend.device) is not None:
            args, kwargs = pytree.tree_unflatten(inputs, self.network.captured.in_spec)
            return pytree.tree_leaves(self.original(*args, **kwargs))
        blank = {name: torch.empty(c.shape, dtype=c.dtype) for name, c in self.network.constants.items()}
        return self.network.outputs(interpret.run(self.network.graph, blank, inputs))

    def run_flat(self, inputs: list[Any]) -> list[Any]:
        """The graph's outputs for its inputs, as torch.compile's operator calls it."""
        assert self.network is not None
        if (why := self.misfit(inputs)) is None:
            return self.ready()(inputs)
        args, kwargs = pytree.tree_unflatten(inputs, self.network.captured.in_spec)
        return pytree.tree_leaves(self._others.answer(self, args, kwargs, why))

    def _eager(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        threads.settle()
        body = self.body
        if not torch.is_grad_enabled():
            try:
                if self.how.layout == "channels_last":
                    args = tuple(on_tensors(channels_last, v) for v in args)
                    kwargs = {name: on_tensors(channels_last, v) for name, v in kwargs.items()}
                if self._memory is None:
                    self._memory = frozenset() if torch.compiler.is_dynamo_compiling() else memory_of(body)
                return (
                    unshared(body(*args, **kwargs), self._memory) if self._memory else body(*args, **kwargs)
                )
            except AerogelError:
                raise
            except Exception as error:
                raise others.not_taken(self._reason(args, kwargs), error) from error
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves((args, kwargs))):
            raise AerogelError(others.NO_TRAINING)
        with torch.no_grad():
            return self._eager(args, kwargs)

    def _reason(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """What is different about a call that torch did not answer."""
        if self.captured is None:
            return f"called as f({drawn(args, kwargs)})"
        try:
            return self.captured.misfit(self._flat(args, kwargs), self.backend.device) or "called as compiled"
        except ShapeError as why:
            return str(why)

    def train(self, mode: bool = True) -> Compiled:
        if mode:
            raise AerogelError("a compiled module cannot train. Fine-tune the original, then compile again.")
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What changes nothing, such as `.to("cpu")` on a CPU, is done; all else raises."""
        return unchanged(self, fn, self.backend.device)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's names and dense weights, as copies: what is done to them does not reach this
        module."""
        original = self.__dict__["_original"]
        held = (original.made() if isinstance(original, Later) else original).state_dict(*args, **kwargs)
        for name, value in held.items():
            held[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return held

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """New values for the same masks: folded and packed again under the same plan."""
        answer = new_values(self, state_dict, strict)
        self.source = None
        self._fresh()
        return answer

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What was loaded travels as its file."""
        if self.source is None:
            return super().__reduce_ex__(protocol)
        return opened, (self.source,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.source is not None:
            return self.source.open()
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self._unbound(), memo))
        made._fresh()
        return made

    def _unbound(self) -> dict[str, Any]:
        """Everything but bound memory."""
        bound = ("_lock", "_runner", "_others", "_accepted")
        return {k: v for k, v in self.__dict__.items() if k not in bound}

    def __getstate__(self) -> dict[str, Any]:
        """For other processes: weights as they were packed, and the original without its zeros."""
        return sent(self._unbound())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(received(state))
        self._fresh()

    @property
    def workspace_limit(self) -> int:
        """Bytes kept between calls, at most, of programs for sizes and of memory to run them in, beside what
        the last call used; 1 GiB unless it is set."""
        return self._limit

    @workspace_limit.setter
    def workspace_limit(self, most: int) -> None:
        if type(most) is not int or most < 0:
            raise InvalidArgument(f"workspace_limit must be a number of bytes; got {most!r:.40}")
        self._limit = most
        if self._runner is not None:
            self._runner.limit = most

    def workspace_bytes(self) -> int:
        """Bytes of the programs for all sizes, and of memory to run them in that no call uses now."""
        return 0 if self._runner is None else self._runner.workspace_bytes()

    def forget(self) -> None:
        """As if never called: memory and code of all sizes are given back, and what was seen of the data."""
        if self._runner is not None:
            self._runner.forget()
        self._others.forget()


def _traced(value: Any) -> bool:
    """Whether a tensor stands for another while torch.export looks on."""
    if not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(value, FakeTensor | FunctionalTensor)


def _tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, np.ndarray) and not value.flags.writeable:  # from another process; torch would warn
        value = value.copy()
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as why:
        raise ShapeError(f"input '{name}' is a {type(value).__name__}, no array: {why}") from None
