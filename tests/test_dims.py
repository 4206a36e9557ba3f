"""Sizes inside a file as expressions of its inputs': what they say, and what becomes possible by them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper

import aerogel
from aerogel.backends.cpu.lower.program import build
from aerogel.capture.onnx.expressions import Expression, joined
from aerogel.capture.onnx.read import read
from aerogel.capture.separate import separate
from aerogel.errors import ShapeError
from aerogel.ir import Conv, Graph, Node, Ref, host
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.reading import network_of
from tests.onnx_files import answers, numbers, written

node = helper.make_node
OPEN = ["N", 4, "H", "W"]


def test_expressions_are_what_python_says() -> None:
    """Seeded sums, quotients and roundings, at sizes that are not the examples'."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        sizes = {"h": int(rng.integers(1, 300)), "w": int(rng.integers(1, 300))}
        values = {name: (Expression.open(name, (v, v)), Fraction(v)) for name, v in sizes.items()}
        expression, wanted = values["h"]
        for _ in range(8):
            op = str(rng.choice(["add", "sub", "mul", "floordiv", "truediv", "neg", "floor", "ceil"]))
            other: tuple[Expression | int, Fraction]
            number = int(rng.integers(1, 9))
            other = values["w"] if op in ("add", "sub") and rng.random() < 0.5 else (number, Fraction(number))
            args = [expression] if op in ("neg", "floor", "ceil") else [expression, other[0]]
            found = joined(op, args, False)
            assert found is not None
            if op == "floordiv":
                wanted = Fraction(wanted // other[1])
            elif op in ("neg", "floor", "ceil"):
                wanted = {"neg": -wanted, "floor": Fraction(wanted.__floor__())}.get(
                    op, Fraction(wanted.__ceil__())
                )
            else:
                how = {"add": wanted + other[1], "sub": wanted - other[1], "mul": wanted * other[1]}
                wanted = how.get(op, wanted / other[1])
            expression = found
            assert expression.both[0] == pytest.approx(float(wanted), rel=1e-12), f"seed {seed}: {expression}"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((-1, 2, 1), (1, 2, 0), True),
        ((4, 2, 0), (0, 2, 2), True),
        ((-1, 2, 1), (0, 2, 0), False),
        ((1, 3, 0), (0, 3, 0), False),
    ],
)
def test_one_size_is_written_one_way(
    one: tuple[int, int, int], other: tuple[int, int, int], same: bool
) -> None:
    """(h + a)//b + c."""
    h = Expression.open("h", (7, 39))
    first, second = (
        (h + Expression.of(a)).times(Fraction(1, b)).floor() + Expression.of(c) for a, b, c in (one, other)
    )
    assert (first == second) is same
    assert (str(first) == str(second)) is same


def _residual(path: Path, short: list[Any], arrays: dict[str, Any]) -> Path:
    """A strided 3x3 with a shortcut beside it, in a file whose batch and image stay open."""
    nodes = [
        node("Conv", ["x", "a"], ["p"], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Relu", ["p"], ["q"]),
        node("Conv", ["q", "b"], ["r"], pads=[1, 1, 1, 1]),
        *short,
        node("Add", ["r", "s"], ["t"]),
        node("Relu", ["t"], ["y"]),
    ]
    arrays = {"a": numbers(4, 4, 3, 3), "b": numbers(4, 4, 3, 3, seed=1), **arrays}
    return written(path, nodes, {"x": OPEN}, {"y": OPEN}, arrays)


SHORTCUTS = {
    "a projection": [node("Conv", ["x", "c"], ["s"], strides=[2, 2])],
    "a pool": [node("MaxPool", ["x"], ["s"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])],
    "a part": [
        node("Conv", ["x", "c"], ["o"], strides=[2, 2]),
        node("Concat", ["o", "p"], ["both"], axis=1),
        node("Split", ["both"], ["s", "unused"], axis=1, num_outputs=2),
    ],
    "and back": [
        node("Resize", ["q", "", "twice"], ["large"], mode="nearest"),
        node("MaxPool", ["large"], ["s"], kernel_shape=[2, 2], strides=[2, 2]),
    ],
}


@pytest.mark.parametrize("what", SHORTCUTS)
def test_residuals_fuse_where_sizes_stay_open(what: str, tmp_path: Path) -> None:
    arrays = {"c": numbers(4, 4, 1, 1, seed=2), "twice": np.array([1, 1, 2, 2], np.float32)}
    path = _residual(tmp_path / "m.onnx", SHORTCUTS[what], arrays)
    captured = read(path, {"x": (1, 4, 12, 10)})
    network, _ = network_of(GraphModel(captured, captured.constants), captured.filled(), None)
    assert [n.op for n in network.graph.nodes if n.op.startswith("aten.add")] == []
    fast = aerogel.compile(path, shapes={"x": (1, 4, 12, 10)}, tune="off")
    for shape in ((1, 4, 12, 10), (3, 4, 12, 10), (2, 4, 9, 15)):
        x = numbers(*shape)
        if what != "and back" or shape[2] % 2 == 0:
            assert np.allclose(fast.run(None, {"x": x})[0], answers(path, x)[0], atol=1e-5), shape


def test_sizes_that_agree_by_chance_are_not_one(tmp_path: Path) -> None:
    """Half of an even size, rounded up or down: both examples are even."""
    short = [node("MaxPool", ["x"], ["s"], kernel_shape=[2, 2], strides=[2, 2])]
    path = _residual(tmp_path / "m.onnx", short, {})
    captured = read(path, {"x": (1, 4, 12, 10)})
    network, _ = network_of(GraphModel(captured, captured.constants), captured.filled(), None)
    assert [n.op for n in network.graph.nodes if n.op.startswith("aten.add")] == ["aten.add.Tensor"]
    fast, x = aerogel.compile(path, shapes={"x": (1, 4, 12, 10)}, tune="off"), numbers(1, 4, 12, 10)
    assert np.allclose(fast.run(None, {"x": x})[0], answers(path, x)[0], atol=1e-5)


def _shape_of(start: int, end: int, name: str) -> Any:
    return node("Shape", ["x"], [name], start=start, end=end)


def test_a_number_with_fractions_is_not_its_floor(tmp_path: Path) -> None:
    """H / 3 in float32, rounded down and up: alike at both examples, and at 4 rows not."""
    nodes = [_shape_of(2, 3, "h"), _shape_of(0, 2, "nc"), _shape_of(3, 4, "w")]
    nodes += [node("Cast", ["h"], ["f"], to=1), node("Div", ["f", "three"], ["q"])]
    for how, name in (("Floor", "a"), ("Ceil", "b")):
        nodes += [node(how, ["q"], [f"{name}f"]), node("Cast", [f"{name}f"], [f"{name}i"], to=7)]
        nodes += [node("Concat", ["nc", f"{name}i", "w"], [f"{name}s"], axis=0)]
        nodes += [node("Resize", ["x", "", "", f"{name}s"], [name], mode="linear")]
    nodes += [node("Conv", ["a", "k"], ["c"], pads=[1, 1, 1, 1]), node("Add", ["c", "b"], ["y"])]
    sizes: list[Any] = ["N", 16, "H", "W"]
    arrays = {"three": np.array([3], np.float32), "k": _kernel()}
    path = written(tmp_path / "m.onnx", nodes, {"x": sizes}, {"y": None}, arrays)
    captured = read(path, {"x": (1, 16, 12, 10)})
    network, _ = network_of(GraphModel(captured, captured.constants), captured.filled(), None)
    assert "aten.add.Tensor" in [n.op for n in network.graph.nodes]
    fast, x = aerogel.compile(path, shapes={"x": (1, 16, 12, 10)}, tune="off"), numbers(1, 16, 12, 10)
    assert np.allclose(fast.run(None, {"x": x})[0], answers(path, x)[0], atol=1e-5)


def _kernel() -> Any:
    kept = np.random.default_rng(0).random((16, 16, 3, 3)) > 0.9
    return (numbers(16, 16, 3, 3) * kept).astype(np.float32)


def test_the_name_of_a_size_is_no_expression(tmp_path: Path) -> None:
    """A file may call an input's size "H + 1"; nothing says that it is one more than H."""
    nodes = [node("Conv", ["x", "k"], ["c"], pads=[1, 1, 2, 1]), node("Add", ["c", "z"], ["y"])]
    sizes: dict[str, list[Any] | None] = {"x": ["N", 16, "H", "W"], "z": ["N", 16, "H + 1", "W"]}
    path = written(tmp_path / "m.onnx", nodes, sizes, {"y": None}, {"k": _kernel()})
    fast = aerogel.compile(path, shapes={"x": (1, 16, 12, 10), "z": (1, 16, 13, 10)}, tune="off")
    for rows in (13, 1):
        x, z = numbers(1, 16, 12, 10), numbers(1, 16, rows, 10)
        assert np.allclose(fast.run(None, {"x": x, "z": z})[0], answers(path, x, z)[0], atol=1e-5)


def test_a_residual_of_other_sizes_never_reaches_a_kernel() -> None:
    """The second line, if a rule about sizes were wrong."""
    made = Node("y", "conv", (Ref("x"), Ref("w"), Ref("z")), {}, Conv(4, 4, epilogue=("add",)))
    graph = Graph(("x", "z"), ("w",), (made,), (Ref("y"),))
    shapes = {"x": (1, 4, 5, 5), "z": (1, 4, 1, 5), "w": (4, 4, 1, 1), "y": (1, 4, 5, 5)}
    with pytest.raises(ShapeError, match="other sizes"):
        build(graph, shapes, {}, {}, {}, host())


def test_a_batch_that_stays_open_runs_image_by_image(tmp_path: Path) -> None:
    arrays = {"c": numbers(4, 4, 1, 1, seed=2)}
    path = _residual(tmp_path / "m.onnx", SHORTCUTS["a projection"], arrays)
    assert separate(read(path, {"x": (4, 4, 12, 10)}))


def test_padding_that_comes_out_as_a_number_is_one(tmp_path: Path) -> None:
    """SAME at stride 1, as exporters write it: computed from sizes, and the same at all of them."""
    path = written(
        tmp_path / "m.onnx",
        [
            node("Conv", ["x", "a"], ["p"]),
            node("Relu", ["p"], ["q"]),
            node("MaxPool", ["q"], ["y"], kernel_shape=[2, 2], auto_pad="SAME_UPPER", ceil_mode=1),
        ],
        {"x": OPEN},
        {"y": OPEN},
        {"a": numbers(4, 4, 1, 1)},
    )
    captured = read(path, {"x": (1, 4, 12, 10)})
    pads = [n for n in captured.graph.nodes if n.op == "aten.constant_pad_nd.default"]
    assert [n.args[1] for n in pads] == [(0, 1, 0, 1)]
    fast = aerogel.compile(path, shapes={"x": (1, 4, 12, 10)}, tune="off")
    for shape in ((1, 4, 12, 10), (2, 4, 7, 5)):
        assert np.array_equal(
            fast.run(None, {"x": numbers(*shape)})[0].shape, answers(path, numbers(*shape))[0].shape
        )
        assert np.allclose(
            fast.run(None, {"x": numbers(*shape)})[0], answers(path, numbers(*shape))[0], atol=1e-5
        )
    assert torch.is_tensor(captured.constants[next(iter(captured.constants))])
