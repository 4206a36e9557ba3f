"""What torch's quantizers leave in an exported program: `quantized_decomposed` (PT2E) and `torchao`'s own
operators, read as what they mean.

Weights are computed now, and the step of each filter is kept beside them. Maps become bytes with their
own scale and zero point; signed ones are held as unsigned bytes, 128 more, as files of ONNX are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aerogel.capture import interpret
from aerogel.errors import UnsupportedModel
from aerogel.ir import Node, Quantized, Ref

_READ = {
    "quantized_decomposed": (
        "quantize_per_tensor",
        "dequantize_per_tensor",
        "quantize_per_channel",
        "dequantize_per_channel",
    ),
    "torchao": ("quantize_affine", "dequantize_affine"),
}


@dataclass(frozen=True)
class Bytes:
    """What bytes mean, and the range of numbers they may have where that is not all of it."""

    how: Quantized
    low: float | None = None
    high: float | None = None


def reads(target: Any) -> bool:
    """Whether an operator is one of a quantizer's that is read here."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target._schema.name.split("::")[1] in _READ.get(target.namespace, ())


class Quantizers:
    """What was read of a program so far: the steps of its weights, and what its bytes mean."""

    def __init__(self) -> None:
        self.steps: dict[str, torch.Tensor] = {}
        self.meant: dict[str, Bytes] = {}

    def read(
        self,
        node: torch.fx.Node,
        names: Mapping[Any, Any],
        constants: Mapping[str, torch.Tensor],
        nodes: Sequence[Node],
    ) -> torch.Tensor | list[tuple[Node, torch.dtype]]:
        """A weight as a constant, or the nodes that make bytes of a map or numbers of bytes."""
        given = bound(node, lambda n: folded(getattr(names.get(n), "name", ""), constants, nodes))
        if isinstance(given["input"], torch.Tensor):
            made = computed(node, given)
            own = steps(given, len(made)) if made.is_floating_point() and made.dim() > 1 else None
            if own is not None:
                self.steps[node.name] = own
            return made
        meant, x = meaning(node, given), names[given["input"]]
        both = meant.how.scale, meant.how.zero
        if not makes_bytes(node.target):
            if self.meant.get(getattr(x, "name", "")) != meant:
                raise UnsupportedModel(f"{node.name} reads bytes by another scale than they were made with")
            return [(Node(node.name, "dequantize", (x, *both)), torch.float32)]
        if not all(reads(user.target) for user in node.users):
            raise UnsupportedModel(f"{node.name} gives bytes that are not read as numbers")
        self.meant[node.name] = meant
        made_of = list[tuple[Node, torch.dtype]]()
        if (meant.low, meant.high) != (None, None):
            kept = Node(f"{node.name}_range", "aten.clamp.default", (x, meant.low, meant.high))
            made_of, x = [(kept, torch.float32)], Ref(kept.name)
        return [*made_of, (Node(node.name, "quantize", (x, *both)), torch.uint8)]


def makes_bytes(target: Any) -> bool:
    return "::quantize_" in target._schema.name


def bound(node: torch.fx.Node, held: Callable[[torch.fx.Node], torch.Tensor | None]) -> dict[str, Any]:
    """The arguments of a node by name; constants as tensors, what is computed as it is in the program."""
    target: Any = node.target
    named = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    return {name: _looked_up(value, held) for name, value in named.items()}


def _looked_up(value: Any, held: Callable[[torch.fx.Node], torch.Tensor | None]) -> Any:
    if not isinstance(value, torch.fx.Node):
        return value
    found = held(value)
    return value if found is None else found


def folded(name: str, constants: Mapping[str, torch.Tensor], nodes: Sequence[Node]) -> torch.Tensor | None:
    """A value that is known now: a constant, or what is computed from constants alone, as a weight under its
    mask."""
    if name in constants:
        return constants[name]
    before, wanted, inside = {node.name: node for node in nodes}, [name], set[str]()
    while wanted:
        one = wanted.pop()
        if one in constants or one in inside:
            continue
        if one not in before:
            return None
        inside.add(one)
        wanted += before[one].inputs
    values: dict[str, Any] = dict(constants)
    with torch.no_grad():
        for node in nodes:
            if node.name in inside:
                values[node.name] = interpret.call(node, values)
    found = values[name]
    return found if isinstance(found, torch.Tensor) else None


def computed(node: torch.fx.Node, given: Mapping[str, Any]) -> torch.Tensor:
    """A constant, quantized or dequantized by torch itself."""
    target: Any = node.target
    try:
        with torch.no_grad():
            made: torch.Tensor = target(**given)
    except Exception as why:
        raise UnsupportedModel(f"{node.name}: a weight cannot be dequantized: {str(why)[:200]}") from None
    return made


def steps(given: Mapping[str, Any], filters: int) -> torch.Tensor | None:
    """The step of each filter of a weight; None where filters have several."""
    scale = given.get("scale", given.get("scales"))
    found = torch.as_tensor(scale, dtype=torch.float32).flatten() if _known(scale) else torch.zeros(0)
    if found.numel() not in (1, filters) or given.get("axis", 0) != 0:
        return None
    return found.expand(filters).clone()


def meaning(node: torch.fx.Node, given: Mapping[str, Any]) -> Bytes:
    """What the bytes of a map mean. What is no byte, or has no one scale, is an UnsupportedModel."""
    scale, zero = given.get("scale"), given.get("zero_point")
    dtype = given.get("dtype", given.get("output_dtype" if makes_bytes(node.target) else "input_dtype"))
    after = given.get("out_dtype") or given.get("output_dtype")
    if dtype not in (torch.uint8, torch.int8) or after not in (None, torch.float32, dtype):
        raise UnsupportedModel(f"{node.name} is quantized to {dtype}, or comes back as {after}")
    if not _known(scale) or not (zero is None or _known(zero)):
        raise UnsupportedModel(f"{node.name} has a scale that is computed while the model runs")
    step, middle = (torch.as_tensor(v, dtype=torch.float64).flatten() for v in (scale, zero or 0))
    if step.numel() != 1 or middle.numel() != 1:
        raise UnsupportedModel(f"{node.name} has a scale for each channel, and is no weight")
    limits, shift = torch.iinfo(dtype), 128 if dtype == torch.int8 else 0
    least, most = (_limit(given.get(f"quant_{n}"), getattr(limits, n)) for n in ("min", "max"))
    own, at = float(np.float32(step.item())), middle.item()
    tiny = float(np.finfo(np.float32).tiny)
    if not tiny <= own < np.inf or not limits.min <= at <= limits.max or at != int(at):
        raise UnsupportedModel(f"{node.name} has scale {own} and zero point {at}, which are none of bytes")
    if not limits.min <= least <= most <= limits.max:
        raise UnsupportedModel(f"{node.name} is limited to {least} to {most}, which are no bytes")
    how = Quantized(own, int(at) + shift)
    low = None if least == limits.min else (least - at) * own
    return Bytes(how, low, None if most == limits.max else (most - at) * own)


def _known(value: Any) -> bool:
    return isinstance(value, int | float | torch.Tensor)


def _limit(value: Any, default: int) -> int:
    if value is None:
        return default
    if not _known(value):
        raise UnsupportedModel("the limits of quantized numbers are computed while the model runs")
    return int(value)
