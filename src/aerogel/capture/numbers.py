"""Numbers that a model reads out of its own constant tensors.

`torch.full((n, 1), self.stride[0])` reads the number in `stride[0]`. torch.export does not know it and writes
an unknown number into the graph. Where the tensor is a plain attribute of the model, which no call and no
state_dict changes, the number is known now.
"""

from __future__ import annotations

from typing import Any

import torch

MAX_ELEMENTS = 1024  # of a tensor that is computed here: what numbers are read out of is small
_ITEM = torch.ops.aten.item.default


def read_numbers(program: torch.export.ExportedProgram) -> tuple[dict[Any, Any], set[Any]]:
    """Return the number behind each `item()` of a constant, and the nodes that only led to such numbers."""
    signature = program.graph_signature
    tensors: dict[Any, torch.Tensor] = {}
    numbers: dict[Any, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in signature.inputs_to_lifted_tensor_constants:
            constant = program.constants.get(signature.inputs_to_lifted_tensor_constants[node.name])
            if isinstance(constant, torch.Tensor) and _is_readable(node, constant):
                tensors[node] = constant.detach()
        elif _is_function_of(node, tensors):
            value = _computed(node, tensors)
            if node.target is _ITEM:
                numbers[node] = value
            elif isinstance(value, torch.Tensor) and _is_readable(node, value):
                tensors[node] = value
    unused = set[Any]()
    for node in reversed(program.graph.nodes):
        if node in tensors and node.op == "call_function" and unused.union(numbers).issuperset(node.users):
            unused.add(node)
    return numbers, unused


def _is_readable(node: Any, value: torch.Tensor) -> bool:
    """Whether a tensor is small, and nothing in the graph writes to it."""
    small = value.layout == torch.strided and not value.is_meta and value.numel() <= MAX_ELEMENTS
    return small and not any(
        isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable
        for user in node.users
    )


def _is_function_of(node: Any, tensors: dict[Any, torch.Tensor]) -> bool:
    """Whether a node is an operator of torch that reads known tensors, at least one, and nothing else."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace != "aten" or node.target._schema.is_mutable:
        return False
    return bool(node.all_input_nodes) and all(source in tensors for source in node.all_input_nodes)


def _computed(node: Any, tensors: dict[Any, torch.Tensor]) -> Any:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: tensors[source])
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        return node.target(*args, **kwargs)
