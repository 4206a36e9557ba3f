"""A network on this machine: a program for each set of input shapes, and workspaces that calls take and give
back."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, repeat
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.backends import Runner
from aerogel.backends.cpu.lower.planes import likely, places
from aerogel.backends.cpu.lower.program import Program, build
from aerogel.backends.cpu.memory import Arena, ProgramMemory
from aerogel.backends.cpu.threads import threads as threads_now
from aerogel.backends.cpu.threads import walker_code
from aerogel.backends.cpu.workspace import OtherShape, Workspace
from aerogel.backends.watch import Watch, without
from aerogel.capture import interpret
from aerogel.capture.network import Network, sizes_of
from aerogel.capture.nodes import Shapes, problem
from aerogel.capture.separate import separate
from aerogel.errors import ShapeError
from aerogel.ir import ALONE, Config, Node, Plan, Target, references
from aerogel.locks import Lock
from aerogel.methods import BASELINE, cpu_form

TOGETHER = 8
"""Images that run at once beside one, and beside as many as the model was tuned for."""
_numbers = count()  # of runners: the first part of their programs' keys


def program(
    network: Network,
    shapes: Shapes,
    choices: Mapping[str, Config],
    target: Target,
    pooled: Collection[str] = (),
) -> Program:
    """What runs for these shapes under these choices; nodes `pooled` do the pooling after them too."""
    stored, weights = network.stored, network.weights
    return build(network.graph, shapes, stored, choices, weights, target, pooled, network.meanings)


def workspace(
    network: Network, made: Program, target: Target, arena: Callable[[int], Arena] = Arena
) -> Workspace:
    """With those constants that torch reads: nodes of its own, and outputs."""
    read = set(references(network.graph.outputs)).union(*(part.read() for part in made.parts))
    return Workspace(network.graph, made, network.real(read), network.biases, target.threads, arena)


def table_bytes(network: Network, made: Program) -> int:
    """Return the bytes of tables and code that a program's kernels hold for themselves: packed weights are
    shared with other programs."""
    shared = {id(array) for weight in network.weights.values() for array in weight.arrays()}
    tables = {
        id(array): array.nbytes for part in made.parts for n in part.natives for array in n.kernel.owned
    }
    return sum(size for name, size in tables.items() if name not in shared)


def let_go(network: Network, choices: Mapping[str, Config]) -> None:
    """Keep no dense copy of weights that only kernels of ours read, as they were packed."""
    users, convs = network.graph.users(), {node.name: node for node in network.convs()}
    for name, weight in network.weights.items():
        configs = [choices.get(user, Config(BASELINE)) for user in users[name]]
        places = {i for user in users[name] if user in convs for i in _places(convs[user], name)}
        if weight.held and places == {1} and all(config.method != BASELINE for config in configs):
            conv, form = convs[users[name][0]].conv, cpu_form(configs[0].method)
            assert conv is not None
            network.let_go(name, partial(form.unpack, weight.packed(form.pack, conv, configs[0]), conv))


def _give_back() -> None:
    """Building a program takes and frees large arrays: what the C library still holds of them goes back to
    the machine, which may have many such processes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _places(node: Node, name: str) -> list[int]:
    """As which inputs a convolution reads a value: 1 is the weight."""
    return [i for i, own in enumerate(node.conv_inputs()) if own == name]


def batches(network: Network, plan: Plan) -> tuple[int, ...]:
    """Numbers of images that programs are made for, the largest first; none where images of a batch may meet,
    and each number has a program of its own."""
    if plan.image_by_image:
        return (1,)
    if not separate(network.captured):
        return ()
    example = [v for v in pytree.tree_leaves(network.captured.example) if isinstance(v, torch.Tensor)]
    return tuple(sorted({1, TOGETHER, max(1, len(example[0]))}, reverse=True))


def pieces(images: int, sizes: Sequence[int]) -> Iterator[int]:
    """So many images in pieces of these sizes, the largest first; the last is one."""
    for size in sizes:
        yield from repeat(size, images // size)
        images %= size


class CpuRunner(Runner):
    """Safe to call from any number of threads at once."""

    def __init__(self, network: Network, plan: Plan, target: Target) -> None:
        self.network = network
        self._target = target
        self.plan = plan
        self._threads = plan.target.threads if isinstance(plan.target, Target) else 1
        self._lock = Lock()
        self._warned = False
        self._batches = batches(network, plan)
        self._number = next(_numbers)
        self.memory = ProgramMemory()
        self._fresh()

    @property
    def limit(self) -> int:
        """Bytes of programs and idle arenas kept between calls."""
        return self.memory.limit

    @limit.setter
    def limit(self, most: int) -> None:
        self.memory.limit = most

    def share_memory(self, other: Runner) -> None:
        """Keep programs and arenas within the limit of another runner, and use the same arenas."""
        if isinstance(other, CpuRunner):
            self.memory = other.memory

    @property
    def programs(self) -> dict[Any, Program]:
        """The programs that are kept, by thread count, whether zeros are skipped, and sizes of the inputs."""
        return {
            key[1:]: entry.program
            for key, entry in list(self.memory.entries.items())
            if isinstance(key, tuple) and key[0] == self._number
        }

    def _fresh(self) -> None:
        self._watch = Watch(self.plan)
        self._counted: dict[int, tuple[int, int]] = {}

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """A batch whose images do not meet is cut into the sizes that programs are made for."""
        threads = threads_now()
        self._warn(threads)
        if not self._batches:
            return self._run(inputs, threads)
        images = next((len(v) for v in inputs if isinstance(v, torch.Tensor) and v.dim()), 1)
        if images in self._batches or images < 1:
            return self._run(inputs, threads)
        done, each = 0, []
        for size in pieces(images, self._batches):
            cut = [v[done : done + size] if isinstance(v, torch.Tensor) else v for v in inputs]
            each.append(self._run(cut, threads))
            done += size
        return [torch.cat(parts) for parts in zip(*each, strict=True)]

    def _run(self, inputs: list[Any], threads: int) -> list[Any]:
        network = self.network
        skips = self._watch.skips()
        key = (self._number, threads, skips, *sizes_of(inputs))
        with torch.no_grad():
            space = self._take(key, inputs, threads, skips)
            try:
                found = network.outputs(space.run(inputs))
                if skips and self._watch.looks():
                    self._watch.look(self._active(space.program))
                return found
            except OtherShape:  # sizes that depend on data: torch runs this call
                return network.outputs(interpret.run(network.graph, network.real(), inputs))
            finally:
                self.memory.give_back(key, space)

    def _active(self, made: Program) -> dict[str, float]:
        """The share of windows that each layer which skips zeros found active since it was last asked."""
        found: dict[str, float] = {}
        for native in (native for part in made.parts for native in part.natives):
            counts = native.kernel.counts
            if counts is None:
                continue
            active, seen = (int(n) for n in counts.reshape(-1, 8)[:, :2].sum(0))
            old_active, old_seen = self._counted.get(id(counts), (0, 0))
            self._counted[id(counts)] = active, seen
            share = (active - old_active) / max(1, seen - old_seen)
            found[native.conv] = max(share, found.get(native.conv, 0.0))
        return found

    def _take(self, key: Any, inputs: list[Any], threads: int, skips: bool) -> Workspace:
        made = self.memory.find(key)
        if made is None:
            made = self._program(inputs, threads, skips)
            _give_back()
            self.memory.add(key, made, table_bytes(self.network, made))
        space = self.memory.take(key)
        if space is None:
            return workspace(self.network, made, replace(self._target, threads=threads), self.memory.arena)
        space.move(self.memory.arena(space.size))
        return space

    def _program(self, inputs: list[Any], threads: int, skips: bool) -> Program:
        target = replace(self._target, threads=threads)
        shapes = self.network.shapes(inputs)
        pooled = {c.node for c in self.plan.choices if c.pooled}
        choices = self._choices(shapes, target, skips)
        made = program(self.network, shapes, choices, target, pooled)
        let_go(self.network, choices)
        return made

    def warm(self, images: Iterable[int], threads: int) -> None:
        """Have the code of calls with so many images generated, at the example's sizes; within
        `llvm.warming`."""
        walker_code()
        example = self.network.captured.flat(*self.network.captured.example)
        for size in {
            piece for n in images for piece in (pieces(n, self._batches) if self._batches else (n,))
        }:
            given = [
                torch.empty((size, *v.shape[1:]), dtype=v.dtype, device="meta")
                if isinstance(v, torch.Tensor) and v.dim()
                else v
                for v in example
            ]
            if (why := self.network.captured.misfit(given, "meta")) is not None:
                raise ShapeError(f"a batch of {size}: {why}")
            for skips in {True, not without({c.node: c for c in self.plan.choices})}:
                self._program(given, threads, skips)

    def _choices(self, shapes: Shapes, target: Target, skips: bool) -> dict[str, Config]:
        """The plan's choices, for any number of images; at other sizes the same methods, each with its own
        first configuration."""
        tuned = {c.node: c for c in self.plan.choices}
        if not skips:
            tuned |= {node: replace(tuned[node], config=config) for node, config in without(tuned).items()}
        convs = {n.name: problem(n, shapes) for n in self.network.convs() if n.name in tuned}
        again = target.threads == self._threads
        alike = {n: replace(conv, n=tuned[n].conv.n) for n, conv in convs.items()}
        chosen = {n: tuned[n].config for n, conv in alike.items() if again and conv == tuned[n].conv}
        if len(chosen) == len(convs):
            return chosen
        nodes = {n.name: n for n in self.network.convs()}
        stats = {n: replace(self.network.stats(nodes[n]), idle=tuned[n].idle) for n in convs}
        stands = places(convs, likely(convs, stats, target), target)
        for name, conv in convs.items():
            form = cpu_form(tuned[name].config.method)
            own = replace(stats[name], place=stands.get(name, ALONE))
            if name not in chosen and form.refuse(conv, target, own) is None:
                ours = form.NAME != BASELINE
                chosen[name] = next(form.configs(conv, target, own)) if ours else tuned[name].config
        return chosen

    def _warn(self, threads: int) -> None:
        tuned = self._threads
        if threads != tuned and not self._warned:
            self._warned = True
            warnings.warn(
                f"tuned for {tuned} threads, running on {threads}: right, but maybe not fastest. "
                f"Call torch.set_num_threads({tuned}), or compile again.",
                stacklevel=4,
            )

    def workspace_bytes(self) -> int:
        return self.memory.bytes()

    def forget(self) -> None:
        self.memory.clear(self._number)
        self._fresh()
        self.network.keep(self.plan)
