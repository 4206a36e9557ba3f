"""Which values of an exported graph may share memory, and the graph without writes into shared memory.

torch.export gives a graph that still writes in place. `x.relu_()` is a new value under another name, unless
something else looks into the same memory: then every such value changes with it. What may share memory is
told by the operators' own schemas.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any

import torch

from aerogel.errors import UnsupportedModel
from aerogel.ir import Graph, references

_FRESH = frozenset(
    f"aten::{name}"
    for name in (
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "avg_pool1d",
        "batch_norm",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "group_norm",
        "instance_norm",
        "layer_norm",
        "linear",
        "log_softmax",
        "matmul",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "prelu",
        "relu6",
        "rms_norm",
        "scaled_dot_product_attention",
        "softmax",
        "square",
        "std",
        "upsample_bicubic2d",
        "upsample_bilinear2d",
        "upsample_linear1d",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "var",
        "where",
    )
)
"""Operators that torch composes of others, so that their schema promises nothing, and that always give new
memory. Whatever is composed and not listed here may share memory."""
_DROPOUTS = ("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout")


def looks_into(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The values whose memory a node's value may share: arguments that its schema marks, or all where it
    cannot say."""
    tensors = [a for a in node.all_input_nodes if _holds_tensors(a)]
    if node.target is operator.getitem:
        return tensors[:1]
    if not isinstance(node.target, torch._ops.OpOverload):
        return tensors
    schema = node.target._schema
    if any(given.alias_info is not None for given in schema.returns):
        marked = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None]
        given = [node.args[i] for i in marked if i < len(node.args)]
        return (
            [a for a in given if isinstance(a, torch.fx.Node)]
            if all(i < len(node.args) for i in marked)
            else tensors
        )
    return tensors if may_share(node.target) else []


def writes(node: torch.fx.Node) -> torch.fx.Node | None:
    """The value a node writes to, if it does. Raises UnsupportedModel where it writes to several or to none
    of its own values."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return None
    changed = [
        i
        for i, a in enumerate(node.target._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    if changed != [0] or not isinstance(node.args[0], torch.fx.Node):
        raise UnsupportedModel(
            f"{node.target} writes to its arguments; aerogel compiles models without state"
        )
    return node.args[0]


def shared(program: torch.export.ExportedProgram) -> bool:
    """Whether the graph writes to memory that several of its values may look into."""
    groups: dict[torch.fx.Node, set[torch.fx.Node]] = {}
    before: dict[torch.fx.Node, torch.fx.Node] = {}  # what a write gave is the value it wrote to
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        try:
            target = writes(node)
        except UnsupportedModel:  # an `out=`: functionalization knows them
            return True
        if target is not None:
            before[node] = target = before.get(target, target)
            if target in groups:
                return True
            continue
        for other in looks_into(node):
            other = before.get(other, other)
            group = groups.get(node, {node}) | groups.get(other, {other})
            groups |= dict.fromkeys(group, group)
    return False


def functional(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The same program without writes, by torch's own functionalization.

    Dropout that does nothing gives its input itself; torch's functionalization takes it for a copy, so it is
    taken out before.
    """
    for node in list(program.graph.nodes):
        if node.op == "call_function" and _idle_dropout(node):
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        made: torch.export.ExportedProgram = program.run_decompositions({})
        return made


def functional_form(function: torch._ops.OpOverload) -> str:
    """The operator that gives as a new value what this one writes: the overload with the same arguments, by a
    node's name."""
    name = function._schema.name.split("::")[1].removesuffix("_")
    packet, wanted = getattr(torch.ops.aten, name, None), [str(a.type) for a in function._schema.arguments]
    for overload in packet.overloads() if packet is not None else ():
        schema = getattr(packet, overload)._schema
        if not schema.is_mutable and [str(a.type) for a in schema.arguments] == wanted:
            return f"aten.{name}.{overload}"
    raise UnsupportedModel(f"{function} has no form that gives a new value")


def lent(graph: Graph) -> frozenset[str]:
    """Outputs of a graph that may share memory with one of its inputs or constants."""
    borrowed = {*graph.inputs, *graph.constants}
    for node in graph.nodes:
        if node.op == "getitem":
            read = node.inputs[:1]
        elif node.op.startswith("aten."):
            _, base, overload = node.op.split(".")
            function = getattr(getattr(torch.ops.aten, base, None), overload, None)
            read = node.inputs if function is None or may_share(function) else ()
        else:
            read = ()
        if not borrowed.isdisjoint(read):
            borrowed.add(node.name)
    return frozenset(references(graph.outputs)) & borrowed


def may_share(function: torch._ops.OpOverload) -> bool:
    """Whether what an operator gives may share memory with an argument of its own."""
    schema = function._schema
    if any(given.alias_info is not None for given in schema.returns):
        return True
    if schema.name in _FRESH:
        return False
    composed = torch._C._dispatch_has_kernel_for_dispatch_key(
        schema_name(function), "CompositeImplicitAutograd"
    )
    return composed or torch.Tag.maybe_aliasing_or_mutating in function.tags


def _idle_dropout(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in _DROPOUTS:
        return False
    given = dict(zip(("input", "p", "train"), node.args, strict=False)) | node.kwargs
    return given.get("train") is False or bool(given.get("p") == 0)


def schema_name(function: torch._ops.OpOverload) -> str:
    """An operator by the name the dispatcher has for it."""
    name: str = function.name()  # type: ignore[no-untyped-call]
    return name


def _holds_tensors(node: torch.fx.Node) -> bool:
    value: Any = node.meta.get("val")
    return isinstance(value, torch.Tensor | list | tuple)
