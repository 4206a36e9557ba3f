"""Averages, sums and tables of maps of bytes: the kernels and torch's form of them equal the reference to the
last bit, on every ISA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aerogel
from aerogel.backends.cpu.lower import bytemaps
from aerogel.backends.cpu.threads import Segment
from aerogel.capture import interpret
from aerogel.capture.bytemaps import tables
from aerogel.capture.int8 import meanings, quantized
from aerogel.codegen.cpu.abi import Kernel
from aerogel.errors import InvalidFile
from aerogel.ir import (
    IN_BYTES,
    Add,
    Array,
    Average,
    Conv,
    Graph,
    Layout,
    Node,
    Pool,
    Quantized,
    Ref,
    Shape,
    Table,
)
from tests import counts
from tests.small_models import sparse
from tests.suite.guard import Guarded
from tests.suite.sweep import levels, target_of

LEVELS = levels("direct")
ZEROS = (0, 1, 77, 128, 254, 255)


def meaning(rng: np.random.Generator) -> Quantized:
    return Quantized(float(np.float32(rng.random() * 0.1 + 1e-3)), int(rng.choice(ZEROS)))


def planar(rng: np.random.Generator, w: int) -> Layout:
    top, left, bottom, right = (int(v) for v in rng.integers(0, 3, 4))
    pitch = w + max(left, right) + int(rng.integers(3))
    return Layout("planar", pitch, (top, left, bottom, right), 0, "u8")


REGIONS = {name: Guarded() for name in ("x", "y", "residual", "bias")}


def answered(
    kernel: Kernel,
    given: dict[str, tuple[Array, Layout, int]],
    shape: Shape,
    zero: int,
    table: Array | None = None,
    threads: int = 1,
) -> Array:
    """Twice, against both guards, y once in the residual's place. The answer, after a look at its border."""
    answers = []
    for back in (False, True):
        places = {}
        for name, (array, layout, own) in given.items():
            sizes = (array.shape[0], array.shape[1], array.shape[2], array.shape[3])
            buffer = REGIONS[name].place(layout.elements(sizes), layout.item, back)
            layout.write(buffer, array, own)
            places[name] = buffer.ctypes.data
        y = REGIONS["y"].place(kernel.writes.elements(shape), kernel.writes.item, back)
        if back and "residual" in given:
            count = kernel.writes.elements(shape)
            y = np.frombuffer(REGIONS["residual"].memory[-4 * count :], np.uint32)
        if table is not None:
            places["bias"] = REGIONS["bias"].copy(table, back).ctypes.data
        Segment([(kernel, kernel.bind(y=y.ctypes.data, **places))], threads)()
        assert kernel.writes.dirty_border(y, shape, zero) == 0
        answers.append(kernel.writes.read(y, shape))
    np.testing.assert_array_equal(answers[0], answers[1])
    return answers[0]


def in_torch(node: Node, **values: Array) -> Array:
    found: Array = interpret.call(node, {name: torch.from_numpy(v) for name, v in values.items()}).numpy()
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(20))
def test_averages(level: str, seed: int, ran: Callable[[str, int], None]) -> None:
    ran("bytemaps", 0 if level != LEVELS[0] else counts.count("bytemaps", 1 / 60))
    for number in counts.seeds("bytemaps", 1 / 60, skip=seed * 1000):
        rng = np.random.default_rng(number)
        n, c, h, w = (int(v) for v in rng.integers((1, 1, 3, 3), (3, 14, 14, 40)))
        window, step = (tuple(int(v) for v in rng.integers(1, 4, 2)) for _ in range(2))
        pad = (int(rng.integers(0, window[0] // 2 + 1)), int(rng.integers(0, window[1] // 2 + 1)))
        whole = Pool("average", (0, 0), (1, 1), (0, 0), (1, 1))
        pool = whole if seed % 2 else Pool("average", (window[0], window[1]), (step[0], step[1]), pad, (1, 1))
        how = Average(meaning(rng), None if seed % 4 == 1 else meaning(rng), pool)
        x = rng.integers(0, 256, (n, c, h, w)).astype(np.uint8)
        if rng.random() < 0.3:
            x[...] = rng.choice([0, 255], x.shape)
        shape = how.shape(x.shape)
        assert shape is not None
        p, q = shape[2:]
        wanted, reads, writes = how.bytes_of(x), planar(rng, w), planar(rng, q)
        zero = 0 if how.y is None else how.y.zero
        writes = replace(writes, dtype="f32" if how.y is None else "u8")
        kernel = bytemaps.kernel(how, (n, c, h, w), (n, c, p, q), reads, writes, target_of(level))
        got = answered(kernel, {"x": (x, reads, how.x.zero)}, (n, c, p, q), zero, threads=1 + seed % 2)
        np.testing.assert_array_equal(got, wanted)
        if level == LEVELS[0]:
            node = Node("y", "u8.average", (Ref("x"), *how.args))
            np.testing.assert_array_equal(in_torch(node, x=x), wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(20))
def test_sums_of_two_maps(level: str, seed: int, ran: Callable[[str, int], None]) -> None:
    ran("bytemaps", 0 if level != LEVELS[0] else counts.count("bytemaps", 1 / 60))
    for number in counts.seeds("bytemaps", 1 / 60, skip=seed * 1000):
        rng = np.random.default_rng(number)
        shape = tuple(int(v) for v in rng.integers((1, 1, 1, 1), (3, 14, 14, 40)))
        n, c, h, w = shape
        how, layout = Add(meaning(rng), meaning(rng), meaning(rng)), planar(rng, w)
        a, b = (rng.integers(0, 256, shape).astype(np.uint8) for _ in range(2))
        wanted = how.bytes_of(a, b)
        kernel = bytemaps.kernel(how, (n, c, h, w), (n, c, h, w), layout, layout, target_of(level))
        given = {"x": (a, layout, how.a.zero), "residual": (b, layout, how.b.zero)}
        got = answered(kernel, given, (n, c, h, w), how.y.zero, threads=1 + seed % 2)
        np.testing.assert_array_equal(got, wanted)
        if level == LEVELS[0]:
            node = Node("y", "u8.add", (Ref("a"), Ref("b"), *how.args))
            np.testing.assert_array_equal(in_torch(node, a=a, b=b), wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(20))
def test_tables(level: str, seed: int, ran: Callable[[str, int], None]) -> None:
    """Any table, one of the same numbers at another scale, and one whose zero is not the border's."""
    ran("bytemaps", 0 if level != LEVELS[0] else counts.count("bytemaps", 1 / 60))
    for number in counts.seeds("bytemaps", 1 / 60, skip=seed * 1000):
        rng = np.random.default_rng(number)
        n, c, h, w = (int(v) for v in rng.integers((1, 1, 1, 1), (3, 14, 14, 40)))
        x_how, how, layout = meaning(rng), Table(meaning(rng)), planar(rng, w)
        table = Table.same(x_how, how.y) if seed % 3 else rng.integers(0, 256, 256).astype(np.uint8)
        x = rng.integers(0, 256, (n, c, h, w)).astype(np.uint8)
        kernel = bytemaps.kernel(how, (n, c, h, w), (n, c, h, w), layout, layout, target_of(level))
        given = {"x": (x, layout, x_how.zero)}
        got = answered(kernel, given, (n, c, h, w), how.y.zero, table, threads=1 + seed % 2)
        np.testing.assert_array_equal(got, table[x])
        if level == LEVELS[0]:
            node = Node("y", "u8.table", (Ref("x"), Ref("t"), *how.args))
            np.testing.assert_array_equal(in_torch(node, x=x, t=table), table[x])


def test_every_byte_through_every_table() -> None:
    """All 256 bytes, at every place of a vector."""
    x = np.add.outer(np.arange(256), np.arange(256)).astype(np.uint8).reshape(1, 4, 64, 256)
    table = np.random.default_rng(0).permutation(256).astype(np.uint8)
    layout, how = Layout("planar", 256, dtype="u8"), Table(Quantized(1.0, 3))
    for level in LEVELS:
        kernel = bytemaps.kernel(how, (1, 4, 64, 256), (1, 4, 64, 256), layout, layout, target_of(level))
        got = answered(kernel, {"x": (x, layout, 0)}, (1, 4, 64, 256), 3, table)
        np.testing.assert_array_equal(got, table[x])


def test_every_pair_of_bytes_adds_up() -> None:
    a, b = (v.astype(np.uint8).reshape(1, 4, 64, 256) for v in np.indices((256, 256)))
    layout = Layout("planar", 256, dtype="u8")
    for level, scale, zero in product(LEVELS, (0.3, 1.0, 1.7), (0, 100, 255)):
        how = Add(Quantized(0.5, 9), Quantized(0.5 * scale, 200), Quantized(0.75, zero))
        kernel = bytemaps.kernel(how, (1, 4, 64, 256), (1, 4, 64, 256), layout, layout, target_of(level))
        given = {"x": (a, layout, 9), "residual": (b, layout, 200)}
        got = answered(kernel, given, (1, 4, 64, 256), zero)
        np.testing.assert_array_equal(got, how.bytes_of(a, b))


class Between(nn.Module):
    """Whatever stands between convolutions: SiLU, an average, a sum that no convolution takes, a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 10, 3, 1, 1), nn.Conv2d(10, 10, 3, 1, 1), nn.Conv2d(10, 14, 1)
        self.inner, self.head = nn.Linear(14, 9), nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.a(x))
        z = y + F.silu(self.b(y))  # into the convolution, after its table
        low = torch.sigmoid(F.avg_pool2d(z, 3, 2, 1))
        other = F.max_pool2d(y, 3, 2, 1)
        joined = F.gelu(low + other)  # neither is a convolution
        found: torch.Tensor = self.head(F.hardswish(self.inner(self.c(joined).mean((2, 3)))))
        return found


def test_a_network_whose_maps_stay_in_bytes(tmp_path: Path) -> None:
    """Nothing between the first and the last convolution is a number; torch computes the same bytes, and so
    does the saved file on lesser machines."""
    torch.manual_seed(5)
    model, images = sparse(Between(), 0.6), [torch.randn(2, 3, 18, 21) for _ in range(4)]
    fast = aerogel.compile(model, images[0], dtype="int8", calibration=images, tune="off")
    net = fast.network
    assert net is not None
    ops = [node.op for node in net.graph.nodes]
    assert {op for op in ops if op.startswith("aten")} == {"aten.max_pool2d.default"}
    assert [ops.count(op) for op in ("quantize", "dequantize")] == [2, 1]
    assert [ops.count(op) for op in IN_BYTES] == [2, 2, 4]
    aerogel.save(fast, tmp_path / "m.aero")
    loaded = aerogel.load(tmp_path / "m.aero")
    for n, h, w in ((2, 18, 21), (1, 18, 21), (3, 30, 17)):
        x = torch.randn(n, 3, h, w)
        wanted = net.outputs(interpret.run(net.graph, net.real(), [x]))[0]
        for module in (fast, loaded):
            assert (module(x) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert (fast(x) - model(x)).norm() <= 0.2 * model(x).norm()


def test_bytes_that_mean_something_else_are_refused() -> None:
    how = Average(Quantized(0.5, 3), None, Pool("average", (0, 0), (1, 1), (0, 0), (1, 1)))
    read = Node("q", "quantize", (Ref("x"), 0.5, 3))
    for args, op in (((0.25, 3, *how.args[2:]), "u8.average"), ((0.5, 4, *how.args[2:]), "u8.average")):
        graph = Graph(("x",), (), (read, Node("y", op, (Ref("q"), *args))), (Ref("y"),))
        with pytest.raises(InvalidFile, match="mean something else"):
            meanings(graph, {})
    two = [Node(f"q{i}", "quantize", (Ref("x"), 0.5, i)) for i in range(2)]
    joined = Node("y", "aten.cat.default", ((Ref("q0"), Ref("q1")), 1))
    with pytest.raises(InvalidFile, match="several meanings"):
        meanings(Graph(("x",), (), (*two, joined), (Ref("y"),)), {})
    table = Graph(("x",), ("t",), (read, Node("y", "u8.table", (Ref("q"), Ref("t"), 1.0, 0))), (Ref("y"),))
    for bad in (
        torch.zeros(255, dtype=torch.uint8),
        torch.zeros(256),
        torch.zeros(2, 128, dtype=torch.uint8),
    ):
        with pytest.raises(InvalidFile, match="256 bytes"):
            tables(table, {"t": bad})
    for args in ((Ref("q"), 1.0, 0), (Ref("q"), Ref("t"), 0.0, 0), (Ref("q"), Ref("t"), 1.0, 256)):
        with pytest.raises(InvalidFile):
            Node("y", "u8.table", args)
    for window in ((0, 3), (2, 2, 2), (-1, 1), (2**10, 1)):
        with pytest.raises(InvalidFile, match=r"u8\.average takes"):
            Node("y", "u8.average", (Ref("q"), 0.5, 3, 0.5, 3, window, (1, 1), (0, 0), True))
    assert Graph.from_json(table.to_json()) == table


def test_maps_of_several_meanings_are_joined() -> None:
    """As in a file that was quantized elsewhere: what means something else is changed on its way."""
    graph = Graph(
        ("x",), ("w", "b"),
        (
            Node("a", "conv", (Ref("x"), Ref("w"), Ref("b")), conv=Conv.parse("c4k4r1s1u1p0+bias")),
            Node("c", "conv", (Ref("x"), Ref("w"), Ref("b")), conv=Conv.parse("c4k4r1s1u1p0+bias+relu")),
            Node("y", "aten.cat.default", ((Ref("a"), Ref("c")), 1)),
        ),
        (Ref("y"),),
    )  # fmt: skip
    shapes = dict.fromkeys("xac", (1, 4, 5, 5)) | {"y": (1, 8, 5, 5)}
    known = {name: Quantized(0.01 * (i + 1), 40 * i) for i, name in enumerate("xacy")}
    made, constants = quantized(
        graph, {"w": torch.randn(4, 4, 1, 1), "b": torch.zeros(4)}, shapes, known, ("a", "c")
    )
    assert [node.op for node in made.nodes].count("u8.table") == 2
    assert meanings(made, constants)["y"] == known["y"]
