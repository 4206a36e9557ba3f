"""Which channels are the same ones all over a network, so that they can only change places together.

A set of channels begins where a convolution or a Linear gives them. ReLU, batch norm, pooling, depthwise
convolutions and the like pass it on; an addition ties two sets; a concatenation lays sets side by side; the
next convolution reads them. Whatever is not known to treat channels alike holds them in their places, as the
model's inputs and outputs do.
"""

from __future__ import annotations

import re
from typing import Any

from aerogel.capture.captured import Captured
from aerogel.ir import Node, Ref, references

CONVS = {"conv1d": 3, "conv2d": 4, "conv3d": 5}
"""And how many dimensions their images have."""
TRANSPOSED = {"conv_transpose1d": 3, "conv_transpose2d": 4, "conv_transpose3d": 5}
GROUPS = 6
"""The place of groups among the arguments of both."""
_SAME = """
    relu relu6 hardtanh hardswish hardsigmoid silu sigmoid tanh leaky_relu elu selu celu gelu mish softplus
    clamp clamp_min clamp_max neg abs exp log erf sqrt square reciprocal pow clone contiguous to detach alias
    dropout feature_dropout max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest2d
    upsample_bilinear2d upsample_bicubic2d
"""
SAME = frozenset(_SAME.split())
BOTH = {"add", "sub", "mul", "div", "maximum", "minimum"}
SHAPED = {"view", "reshape", "flatten", "squeeze", "unsqueeze"}
DIMENSIONS = re.compile(r".*([123])d")
PADS = {"constant_pad_nd", "pad", "reflection_pad2d", "replication_pad2d"}
INPUT = "the model's input gives them"

Sets = tuple[int, ...]
"""Sets of channels side by side."""


class Ties:
    """Of a captured network. `uses` says for each constant which sets lie along which of its dimensions,
    `readers` along which one a layer's weight meets its input."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self.sizes: list[int] = []
        self.uses: dict[str, dict[int, Sets]] = {}
        self.readers: dict[str, int] = {}
        self._above: list[int] = []
        self._held: dict[int, str] = {}
        self._of: dict[str, Sets] = {}
        same: dict[Any, str] = {}
        self._name = {
            name: same.setdefault((t.data_ptr(), t.shape, t.stride()) if t.numel() else name, name)
            for name, t in captured.constants.items()
        }
        for name in captured.graph.inputs:
            self._hold(self._fresh(name), INPUT)
        read = dict.fromkeys(references(captured.graph.outputs), "the model gives them")
        for node in captured.graph.nodes:
            if not self._passes(node):
                read |= dict.fromkeys(node.inputs, f"{node.op} of '{node.layer or node.name}' reads them")
                self._hold(self._fresh(node.name), f"{node.op} of '{node.layer or node.name}' gives them")
        for name, why in read.items():
            self._hold(self._of.get(name, ()), why)
            self.hold(name, why)

    def root(self, number: int) -> int:
        """The set that stands for all those tied to it."""
        while (above := self._above[number]) != number:
            number = above
        return number

    def held(self, number: int) -> str:
        """Why a set stays in its order; "" where it may change."""
        return self._held.get(self.root(number), "")

    def hold(self, constant: str, why: str) -> None:
        """The sets along a constant stay as they are."""
        for sets in self.uses.get(self._name.get(constant, ""), {}).values():
            self._hold(sets, why)

    def _hold(self, sets: Sets, why: str) -> None:
        for number in sets:
            self._held.setdefault(self.root(number), why)

    def _shape(self, name: str) -> tuple[int | str, ...]:
        constant = self._captured.constants.get(name)
        return tuple(self._captured.shapes.get(name, ()) if constant is None else constant.shape)

    def _fresh(self, name: str) -> Sets:
        """A set of its own for a value's second dimension, if that is of a known size."""
        shape = self._shape(name)
        if len(shape) < 2 or not isinstance(shape[1], int):
            return ()
        self.sizes.append(shape[1])
        self._above.append(len(self._above))
        self._of[name] = (len(self._above) - 1,)
        return self._of[name]

    def _tie(self, a: Sets, b: Sets) -> None:
        if [self.sizes[i] for i in a] != [self.sizes[i] for i in b]:
            self._hold((*a, *b), "they meet others that lie side by side in other numbers")
            return
        for one, other in zip(a, b, strict=True):
            low, high = sorted((self.root(one), self.root(other)))
            why = self.held(low) or self.held(high)
            self._above[high] = low
            if why:
                self._held[low] = why

    def _lies(self, constant: str, dim: int, sets: Sets) -> None:
        """A constant's dimension follows these sets."""
        known = self.uses.setdefault(self._name[constant], {})
        if dim in known:
            self._tie(known[dim], sets)
        known[dim] = sets

    def _passes(self, node: Node) -> bool:
        """Whether it is known what the node does to channels; then that is noted."""
        name = node.op.split(".")[1] if node.op.startswith("aten.") else ""
        if name == "sym_size":  # gives a number
            return True
        if not node.args or (
            node.kwargs and (name not in SAME or any(references(tuple(node.kwargs.values()))))
        ):
            return False
        if name in CONVS or name in TRANSPOSED or name == "linear":
            return self._layer(node, name)
        if name == "cat":
            return self._beside(node)
        if name in BOTH:
            return self._both(node)
        x = node.args[0].name if isinstance(node.args[0], Ref) else ""
        if x not in self._of:
            return False
        if name in ("batch_norm", "prelu"):
            return self._scaled(node, x)
        if any(self._shape(other) for other in node.inputs if other != x):  # other than numbers
            return False
        rank = len(self._shape(x))
        if name == "mean":
            over = node.args[1] if len(node.args) > 1 else None
            return isinstance(over, tuple) and all(d % rank > 1 for d in over) and self._keeps(node, x)
        if name in PADS:
            return len(node.args[1]) <= 2 * (rank - 2) and self._keeps(node, x)
        image = DIMENSIONS.fullmatch(name)  # max_pool1d of features pools channels
        same = name in SAME and rank == len(self._shape(node.name))
        same = same and (image is None or rank == 2 + int(image[1]))
        return (same or name in SHAPED) and self._keeps(node, x)

    def _keeps(self, node: Node, x: str) -> bool:
        """Whether batch and channels come first before and after."""
        known = self._shape(node.name)[:2] == self._shape(x)[:2]
        if known:
            self._of[node.name] = self._of[x]
        return known

    def _layer(self, node: Node, name: str) -> bool:
        """A convolution, transposed or not, or a Linear on features."""
        x, weight, *rest = node.args
        shapes, turned = self._captured.constants, name in TRANSPOSED
        if not isinstance(x, Ref) or not isinstance(weight, Ref):
            return False
        if weight.name not in shapes or x.name not in self._of:
            return False
        bias = rest[0].name if rest and isinstance(rest[0], Ref) else ""
        if len(self._shape(x.name)) != ({**CONVS, **TRANSPOSED}.get(name, 2)) or (
            bias and bias not in shapes
        ):
            return False
        many = node.args[GROUPS] if len(node.args) > GROUPS else 1
        k, c = (shapes[weight.name].shape[i] for i in (0, 1))
        if many == 1:
            self.readers[self._name[weight.name]] = 0 if turned else 1
            self._lies(weight.name, 0 if turned else 1, self._of[x.name])
            made = self._fresh(node.name)
        elif many == k == self._shape(x.name)[1] and c == 1:  # each channel by itself
            made = self._of[node.name] = self._of[x.name]
        else:
            return False
        self._lies(weight.name, 1 if turned and many == 1 else 0, made)
        if bias:
            self._lies(bias, 0, made)
        return True

    def _scaled(self, node: Node, x: str) -> bool:
        own = [a.name for a in node.args[1:] if isinstance(a, Ref)]
        sizes = [self._captured.constants[n].shape for n in own if n in self._captured.constants]
        if len(sizes) != len(own) or any(s not in ((1,), self._shape(x)[1:2]) for s in map(tuple, sizes)):
            return False
        for constant, size in zip(own, sizes, strict=True):
            if size.numel() == self._shape(x)[1]:
                self._lies(constant, 0, self._of[x])
        return self._keeps(node, x)

    def _both(self, node: Node) -> bool:
        """Two maps number by number, one of which may be a number for all channels, or one for each."""
        if len(node.args) < 2:
            return False
        names = [a.name for a in node.args[:2] if isinstance(a, Ref)]
        shape, constants = self._shape(node.name), self._captured.constants
        fixed = [n for n in names if n in constants and constants[n].numel() > 1]
        maps = [n for n in names if n not in constants and self._shape(n)]
        if len(shape) < 2 or any(n not in self._of or len(self._shape(n)) != len(shape) for n in maps):
            return False
        maps = [n for n in maps if self._shape(n)[1] == shape[1]]
        dims = {n: 1 - len(shape) + constants[n].dim() for n in fixed}
        if not maps or any(
            dim < 0 or constants[n].shape[dim] != shape[1] or constants[n].numel() != shape[1]
            for n, dim in dims.items()
        ):
            return False
        for other in maps[1:]:
            self._tie(self._of[maps[0]], self._of[other])
        for name, dim in dims.items():
            self._lies(name, dim, self._of[maps[0]])
        return self._keeps(node, maps[0])

    def _beside(self, node: Node) -> bool:
        maps = [a.name if isinstance(a, Ref) else "" for a in node.args[0]]
        dim = node.args[1] if len(node.args) > 1 else 0
        if any(name not in self._of for name in maps):
            return False
        if dim in (1, 1 - len(self._shape(node.name))):
            self._of[node.name] = tuple(number for name in maps for number in self._of[name])
            return True
        for other in maps[1:]:
            self._tie(self._of[maps[0]], self._of[other])
        return dim not in (0, -len(self._shape(node.name))) and self._keeps(node, maps[0])
