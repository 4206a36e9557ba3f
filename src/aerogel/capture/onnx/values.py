"""What an ONNX file's values are while it is read, and the graph that grows on the way.

Every value is one of three things:

    Ref               a tensor of the graph, computed when the model runs
    array             known now: an initializer, or folded from some
    array of `Size`   whole numbers that depend on open sizes: ONNX computes shapes with tensors,
                      torch with integers

Each node is run at once on tensors without memory, in two sizes of the open dimensions: what both agree on is
fixed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from aerogel.capture import interpret
from aerogel.capture.captured import Captured
from aerogel.capture.onnx.dims import Dims, dims_of
from aerogel.capture.onnx.expressions import Expression
from aerogel.capture.onnx.file import File
from aerogel.capture.onnx.origins import Origins
from aerogel.capture.onnx.sizes import Size, in_form, least
from aerogel.errors import AerogelError, UnsupportedModel
from aerogel.ir import Argument, Graph, Node, Quantized, Ref, Special

Value = Any  # Ref, or an array of numbers or of Sizes
MOST_FOLDED = 2**28
"""Elements that folding may make."""


_FROM_NOTHING = ("arange", "full", "ones", "scalar_tensor", "zeros")
"""What would take memory while a file is read."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
OPERATORS: dict[str, Callable[..., Any]] = {}
"""What builds each of ONNX's operators, by its name."""


def operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Enter a function under its own name."""
    OPERATORS[function.__name__] = function
    return function


class Reader:
    """One walk over a file: nodes, constants, and what every value is in two examples."""

    def __init__(self, file: File, shapes: Mapping[str, tuple[int, ...]], trains: bool = False) -> None:
        """`trains`: gradients shall pass, so maps are not rounded."""
        self.trains = trains
        self.file, self.nodes, self.constants = file, list[Node](), dict[str, torch.Tensor]()
        self.values: dict[str, Value] = {}
        self.origins = Origins(file.arrays)
        self.blank: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self.used, self.made = set[str](), dict[str, Node]()
        self.ranged: set[str] = set()  # maps that stand for integers
        self.bytes: dict[str, tuple[str, Quantized]] = {}
        """Values of the file that are integers: the bytes of ours that hold them, and what those mean."""
        self.steps_of: dict[int, tuple[Any, Any, int | None]] = {}
        """Arrays that were integers: the array, its scales and their axis, by the array's identity."""
        self.steps: dict[str, torch.Tensor] = {}
        # tensors whose numbers are known in both examples
        self.seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.loose: dict[str, tuple[int, ...]] = {}
        """Tensors whose sizes may be alike in both examples by chance, and the dimensions of which that is
        not so."""
        self.sized: dict[str, Dims] = {}
        """The sizes of tensors as expressions, and numbers computed from sizes."""
        self._opened: dict[str, int] = {}
        self.inputs = tuple(self._input(name, shapes) for name in file.inputs)

    def captured(self) -> Captured:
        """What was read, as a graph."""
        outputs = tuple(self.tensor(self.values[name]) for name in self.file.outputs)
        used = {o.name for o in outputs}
        nodes = list[Node]()
        for node in reversed(self.nodes):  # what nothing reads is left out
            if node.name in used:
                nodes.append(node)
                used.update(node.inputs)
        constants = {name: value for name, value in self.constants.items() if name in used}
        graph = Graph(tuple(i.name for i in self.inputs), tuple(constants), tuple(reversed(nodes)), outputs)
        shapes = {
            name: self.shape(Ref(name)) for name, v in self.blank[0].items() if isinstance(v, torch.Tensor)
        }
        example = tuple(self.blank[0][i.name] for i in self.inputs), dict[str, Any]()
        out = tuple(0 for _ in outputs) if len(outputs) > 1 else 0
        sizes = tuple(tuple(self.file.dims(name)) for name in self.file.inputs)
        dtypes = tuple(self.blank[0][i.name].dtype for i in self.inputs)
        specs = pytree.tree_structure(example), pytree.tree_structure(out)
        types = {name: v.dtype for name, v in self.blank[0].items() if isinstance(v, torch.Tensor)}
        return Captured(
            graph,
            constants,
            *specs,
            shapes,
            sizes,
            dtypes,
            example,
            self.file.outputs,
            types=types,
            steps={name: step for name, step in self.steps.items() if name in constants},
        )

    def types(self) -> dict[str, torch.dtype]:
        """The element type of every tensor by its name."""
        return {name: v.dtype for name, v in self.blank[0].items() if isinstance(v, torch.Tensor)}

    def _input(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Ref:
        first, second = self.file.examples(name, shapes)
        own = self.fresh(name)
        dtype = self.file.dtype(name)
        for blank, shape in zip(self.blank, (first, second), strict=True):
            blank[own] = torch.empty(shape, dtype=dtype, device="meta")
        self.sized[own] = tuple(
            Expression.of(d) if isinstance(d, int) else self._open(d, (one, other), _NAME.fullmatch(d))
            for d, one, other in zip(self.file.dims(name), first, second, strict=True)
        )
        self.values[name] = Ref(own)
        return Ref(own)

    # what operators are built with

    def emit(self, op: str, *args: Any, layer: str = "", **kwargs: Any) -> Ref:
        """A node of the graph; its value in both examples is computed at once."""
        name = self.fresh(layer or op.split(".")[1])
        node = Node(
            name, op, tuple(map(_argument, args)), {k: _argument(v) for k, v in kwargs.items()}, layer=layer
        )
        self._add(node)
        return Ref(name)

    def size(self, op: str, *args: Any, dtype: torch.dtype = torch.int64) -> Size:
        """Arithmetic on sizes."""
        name = self.fresh(op)
        node = Node(name, f"int.{op}", tuple(map(_argument, args)))
        self._add(node)
        both = self.blank[0][name], self.blank[1][name]
        whole = not dtype.is_floating_point
        self.sized[name] = (in_form(op, args, dtype) or self._open(f"size {name}", both, whole=whole),)
        return Size(self, name, both, dtype, least(op, args))

    def outer(self, node: Node, answers: tuple[list[torch.Tensor], list[torch.Tensor]]) -> Ref:
        """A node that only onnxruntime can run, with what it gave for both examples."""
        self.nodes.append(node)
        for blank, given in zip(self.blank, answers, strict=True):
            blank[node.name] = [t.to("meta") for t in given]
        return Ref(node.name)

    def loosen(self, ref: Ref, sure: tuple[int, ...]) -> None:
        """From here on the sizes of a tensor, and of what is computed from it, count as open but for some
        dimensions."""
        self.loose[ref.name] = sure
        self.sized[ref.name] = self._dims(self.made[ref.name])

    def _add(self, node: Node) -> None:
        self.nodes.append(node)
        self.made[node.name] = node
        by_chance = any(
            isinstance(self.blank[0][n], int | float) and self.blank[0][n] == self.blank[1][n]
            for n in node.inputs
        )
        if by_chance or any(n in self.loose for n in node.inputs):  # channels come from weights
            sure = [self.loose[n] for n in node.inputs if n in self.loose]
            self.loose[node.name] = (1,) if all(sure) else ()
        without = node
        if node.op.split(".")[1:2] and node.op.split(".")[1] in _FROM_NOTHING:
            without = replace(node, kwargs={**node.kwargs, "device": "meta"})
        for blank in self.blank:
            try:
                with torch.no_grad():
                    blank[node.name] = interpret.call(without, blank)
                interpret.fits(node.layer or node.name, blank[node.name])
            except AerogelError:
                raise
            except Exception as why:
                first = str(why).splitlines()[0][:200] if str(why) else type(why).__name__
                raise UnsupportedModel(
                    f"node '{node.layer or node.name}' ({node.op}) does not fit its inputs: {first}"
                ) from None
        if isinstance(self.blank[0][node.name], torch.Tensor):
            self.sized[node.name] = self._dims(node)

    def _dims(self, node: Node) -> Dims:
        """The sizes of what a node gives. What no rule says is a number if it is one in both examples, or
        open."""
        pairs = list(zip(*(blank[node.name].shape for blank in self.blank), strict=True))
        told, sure = self._told(node, len(pairs)), self.loose.get(node.name, range(len(pairs)))
        found = list[Expression]()
        for i, both in enumerate(pairs):
            size = told[i] if len(told) == len(pairs) else None
            if size is None or size.both != both:
                alike = both[0] == both[1] and i in sure
                size = Expression.of(both[0]) if alike else self._open(f"{node.name} {i}", both)
            found.append(size)
        return tuple(found)

    def _open(
        self, what: str, both: tuple[float, float], named: Any = None, whole: bool = True
    ) -> Expression:
        """A number that follows from no other. A file may call its values anything, so they have numbers
        here; `named` are sizes of inputs whose names are words."""
        number = self._opened.setdefault(what, len(self._opened))
        return Expression.open(what if named else f"?{number}", both, whole)

    def _told(self, node: Node, rank: int) -> Dims:
        """What the rules say; of a piece, those of what was cut."""
        whole = self.made.get(node.args[0].name) if node.op == "getitem" else node
        return () if whole is None else dims_of(whole, self.known_sizes, rank) or ()

    def known_sizes(self, ref: Ref) -> Dims:
        """The sizes of a tensor, or a number as the only one."""
        if ref.name not in self.sized:
            self.sized[ref.name] = tuple(map(Expression.of, self.blank[0][ref.name].shape))  # a constant
        return self.sized[ref.name]

    def fresh(self, name: str) -> str:
        """A name of its own."""
        base = name or "value"
        while name in self.used or not name:
            name = f"{base}_{len(self.used)}"
        self.used.add(name)
        return name

    def tensor(self, value: Value) -> Ref:
        """A value as a tensor of the graph."""
        if isinstance(value, Ref):
            return value
        array = np.asarray(value)
        if array.dtype == object:
            dtype = Special("dtype", str(self.dtype(array)).removeprefix("torch."))
            parts = [self.emit("aten.scalar_tensor.default", v, dtype=dtype) for v in array.ravel()]
            whole = self.emit("aten.stack.default", tuple(parts)) if array.ndim else parts[0]
            whole = whole if array.ndim < 2 else self.emit("aten.reshape.default", whole, array.shape)
            both = ([v.both[e] if isinstance(v, Size) else v for v in array.ravel()] for e in range(2))
            first, second = (
                torch.tensor(values, dtype=self.dtype(array)).reshape(array.shape) for values in both
            )
            self.seen[whole.name] = first, second
            return whole
        name = self.fresh(self.file.named(value) or "constant")
        self.constants[name] = _tensor(np.array(array))
        self.origins.becomes(value, name)
        held = self.steps_of.get(id(value))
        if held is not None and held[2] in (None, 0):  # each filter has its own, or all have one
            self.steps[name] = torch.from_numpy(np.broadcast_to(held[1], held[0].shape[:1]).copy())
        self.seen[name] = self.constants[name], self.constants[name]
        for blank in self.blank:
            blank[name] = self.constants[name].to("meta")
        return Ref(name)

    def turned(self, array: Any, axes: tuple[int, ...]) -> Any:
        """A constant with its dimensions in another order; what is known of it comes along."""
        made = self.origins.turned(array, axes)
        if id(array) in self.steps_of:
            _, scales, axis = self.steps_of[id(array)]
            self.steps_of[id(made)] = made, scales, None if axis is None else axes.index(axis)
        return made

    def ints(self, value: Value) -> tuple[Any, ...]:
        """A value as whole numbers: known, or Sizes."""
        if isinstance(value, Ref):
            raise UnsupportedModel(
                f"the sizes in '{value.name}' are computed from the data; aerogel needs them from the shapes"
            )
        array = np.asarray(value)
        if array.dtype.kind == "f" or any(
            isinstance(v, float) or (isinstance(v, Size) and v.dtype.is_floating_point) for v in array.flat
        ):
            raise UnsupportedModel("numbers with fractions where whole ones belong")
        return tuple(v if isinstance(v, Size) else int(v) for v in array.ravel())

    def number(self, value: Value) -> float | None:
        """The one number of a constant."""
        held = self.constants.get(value.name) if isinstance(value, Ref) else None
        return held.item() if held is not None and held.numel() == 1 else None

    def maker(self, value: Value) -> Node | None:
        """The node that gives a tensor."""
        return self.made.get(value.name) if isinstance(value, Ref) else None

    def known(self, value: Value, what: str) -> Any:
        """A value that must be a constant."""
        if isinstance(value, Ref) or np.asarray(value).dtype == object:
            raise UnsupportedModel(f"{what} is computed while the model runs; aerogel needs it as a constant")
        return value

    def shape(self, ref: Ref) -> tuple[int | str, ...]:
        """The sizes of a tensor: numbers where they are fixed, names where they are open."""
        sizes = self.known_sizes(ref)
        return tuple(str(s) if s is None or s.number is None else s.number for s in sizes)

    def sizes(self, ref: Ref) -> list[Any]:
        """The sizes of a tensor as numbers or Sizes."""
        found: list[Any] = []
        for i, size in enumerate(self.shape(ref)):
            if isinstance(size, int):
                found.append(size)
            else:
                name = self.fresh(f"{ref.name}.{i}")
                self._add(Node(name, "aten.sym_size.int", (ref, i)))
                self.sized[name] = self.known_sizes(ref)[i : i + 1]
                found.append(Size(self, name, (self.blank[0][name], self.blank[1][name]), torch.int64, 0))
        return found

    def rank(self, value: Value) -> int:
        return len(self.blank[0][value.name].shape) if isinstance(value, Ref) else np.asarray(value).ndim

    def dtype(self, value: Value) -> torch.dtype:
        if isinstance(value, Ref):
            found: torch.dtype = self.blank[0][value.name].dtype
            return found
        array = np.asarray(value)
        if array.dtype == object:
            return next((v.dtype for v in array.flat if isinstance(v, Size)), torch.int64)
        return _tensor(np.zeros(0, array.dtype)).dtype

    def item(self, several: Ref, i: int) -> Ref:
        """One of several values."""
        name = self.fresh(f"{several.name}.{i}")
        self._add(Node(name, "getitem", (several, i)))
        return Ref(name)


def _tensor(array: Any) -> torch.Tensor:
    """numpy has no bf16 of its own, onnx brings one."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _argument(value: Any) -> Argument:
    if isinstance(value, Size):
        return Ref(value.name)
    if isinstance(value, list | tuple):
        return tuple(map(_argument, value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return Special("float", "nan" if math.isnan(value) else "inf" if value > 0 else "minus_inf")
    return value
