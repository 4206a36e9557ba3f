"""torch.export -> Graph. In-place operators become functional; sizes of batch, height and width stay open where the model allows.

torch specialises a size of 1, so a batch of one is exported as two copies of itself. Nothing is decomposed: that costs seconds and
hides the convolutions' neighbours.
"""

from __future__ import annotations

import inspect
import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aerogel.errors import UnsupportedModel
from aerogel.graph import Argument, Graph, Node, Ref, Special

_INTS = {
    operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.floordiv: "floordiv", operator.truediv: "truediv",
    operator.mod: "mod", operator.neg: "neg", torch.sym_min: "min", torch.sym_max: "max", math.floor: "floor", math.ceil: "ceil",
    math.trunc: "trunc",
}  # fmt: skip
_VIEWS = {
    "view", "reshape", "slice", "select", "transpose", "permute", "chunk", "split", "split_with_sizes", "unbind", "narrow",
    "expand", "squeeze", "unsqueeze", "flatten", "t", "detach", "unflatten", "getitem", "contiguous", "view_as", "movedim",
    "unfold",
}  # fmt: skip


@dataclass(frozen=True)
class Captured:
    """A graph with its constants, how a call's arguments map to its inputs, and which sizes stay open.

    `sizes` holds for each input its dimensions: a number (fixed) or a name (open; the same name means the same size); `dtypes` its
    element type, None where it is no tensor. `example` is the call it was captured with, its tensors without memory.
    """

    graph: Graph
    constants: dict[str, torch.Tensor]
    in_spec: Any
    out_spec: Any
    shapes: dict[str, tuple[int | str, ...]]
    sizes: tuple[tuple[int | str, ...], ...]
    dtypes: tuple[torch.dtype | None, ...]
    example: tuple[tuple[Any, ...], dict[str, Any]]
    output_names: tuple[str, ...]

    def filled(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call like the example, with random numbers (no integer but zero is always right)."""

        def fill(blank: torch.Tensor) -> torch.Tensor:
            made = torch.rand(blank.shape) if blank.is_floating_point() else torch.zeros(blank.shape)
            return made.to(blank.dtype)

        args, kwargs = pytree.tree_map_only(torch.Tensor, fill, self.example)
        return args, kwargs

    def __reduce__(self) -> Any:
        """Structures travel as text: copying torch's own objects warns."""
        specs = pytree.treespec_dumps(self.in_spec), pytree.treespec_dumps(self.out_spec)
        rest = self.shapes, self.sizes, self.dtypes, self.example, self.output_names
        return _captured, (self.graph, self.constants, *specs, *rest)


def _captured(graph: Graph, constants: Any, in_spec: str, out_spec: str, *rest: Any) -> Captured:
    return Captured(graph, constants, pytree.treespec_loads(in_spec), pytree.treespec_loads(out_spec), *rest)


def capture(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any = None) -> Captured:
    """Export and translate. Raises UnsupportedModel with torch's own first line where it cannot."""
    if any(m.training for m in model.modules() if isinstance(m, torch.nn.Dropout | torch.nn.modules.batchnorm._BatchNorm)):
        raise UnsupportedModel("the model is in training mode; call model.eval() first")
    example = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device="meta"), (tuple(args), dict(kwargs)))
    args, kwargs = pytree.tree_map_only(torch.Tensor, _doubled, (args, kwargs))
    if dynamic_shapes is None:
        dynamic_shapes = pytree.tree_map(_open_sizes, tuple(args)), pytree.tree_map(_open_sizes, dict(kwargs))
        dynamic_shapes = _by_name(model, *dynamic_shapes)
    try:
        with torch.no_grad():
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as why:  # torch.export raises dozens of types
        first = next((line for line in str(why).splitlines() if line.strip()), type(why).__name__)
        raise UnsupportedModel(f"torch.export cannot take the whole model: {first.strip()}") from why
    return _Translation(program).result(example)


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor]) if tensor.dim() > 1 and tensor.shape[0] == 1 else tensor


def _open_sizes(value: Any) -> Any:
    """Batch, and the image's height and width."""
    if not isinstance(value, torch.Tensor):
        return None
    auto = torch.export.Dim.AUTO
    if value.dim() in (3, 4, 5):
        return {0: auto, **dict.fromkeys(range(2, value.dim()), auto)}
    return {0: auto} if value.dim() else None


def _by_name(model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """As torch.export wants it: in order, or by parameter name where there are keyword inputs or a `*args`."""
    signature = inspect.signature(model.forward)
    if not kwargs and not any(p.kind == p.VAR_POSITIONAL for p in signature.parameters.values()):
        return tuple(args)
    found = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


def _shape(value: Any) -> tuple[int | str, ...]:
    return tuple(d if isinstance(d, int) else str(d) for d in value.shape) if isinstance(value, torch.Tensor) else ()


class _Translation:
    """One walk over the exported graph."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.program = program
        self.names: dict[Any, Argument] = {}
        self.viewed: dict[str, str] = {}  # a value that is a view -> the value it looks into
        self.nodes: list[Node] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.inputs: list[str] = []
        self.sizes: list[tuple[int | str, ...]] = []
        self.shapes: dict[str, tuple[int | str, ...]] = {}
        self.dtypes: list[torch.dtype | None] = []

    def result(self, example: Any) -> Captured:
        self._placeholders()
        outputs: tuple[Argument, ...] = ()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                outputs = tuple(self._argument(a) for a in node.args[0])
            elif node.op == "get_attr":
                self._constant(node.name, getattr(self.program.graph_module, node.target))
                self.names[node] = Ref(node.name)
        if self.program.graph_signature.buffers_to_mutate or self.program.graph_signature.user_inputs_to_mutate:
            raise UnsupportedModel("the model writes to a buffer or an input while it runs; aerogel compiles models without state")
        graph = Graph(tuple(self.inputs), tuple(self.constants), tuple(self.nodes), outputs)
        spec = self.program.call_spec
        names = tuple(o.name if isinstance(o, Ref) else f"output_{i}" for i, o in enumerate(outputs))
        sizes, dtypes = tuple(self.sizes), tuple(self.dtypes)
        return Captured(graph, self.constants, spec.in_spec, spec.out_spec, self.shapes, sizes, dtypes, example, names)

    def _placeholders(self) -> None:
        signature = self.program.graph_signature
        held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
        users = {spec.arg.name for spec in signature.input_specs if spec.kind == torch.export.graph_signature.InputKind.USER_INPUT}
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            if node.name in held:
                source = held[node.name]
                value = self.program.state_dict.get(source, self.program.constants.get(source))
                self._constant(source, value)
                self.names[node] = Ref(source)
            elif node.name in users:
                value = node.meta.get("val")
                self.inputs.append(node.name)
                self.sizes.append(_shape(value))
                self.dtypes.append(value.dtype if isinstance(value, torch.Tensor) else None)
                self.shapes[node.name] = _shape(value)
                self.names[node] = Ref(node.name)

    def _constant(self, name: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            raise UnsupportedModel(f"the constant '{name}' is a {type(value).__name__}, not a tensor")
        self.constants[name] = value.detach()

    def _call(self, node: Any) -> None:
        args = tuple(self._argument(a) for a in node.args)
        kwargs = {k: self._argument(v) for k, v in node.kwargs.items()}
        layer = next((path for path, _ in reversed(list((node.meta.get("nn_module_stack") or {}).values()))), "")
        if node.target in _INTS:
            op = f"int.{_INTS[node.target]}"
        elif node.target is operator.getitem:
            op = "getitem"
        elif isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
            base, overload = node.target._schema.name.split("::")[1], node.target._overloadname
            if base.startswith("_assert"):
                return  # what torch.export knows already
            if base.endswith("_") and node.target._schema.is_mutable:
                self._in_place(node, base[:-1], overload, args, kwargs, layer)
                return
            op = f"aten.{base}.{overload}"
        else:
            if not node.users:
                return  # a check of sizes: torch's own guards
            raise UnsupportedModel(f"operator {node.target} at '{layer or node.name}' is not one aerogel calls")
        self._add(node, Node(node.name, op, args, kwargs, layer=layer))
        if op.split(".")[-2 if op.count(".") > 1 else 0] in _VIEWS and args and isinstance(args[0], Ref):
            self.viewed[node.name] = self.viewed.get(args[0].name, args[0].name)

    def _in_place(self, node: Any, base: str, overload: str, args: tuple[Argument, ...], kwargs: Any, layer: str) -> None:
        """`x.relu_()` gives a new value. torch.export shows that value to whoever reads x later, a skip connection included."""
        target = args[0]
        assert isinstance(target, Ref)
        if target.name in self.viewed or target.name in self.viewed.values():
            raise UnsupportedModel(f"'{layer or node.name}' writes into a view in place; write it without the underscore")
        self._add(node, Node(node.name, f"aten.{base}.{overload}", args, kwargs, layer=layer))

    def _add(self, source: Any, node: Node) -> None:
        self.nodes.append(node)
        self.names[source] = Ref(node.name)
        self.shapes[node.name] = _shape(source.meta.get("val"))

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, torch.fx.Node):
            return self.names[value]
        if isinstance(value, list | tuple):
            return tuple(self._argument(v) for v in value)
        if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
            kind = {torch.dtype: "dtype", torch.memory_format: "memory_format", torch.layout: "layout"}[type(value)]
            return Special(kind, str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return Special("device", value.type)
        if isinstance(value, float) and not math.isfinite(value):
            return Special("float", "nan" if math.isnan(value) else "inf" if value > 0 else "minus_inf")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise UnsupportedModel(f"an argument of type {type(value).__name__} has no place in a graph")
