"""ONNX nodes beside onnxruntime: a few random ones (tests/fuzz has the rest), and by name each flag that once
went wrong."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aerogel
from aerogel.capture import foreign
from aerogel.errors import AerogelError, UnsupportedModel
from tests.fuzz.onnx_cases import BOOL, F32, I32, I64, U8, Build, Case, case
from tests.fuzz.onnx_nodes import outcome

COUNT = 64
PIECES = 4
TOO_SMALL = (
    "too small",
    "greater than actual input size",
    "smaller than kernel",
    "greater than 0",
    "non-zero dimensions",
)
"""torch's words on images smaller than a window: not wrong, but not ours."""


@pytest.mark.parametrize("piece", range(PIECES))
def test_random_nodes(piece: int, tmp_path: Path) -> None:
    refused = 0
    for seed in range(piece, COUNT, PIECES):
        one = case(seed)
        got = outcome(one, tmp_path)
        small = any(words in got.reason for words in TOO_SMALL)
        assert got.kind in ("ok", "raises", "refused") or small, f"{seed}: {one}: {got.reason}"
        refused += got.kind == "refused"
    assert refused <= 1


def built(fill: Any, *sizes: dict[str, int], opset: int = 17) -> Case:
    """A case at given sizes: the first to compile at."""
    b = Build(0)
    b.opset, b.open = opset, True
    b.sets = [{"n": 2, "d": 4, "h": 9, "w": 8, "l": 3, **own} for own in sizes or ({}, {"h": 6}, {"w": 11})]
    fill(b)
    return b.case("named")


def resized(*scales: float, x: tuple[Any, ...] = ("n", 3, "h", "w"), **a: Any) -> Any:
    return lambda b: b.give(b.node("Resize", b.x(*x), "", b.const([1, 1, *scales], F32), **a))


def to_shape(op: str, number: int, mode: str, where: str) -> Any:
    """A resize to sizes that are computed from the input's."""

    def fill(b: Build) -> None:
        x = b.x("n", 3, "h", "w")
        front, back = (b.node("Slice", b.node("Shape", x), b.ints(i), b.ints(i + 2)) for i in (0, 2))
        sizes = b.node("Concat", front, b.node(op, back, b.ints(number)), axis=0)
        a: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": where, "nearest_mode": "floor"}
        b.give(b.node("Resize", x, "", "", sizes, **a))

    return fill


def pooled(op: str, kind: Any = F32, **a: Any) -> Any:
    return lambda b: b.give(b.node(op, b.x("n", 3, "h", "w", dtype=kind), **a))


def beyond(b: Build) -> None:
    b.opset = 21
    b.give(b.node("AveragePool", b.x(1, 3, 9), kernel_shape=[1], strides=[3], auto_pad="SAME_UPPER"))


def sliced(start: int, end: int, step: int) -> Any:
    return lambda b: b.give(
        b.node("Slice", b.x("n", 3, "h"), b.ints(start), b.ints(end), b.ints(2), b.ints(step))
    )


def cut_then(op: str, **a: Any) -> Any:
    """Part of an open size, and what asks how long it is."""

    def fill(b: Build) -> None:
        b.give(b.node(op, b.node("Slice", b.x("n", 3, "h", "w"), b.ints(0), b.ints(7), b.ints(2)), **a))

    return fill


def same_sizes(b: Build) -> None:
    x = b.x("n", 3, "h", "w")
    same = b.node("Equal", *(b.node("Slice", b.node("Shape", x), b.ints(i), b.ints(i + 1)) for i in (2, 3)))
    b.give(b.node("Where", same, x, b.node("Neg", x)))


def scaled_in_float32(b: Build) -> None:
    """0.7 of 10 is 7 in float32, and 6.99 in Python's numbers."""
    size = b.node("Cast", b.node("Shape", b.x("h", "w")), to=1)
    b.give(b.node("Cast", b.node("Floor", b.node("Mul", size, b.const(0.7, F32))), to=7))


def other_scale(b: Build) -> None:
    zero = b.const(3, U8)
    integers = b.node("QuantizeLinear", b.x("n", 3, "h"), b.const(0.1, F32), zero)
    b.give(b.node("DequantizeLinear", integers, b.const(1.5, F32), zero))


def range_of_fractions(b: Build) -> None:
    size = b.node("Gather", b.node("Shape", b.x("h", 2)), b.const(0, I64), axis=0)
    b.give(b.node("Range", b.const(-0.9, F32), b.node("Cast", size, to=1), b.const(1.5, F32)))


SMALL = ({"h": 9, "w": 8}, {"h": 2, "w": 7}, {"h": 5, "w": 3})
LINEAR: dict[str, Any] = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
NAMED: dict[str, tuple[Any, ...]] = {
    "resize by 1.5 at odd sizes": (
        resized(1.5, 1.5, **LINEAR),
        {"h": 13, "w": 12},
        {"h": 16, "w": 11},
        {"h": 7, "w": 5},
    ),
    "resize by 1.5 compiled at odd sizes": (
        resized(1.5, 1.5, **LINEAR),
        {"h": 16, "w": 11},
        {"h": 13, "w": 12},
    ),
    "resize to half, down to one pixel": (
        resized(0.5, 0.5, mode="linear", coordinate_transformation_mode="pytorch_half_pixel"),
        {"h": 10},
        {"h": 2, "w": 3},
    ),
    "resize by 1.1 keeps small sizes": (
        resized(1.1, 1.1, **LINEAR),
        {"h": 3, "w": 10},
        {"h": 5, "w": 5},
        {"h": 12, "w": 7},
    ),
    "nearest by 1.3": (resized(1.3, 1.3, mode="nearest"), {"h": 17}, {"h": 20, "w": 4}, {"h": 2, "w": 2}),
    "nearest by 2.5, floor": (
        resized(2.5, 1.7, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        *SMALL,
    ),
    "cubic by 1.5": (resized(1.5, 1.5, mode="cubic", coordinate_transformation_mode="half_pixel"), *SMALL),
    "cubic without what lies outside": (resized(1.5, 1.5, mode="cubic", exclude_outside=1), *SMALL),
    "linear, asymmetric": (
        resized(1.5, 2.0, mode="linear", coordinate_transformation_mode="asymmetric"),
        *SMALL,
    ),
    "three dimensions": (resized(1.5, 2.0, 0.5, x=("n", 2, "d", "h", "w"), **LINEAR), *SMALL),
    "nearest to sizes, asymmetric": (to_shape("Add", 3, "nearest", "asymmetric"), *SMALL),
    "cubic to sizes": (to_shape("Mul", 2, "cubic", "asymmetric"), *SMALL),
    "average with uneven pads, rounded up, all counted": (
        pooled(
            "AveragePool",
            kernel_shape=[3, 2],
            strides=[2, 3],
            pads=[0, 1, 2, 0],
            ceil_mode=1,
            count_include_pad=1,
        ),
        {"h": 9, "w": 12},
        {"h": 6, "w": 7},
        {"h": 8, "w": 11},
    ),
    "average with uneven pads, rounded up, pixels counted": (
        pooled("AveragePool", kernel_shape=[3, 2], strides=[2, 3], pads=[0, 1, 2, 0], ceil_mode=1),
        *SMALL,
    ),
    "average, SAME with a stride over an open size": (
        pooled("AveragePool", kernel_shape=[3, 4], strides=[2, 3], auto_pad="SAME_UPPER"),
        *SMALL,
    ),
    "average, SAME beyond the window": (beyond, {}),
    "maximum, SAME and dilated": (
        pooled("MaxPool", kernel_shape=[2, 3], strides=[1, 3], dilations=[2, 2], auto_pad="SAME_UPPER"),
        {},
        {"h": 6},
    ),
    "maximum with uneven pads, rounded up": (
        pooled("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[0, 1, 2, 0], ceil_mode=1),
        {},
        {"h": 6},
        {"h": 7, "w": 5},
    ),
    "maximum of bytes": (pooled("MaxPool", U8, kernel_shape=[2, 2], pads=[0, 1, 1, 0]), *SMALL),
    "backwards to the end": (sliced(-1, -3, -1), *SMALL),
    "backwards from beyond": (sliced(2**31 - 1, 1, -2), *SMALL),
    "backwards to what means all": (sliced(4, 2**63 - 1, -1), *SMALL),
    "a cut, flattened": (cut_then("Flatten", axis=3), *SMALL),
    "a cut's shape": (cut_then("Shape"), *SMALL),
    "comparing open sizes": (same_sizes, {"h": 9, "w": 8}, {"h": 6, "w": 6}),
    "float32 on sizes": (scaled_in_float32, {"h": 9}, {"h": 10, "w": 20}, {"h": 30, "w": 3}),
    "read by another scale": (other_scale, *SMALL),
    "a range of fractions": (range_of_fractions, {"h": 14}, {"h": 3}),
    "whole powers": (lambda b: b.give(b.node("Pow", b.x("n", "h", dtype=I32), b.const(2.0, F32))), *SMALL),
    "sums of int32": (lambda b: b.give(b.node("ReduceSum", b.x("n", "h", dtype=I32), b.ints(1))), *SMALL),
    "whole sums of products": (
        lambda b: b.give(b.node("MatMulInteger", b.x("h", 3, dtype=U8), b.weight(3, 4, dtype=U8))),
        *SMALL,
    ),
    "remainders": (lambda b: b.give(b.node("Mod", b.x("n", "h", dtype=I64), b.const([-3], I64))), *SMALL),
    "a scalar beside a product": (
        lambda b: b.give(b.node("Gemm", b.x("h", 3), b.weight(3, 4), b.const([1.5], F32))),
        *SMALL,
    ),
    "block of three": (
        lambda b: b.give(b.node("SpaceToDepth", b.x("n", 2, "h", "w"), blocksize=3)),
        {"w": 6},
        {"h": 12, "w": 3},
    ),
    "a number of classes": (
        lambda b: b.give(b.node("OneHot", b.x("h", dtype=I64), b.const(5, I64), b.const([0, 2], F32))),
        *SMALL,
    ),
    "choosing by row": (
        lambda b: b.give(b.node("Where", b.x("h", dtype=BOOL), b.x("n", 3, "h"), b.x("n", 1, "h"))),
        *SMALL,
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_named(name: str, tmp_path: Path) -> None:
    fill, *sizes = NAMED[name]
    one = built(fill, *sizes)
    got = outcome(one, tmp_path)
    assert got.kind == "ok", f"{one}: {got.reason}"


@pytest.mark.parametrize(("count", "channels"), [(2, 7), (3, 5), (3, 7), (4, 7), (3, 10)])
@pytest.mark.parametrize("opset", [18, 21])
def test_parts_that_cannot_be_alike(count: int, channels: int, opset: int, tmp_path: Path) -> None:
    def fill(b: Build) -> None:
        b.give(*b.node("Split", b.x("n", channels, "h"), outputs=count, axis=1, num_outputs=count))
        b.give(*b.node("Split", b.x("h", "w"), outputs=count, axis=-1, num_outputs=count))

    sizes = ({"w": 10}, {"w": 11}, {"w": 9, "h": 2})
    got = outcome(built(fill, *sizes, opset=opset), tmp_path)
    assert got.kind == "ok", got.reason


def test_a_size_below_any_is_told_apart(tmp_path: Path) -> None:
    """torch writes -1 for "as it is": no size is."""

    def fill(b: Build) -> None:
        shape = b.node("Shape", b.x("n", 1, "h"))
        asked = b.node("Where", b.node("Equal", shape, b.ints(-1, -1, -1)), b.ints(1, 1, 1), shape)
        b.give(b.node("Expand", b.x("n", 1, 1), asked))

    one = built(fill, {}, {"h": 4}, {"n": 1})
    assert outcome(one, tmp_path).kind == "ok"
    fast = aerogel.compile(
        tmp_path / "case.onnx", shapes={n: v.shape for n, v in one.feeds[0].items()}, tune="off"
    )
    assert fast.network is not None
    assert not [n for n in fast.network.graph.nodes if n.op == "onnx"]


def test_without_onnxruntime_it_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = built(resized(1.5, 1.5, mode="linear", coordinate_transformation_mode="asymmetric"))
    (tmp_path / "m.onnx").write_bytes(one.model.SerializeToString())
    monkeypatch.setattr(foreign, "available", lambda: False)
    with pytest.raises(UnsupportedModel, match=r"Resize.*linear, asymmetric.*pip install onnxruntime"):
        aerogel.compile(tmp_path / "m.onnx", shapes={"x0": (2, 3, 9, 8)}, tune="off")


def test_enlarging_by_two_stays_torch_s(tmp_path: Path) -> None:
    """What kernels of ours take along."""
    for where, nearest in (("asymmetric", "floor"), ("half_pixel", "round_prefer_floor")):
        one = built(
            resized(2.0, 2.0, mode="nearest", coordinate_transformation_mode=where, nearest_mode=nearest)
        )
        assert outcome(one, tmp_path).kind == "ok"
        fast = aerogel.compile(tmp_path / "case.onnx", shapes={"x0": (2, 3, 9, 8)}, tune="off")
        assert fast.network is not None
        assert any(n.op == "aten.upsample_nearest2d.default" for n in fast.network.graph.nodes)


def test_no_axes_to_squeeze_fixes_the_sizes(tmp_path: Path) -> None:
    one = built(lambda b: b.give(b.node("Squeeze", b.x(1, "h", "w"))), {"h": 4, "w": 1})
    assert outcome(one, tmp_path).kind == "ok"
    fast = aerogel.compile(tmp_path / "case.onnx", shapes={"x0": (1, 4, 1)}, tune="off")
    with pytest.raises(AerogelError, match="takes 4 there"):
        fast.run(None, {"x0": np.zeros((1, 1, 1), np.float32)})


class Flags(nn.Module):
    """Layers with the flags that exporters translate each in their own way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Conv2d(3, 7, 3, 1, 1), nn.Conv2d(7, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        if self.kind == "pools":
            x = F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)
            x = F.max_pool2d(F.pad(x, (0, 1, 1, 0), mode="replicate"), 2, 2, ceil_mode=True)
        elif self.kind == "resizes":
            x = F.interpolate(
                F.interpolate(x, scale_factor=1.5, mode="bilinear"), scale_factor=1.5, mode="nearest"
            )
            x = F.interpolate(x[:, :, ::2], size=x.shape[2:], mode="bilinear", align_corners=True)
        else:
            x = torch.cat(x.chunk(3, 1)[::-1], 1) + torch.cat(torch.split(x, [2, 5], 1)[::-1], 1)
            x = F.interpolate(x, scale_factor=2, mode="bicubic")
        out: Tensor = self.last(x)
        return out


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("kind", ["pools", "resizes", "parts"])
def test_files_of_both_exporters(kind: str, dynamo: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path, x = Flags(kind).eval(), tmp_path / "m.onnx", torch.randn(2, 3, 13, 12)
    dims = {i: torch.export.Dim(name, min=6, max=64) for i, name in ((0, "n"), (2, "h"), (3, "w"))}
    dims[0] = torch.export.Dim("n", max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how: dict[str, Any] = {"dynamic_shapes": (dims,), "verbose": False} if dynamo else {
            "input_names": ["x"], "dynamic_axes": {"x": {0: "n", 2: "h", 3: "w"}}}  # fmt: skip
        torch.onnx.export(model, (x,), path, dynamo=dynamo, **how)
    name = onnx.load(path).graph.input[0].name
    fast = aerogel.compile(path, shapes={name: (2, 3, 13, 12)}, tune="off")
    for shape in ((2, 3, 13, 12), (1, 3, 16, 11), (3, 3, 8, 9)):
        x = torch.randn(shape)
        with torch.no_grad():
            wanted = model(x)
        (got,) = fast.run(None, {name: x.numpy()})
        assert got.shape == tuple(wanted.shape)
        assert np.abs(got - wanted.numpy()).max() <= 1e-4 * wanted.abs().max()


def test_a_piece_holds_its_own_options(tmp_path: Path) -> None:
    """Numbers that onnxruntime wants as constants are in its part of the model; weights are not."""
    one = built(
        lambda b: b.give(b.node("OneHot", b.x("h", dtype=I64), b.const(5, I64), b.const([0, 2], F32)))
    )
    assert outcome(one, tmp_path).kind == "ok"
    fast = aerogel.compile(tmp_path / "case.onnx", shapes={"x0": (9,)}, tune="off")
    assert fast.network is not None
    (piece,) = [n for n in fast.network.graph.nodes if n.op == "onnx"]
    content = fast.network.constants[piece.inputs[0]].numpy().tobytes()
    assert len(onnx.ModelProto.FromString(content).graph.initializer) == 2
