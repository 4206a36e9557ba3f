"""`dense` on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from aerogel.codegen.cpu.abi import LibraryCall
from aerogel.errors import InvalidFile
from aerogel.ir import ALONE, INT8, NUMPY, Array, Config, Conv, Layout, Packed, Place, Stats, Target
from aerogel.ir.tensors import dilation, epilogue, padded, plain, private_ops, to_torch
from aerogel.methods.dense import NAME

VERSION = 1

LAYOUTS = ("contiguous", "channels_last")
_FUSED = {
    "relu": ("relu", ""),
    "relu6": ("hardtanh", ""),
    "silu": ("swish", ""),
    "hardswish": ("hardswish", ""),
    "gelu": ("gelu", "none"),
    "sigmoid": ("sigmoid", ""),
    "hardsigmoid": ("hardsigmoid", ""),
}


def refuse(conv: Conv, target: Target, stats: Stats) -> str | None:
    d = conv.dtypes
    if d != INT8 and len({d.input, d.weight, d.output}) != 1:
        return f"torch wants one element type throughout, not {d}"
    if conv.n == 0:
        return "an empty batch has nothing to time"
    return None


def configs(conv: Conv, target: Target, stats: Stats) -> Iterator[Config]:
    """Prepacked channels_last first: it wins most layers. A Linear has one form, and so has int8, which torch
    multiplies as floats."""
    if conv.dtypes == INT8:
        yield Config.make(NAME, channels_last=0, prepacked=0)
        return
    if conv.n is not None and _features(conv):
        yield Config.make(NAME, channels_last=0, prepacked=0)
        return
    for prepacked in (1, 0) if private_ops(conv.dtypes.input) else (0,):
        for layout in (1, 0):
            yield Config.make(NAME, channels_last=layout, prepacked=prepacked)


def pack(weight: Array, conv: Conv, config: Config) -> Packed:
    return Packed(NAME, VERSION, {"weight": weight})


def unpack(packed: Packed, conv: Conv) -> Array:
    check(packed, conv)
    return packed.arrays["weight"]


def check(packed: Packed, conv: Conv) -> None:
    weight = packed.arrays.get("weight")
    good = (
        weight is not None and weight.shape == conv.weight_shape and weight.dtype == NUMPY[conv.dtypes.weight]
    )
    if not good or (packed.format, packed.version) != (NAME, VERSION):
        raise InvalidFile(f"not a {NAME} version {VERSION} weight of {conv.layer()}")


def layouts(
    conv: Conv,
    config: Config,
    target: Target,
    place: Place = ALONE,
) -> tuple[Layout, Layout]:
    """torch's own layouts, which have no border whatever is asked for."""
    kind = LAYOUTS[config["channels_last"]]
    return Layout(kind, conv.size[1], dtype=conv.dtypes.input), Layout(
        kind, conv.out[1], dtype=conv.dtypes.output
    )


def pixels(conv: Conv, config: Config, target: Target, pitch: int, rows: int) -> int:
    return rows * pitch


def build(
    packed: Packed,
    conv: Conv,
    config: Config,
    target: Target,
    reads: Layout,
    writes: Layout,
    rows: int | None = None,
) -> LibraryCall:
    weight = to_torch(unpack(packed, conv), conv.dtypes.weight)
    if _features(conv) and conv.dtypes != INT8:
        return LibraryCall(reads, writes, _linear(weight, conv))
    call = _plain(weight, conv, config)
    if config["prepacked"] and not _misread(conv):
        call = _or_else(lambda: _prepacked(weight, conv), call)
    return LibraryCall(reads, writes, call)


Call = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]


def _or_else(make: Callable[[], Call], other: Call) -> Call:
    """A call by torch's private operators; where those fail (an internal error of torch's: bf16, added to and
    ReLU), the other."""
    made: list[Call] = []
    try:
        made.append(make())
    except RuntimeError:
        return other

    def call(x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        try:
            return made[-1](x, bias, residual)
        except RuntimeError:
            if made[-1] is other:
                raise
            made.append(other)
            return other(x, bias, residual)

    return call


def _plain(weight: torch.Tensor, conv: Conv, config: Config) -> Call:
    if _misread(conv):  # the same numbers under the strides of row after row, which torch reads right
        return lambda x, bias, residual: plain(x.flatten().view(x.shape), weight, conv, bias, residual)
    if config["channels_last"]:
        weight = weight.contiguous(memory_format=torch.channels_last)
    return lambda x, bias, residual: plain(x, weight, conv, bias, residual)


def _linear(weight: torch.Tensor, conv: Conv) -> Call:
    """One torch call: each gives up the GIL, and beside a busy thread waits for it."""
    flat = weight.flatten(1)

    def call(x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        own = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
        if x.dim() == 2:
            return epilogue(F.linear(x, flat, own), conv, conv.epilogue, residual)
        return epilogue(F.linear(x.flatten(1), flat, own)[:, :, None, None], conv, conv.epilogue, residual)

    return call


def _features(conv: Conv) -> bool:
    """Whether this is a Linear: one pixel, one tap, every channel read by every filter."""
    return (conv.size, conv.r, conv.s, conv.groups, conv.pad) == ((1, 1), 1, 1, 1, (0, 0, 0, 0))


def _misread(conv: Conv) -> bool:
    """oneDNN under torch 2.13 reads the wrong pixels, outside the image too, of one channel in channels_last
    whose output is one pixel wide, with a stride across columns and none across rows."""
    return conv.c == 1 and conv.out[1] == 1 and conv.stride[1] > 1 and conv.stride[0] == 1


def _prepacked(weight: torch.Tensor, conv: Conv) -> Call:
    ops = private_ops(conv.dtypes.input)
    assert ops is not None
    reorder, fused = ops
    top, left, bottom, right = conv.pad
    even = (top, left) == (bottom, right)
    padding = [top, left] if even else [0, 0]
    n, c, h, w = conv.x_shape
    size = [n, c, h, w] if even else [n, c, h + top + bottom, w + left + right]
    shape = (padding, list(conv.stride), dilation(conv), conv.groups)
    packed = reorder(weight.to_mkldnn(), *shape, size)
    steps = tuple(e for e in conv.epilogue if e != "bias")
    if steps[:1] == ("add",):
        after = steps[2:] if steps[1:2] == ("relu",) else steps[1:]
        unary = "relu" if steps[1:2] == ("relu",) else None

        def call(x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
            x, _ = padded(x, conv)
            own = None if bias is None else bias.to(x.dtype)
            y = fused.binary(x, residual, packed, own, *shape, "add", 1.0, unary, [], None)
            return epilogue(y, conv, after, residual)

        return call
    attribute, scalars, algorithm = _attribute(steps[0]) if steps else ("none", [], "")
    after = steps[attribute != "none" :]

    def call_unary(x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        x, _ = padded(x, conv)
        own = None if bias is None else bias.to(x.dtype)
        y = fused(x, packed, own, *shape, attribute, scalars, algorithm)
        return epilogue(y, conv, after, residual)

    return call_unary


def _attribute(step: str) -> tuple[str, list[float], str]:
    """oneDNN's name of an activation, with its numbers; "none" of one it has not."""
    if step.startswith("threshold"):
        return "none", [], ""
    if step.startswith("leaky_relu"):
        return "leaky_relu", [float(step.removeprefix("leaky_relu"))], ""
    name, algorithm = _FUSED[step]
    return name, [0.0, 6.0] if step == "relu6" else [], algorithm
