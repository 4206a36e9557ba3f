"""Graph -> Graph: convolutions become Conv nodes, batch norm is folded into them, what follows elementwise
becomes their epilogue.

Everything is decided by use counts: a value is absorbed only where nothing else reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from aerogel.capture.affine import Affine, affine
from aerogel.capture.nodes import Sides, activation_of, added, zero_pad
from aerogel.capture.transposed import enlarging
from aerogel.ir import Conv, Dtypes, Graph, Node, Ref, references
from aerogel.ir.tensors import DTYPE_NAMES, flushed

Shapes = dict[str, tuple[int | str, ...]]
"""Sizes of each value, open ones by name: equal means surely equal."""
Types = dict[str, torch.dtype]
"""The element type of each value."""

FEW_FILTERS = 16
"""Folded at once: in float64 so many stay in the cache."""

_FLATTEN = ("aten.flatten.using_ints", "aten.view.default", "aten.reshape.default")
RANDOM = ("aten.dropout.default", "aten.feature_dropout.default")
_PASS = (
    "aten.dropout.default",
    "aten.feature_dropout.default",
    "aten.detach.default",
    "aten.lift_fresh_copy.default",
)


def random(node: Node) -> bool:
    """Whether a node gives other numbers at every call: dropout that is on."""
    if node.op not in RANDOM:
        return False
    given = dict(zip(("input", "p", "train"), node.args, strict=False)) | dict(node.kwargs)
    return given.get("train") is not False and given.get("p") != 0


def fuse(
    graph: Graph, constants: Mapping[str, torch.Tensor], shapes: Shapes, types: Types
) -> tuple[Graph, dict[str, torch.Tensor], dict[str, str]]:
    """The fused graph, its constants, and for each convolution left to torch the reason in words."""
    work = _Fuse(graph, dict(constants), shapes, types)
    work.run()
    return work.graph(), work.kept(), work.left


class _Fuse:
    def __init__(
        self, graph: Graph, constants: dict[str, torch.Tensor], shapes: Shapes, types: Types
    ) -> None:
        self.source, self.constants, self.shapes, self.types = graph, constants, shapes, types
        self.nodes: dict[str, Node] = {}
        self.renamed: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.uses = {name: len(users) for name, users in graph.users().items()}

    def run(self) -> None:
        for original in self.source.nodes:
            kwargs = {name: self._renamed(value) for name, value in original.kwargs.items()}
            node = replace(original, args=self._renamed(original.args), kwargs=kwargs)
            base = node.op.rpartition(".")[0]
            if node.op in _PASS and isinstance(node.args[0], Ref) and not random(node):
                self._absorb(node, node.args[0].name)
            elif base in ("aten.conv2d", "aten.conv1d"):
                self.nodes[node.name] = self._convolution(node)
            elif node.op == "aten.linear.default":
                self.nodes[node.name] = self._linear(node)
            elif self._rank(node) == 4 and (pair := enlarging(node, self.constants)) is not None:
                self.nodes |= {made.name: made for made in pair}
                self.uses[pair[0].name] = 1
            elif not any(
                taken(node) for taken in (self._average, self._channelwise, self._shifted, self._epilogue)
            ):
                self.nodes[node.name] = node
                if base in ("aten.conv3d", "aten.conv_transpose2d", "aten.conv_transpose1d"):
                    self.left[node.layer or node.name] = f"{base[5:]} has no sparse kernel; torch runs it"

    def _renamed(self, argument: Any) -> Any:
        """An argument with the names that its values have now."""
        if isinstance(argument, Ref):
            return Ref(self.renamed.get(argument.name, argument.name))
        return tuple(self._renamed(a) for a in argument) if isinstance(argument, tuple) else argument

    def _absorb(self, node: Node, into: str) -> None:
        """`node`'s value is `into`'s from now on, with `node`'s readers."""
        self.renamed[node.name] = into
        self.uses[into] = self.uses[into] - 1 + self.uses[node.name]

    def _convolution(self, node: Node) -> Node:
        """aten.conv2d / conv1d as a Conv node, or as it is where its arguments are not fixed."""
        args = [*node.args, *([None, 1, 0, 1, 1][len(node.args) - 2 :])]
        x, weight, bias, stride, padding, dilation, groups = (
            node.kwargs.get(n, a) for n, a in zip(_NAMES, args, strict=True)
        )
        layer = node.layer or node.name
        held = self._held(weight)
        if held is None or (bias is not None and bias.name not in self.constants):
            self.left[layer] = "its weight is computed while the model runs"
            return node
        if held.dtype not in DTYPE_NAMES:
            self.left[layer] = (
                f"its weight is {held.dtype}; kernels of ours take float32, float16 and bfloat16"
            )
            return node
        flat = held.dim() == 3
        if isinstance(x, Ref) and len(self.shapes.get(x.name, ())) != held.dim():
            self.left[layer] = "its input is one image without a batch, or of unknown rank; torch runs it"
            return node
        (stride_h, stride_w), (dil_h, dil_w) = _pair(stride, flat, 1), _pair(dilation, flat, 1)
        k, c_group, r, s = (held[:, :, None] if flat else held).shape
        pad = _padding(padding, flat, (r, s), (dil_h, dil_w))
        if not all(isinstance(v, int) for v in (stride_h, stride_w, dil_h, dil_w, groups, *pad)):
            self.left[layer] = "its stride, padding or dilation is computed while the model runs"
            return node
        x, pad = self._padded(x, pad)
        epilogue = ("bias",) if bias is not None else ()
        dtypes = Dtypes.of(DTYPE_NAMES[held.dtype])
        conv = Conv(
            c_group * groups, k, r, s, (stride_h, stride_w), pad, (dil_h, dil_w), groups, dtypes, epilogue
        )
        if flat:
            self.constants[f"{weight.name}#2d"] = held[:, :, None]
            weight = Ref(f"{weight.name}#2d")
        return Node(node.name, "conv", (x, weight) if bias is None else (x, weight, bias), {}, conv, layer)

    def _padded(self, x: Any, pad: Sides) -> tuple[Any, Sides]:
        """The zeros that a node before it puts around the image are the convolution's own."""
        before = self._only(x)
        sides = None if before is None else zero_pad(before)
        if before is None or sides is None:
            return x, pad
        del self.nodes[before.name]
        return before.args[0], added(pad, sides)

    def _linear(self, node: Node) -> Node:
        """A Linear over features is a 1x1 convolution of an image of one pixel, or torch's where it stands
        over something else."""
        held = self._held(node.args[1])
        bias = node.args[2] if len(node.args) > 2 else None
        fixed = (
            held is not None and held.dtype in DTYPE_NAMES and (bias is None or bias.name in self.constants)
        )
        if held is None or not fixed or len(self.shapes.get(node.name, ())) != 2:
            return node
        name = f"{node.args[1].name}#4d"
        self.constants[name] = held[:, :, None, None]
        dtypes = Dtypes.of(DTYPE_NAMES[held.dtype])
        conv = Conv(held.shape[1], held.shape[0], dtypes=dtypes, epilogue=() if bias is None else ("bias",))
        args = (node.args[0], Ref(name), *(() if bias is None else (bias,)))
        return Node(node.name, "conv", args, {}, conv, node.layer or node.name)

    def _shifted(self, node: Node) -> bool:
        """Numbers for each feature, added to a Linear over something else than features, are its bias."""
        if node.op != "aten.add.Tensor" or node.kwargs or len(node.args) != 2:
            return False
        for own, by in (node.args, node.args[::-1]):
            before, held = self._only(own), self._held(by)
            if before is None or before.op != "aten.linear.default" or held is None:
                continue
            weight = self._held(before.args[1])
            alone = weight is not None and before.args[2:] in ((), (None,)) and held.dtype == weight.dtype
            if weight is None or not alone or held.shape[-1:] != weight.shape[:1]:
                continue
            if held.numel() == len(weight) and held.dim() <= self._rank(before):
                self.constants[f"{node.name}.bias"] = held.reshape(-1)
                args = (*before.args[:2], Ref(f"{node.name}.bias"))
                self._replace(before, node, replace(before, name=node.name, args=args))
                return True
        return False

    def _average(self, node: Node) -> bool:
        """A pool to one pixel becomes a mean over the image; a flatten after it, a mean that keeps no
        dimensions."""
        if (
            node.op == "aten.adaptive_avg_pool2d.default"
            and node.args[1] in ((1, 1), (1,), 1)
            and self._rank(node) == 4
        ):
            self.nodes[node.name] = replace(node, op="aten.mean.dim", args=(node.args[0], (2, 3), True))
            return True
        before = self._only(node.args[0]) if node.op in _FLATTEN else None
        if (
            before is None
            or before.op != "aten.mean.dim"
            or before.kwargs
            or before.args[1:] != ((2, 3), True)
        ):
            return False
        if self.shapes.get(node.name) != self.shapes.get(before.name, ())[:2]:
            return False
        self._replace(before, node, replace(before, name=node.name, args=(before.args[0], (2, 3), False)))
        return True

    def _channelwise(self, node: Node) -> bool:
        """A scale and a shift of each channel, folded into the convolution before it. Of a batch norm without
        one, a depthwise 1x1 convolution."""
        found = affine(node, self.constants, self.shapes.get(node.name, ()))
        if found is None or self.types.get(found.x.name) != self.types.get(node.name):
            return False
        if self._folded(node, found):
            return True
        return node.op.startswith("aten.batch_norm.") and self._scale(node, found)

    def _folded(self, node: Node, by: Affine) -> bool:
        """w * scale, and the shift as a bias."""
        before, woven = self._behind(by.x)
        if before is None or before.conv is None or before.conv.epilogue not in ((), ("bias",)):
            return False
        if woven is not None:
            by = by.spread(woven.args[1] ** 2)
        _, weight, bias, _ = before.conv_inputs()
        moved = by.shift
        if bias is not None:
            moved = moved + self.constants[bias].double() * (1.0 if by.scale is None else by.scale)
        names = weight, f"{before.name}.bias"
        if by.scale is not None:
            names = f"{before.name}.weight", names[1]
            scaled = _scaled(self.constants[weight], by.scale)
            if _lost(self.constants[weight], scaled):
                return False
            self.constants[names[0]] = scaled
        self.constants[names[1]] = moved.float()
        conv = replace(before.conv, epilogue=("bias",))
        merged = Node(node.name, "conv", (before.args[0], *map(Ref, names)), {}, conv, before.layer)
        self._behind_replaced(before, woven, node, merged)
        return True

    def _behind(self, argument: Any) -> tuple[Node | None, Node | None]:
        """The node behind an argument, if this is its only reader, and the weaving of its channels to pixels
        that is between: what is done to each number alone may as well be done before that."""
        before = self._only(argument)
        if before is None or before.op != "aten.pixel_shuffle.default" or self._rank(before) != 4:
            return before, None
        return self._only(before.args[0]), before

    def _behind_replaced(self, before: Node, woven: Node | None, after: Node, merged: Node) -> None:
        """`merged` stands for `before` and `after`, and is woven where `before` was."""
        if woven is None:
            self._replace(before, after, merged)
            return
        self.nodes[before.name] = replace(merged, name=before.name)
        self._replace(woven, after, replace(woven, name=after.name))

    def _scale(self, node: Node, by: Affine) -> bool:
        own = self._held(node.args[3])
        if by.scale is None or own is None or own.dtype not in DTYPE_NAMES or self._rank(node) != 4:
            return False
        names = f"{node.name}.weight", f"{node.name}.bias"
        self.constants[names[0]] = by.scale.to(own.dtype)[:, None, None, None]
        self.constants[names[1]] = by.shift.float()
        channels, dtypes = len(by.scale), Dtypes.of(DTYPE_NAMES[own.dtype])
        conv = Conv(channels, channels, groups=channels, dtypes=dtypes, epilogue=("bias",))
        self.nodes[node.name] = Node(
            node.name, "conv", (by.x, *map(Ref, names)), {}, conv, node.layer or node.name
        )
        return True

    def _held(self, argument: Any) -> torch.Tensor | None:
        return self.constants.get(argument.name) if isinstance(argument, Ref) else None

    def _epilogue(self, node: Node) -> bool:
        """An activation or a residual add after a convolution that nothing else reads."""
        step = activation_of(node)
        if step is not None:
            before, woven = self._behind(node.args[0])
            if before is None or before.conv is None or before.conv.activation is not None:
                return False
            merged = replace(before, name=node.name, conv=_with(before.conv, step))
            self._behind_replaced(before, woven, node, merged)
            return True
        if (
            node.op != "aten.add.Tensor"
            or node.kwargs.get("alpha", 1) != 1
            or not all(isinstance(a, Ref) for a in node.args)
        ):
            return False
        first, second = (a.name for a in node.args)
        order = list(self.nodes)
        for own, other in sorted(
            [(first, second), (second, first)],
            key=lambda p: order.index(p[0]) if p[0] in self.nodes else -1,
            reverse=True,
        ):
            before = self._only(Ref(own))
            if (
                before is None
                or before.conv is None
                or "add" in before.conv.epilogue
                or own == other
                or not self._same_shape(own, other)
            ):
                continue
            args = (*before.args, Ref(other))
            self._replace(
                before, node, replace(before, name=node.name, conv=_with(before.conv, "add"), args=args)
            )
            return True
        return False

    def _same_shape(self, own: str, other: str) -> bool:
        """Whether both are known and equal, in sizes and element type: an add that broadcasts or converts
        stays torch's."""
        alike = own in self.types and self.types[own] == self.types.get(other)
        return alike and own in self.shapes and self.shapes[own] == self.shapes.get(other)

    def _rank(self, node: Node) -> int:
        """Dimensions of what a node gives; 0 where they are unknown."""
        return len(self.shapes.get(node.name, ()))

    def _only(self, argument: Any) -> Node | None:
        """The node behind an argument, if this is its only reader."""
        if not isinstance(argument, Ref) or self.uses.get(argument.name) != 1:
            return None
        return self.nodes.get(argument.name)

    def _replace(self, before: Node, after: Node, merged: Node) -> None:
        """`merged` stands where `after` stood; `before` is gone."""
        del self.nodes[before.name]
        self.nodes[after.name] = merged

    def graph(self) -> Graph:
        """What the outputs need, in order: sizes that only a flatten read are gone."""
        outputs = self._renamed(self.source.outputs)
        used, nodes = set(references(outputs)), list[Node]()
        for node in reversed(self.nodes.values()):
            if node.name in used:
                nodes.append(node)
                used.update(node.inputs)
        return Graph(
            self.source.inputs, tuple(n for n in self.constants if n in used), tuple(reversed(nodes)), outputs
        )

    def kept(self) -> dict[str, torch.Tensor]:
        return {name: flushed(self.constants[name]) for name in self.graph().constants}


_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def _scaled(weight: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Filters times their numbers, in float64."""
    found = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for into, filters, numbers in zip(
        *(torch.split(t, FEW_FILTERS) for t in (found, weight, by)), strict=True
    ):
        into.copy_(filters.double() * numbers[:, None, None, None])
    return found


def _lost(weight: torch.Tensor, scaled: torch.Tensor) -> bool:
    """Whether a scale leaves most weights in half precision too small to be told well, or some too large."""
    if weight.dtype != torch.float16:
        return False
    kept, coarse = weight != 0, scaled.abs() < torch.finfo(weight.dtype).tiny
    return bool((scaled.isinf() & weight.isfinite()).any() or 2 * (kept & coarse).sum() > kept.sum())


def _with(conv: Conv, step: str) -> Conv:
    return replace(conv, epilogue=(*conv.epilogue, step))


def _pair(value: Any, flat: bool, other: int) -> tuple[Any, Any]:
    values = value if isinstance(value, tuple) else (value,)
    if flat:
        return other, values[0]
    return values[0], values[-1]


def _padding(
    value: Any, flat: bool, kernel: tuple[int, int], dilation: tuple[Any, Any]
) -> tuple[Any, Any, Any, Any]:
    """(top, left, bottom, right); "same" puts the odd one at the end, as torch does."""
    if value == "valid":
        return 0, 0, 0, 0
    if value == "same":
        h, w = (d * (size - 1) for d, size in zip(dilation, kernel, strict=True))
        return h // 2, w // 2, h - h // 2, w - w // 2
    h, w = _pair(value, flat, 0)
    return h, w, h, w
