"""`Workspace`: a program's segments, bound to an arena, for one set of input shapes and one thread count.

A call takes a workspace and an arena and gives both back, so two calls never share one. A workspace moves to
another arena by writing other addresses into its argument blocks. Outputs are fresh tensors that alias
nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aerogel.backends.cpu.lower.program import Export, Part, Program
from aerogel.backends.cpu.memory import Arena
from aerogel.backends.cpu.threads import Segment
from aerogel.capture import interpret
from aerogel.codegen.cpu.abi import POINTERS
from aerogel.ir import ITEM_BYTES, LINE_BYTES, NUMPY, Array, Graph, round_up
from aerogel.ir.tensors import TORCH, to_torch


@dataclass
class _Bound:
    """A segment with the places where a tensor's address goes: (arguments, slot, tensor's name, bytes to
    add)."""

    part: Part
    segment: Segment
    patches: list[tuple[NDArray[np.int64], int, str]]
    imports: dict[str, Export]

    def whole(self) -> None:
        self.segment()

    def profiled(self) -> None:
        """One kernel at a time, under its layer's name: slower, and only while torch.profiler looks."""
        for step, single in zip(self.part.natives, self.segment.singles(), strict=True):
            with torch.profiler.record_function(f"aerogel::{step.label}"):
                single()


def _inner(graph: Graph, program: Program) -> dict[str, Export]:
    """Tensors between our kernels and a convolution or Linear of torch's, which returns none of its inputs:
    they lie in the arena, since beside a busy Python thread a call that makes a tensor waits for the GIL."""
    convolutions = {node.name for node in graph.nodes if node.conv is not None}
    exports = {name: made for part in program.parts for name, made in part.exports.items()}
    users = graph.users()
    return {n: e for n, e in exports.items() if convolutions.issuperset(users[n])}


def _fresh(made: Export) -> torch.Tensor:
    """A tensor of its own. numpy makes it: torch.empty gives up the GIL, and beside a busy Python thread
    waits 5 ms for it."""
    tensor = torch.from_numpy(np.empty(made.shape, NUMPY[made.dtype]))
    return tensor if made.dtype != "bf16" else tensor.view(torch.bfloat16)


class OtherShape(Exception):
    """A value of this call has another shape or element type than the workspace was made for."""


def _same(value: torch.Tensor, wanted: Export) -> torch.Tensor:
    """Kernels read by address: what they are given is looked at first."""
    if tuple(value.shape) != wanted.shape or value.dtype != TORCH[wanted.dtype]:
        raise OtherShape
    return value


def _profiling() -> bool:
    """Whether torch.profiler looks on; where this torch cannot say, no."""
    known = getattr(torch.autograd, "_profiler_enabled", None)
    return bool(known and known())


class Workspace:
    """Bound kernels of a Program, and where its values lie in an arena."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        constants: Mapping[str, torch.Tensor],
        biases: Mapping[str, Array],
        threads: int,
        arena: Callable[[int], Arena] = Arena,
    ) -> None:
        """Bind to what `arena` gives for a number of bytes."""
        self.graph, self.program, self.constants = graph, program, constants
        self._bias = biases
        self._moving: list[tuple[NDArray[np.int64], int]] = []  # slots that hold addresses in the arena
        self._scratch_at = round_up(program.arena_bytes, LINE_BYTES)
        size = self._scratch_at + round_up(program.scratch_bytes * threads, LINE_BYTES)
        self._inner_at: dict[str, tuple[int, Export]] = {}
        for name, made in _inner(graph, program).items():
            self._inner_at[name] = size, made
            size += round_up(math.prod(made.shape) * ITEM_BYTES[made.dtype], LINE_BYTES)
        self.size = size
        self.arena: Arena | None = arena(size)
        self._address = self.arena.address
        self._inner = self._inner_tensors(self.arena)
        self.steps: list[_Bound | Part] = []
        for part in program.parts:
            self.steps.append(part if part.node is not None else self._bind(part, threads))

    def move(self, arena: Arena) -> None:
        """Work in this arena from now on."""
        distance = arena.address - self._address
        for arguments, slot in self._moving if distance else ():
            arguments[slot] += distance
        self.arena, self._address = arena, arena.address
        self._inner = self._inner_tensors(arena)

    def release(self) -> Arena:
        """Give the arena up; `move` comes before the next run."""
        arena, self.arena, self._inner = self.arena, None, {}
        assert arena is not None
        return arena

    def _inner_tensors(self, arena: Arena) -> dict[str, torch.Tensor]:
        """Tensors over their places in the arena."""
        tensors = {}
        for name, (at, made) in self._inner_at.items():
            first = arena.start + at
            last = first + math.prod(made.shape) * ITEM_BYTES[made.dtype]
            array = arena.buffer[first:last].view(NUMPY[made.dtype]).reshape(made.shape)
            tensors[name] = to_torch(array, made.dtype)
        return tensors

    def _bind(self, part: Part, threads: int) -> _Bound:
        bound, patches = [], []
        imports: dict[str, Export] = {}
        base = self._address
        for step in part.natives:
            addresses = {"scratch": base + self._scratch_at}
            if step.bias is not None:
                addresses["bias"] = self._bias[step.bias].ctypes.data
            moving = {"scratch"}
            places = (("x", step.x), ("y", step.y), ("residual", step.residual), ("bias", step.gate))
            for slot, name in places:
                if name is not None and name.startswith("@"):
                    addresses[slot] = 0
                elif name is not None:
                    addresses[slot] = base + self.program.offsets[name]
                    moving.add(slot)
            arguments = step.kernel.bind(**addresses)
            self._moving += [(arguments, POINTERS.index(slot)) for slot in moving]
            bound.append((step.kernel, arguments))
            for slot, name in (("x", step.x), ("y", step.y)):
                if name.startswith("@"):
                    patches.append((arguments, POINTERS.index(slot), name[1:]))
                    if slot == "x":
                        imports[name[1:]] = Export(self.program.shapes[name[1:]], step.kernel.reads.dtype)
        return _Bound(part, Segment(bound, threads), patches, imports)

    def _torch(self, part: Part, values: Mapping[str, Any]) -> Any:
        assert part.node is not None
        if part.library is None:
            return interpret.answer(part.node, values)
        x, _, bias, residual = part.node.conv_inputs()
        return part.library.call(
            values[x], None if bias is None else values[bias], None if residual is None else values[residual]
        )

    def timed(self, inputs: list[Any]) -> dict[str, float]:
        """Microseconds of each value's kernels, each run in its place in the network: caches are as warm as
        they will be. A copy that cuts a map for a reader is part of the reader's time."""
        spent: dict[str, float] = {}
        cut: dict[str, float] = {}

        def launch(bound: _Bound) -> None:
            for step, single in zip(bound.part.natives, bound.segment.singles(), strict=True):
                began = time.perf_counter_ns()
                single()
                us = (time.perf_counter_ns() - began) / 1e3 + cut.pop(step.x, 0.0)
                whole = step.y.startswith("@") or step.y in self.program.shapes
                into = spent if whole else cut
                into[step.y] = into.get(step.y, 0.0) + us

        self.run(inputs, launch)
        return spent

    def run(self, inputs: list[Any], launch: Callable[[_Bound], None] | None = None) -> dict[str, Any]:
        """All values that torch holds, outputs among them. `launch` runs a segment, by default as one foreign
        call."""
        launch = launch or (_Bound.profiled if _profiling() else _Bound.whole)
        values: dict[str, Any] = {**self.constants, **dict(zip(self.graph.inputs, inputs, strict=True))}
        for step in self.steps:
            if isinstance(step, Part):
                assert step.node is not None
                values[step.node.name] = self._torch(step, values)
                continue
            held = {name: _same(values[name], wanted).contiguous() for name, wanted in step.imports.items()}
            for name, fresh in step.part.exports.items():
                held[name] = self._inner[name] if name in self._inner else _fresh(fresh)
            for arguments, slot, name in step.patches:
                arguments[slot] = held[name].data_ptr()
            launch(step)
            values.update({name: held[name] for name in step.part.exports})
        return values
