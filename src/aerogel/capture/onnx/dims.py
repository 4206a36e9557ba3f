"""The sizes of what each node gives, as expressions of its inputs' sizes: for the operators that networks of
images are made of. Of the others only the numbers are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from aerogel.capture.bytemaps import UNARY
from aerogel.capture.nodes import pooling_of
from aerogel.capture.onnx.expressions import Expression
from aerogel.ir import Node, Ref

Dims = tuple[Expression | None, ...]
"""None: nothing but the numbers is known."""
Known = Callable[[Any], Dims]
"""The sizes of a tensor, or of a number: () for a number that is known, (it,) for a size."""

_OTHERS = """
    batch_norm clone contiguous cos cumsum detach dropout erf exp floor flip hardtanh instance_norm layer_norm
    log log_softmax neg pow round rsqrt sin softmax sqrt to
"""
_ALIKE = {*_OTHERS.split(), *(name.removeprefix("aten.") for name in UNARY)}
"""Operators that give as many numbers as their first input has, whatever its sizes."""
_BROADCAST = {"add", "sub", "mul", "div", "maximum", "minimum", "pow", "fmod", "remainder", "where"}


def dims_of(node: Node, known: Known, rank: int) -> Dims | None:
    """What is known of the sizes that a node gives a tensor of this rank."""
    base, _, overload = node.op.removeprefix("aten.").partition(".")
    if base in _BROADCAST and overload not in ("Scalar", "Tensor_Scalar"):
        return _broadcast([known(a) for a in node.args if isinstance(a, Ref)], rank)
    if base in _BROADCAST or (base in _ALIKE and overload != "Tensor"):
        return known(node.args[0])
    rule = _RULES.get(base)
    return None if rule is None else rule(node, known)


def _broadcast(given: Sequence[Dims], rank: int) -> Dims:
    found: list[Expression | None] = []
    for i in range(-rank, 0):
        sizes = {dims[i] for dims in given if len(dims) >= -i}
        sizes = {s for s in sizes if s is None or s.number != 1} or sizes
        found.append(next(iter(sizes)) if len(sizes) == 1 else None)
    return tuple(found)


def _pair(value: Any, count: int) -> list[int] | None:
    values = list(value) if isinstance(value, tuple) else [value]
    values = values * count if len(values) == 1 else values
    return values if len(values) == count and all(type(v) is int for v in values) else None


def _windows(dims: Dims, window: Any, stride: Any, pad: Any, dilation: Any) -> list[Expression | None]:
    """How many windows there are along each dimension of an image."""
    options = [_pair(v, len(dims)) for v in (window, stride, pad, dilation)]
    if any(o is None for o in options):
        return [None] * len(dims)
    found: list[Expression | None] = []
    for size, k, s, p, d in zip(dims, *(o for o in options if o is not None), strict=True):
        if size is None or s < 1:
            found.append(None)
        else:
            room = size + Expression.of(2 * p - d * (k - 1) - 1)
            found.append(room.times(Fraction(1, s)).floor() + Expression.of(1))
    return found


def _convolved(node: Node, known: Known) -> Dims:
    x, (filters, _, *kernel) = known(node.args[0]), known(node.args[1])
    _, _, _, stride, pad, dilation, _ = node.args
    window = tuple(k.number if k is not None else None for k in kernel)
    return x[0], filters, *_windows(x[2:], window, stride, pad, dilation)


def _pooled(node: Node, known: Known) -> Dims:
    own, x = pooling_of(node), known(node.args[0])
    if own is None or own.window == (0, 0):
        return x[0], x[1], *[None] * len(x[2:])
    return x[0], x[1], *_windows(x[2:], own.window, own.stride, own.pad, own.dilation)


def _mean(node: Node, known: Known) -> Dims | None:
    x, over, *keeps = known(node.args[0]), *node.args[1:3]
    if not isinstance(over, tuple):
        return None
    gone = {i % len(x) for i in over}
    kept = [Expression.of(1) if i in gone else d for i, d in enumerate(x)]
    return tuple(kept if keeps == [True] else [d for i, d in enumerate(x) if i not in gone])


def _padded(node: Node, known: Known) -> Dims | None:
    if node.op.startswith("aten.pad.") and "constant" not in node.args:
        return None
    dims, sides = list(known(node.args[0])), node.args[1]
    for i, (before, after) in enumerate(zip(sides[::2], sides[1::2], strict=True)):
        more, size = [_number(v, known) for v in (before, after)], dims[-1 - i]
        wide = size is not None and None not in more
        dims[-1 - i] = sum((m for m in more if m is not None), size) if wide and size is not None else None
    return tuple(dims)


def _number(value: Any, known: Known) -> Expression | None:
    """A number in a node's arguments, which may be a size."""
    if isinstance(value, Ref):
        return next(iter(known(value)), None)
    return Expression.of(value) if type(value) is int else None


def _joined(node: Node, known: Known) -> Dims:
    parts = [known(part) for part in node.args[0]]
    axis = (node.args[1] if len(node.args) > 1 else 0) % len(parts[0])
    along = [part[axis] for part in parts]
    whole = None if None in along else sum((a for a in along if a is not None), Expression.of(0))
    return (*parts[0][:axis], whole, *parts[0][axis + 1 :])


def _cut(node: Node, known: Known) -> Dims:
    """All but the dimension that is cut."""
    x, axis = known(node.args[0]), node.args[1 if node.op.startswith("aten.slice.") else 2]
    axis %= len(x)
    return (*x[:axis], None, *x[axis + 1 :])


def _selected(node: Node, known: Known) -> Dims:
    x, axis = known(node.args[0]), node.args[1]
    axis %= len(x)
    return (*x[:axis], *x[axis + 1 :])


def _moved(node: Node, known: Known) -> Dims:
    x = known(node.args[0])
    return tuple(x[i] for i in node.args[1])


def _unsqueezed(node: Node, known: Known) -> Dims:
    x = list(known(node.args[0]))
    x.insert(node.args[1] % (len(x) + 1), Expression.of(1))
    return tuple(x)


def _squeezed(node: Node, known: Known) -> Dims | None:
    """torch keeps what is not one."""
    x = known(node.args[0])
    gone = {i % len(x) for i in node.args[1]}
    ones = all(d is not None and d.number == 1 for i, d in enumerate(x) if i in gone)
    return tuple(d for i, d in enumerate(x) if i not in gone) if ones else None


def _sized(node: Node, known: Known) -> Dims:
    """Upsampling to sizes that are named."""
    x, sizes = known(node.args[0]), node.args[1]
    named = [_number(v, known) for v in sizes] if isinstance(sizes, tuple) else [None] * len(x[2:])
    return (*x[:2], *named)


def _shuffled(node: Node, known: Known) -> Dims:
    n, c, h, w = known(node.args[0])
    by = node.args[1]
    channels = None if c is None else c.times(Fraction(1, by * by))
    return n, channels, *(None if v is None else v.times(Fraction(by)) for v in (h, w))


def _reshaped(node: Node, known: Known) -> Dims:
    return tuple(None if v == -1 else _number(v, known) for v in node.args[1])


def _linear(node: Node, known: Known) -> Dims:
    return (*known(node.args[0])[:-1], known(node.args[1])[0])


_RULES: dict[str, Callable[[Node, Known], Dims | None]] = {
    "conv1d": _convolved,
    "conv2d": _convolved,
    "max_pool2d": _pooled,
    "avg_pool2d": _pooled,
    "mean": _mean,
    "constant_pad_nd": _padded,
    "pad": _padded,
    "cat": _joined,
    "slice": _cut,
    "split_with_sizes": _cut,
    "select": _selected,
    "permute": _moved,
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "upsample_nearest2d": _sized,
    "upsample_bilinear2d": _sized,
    "pixel_shuffle": _shuffled,
    "reshape": _reshaped,
    "linear": _linear,
}
