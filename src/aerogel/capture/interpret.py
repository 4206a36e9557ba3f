"""Graph nodes as torch calls: the dense form of everything, used where no kernel of ours runs.

A node calls a function of torch that writes to nothing, or computes with numbers; what it asks for is looked
at here, since graphs come from files too.
"""

from __future__ import annotations

import math
import operator
import os
import resource
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch

from aerogel.capture import foreign
from aerogel.errors import AerogelError, InvalidFile, ShapeError
from aerogel.ir import BYTES, IN_BYTES, Add, Argument, Average, Graph, Node, Ref, Special
from aerogel.ir.bytemaps import parsed
from aerogel.ir.tensors import plain

INTS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "truediv": operator.truediv,
    "mod": operator.mod,
    "neg": operator.neg,
    "min": min,
    "max": max,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "float": float,
}
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
MOST = 2**63
"""No size is larger, and no number that sizes are computed from."""
FREE_BYTES = 64 << 20
"""Not worth asking whether there is so much."""
_FLOATS = {"inf": math.inf, "minus_inf": -math.inf, "nan": math.nan}


_RESHAPES: dict[str, Callable[..., Any]] = {
    "view.default": torch.ops.aten.reshape.default,
    "view.dtype": lambda x, dtype: torch.ops.aten.view.dtype(x.contiguous(), _type(dtype)),
    "view_as.default": lambda x, other: torch.ops.aten.reshape.default(x, other.shape),
}


def _type(value: Any) -> torch.dtype:
    """An element type: torch takes a number for one of its own without looking, and crashes."""
    if not isinstance(value, torch.dtype):
        raise InvalidFile(f"{value!r:.40} is no element type")
    return value


def function(node: Node) -> Callable[..., Any]:
    """What a node calls."""
    return _function(node.op)


@cache
def _function(op: str) -> Callable[..., Any]:
    if op == "getitem":
        return _item
    if op in BYTES:
        return _quantize if op == BYTES[0] else _dequantize
    if op in IN_BYTES:
        return partial(_in_bytes, op)
    kind, _, rest = op.partition(".")
    if kind == "int":
        return lambda *args: _number(rest, args)
    base, overload = rest.split(".")
    # kernels of ours and of oneDNN lay values out as they like; a view wants them as torch would
    if rest in _RESHAPES:
        return _RESHAPES[rest]
    found = getattr(getattr(torch.ops.aten, base, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise InvalidFile(f"torch has no operator '{op}'")
    if found._schema.is_mutable:
        raise InvalidFile(f"'{op}' writes to its arguments; a node gives a new value")
    return found


def _quantize(x: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
    """Numbers as bytes, as ir/quantized.py says it. NaN is the lowest."""
    if x.is_meta:
        return torch.empty_like(x, dtype=torch.uint8)
    v = (x.float() / scale).nan_to_num_(-zero, 255.0, -255.0)
    return v.clamp_(-zero, 255 - zero).round_().add_(zero).to(torch.uint8)


def _dequantize(q: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
    return q.float().sub_(zero).mul_(scale)


def _in_bytes(op: str, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """What is done to maps of bytes (ir/bytemaps.py)."""
    other, rest = (None, args) if op == "u8.average" else (args[0], args[1:])
    how = parsed(op, [tuple(a) if isinstance(a, list) else a for a in rest])
    if isinstance(how, Average):
        return torch.from_numpy(how.bytes_of(x.numpy()))
    assert isinstance(other, torch.Tensor)
    if isinstance(how, Add):
        return torch.from_numpy(how.bytes_of(x.numpy(), other.numpy()))
    return other[x.long()]


def _item(values: Any, index: Any) -> Any:
    if not isinstance(values, list | tuple) or type(index) is not int:
        raise InvalidFile("getitem takes one of several values, by its number")
    return values[index]


def _number(name: str, args: tuple[Any, ...]) -> Any:
    """Arithmetic on sizes: numbers in, one number out, none of them larger than a size can be."""
    if not all(isinstance(a, _NUMBERS) for a in args):
        raise InvalidFile(
            f"int.{name} computes with numbers, not with {', '.join(type(a).__name__ for a in args)[:80]}"
        )
    found = INTS[name](*args)
    if isinstance(found, int) and not -MOST < found < MOST:
        raise InvalidFile(f"int.{name} gives a number that no size can be")
    return found


def argument(raw: Argument, values: Mapping[str, Any]) -> Any:
    """An argument with its references looked up."""
    if isinstance(raw, Ref):
        return values[raw.name]
    if isinstance(raw, tuple):
        return [argument(item, values) for item in raw]
    if isinstance(raw, Special):
        if raw.kind == "float":
            return _FLOATS[raw.name]
        return torch.device(raw.name) if raw.kind == "device" else _constant(raw.kind, raw.name)
    return raw


@cache
def _constant(kind: str, name: str) -> Any:
    found, wanted = (
        getattr(torch, name, None),
        {"dtype": torch.dtype, "memory_format": torch.memory_format}.get(kind, torch.layout),
    )
    if not isinstance(found, wanted):
        raise InvalidFile(f"torch has no {kind} '{name[:80]}'")
    return found


def call(node: Node, values: Mapping[str, Any]) -> Any:
    """One node in torch."""
    if node.conv is not None:
        return convolve(node, values)
    if node.op == "onnx":
        content, inputs = (argument(a, values) for a in node.args)
        return foreign.run(content, inputs)
    args = [argument(a, values) for a in node.args]
    return function(node)(*args, **{k: argument(v, values) for k, v in node.kwargs.items()})


def answer(node: Node, values: Mapping[str, Any]) -> Any:
    """`call` while the model runs: where torch refuses the numbers it is given, an error that names the
    node."""
    try:
        return call(node, values)
    except AerogelError:
        raise
    except Exception as why:
        if type(why).__module__ != "builtins":  # torch's own, which tracing listens to
            raise
        first = str(why).strip().splitlines()[0][:200] if str(why).strip() else type(why).__name__
        raise ShapeError(
            f"'{node.layer or node.name}' ({node.op}) does not run on what it is given: {first}"
        ) from why


def convolve(node: Node, values: Mapping[str, Any]) -> torch.Tensor:
    """A conv node, plain. One dimension counts as an image of one row, features as an image of one pixel."""
    assert node.conv is not None
    x, weight, bias, residual = (values[name] if name else None for name in node.conv_inputs())
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight, torch.Tensor)
    if x.dim() == 4:
        return plain(x, weight, node.conv, bias, residual)
    shape = (*x.shape[:2], 1, *x.shape[2:], *([1] * (3 - x.dim())))
    y = plain(
        x.reshape(shape),
        weight,
        node.conv,
        bias,
        None if residual is None else residual.reshape(*residual.shape[:2], *shape[2:]),
    )
    return y.flatten(1) if x.dim() == 2 else y.squeeze(2)


def memory() -> int:
    """Bytes that this process may have: the machine's, or what its limit leaves."""
    page, (limit, _) = os.sysconf("SC_PAGE_SIZE"), resource.getrlimit(resource.RLIMIT_AS)
    most = page * os.sysconf("SC_PHYS_PAGES")
    if limit == resource.RLIM_INFINITY:
        return most
    with open("/proc/self/statm") as said:
        return max(0, min(most, limit - page * int(said.read().split()[0])))


def fits(name: str, value: Any) -> None:
    """A file that asks for a tensor larger than the memory there is is no model."""
    for tensor in value if isinstance(value, list | tuple) else [value]:
        if isinstance(tensor, torch.Tensor):
            wanted = math.prod(tensor.shape) * tensor.element_size()
            if wanted > FREE_BYTES and wanted > memory():
                raise InvalidFile(f"'{name}' would take {wanted} bytes; this process may have {memory()}")


def run(graph: Graph, constants: Mapping[str, torch.Tensor], inputs: list[Any]) -> dict[str, Any]:
    """Every value of the graph, computed by torch. Outputs are looked up by the caller."""
    values: dict[str, Any] = {**constants, **dict(zip(graph.inputs, inputs, strict=True))}
    for node in graph.nodes:
        values[node.name] = answer(node, values)
    return values
