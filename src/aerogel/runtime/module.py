"""`Compiled`: what compile() gives back. Called like the model it came from; for inference only."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.candidate import Config, Stats
from aerogel.capture import interpret
from aerogel.capture.export import Captured
from aerogel.capture.fuse import fuse
from aerogel.capture.half import Half, halved
from aerogel.errors import AerogelError, ShapeError
from aerogel.graph import Graph, Node, Ref
from aerogel.layout import Array
from aerogel.methods import method
from aerogel.methods.dense import KINDS, from_torch
from aerogel.plan import Plan, Timing
from aerogel.runtime import operator, pool
from aerogel.runtime.eager import channels_last
from aerogel.runtime.program import NATIVE, Packs, Program, build
from aerogel.runtime.stays import problem
from aerogel.runtime.watch import Watch, without
from aerogel.runtime.workspace import OtherShape, Workspace
from aerogel.target import host

SHAPES = 8
"""Sets of input shapes kept bound at once; the least recently used one goes first."""

Timings = list[dict[str, list[float]]]


class Network:
    """A fused graph with its constants, runnable under any choices. Holds no workspace itself."""

    def __init__(self, captured: Captured, graph: Graph, constants: dict[str, torch.Tensor], half: Half | None = None) -> None:
        self.captured, self.graph, self.constants, self.half = captured, graph, constants, half
        self.kinds: dict[str, str] = {}
        self.arrays: dict[str, Array] = {}  # copies: torch moves a tensor's memory when it is sent to another process
        for node in self.convs():
            _, weight, bias, _ = node.conv_inputs()
            self.arrays[weight] = from_torch(constants[weight] + 0)  # pruning leaves minus zeros, which as bits of bf16 are none
            if bias is not None:
                self.arrays[bias] = constants[bias].float().numpy().copy()
        self.packs = Packs(self.arrays)
        self._sized: tuple[Any, dict[str, tuple[int, ...]]] | None = None

    def halved(self, half: Half) -> Network:
        """The same network in half precision."""
        return Network(self.captured, *halved(self.graph, self.constants, half), half)

    def convs(self) -> list[Node]:
        return [n for n in self.graph.nodes if n.conv is not None]

    def stats(self, node: Node) -> Stats:
        return Stats.of(self.arrays[node.conv_inputs()[1]])

    def flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """A call's arguments in the order of the graph's inputs."""
        wanted = self.captured.in_spec
        given, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if spec != wanted:
            names = wanted.child(1).context
            ordered = {k: kwargs[k] for k in names or () if k in kwargs}
            given, spec = pytree.tree_flatten((tuple(args), ordered))
            if spec != wanted or len(ordered) != len(kwargs):
                raise ShapeError(f"called with arguments of another structure than compiled with: {spec}, not {wanted}")
        return given

    def check(self, inputs: list[Any], where: str = "cpu") -> None:
        """Fixed sizes must be as they were, and sizes of one name alike; `where` is the kind of device the tensors are on."""
        seen: dict[str, int] = {}
        examples = pytree.tree_leaves(self.captured.example)
        known = zip(self.graph.inputs, inputs, self.captured.sizes, self.captured.dtypes, examples, strict=True)
        for name, value, sizes, dtype, example in known:
            if not isinstance(value, torch.Tensor):
                if value != example:
                    raise ShapeError(f"input '{name}' is {value!r}; the model was compiled for {example!r}. Compile again for it.")
                continue
            if value.dtype != dtype or value.device.type != where:
                there = "the CPU" if where == "cpu" else where
                raise ShapeError(
                    f"input '{name}' is {value.dtype} on {value.device}; the model was compiled for {dtype} on {there}"
                )
            if value.requires_grad and torch.is_grad_enabled():
                raise AerogelError(
                    "a compiled module cannot train: an input requires grad. Fine-tune the original, then compile again."
                )
            if len(value.shape) != len(sizes):
                raise ShapeError(f"input '{name}' has {len(value.shape)} dimensions; the model was compiled for {len(sizes)}")
            for i, (have, size) in enumerate(zip(value.shape, sizes, strict=True)):
                wanted = size if isinstance(size, int) else seen.setdefault(size, have)
                if have != wanted:
                    raise ShapeError(
                        f"input '{name}' has {have} in dimension {i}; the model takes {wanted} there. "
                        "Compile again with an example of the new size."
                    )

    def values(self, inputs: list[Any]) -> dict[str, torch.Tensor]:
        """Every tensor of the graph for these inputs, computed by torch."""
        with torch.no_grad():
            values = interpret.run(self.graph, self.constants, inputs)
        return {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}

    def shapes(self, inputs: list[Any]) -> dict[str, tuple[int, ...]]:
        """Sizes of every value for these inputs, found by running torch once. Their element types are noted on the way."""
        known = self._sized  # threads may call at once
        if known is None or known[0] != _sizes(inputs):
            return self.learn(inputs, self.values(inputs))
        return known[1]

    def learn(self, inputs: list[Any], values: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """Remember the sizes and element types that inputs like these give every value; `values` may have no memory."""
        self.kinds = {name: KINDS[v.dtype] for name, v in values.items() if v.dtype in KINDS}
        found = {name: tuple(v.shape) for name, v in values.items()}
        self._sized = _sizes(inputs), found
        return found

    def program(
        self, shapes: Mapping[str, tuple[int, ...]], choices: Mapping[str, Config], threads: int, joined: Container[str] = ()
    ) -> Program:
        return build(self.graph, shapes, self.kinds, choices, self.packs, replace(host(), threads=threads), joined)

    def workspace(self, program: Program, threads: int) -> Workspace:
        return Workspace(self.graph, program, self.constants, self.arrays, threads)

    def in_place(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        plans: list[dict[str, Config]],
        inputs: list[Any],
        rounds: int,
        joined: Sequence[Container[str]] = ((), ()),
    ) -> Timings:
        """Microseconds of each conv node in the running network under each plan, index [plan][node][round], plans in turn. `joined`
        are for each plan the nodes that are pooled by their own kernel."""
        threads = pool.threads()
        programs = [self.program(shapes, plan, threads, own) for plan, own in zip(plans, joined, strict=True)]
        spaces = [self.workspace(program, threads) for program in programs]
        times: Timings = [{} for _ in plans]
        with torch.no_grad():
            for i in range(rounds + 1):
                for space, seen in zip(spaces, times, strict=True):
                    for node, spent in space.timed(inputs).items():
                        if i > 0:  # the first round warms up
                            seen.setdefault(node, []).append(spent)
        return times

    def outputs(self, values: Mapping[str, Any]) -> list[Any]:
        """What the graph gives, in order; nothing returned is an input or a constant itself."""
        held = {*self.graph.inputs, *self.graph.constants}
        return [
            values[o.name].clone() if isinstance(o, Ref) and o.name in held else interpret.argument(o, values)
            for o in self.graph.outputs
        ]


def _sizes(inputs: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in inputs)


def _swapped(value: Any) -> Any:
    """An argument with its images in channels_last. A tensor, the usual case, takes the short way: this is time of every call."""
    if isinstance(value, torch.Tensor):
        return channels_last(value)
    return pytree.tree_map_only(torch.Tensor, channels_last, value)


class Compiled(torch.nn.Module):
    """A model compiled for inference. `plan` holds every decision with its timings; `speedup` is over the faster torch layout."""

    def __init__(
        self,
        original: torch.nn.Module,
        network: Network | None,
        plan: Plan,
        how: str,
        notes: tuple[str, ...] = (),
        body: torch.nn.Module | None = None,
        captured: Captured | None = None,
    ) -> None:
        """`how`: "graph" runs the network under the plan; "gpu", "parts" and the names of eager.bodies() call `body`.

        `captured` is what save() writes: the network's own, or given where torch runs a model that was captured whole.
        """
        super().__init__()
        self.__dict__["_original"], self.__dict__["_body"] = original, original if body is None else body
        self.network, self.plan, self.how, self.notes = network, plan, how, notes
        self.captured = captured if network is None else network.captured
        self._fresh()
        super().train(False)

    def _fresh(self) -> None:
        self._lock = threading.Lock()
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._free: dict[Any, list[Workspace]] = {}
        self._warned = False
        self._watch = Watch(self.plan)
        self._number = operator.register(self)

    @property
    def original(self) -> torch.nn.Module:
        """The model this came from: not a submodule, so its weights are not counted twice."""
        held: torch.nn.Module = self.__dict__["_original"]
        return held

    def judged(self, timing: Timing, said: str) -> Compiled:
        """This module with the whole model's timing added to its plan and notes."""
        self.plan, self.notes = replace(self.plan, model=timing), (*self.notes, said)
        return self

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
        missing = [n for n in (*self.input_names, *feed) if (n in feed) != (n in self.input_names)]
        wrong = [n for n in names or () if n not in self.output_names]
        if missing or wrong:
            raise ShapeError(f"'{(missing or wrong)[0]}': the model takes {self.input_names} and gives {self.output_names}")
        given = [torch.as_tensor(feed[n]) for n in self.input_names]
        args, kwargs = pytree.tree_unflatten(given, self.captured.in_spec)
        found = dict(zip(self.output_names, pytree.tree_leaves(self(*args, **kwargs)), strict=True))
        return [found[n].numpy() for n in (self.output_names if names is None else names)]

    @property
    def speedup(self) -> float:
        """Measured over the faster of torch's two layouts, median of paired rounds."""
        return 1.0 if self.plan.model is None else self.plan.model.ratio_p50

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.how != "graph" or self.network is None:
            return self._eager(args, kwargs)
        inputs = self.network.flat(args, kwargs)
        if torch.compiler.is_compiling():
            flat = torch.ops.aerogel.run(inputs, self._number)
            return pytree.tree_unflatten(flat, self.network.captured.out_spec)
        self.network.check(inputs)
        return pytree.tree_unflatten(self.run_flat(inputs), self.network.captured.out_spec)

    def fake_flat(self, inputs: list[Any]) -> list[Any]:
        """Outputs without values, for tracing: the graph on tensors that have only a shape."""
        assert self.network is not None
        blank = {name: torch.empty(c.shape, dtype=c.dtype) for name, c in self.network.constants.items()}
        return self.network.outputs(interpret.run(self.network.graph, blank, inputs))

    def run_flat(self, inputs: list[Any]) -> list[Any]:
        """The graph's outputs for its inputs, checked beforehand; image by image where the plan says so."""
        threads = pool.threads()
        self._warn(threads)
        images = next((len(v) for v in inputs if isinstance(v, torch.Tensor) and v.dim()), 1) if self.plan.apart else 1
        if images < 2:
            return self._once(inputs, threads)
        each = [self._once([v[i : i + 1] if isinstance(v, torch.Tensor) else v for v in inputs], threads) for i in range(images)]
        return [torch.cat(parts) for parts in zip(*each, strict=True)]

    def _once(self, inputs: list[Any], threads: int) -> list[Any]:
        assert self.network is not None
        network = self.network
        skips = self._watch.skips()
        key = (threads, skips, *_sizes(inputs))
        with torch.no_grad():
            workspace = self._take(key, inputs, threads, skips)
            try:
                found = network.outputs(workspace.run(inputs))
                if skips:
                    self._watch.look(workspace.program)
                return found
            except OtherShape:  # sizes that depend on data: torch runs this call
                return network.outputs(interpret.run(network.graph, network.constants, inputs))
            finally:
                with self._lock:
                    if key in self._programs:
                        self._free.setdefault(key, []).append(workspace)

    def _take(self, key: Any, inputs: list[Any], threads: int, skips: bool) -> Workspace:
        assert self.network is not None
        with self._lock:
            program = self._programs.get(key)
            if program is not None:
                self._programs.move_to_end(key)
                if self._free.get(key):
                    return self._free[key].pop()
        if program is None:
            shapes = self.network.shapes(inputs)
            joined = {c.node for c in self.plan.choices if c.pooled}
            program = self.network.program(shapes, self._choices(shapes, threads, skips), threads, joined)
            with self._lock:
                self._programs[key] = program
                while len(self._programs) > SHAPES:
                    gone, _ = self._programs.popitem(last=False)
                    self._free.pop(gone, None)
        return self.network.workspace(program, threads)

    def _choices(self, shapes: Mapping[str, tuple[int, ...]], threads: int, skips: bool = True) -> dict[str, Config]:
        """The plan's choices; at other sizes the same methods, each with its own first configuration for them."""
        assert self.network is not None
        tuned = {c.node: c for c in self.plan.choices}
        if not skips:
            tuned |= {node: replace(tuned[node], config=config) for node, config in without(tuned).items()}
        chosen = {}
        for node in self.network.convs():
            if node.name not in tuned:
                continue
            choice, conv = tuned[node.name], problem(node, shapes)
            if conv == choice.conv and threads == self.plan.target.threads:
                chosen[node.name] = choice.config
                continue
            module, target = method(choice.config.method), replace(host(), threads=threads)
            stats = replace(self.network.stats(node), idle=choice.idle)
            if module.refuse(conv, target, stats) is None:
                native = choice.config.method in NATIVE
                chosen[node.name] = next(module.configs(conv, target, stats)) if native else choice.config
        return chosen

    def _warn(self, threads: int) -> None:
        tuned = self.plan.target.threads
        if threads != tuned and not self._warned:
            self._warned = True
            warnings.warn(
                f"tuned for {tuned} threads, running on {threads}: right, but maybe not fastest. "
                f"Call torch.set_num_threads({tuned}), or compile again.",
                stacklevel=4,
            )

    def _eager(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        body = self.__dict__["_body"]
        if not torch.is_grad_enabled():
            return (
                body(*args, **kwargs)
                if not self.how.startswith("channels_last")
                else body(*map(_swapped, args), **{n: _swapped(v) for n, v in kwargs.items()})
            )
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves((args, kwargs))):
            raise AerogelError(
                "a compiled module cannot train: an input requires grad. Fine-tune the original, then compile again."
            )
        with torch.no_grad():
            return self._eager(args, kwargs)

    def train(self, mode: bool = True) -> Compiled:
        if mode:
            raise AerogelError("a compiled module cannot train. Fine-tune the original, then compile again.")
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise AerogelError("a compiled module stays where it was compiled. Move or convert the original, then compile again.")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's names and dense weights."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """New values for the same masks: folded and packed again under the same plan."""
        if self.network is None or self.how != "graph":
            raise AerogelError("this module runs the original model. Load the weights there, then compile again.")
        old = self.network.captured
        for name, value in state_dict.items():
            held = old.constants.get(name)
            if held is not None and held.dim() > 1 and not torch.equal(held != 0, value != 0):
                raise AerogelError(
                    f"'{name}' has other zeros than the compiled model. Load it into the original, then compile again."
                )
        answer = self.original.load_state_dict(state_dict, strict, assign)
        constants = {name: state_dict.get(name, value) for name, value in old.constants.items()}
        captured = replace(old, constants=constants)
        graph, fused, _ = fuse(captured.graph, constants, captured.shapes)
        half, self.network = self.network.half, Network(captured, graph, fused)
        self.network = self.network if half is None else self.network.halved(half)
        self.captured = captured
        self._fresh()
        return answer

    def __getstate__(self) -> dict[str, Any]:
        """For copies and other processes: everything but bound memory."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_programs", "_free")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fresh()

    def workspace_bytes(self) -> int:
        """Bytes of all workspaces bound now and not in use."""
        with self._lock:
            return sum(w.bytes for free in self._free.values() for w in free)
