"""Functions that files spell out in several nodes, told by their last one."""

from __future__ import annotations

import math
from itertools import permutations

from aerogel.capture.onnx.values import Reader, Value
from aerogel.ir import Node, Ref


def hardswish(r: Reader, product: Ref, by: Ref) -> Ref | None:
    """x where this is x * clip(x + 3, 0, 6) / 6."""
    made = r.maker(product)
    if made is None or made.op != "aten.mul.Tensor" or r.number(by) != 6:
        return None
    for own, clipped in (made.args, made.args[::-1]):
        clip = r.maker(clipped)
        added = r.maker(clip.args[0]) if clip is not None and clip.op == "aten.hardtanh.default" else None
        if (
            added is not None
            and added.op == "aten.add.Tensor"
            and added.args[0] == own
            and r.number(added.args[1]) == 3
        ):
            found: Ref = own
            return found
    return None


def gelu(r: Reader, x: Value, y: Value) -> Ref | None:
    """x where this is x * (1 + erf(x / sqrt(2))) / 2, in whatever order its three factors stand."""
    for product, other in ((x, y), (y, x)):
        made = r.maker(product)
        if made is None or made.op != "aten.mul.Tensor":
            continue
        for own, half, bell in permutations((*made.args, other)):
            if r.number(half) == 0.5 and isinstance(own, Ref) and _is_bell(r, bell, own):
                return own
    return None


def _is_bell(r: Reader, value: Value, x: Ref) -> bool:
    """Whether this is 1 + erf(x / sqrt(2))."""
    added = r.maker(value)
    if added is None or added.op != "aten.add.Tensor":
        return False
    for curve, one in (added.args, added.args[::-1]):
        made = r.maker(curve)
        if made is not None and made.op == "aten.erf.default" and r.number(one) == 1:
            inner = r.maker(made.args[0])
            return inner is not None and _is_times(r, inner, x, math.sqrt(0.5))
    return False


def _is_times(r: Reader, made: Node, x: Ref, by: float) -> bool:
    """Whether this is x * by, written as a product or a quotient."""
    quotient = made.op == "aten.div.Tensor"
    if not quotient and made.op != "aten.mul.Tensor":
        return False
    first, second = made.args if quotient or made.args[0] == x else made.args[::-1]
    number = r.number(second)
    return (
        first == x and number is not None and math.isclose(number, 1 / by if quotient else by, rel_tol=1e-6)
    )
