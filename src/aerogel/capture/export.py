"""torch.export -> Graph. In-place operators become functional; sizes of batch, height and width stay open
where the model allows, and what its Python asked about them is kept as guards.

Nothing is decomposed: that costs seconds and hides the convolutions' neighbours.
"""

from __future__ import annotations

import inspect
import math
import operator
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx.experimental import _config
from torch.utils import _pytree as pytree
from torch.utils._sympy.symbol import SymT, symbol_is_type

from aerogel.capture import interpret
from aerogel.capture.alias import functional, functional_form, shared, writes
from aerogel.capture.captured import SAME_NAME, Captured
from aerogel.capture.copies import shallow_copy
from aerogel.capture.numbers import read_numbers
from aerogel.capture.quantizers import Quantizers, reads
from aerogel.capture.tracing import Failures, forget_export, short_lists, symbols_in
from aerogel.errors import UnsupportedModel
from aerogel.ir import Argument, Graph, Node, Ref, Special
from aerogel.ir.guards import Expression, from_sympy, names_in
from aerogel.locks import Lock

_INTS = {function: name for name, function in interpret.INTS.items()}
_INTS |= {torch.sym_min: "min", torch.sym_max: "max", torch.sym_float: "float"}
_COMPARISONS = (
    operator.ge,
    operator.le,
    operator.gt,
    operator.lt,
    operator.eq,
    operator.ne,
    operator.and_,
    operator.or_,
)
_ONE_AT_A_TIME = Lock(over_fork=True)
"""torch.export changes what is global in torch while it works."""
CAN_OPEN_ONES = hasattr(_config, "backed_size_oblivious")
"""Whether torch can leave a size of 1 open. 2.6 cannot: there larger batches are a program of their own."""
_STATE = (
    "the model writes to a buffer, a parameter or an input while it runs; aerogel compiles models "
    "without state"
)


def capture(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any = None
) -> Captured:
    """Export and translate. Raises UnsupportedModel with torch's own first line where it cannot."""
    example = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    failed: Exception | None = None
    for one in (True, False) if CAN_OPEN_ONES else (False,):
        program = None
        try:
            with _ONE_AT_A_TIME:
                program, caught = _exported(shallow_copy(model), args, kwargs, dynamic_shapes, one)
                guards = guards_of(program, fixed=caught)
                if shared(program):
                    program = functional(program)
                return _Translation(program, guards).result(example)
        except Exception as why:  # torch.export raises dozens of types
            failed = why
        finally:
            forget_export(program)
    if isinstance(failed, UnsupportedModel):
        raise failed
    first = next((line for line in str(failed).splitlines() if line.strip()), type(failed).__name__)
    raise UnsupportedModel(f"torch.export cannot take the whole model: {first.strip()[:300]}") from failed


def _exported(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, one: bool
) -> tuple[Any, bool]:
    """By torch.export, and whether the model went on from a failure.

    If `one`, a batch of 0 or 1 is like any other: it stays open, and what the model asks about it becomes a
    guard. That fails where an example is broadcast along the batch; then sizes of 1 are fixed, as torch does
    by default.
    """
    if dynamic_shapes is None:
        marked = [
            pytree.tree_map(lambda v: _open_sizes(v, one), given) for given in (tuple(args), dict(kwargs))
        ]
        dynamic_shapes = _by_name(model, *marked)
    oblivious = cast(Any, _config).patch(backed_size_oblivious=one) if CAN_OPEN_ONES else nullcontext()
    failures = Failures()
    with torch.no_grad(), warnings.catch_warnings(), oblivious, short_lists(), failures:
        warnings.simplefilter("ignore")
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    return program, failures.seen


def guards_of(program: torch.export.ExportedProgram, fixed: bool = False) -> tuple[Expression, ...]:
    """What the model's Python found to be true of open sizes. What cannot be written down fixes the sizes it
    speaks of; `fixed`, all of them."""
    import sympy

    symbols = [s for node in program.graph.nodes for s in symbols_in(node.meta.get("val"))]
    if not symbols:
        return ()
    environment = symbols[0].node.shape_env
    said = [guard.expr for guard in environment.guards]
    for node in program.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("aten._assert_scalar"):
            told = getattr(node.args[0], "meta", {}).get("val")
            said += [told.node.expr] if isinstance(told, torch.SymBool) else []
        # torch takes no open size for a 1 here
        if node.op == "call_function" and str(node.target).startswith("aten.squeeze."):
            said += [sympy.Ne(s.node.expr, 1) for s in symbols_in(node.args[0].meta["val"])]
    hints = {
        str(s.node.expr): int(s.node.hint) for s in symbols if s.node.expr.is_symbol and s.node.has_hint()
    }
    found: list[Expression] = [("eq", name, hint) for name, hint in hints.items()] if fixed else []
    for expression in dict.fromkeys(_told(expression, environment) for expression in said):
        if expression == True:  # noqa: E712  (sympy's own truth)
            continue
        guard = from_sympy(expression)
        if guard is not None:
            found.append(guard)
            continue
        found += [("eq", str(s), hints[str(s)]) for s in expression.free_symbols if str(s) in hints]
    for symbol, span in program.range_constraints.items():
        low, high = from_sympy(span.lower), from_sympy(span.upper)
        found += [("le", low, str(symbol))] if isinstance(low, int) and low > 0 else []
        found += [("le", str(symbol), high)] if isinstance(high, int) else []
    every = {s for e in (*said, *program.range_constraints) for s in e.free_symbols}
    of_data = {str(s) for s in every if symbol_is_type(s, SymT.UNBACKED_INT)}  # sizes that only the data says
    return tuple(guard for guard in dict.fromkeys(found) if of_data.isdisjoint(names_in(guard)))


def _told(expression: Any, environment: Any) -> Any:
    """A guard in the symbols that were not found to be equal to others."""
    for _ in range(len(environment.replacements) + 1):
        before, expression = expression, expression.xreplace(environment.replacements)
        if before == expression:
            break
    return expression


def _open_sizes(value: Any, one: bool) -> Any:
    """Batch, and the image's height and width; of those that are 1 only the batch, and that only if `one` is
    allowed."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return None
    images = range(2, value.dim()) if value.dim() in (3, 4, 5) else ()
    opened = [i for i in images if value.shape[i] > 1] + ([0] if one or value.shape[0] > 1 else [])
    return dict.fromkeys(opened, torch.export.Dim.AUTO)


def _by_name(model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """As torch.export wants it: in order, or by parameter name where there are keyword inputs or a
    `*args`."""
    signature = inspect.signature(model.forward)
    if not kwargs and not any(p.kind == p.VAR_POSITIONAL for p in signature.parameters.values()):
        return tuple(args)
    found = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


def _shape(value: Any) -> tuple[int | str, ...]:
    return (
        tuple(d if isinstance(d, int) else str(d) for d in value.shape)
        if isinstance(value, torch.Tensor)
        else ()
    )


class _Translation:
    """One walk over the exported graph."""

    def __init__(self, program: torch.export.ExportedProgram, guards: tuple[Expression, ...]) -> None:
        self.program = program
        self.names: dict[Any, Argument] = {}
        self.nodes: list[Node] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.inputs: list[str] = []
        self.sizes: list[tuple[int | str, ...]] = []
        self.shapes: dict[str, tuple[int | str, ...]] = {}
        self.types: dict[str, torch.dtype] = {}
        self.dtypes: list[torch.dtype | None] = []
        self.guards = list(guards)
        self.normed = set[Any]()
        self.quantizers = Quantizers()
        self.numbers, self.unused = read_numbers(program)

    def result(self, example: Any) -> Captured:
        signature = self.program.graph_signature
        if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
            raise UnsupportedModel(_STATE)
        self._placeholders()
        outputs: tuple[Argument, ...] = ()
        for node in self.program.graph.nodes:
            if node in self.numbers:
                self.names[node] = self.numbers[node]
            elif node.op == "call_function" and node not in self.unused:
                self._call(node)
            elif node.op == "output":
                outputs = tuple(self._argument(a) for a in node.args[0])
            elif node.op == "get_attr":
                self._constant(node.name, getattr(self.program.graph_module, node.target))
                self.names[node] = Ref(node.name)
        graph = Graph(tuple(self.inputs), tuple(self.constants), tuple(self.nodes), outputs)
        spec = self.program.call_spec
        names = tuple(o.name if isinstance(o, Ref) else f"output_{i}" for i, o in enumerate(outputs))
        sizes, dtypes = tuple(self.sizes), tuple(self.dtypes)
        made = Captured(
            graph,
            self.constants,
            spec.in_spec,
            spec.out_spec,
            self.shapes,
            sizes,
            dtypes,
            example,
            names,
            tuple(self.guards),
            self.types,
            steps=self.quantizers.steps,
        )
        if (why := made.misfit(pytree.tree_leaves(example), "meta")) is not None:
            raise UnsupportedModel(f"torch.export took another side of a branch than the example does: {why}")
        return made

    def _placeholders(self) -> None:
        signature = self.program.graph_signature
        held = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        users = {
            spec.arg.name
            for spec in signature.input_specs
            if spec.kind == torch.export.graph_signature.InputKind.USER_INPUT
        }
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            if node.name in held:
                source = held[node.name]
                value = self.program.state_dict.get(source, self.program.constants.get(source))
                name = f"{source}{SAME_NAME}" if source in users else source
                self._constant(name, value)
                self.names[node] = Ref(name)
            elif node.name in users:
                value = node.meta.get("val")
                self.inputs.append(node.name)
                self.sizes.append(self._open(node.name, value))
                self.dtypes.append(value.dtype if isinstance(value, torch.Tensor) else None)
                self._seen(node.name, value)
                self.names[node] = Ref(node.name)

    def _open(self, name: str, value: Any) -> tuple[int | str, ...]:
        """Sizes of an input. One that is computed from others (`2 * s0`) has a name of its own, and a guard
        says what it is."""
        sizes = list(_shape(value))
        for i, size in enumerate(sizes):
            if isinstance(size, str) and not value.shape[i].node.expr.is_symbol:
                sizes[i], told = f"{name}_{i}", from_sympy(value.shape[i].node.expr)
                self.guards.append(
                    ("eq", f"{name}_{i}", int(value.shape[i].node.hint) if told is None else told)
                )
        return tuple(sizes)

    def _seen(self, name: str, value: Any) -> None:
        self.shapes[name] = _shape(value)
        if isinstance(value, torch.Tensor):
            self.types[name] = value.dtype

    def _constant(self, name: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            raise UnsupportedModel(f"the constant '{name}' is a {type(value).__name__}, not a tensor")
        self.constants[name] = value.detach()
        self.types[name] = value.dtype

    def _call(self, node: Any) -> None:
        if str(node.target).startswith(("aten._assert", "aten.sym_constrain")):
            return  # guards
        if reads(node.target):
            self._quantizer(node)
            return
        args = tuple(self._argument(a) for a in node.args)
        kwargs = {k: self._argument(v) for k, v in node.kwargs.items()}
        layer = next(
            (path for path, _ in reversed(list((node.meta.get("nn_module_stack") or {}).values()))), ""
        )
        if node.target in _INTS:
            op = f"int.{_INTS[node.target]}"
        elif node.target is operator.getitem:
            op = "getitem"
        elif isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
            base, overload = node.target._schema.name.split("::")[1], node.target._overloadname
            if (target := writes(node)) is not None:
                self._in_place(node, target, args, kwargs, layer)
                return
            # what functionalization makes of a batch norm; a tuple
            if base == "_native_batch_norm_legit_no_training":
                self._add(
                    node,
                    Node(
                        node.name,
                        "aten.batch_norm.default",
                        (*args[:5], False, *args[5:7], False),
                        layer=layer,
                    ),
                )
                self.normed.add(node)
                return
            op = f"aten.{base}.{overload}"
            # what nobody has written to yet: no value of a graph is that
            if op == "aten.empty.memory_format":
                op, kwargs = "aten.zeros.default", {k: v for k, v in kwargs.items() if k != "memory_format"}
        else:
            if not node.users or (
                node.target in _COMPARISONS and all("_assert" in str(u.target) for u in node.users)
            ):
                return  # a check of sizes: torch's own guards
            raise UnsupportedModel(
                f"operator {node.target} at '{layer or node.name}' is not one aerogel calls"
            )
        if op == "getitem" and node.args[0] in self.normed:
            self.names[node] = self.names[node.args[0]]
            return
        self._add(node, Node(node.name, op, args, kwargs, layer=layer))

    def _quantizer(self, node: Any) -> None:
        made = self.quantizers.read(node, self.names, self.constants, self.nodes)
        if isinstance(made, torch.Tensor):
            self._constant(node.name, made)
            self.names[node] = Ref(node.name)
            return
        for one, dtype in made:
            self._add(node, one)
            self.types[one.name] = dtype

    def _in_place(self, node: Any, target: Any, args: tuple[Argument, ...], kwargs: Any, layer: str) -> None:
        """`x.relu_()` gives a new value, which whoever reads x later sees, a skip connection included."""
        if target.op != "call_function":
            raise UnsupportedModel(_STATE)
        self._add(node, Node(node.name, functional_form(node.target), args, kwargs, layer=layer))
        self.names |= {known: self.names[node] for known, name in self.names.items() if name == args[0]}

    def _add(self, source: Any, node: Node) -> None:
        # a buffer called as torch calls a result
        while node.name in self.constants or node.name in self.inputs:
            node = replace(node, name=f"{node.name}_")
        self.nodes.append(node)
        self.names[source] = Ref(node.name)
        self._seen(node.name, source.meta.get("val"))

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, torch.fx.Node):
            return self.names[value]
        if isinstance(value, list | tuple):
            return tuple(self._argument(v) for v in value)
        if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
            kind = {torch.dtype: "dtype", torch.memory_format: "memory_format", torch.layout: "layout"}[
                type(value)
            ]
            return Special(kind, str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return Special("device", value.type)
        if isinstance(value, float) and not math.isfinite(value):
            return Special("float", "nan" if math.isnan(value) else "inf" if value > 0 else "minus_inf")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise UnsupportedModel(f"an argument of type {type(value).__name__} has no place in a graph")
