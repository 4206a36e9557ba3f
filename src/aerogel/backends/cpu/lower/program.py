"""What runs for one set of input shapes: torch calls and native segments, decided once, bound to an arena
many times.

The walk over the graph keeps for each value where it is: in torch's hands, as a plane in the arena, cut into
phases, or several of these. A copy stands where a value is needed in a form it does not have yet; a change of
precision is such a copy, and never a step of its own.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from aerogel.backends.cpu.lower import bytemaps, elementwise, features, pooled, pooling
from aerogel.backends.cpu.lower.arena import Touch, place
from aerogel.backends.cpu.lower.convert import Enlarge, convert, enlarges
from aerogel.backends.cpu.lower.elementwise import Elementwise, elementwise_of, gated
from aerogel.backends.cpu.lower.planes import planes, read, written
from aerogel.backends.cpu.lower.residency import staying
from aerogel.backends.cpu.lower.views import concatenated, cuts, homes, root
from aerogel.capture.nodes import (
    Meanings,
    Stored,
    added_alike,
    casts,
    image_shape,
    padded_pools,
    pairs,
    pooling_of,
    problem,
)
from aerogel.codegen.cpu.abi import Kernel, LibraryCall, native
from aerogel.ir import IN_BYTES, Config, Graph, Layout, Node, Place, Quantized, Shape, Target, Weight
from aerogel.methods import BASELINE, cpu_form


@dataclass(frozen=True)
class Native:
    """One kernel of a segment. Buffers are arena names, or torch values ("@name"); `bias` is a constant's
    name."""

    kernel: Kernel
    x: str
    y: str
    residual: str | None = None
    bias: str | None = None
    gate: str | None = None
    label: str = ""
    conv: str = ""
    """The convolution it computes; what it writes may be that, pooled."""


@dataclass(frozen=True)
class Export:
    """A tensor that passes between a segment and torch."""

    shape: tuple[int, ...]
    dtype: str


@dataclass
class Part:
    """A stretch of the program: one torch node (a dense convolution by a library's call), or the kernels of
    one segment."""

    node: Node | None = None
    library: LibraryCall | None = None
    natives: list[Native] = field(default_factory=list)
    exports: dict[str, Export] = field(default_factory=dict)

    def read(self) -> set[str]:
        """Values that it reads as torch's tensors; a library's call holds its weight."""
        if self.node is None:
            return {step.x[1:] for step in self.natives if step.x.startswith("@")}
        if self.library is None:
            return set(self.node.inputs)
        x, _, *others = self.node.conv_inputs()
        return {x, *(name for name in others if name is not None)}


@dataclass(frozen=True)
class Program:
    """Parts in order, the arena they need, and the shapes of all values they were built for."""

    parts: tuple[Part, ...]
    shapes: Mapping[str, tuple[int, ...]]
    offsets: Mapping[str, int]
    arena_bytes: int
    scratch_bytes: int


def build(
    graph: Graph,
    shapes: Mapping[str, tuple[int, ...]],
    stored: Stored,
    choices: Mapping[str, Config],
    weights: Mapping[str, Weight],
    target: Target,
    joined: Container[str] = (),
    meanings: Meanings = MappingProxyType({}),
) -> Program:
    """`choices` names the configuration of each conv node that gets a kernel of ours; all other nodes are
    torch's. Those `joined` are pooled by the same kernel. `meanings` are of maps in int8."""
    return _Walk(graph, shapes, stored, choices, weights, target, joined, meanings).program()


class _Walk:
    def __init__(
        self,
        graph: Graph,
        shapes: Mapping[str, tuple[int, ...]],
        stored: Stored,
        choices: Mapping[str, Config],
        weights: Mapping[str, Weight],
        target: Target,
        joined: Container[str],
        meanings: Meanings,
    ) -> None:
        self.graph, self.shapes, self.stored = graph, shapes, stored
        self.meanings = meanings
        self.target, self.weights = target, weights
        self.given = choices
        self.choices = {name: c for name, c in choices.items() if c.method != BASELINE}
        self.problems = {n.name: problem(n, shapes) for n in graph.nodes if n.name in self.choices}
        added_alike(graph, shapes)
        self.users = graph.users()
        self.stays = staying(graph, shapes, stored, self.choices.keys(), choices.keys())
        self.cast: dict[
            str, str
        ] = {}  # values that are others in another element type, and need no step for it
        self.homes = homes(
            graph, shapes, {n.name for n in graph.nodes if self._ours(n.name) and not casts(n, stored)}
        )
        self.pooled = {
            name: own
            for name, own in pairs(graph).items()
            if name in joined and name in self.choices and own in self.stays
        }
        self.parts: list[Part] = []
        self.torch = {*graph.inputs, *graph.constants}
        self.arena: dict[str, tuple[Layout, Shape]] = {}
        found = {n.name: elementwise_of(n, shapes, stored) for n in graph.nodes if n.name in self.stays}
        self.elementwise = {name: own for name, own in found.items() if own is not None}
        self.gated = gated(graph, self.elementwise, self.users)
        self.padded = padded_pools(graph)
        self.skipped = {product for product, _ in self.gated.values()}
        self.skipped |= {next(iter(n.inputs)) for n in graph.nodes if n.name in self.padded} & self.stays
        named = {*self.stays, *(name for own in self.elementwise.values() for name in own.maps)}
        sizes = [(stored[name], image_shape(shapes[name])[2:]) for name in named]
        self.planes = planes(self.problems, self.choices, target, sizes)

    def program(self) -> Program:
        for node in self.graph.nodes:
            if node.name in self.choices:
                self._native(node)
            elif self._free_cast(node):
                self.cast[node.name] = node.inputs[0]
            elif node.name in self.stays:
                if node.name not in self.arena and node.name not in self.skipped:  # pooled, or looked through
                    self._staying_node(node)
            elif not (cuts(node) and self.stays.issuperset(self.users[node.name])):
                for name in node.inputs:
                    self._to_torch(name)
                self.parts.append(Part(node, self._dense(node)))
                self.torch.add(node.name)
        for name, users in self.users.items():
            if "" in users:
                self._to_torch(name)
        return self._placed()

    def _free_cast(self, node: Node) -> bool:
        """Whether the copy to whoever reads a value changes its element type on the way. A cast of such a
        cast is none: read from where both began, it would not be rounded in between."""
        if not casts(node, self.stored) or node.inputs[0] in self.cast:
            return False
        if node.op == "dequantize" and node.inputs[0] not in self.arena:  # bytes in torch's hands
            return False
        return node.name in self.stays or all(map(self._ours, self.users[node.name]))

    def _ours(self, name: str) -> bool:
        return name in self.choices or name in self.stays

    def _plane(self, name: str) -> Layout:
        return self.planes[self.stored[name], image_shape(self.shapes[name])[2:]]

    def _staying_node(self, node: Node) -> None:
        if node.conv is not None:
            self._features(node)
        elif node.op == "getitem":  # a slice: it stands in its source
            shape = image_shape(self.shapes[node.name])
            self.arena[node.name] = (self._plane(node.name), shape)
        elif concatenated(node):
            self._concat(node)
        elif node.op in IN_BYTES:
            self._bytemap(node)
        elif node.name in self.elementwise:
            _, own = self.gated.get(node.name, ("", self.elementwise[node.name]))
            self._elementwise(node, own)
        elif larger := enlarges(node, self.shapes):
            self._enlarge(node, larger)
        else:
            self._pool(node)

    def _features(self, node: Node) -> None:
        conv, plane = problem(node, self.shapes), self._plane(node.name)
        x, weight, bias, residual = node.conv_inputs()
        x, residual = self._in_arena(x, plane), None if residual is None else self._in_arena(residual, plane)
        made = features.kernel(self.weights[weight].array, conv, plane, plane, self.target)
        label = f"dot {node.layer or node.name}"
        self._segment().natives.append(Native(made, x, node.name, residual, bias, label=label))
        self.arena[node.name] = (plane, conv.y_shape)

    def _enlarge(self, node: Node, larger: Enlarge) -> None:
        x = node.inputs[0]
        (reads, origin), writes = self._where(x), self._plane(node.name)
        how = self._meaning(x)
        for made in convert(image_shape(self.shapes[x]), reads, writes, self.target, larger=larger, how=how):
            self._segment().natives.append(Native(made, origin, node.name, label=f"enlarge {node.name}"))
        self.arena[node.name] = (writes, image_shape(self.shapes[node.name]))

    def _elementwise(self, node: Node, own: Elementwise) -> None:
        plane, shape = self._plane(node.name), image_shape(self.shapes[node.name])
        gates = None if own.gate is None else self._plane(own.gate)
        gate = None if own.gate is None or gates is None else self._in_arena(own.gate, gates)
        x = self._in_arena(own.x, plane)
        beside = None if own.beside is None else self._in_arena(own.beside, plane)
        made = elementwise.kernel(own, shape, plane, gates, self.target)
        label = f"{own.kind if own.step is None else own.step} {node.layer or node.name}"
        self._segment().natives.append(Native(made, x, node.name, beside, gate=gate, label=label))
        self.arena[node.name] = (plane, shape)

    def _bytemap(self, node: Node) -> None:
        """A table stands in the place of a bias, the second of two maps in that of a residual."""
        x, y = (image_shape(self.shapes[n]) for n in (node.inputs[0], node.name))
        reads, writes = self._plane(node.inputs[0]), self._plane(node.name)
        made = bytemaps.kernel(node.in_bytes(), x, y, reads, writes, self.target)
        source = self._in_arena(node.inputs[0], reads)
        beside = self._in_arena(node.args[1].name, writes) if node.op == "u8.add" else None
        bias = node.args[1].name if node.op == "u8.table" else None
        label = f"{made.name.split()[0]} {node.layer or node.name}"
        self._segment().natives.append(Native(made, source, node.name, beside, bias, label=label))
        self.arena[node.name] = (writes, y)

    def _pool(self, node: Node) -> None:
        own = pooling_of(node)
        assert own is not None
        x, sides = self.padded.get(node.name, (node.inputs[0], (*own.pad, *own.pad)))
        own = replace(own, pad=sides[:2])
        x_shape, y_shape = (image_shape(self.shapes[n]) for n in (x, node.name))
        reads, writes = self._plane(x), self._plane(node.name)
        zero = self.meanings[x].zero if x in self.meanings else 0
        made = pooling.kernel(own, x_shape, y_shape, reads, writes, self.target, zero)
        source = self._in_arena(x, reads)
        self._segment().natives.append(
            Native(made, source, node.name, label=f"pool {node.layer or node.name}")
        )
        self.arena[node.name] = (writes, y_shape)

    def _concat(self, node: Node) -> None:
        whole = image_shape(self.shapes[node.name])
        writes, first, (home, start) = self._plane(node.name), 0, root(node.name, self.homes)
        for name in concatenated(node):
            shape = image_shape(self.shapes[name])
            source, origin = self._where(name)
            if root(name, self.homes) != (home, start + first):  # else it was written there
                how = self._meaning(name)
                for made in convert(shape, source, writes, self.target, (first, whole[1]), how=how):
                    self._segment().natives.append(
                        Native(made, origin, node.name, label=f"concat {node.name}")
                    )
            first += shape[1]
        self.arena[node.name] = (writes, whole)

    def _dense(self, node: Node) -> LibraryCall | None:
        """The library's call for a convolution that has one; the plain torch call otherwise."""
        config = self.given.get(node.name)
        if config is None or node.conv is None or len(self.shapes[node.name]) == 3:
            return None
        conv, module = problem(node, self.shapes), cpu_form(config.method)
        reads, writes = module.layouts(conv, config, self.target)
        packed = self.weights[node.conv_inputs()[1]].packed(module.pack, conv, config)
        made = module.build(packed, conv, config, self.target, reads, writes)
        assert isinstance(made, LibraryCall)
        return made

    def _segment(self) -> Part:
        if not self.parts or self.parts[-1].node is not None:
            self.parts.append(Part())
        return self.parts[-1]

    def _native(self, node: Node) -> None:
        conv, config = self.problems[node.name], self.choices[node.name]
        x, weight, bias, residual = node.conv_inputs()
        writes = self.planes[written(conv)]
        module = cpu_form(config.method)
        wanted, _ = module.layouts(conv, config, self.target, Place(writes.border, writes.pitch))
        reads = self.planes[read(conv)] if wanted.kind == "planar" else wanted
        source = self._in_arena(x, reads)
        if node.name in self.pooled and self._with_pool(node, source, reads):
            return
        beside = None if residual is None else self._in_arena(residual, writes)
        packed = self.weights[weight].packed(module.pack, conv, config)
        label = f"{config.method} {node.layer or node.name}"
        for kernel in native(module.build(packed, conv, config, self.target, reads, writes)):
            self._segment().natives.append(
                Native(kernel, source, node.name, beside, bias, label=label, conv=node.name)
            )
        self.arena[node.name] = (writes, conv.y_shape)

    def _with_pool(self, node: Node, source: str, reads: Layout) -> bool:
        """Convolution and pooling in one kernel, where that can be."""
        conv, config, after = self.problems[node.name], self.choices[node.name], self.pooled[node.name]
        own = next(n for n in self.graph.nodes if n.name == after)
        pool, writes, y_shape = pooling_of(own), self._plane(after), image_shape(self.shapes[after])
        _, weight, bias, _ = node.conv_inputs()
        assert pool is not None
        made = pooled.kernel(
            self.weights[weight].packed(cpu_form(config.method).pack, conv, config),
            conv,
            config,
            self.target,
            reads,
            pool,
            y_shape,
            writes,
        )
        if made is None:
            return False
        self._segment().natives.append(
            Native(
                made,
                source,
                after,
                None,
                bias,
                label=f"{config.method} {node.layer or node.name}, pooled",
                conv=node.name,
            )
        )
        self.arena[after] = (writes, y_shape)
        return True

    def _in_arena(self, name: str, layout: Layout) -> str:
        """The arena's name of a value in this layout, copied there if it is not yet."""
        phases = f"{name}#{layout.pitch}.{layout.border}.{layout.stride}.{layout.kept}"
        key = name if layout.kind == "planar" else phases
        if key in self.arena:
            return key
        shape = image_shape(self.shapes[name])
        source, origin = self._where(name)
        for kernel in convert(shape, source, layout, self.target, how=self._meaning(name)):
            self._segment().natives.append(Native(kernel, origin, key, label=f"copy {name}"))
        self.arena[key] = (layout, shape)
        return key

    def _meaning(self, name: str) -> Quantized | None:
        """Of the bytes that a value is in, or is made of on its way."""
        return self.meanings.get(name) or self.meanings.get(self.cast.get(name, ""))

    def _where(self, name: str) -> tuple[Layout, str]:
        """Where a value can be read from, perhaps in another element type: the arena, or torch's hands."""
        if name in self.arena:
            return self.arena[name][0], name
        if name in self.cast:
            return self._where(self.cast[name])
        return Layout("contiguous", image_shape(self.shapes[name])[3], dtype=self.stored[name]), f"@{name}"

    def _to_torch(self, name: str) -> None:
        """Make a value that lives in the arena a fresh tensor."""
        if name in self.torch:
            return
        (layout, origin), shape = self._where(name), image_shape(self.shapes[name])
        if self.stored[name] == "u8" != layout.dtype:  # bytes are made in quads, and then told apart
            origin = self._in_arena(name, self._plane(name))
            layout = self.arena[origin][0]
        plain = Layout("contiguous", shape[3], dtype=self.stored[name])
        for kernel in convert(shape, layout, plain, self.target, how=self._meaning(name)):
            self._segment().natives.append(Native(kernel, origin, f"@{name}", label=f"copy {name}"))
        self._segment().exports[name] = Export(self.shapes[name], self.stored[name])
        self.torch.add(name)

    def _placed(self) -> Program:
        steps = [step for part in self.parts for step in part.natives]
        touched = [Touch(s.x, s.y, s.residual, s.gate) for s in steps]
        sizes = {
            name: layout.elements(shape) * layout.item_bytes for name, (layout, shape) in self.arena.items()
        }
        inside = {}
        for name in self.homes:
            (whole, channel), (layout, (_, _, h, w)) = root(name, self.homes), self.arena[name]
            inside[name] = whole, layout.planes(channel) * layout.plane(h, w) * layout.item_bytes
        offsets, size = place(touched, sizes, inside)
        return Program(
            tuple(self.parts),
            self.shapes,
            offsets,
            size,
            max((s.kernel.scratch_bytes for s in steps), default=0),
        )
