"""What constants around a convolution become part of it, and what of a weight counts as zero."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper
from torch import Tensor, nn
from torch.nn import functional as F

import aerogel
from aerogel.capture.network import Network
from aerogel.runtime.reading import network_of
from tests.onnx_files import answers, numbers, written
from tests.small_models import right, sparse

Around = Callable[[Any, Tensor], Tensor]


class Held(nn.Module):
    """A layer, a constant, and what is done with both."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], around: Around) -> None:
        super().__init__()
        self.layer, self.around = layer, around
        self.c = nn.Buffer(torch.rand(shape) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.around(self, x)
        return answer


def network(model: nn.Module, x: Tensor) -> Network:
    return network_of(model.eval(), ((x,), {}), None)[0]


def conv(bias: bool = True, **options: Any) -> nn.Module:
    return nn.Conv2d(3, 6, 3, bias=bias, **options)


IMAGES, SIGNALS, ROWS = (2, 3, 9, 7), (2, 3, 17), (4, 12)
FOLDED: dict[str, tuple[nn.Module, tuple[int, ...], Around, tuple[int, ...]]] = {
    "a bias": (conv(False), (1, 6, 1, 1), lambda m, x: m.layer(x) + m.c, IMAGES),
    "a further bias": (conv(), (6, 1, 1), lambda m, x: m.c + m.layer(x), IMAGES),
    "a bias taken away": (conv(), (1, 6, 1, 1), lambda m, x: m.layer(x) - m.c, IMAGES),
    "a scale": (conv(), (1, 6, 1, 1), lambda m, x: m.layer(x) * m.c, IMAGES),
    "a divisor": (conv(False), (6, 1, 1), lambda m, x: m.layer(x) / m.c, IMAGES),
    "both": (conv(), (1, 6, 1, 1), lambda m, x: F.relu((m.layer(x) + m.c) * m.c), IMAGES),
    "one number": (conv(), (1,), lambda m, x: m.layer(x) * m.c, IMAGES),
    "a signal's": (nn.Conv1d(3, 6, 3, bias=False), (1, 6, 1), lambda m, x: m.layer(x) + m.c, SIGNALS),
    "a matrix's": (nn.Linear(12, 6, bias=False), (6,), lambda m, x: m.layer(x) + m.c, ROWS),
    "zeros around": (conv(), (1,), lambda m, x: m.layer(F.pad(x, (0, 1, 2, 0))), IMAGES),
    "and its own": (conv(padding=1), (1,), lambda m, x: m.layer(F.pad(x, (1, 1))), IMAGES),
    "zeros around a signal": (nn.Conv1d(3, 6, 3), (1,), lambda m, x: m.layer(F.pad(x, (2, 1))), SIGNALS),
}
LEFT: dict[str, tuple[nn.Module, tuple[int, ...], Around, tuple[int, ...]]] = {
    "a whole map": (conv(), (1, 6, 7, 5), lambda m, x: m.layer(x) + m.c, IMAGES),
    "a column": (conv(), (6, 7, 1), lambda m, x: m.layer(x) + m.c, IMAGES),
    "the other way": (conv(), (6, 1, 1), lambda m, x: m.c / m.layer(x).exp(), IMAGES),
    "a difference the other way": (conv(), (6, 1, 1), lambda m, x: m.c - m.layer(x), IMAGES),
    "read twice": (conv(), (6, 1, 1), lambda m, x: (y := m.layer(x)) * (y + m.c), IMAGES),
    "wider": (conv(), (1, 6, 1, 1), lambda m, x: m.layer(x) + m.c.double(), IMAGES),
    "larger": (conv(), (5, 1, 6, 1, 1), lambda m, x: m.layer(x) + m.c, IMAGES),
    "times": (conv(), (6, 1, 1), lambda m, x: torch.add(m.layer(x), m.c, alpha=2), IMAGES),
    "ones around": (conv(), (1,), lambda m, x: m.layer(F.pad(x, (0, 1, 2, 0), value=1.0)), IMAGES),
    "pixels less": (conv(), (1,), lambda m, x: m.layer(F.pad(x, (-1, 1))), IMAGES),
    "channels more": (conv(), (1,), lambda m, x: m.layer(F.pad(x[:, 1:], (0, 0, 0, 0, 1, 0))), IMAGES),
}


def test_pixels_woven_of_images_are_left() -> None:
    """Over a signal, pixel_shuffle weaves images."""
    model = Held(nn.Conv1d(3, 6, 3, padding=1), (1,), lambda m, x: F.pixel_shuffle(m.layer(x), 2) * 2.0)
    x = torch.randn(4, 3, 20)
    right(model.eval(), aerogel.compile(model.eval(), x, tune="off"), x)


@pytest.mark.parametrize(
    ("by", "dtype"), [(1e-3, torch.float16), (1e7, torch.float16), (1e39, torch.float32)]
)
def test_a_scale_that_weights_cannot_hold_is_left(by: float, dtype: torch.dtype) -> None:
    layer = nn.Conv2d(3, 6, 3, bias=False)
    model = Held(layer, (1,), lambda m, x: m.layer(x) * by).eval().to(dtype)
    with torch.no_grad():
        layer.weight *= 0.1
    x = (torch.rand(1, 3, 9, 9) * (255 if by < 1 else 1e-4)).to(dtype)
    assert "aten.mul.Tensor" in [node.op for node in network(model, x).graph.nodes]
    with torch.no_grad():
        assert torch.equal(aerogel.compile(model, x, tune="off")(x), model(x))


@pytest.mark.parametrize(("shape", "first"), [((6,), False), ((1, 1, 6), True)])
def test_a_bias_of_every_step(shape: tuple[int, ...], first: bool) -> None:
    """A Linear over steps of a sequence, and its bias as a sum of its own."""

    def around(m: Any, x: Tensor) -> Tensor:
        layer, shift = m.layer(x), m.c
        found: Tensor = shift + layer if first else layer + shift
        return found

    model, x = Held(nn.Linear(12, 6, bias=False), shape, around).eval(), torch.randn(2, 5, 12)
    assert [node.op for node in network(model, x).graph.nodes] == ["aten.linear.default"]
    right(model, aerogel.compile(model, x, tune="off"), x)


@pytest.mark.parametrize("shape", [(5, 6), (1,), (2, 1, 5, 6)])
def test_what_is_no_bias_of_every_step(shape: tuple[int, ...]) -> None:
    model = Held(nn.Linear(12, 6, bias=False), shape, lambda m, x: m.layer(x) + m.c).eval()
    x = torch.randn(2, 5, 12)
    assert "aten.add.Tensor" in [node.op for node in network(model, x).graph.nodes]
    right(model, aerogel.compile(model, x, tune="off"), x)


@pytest.mark.parametrize("sparsity", [0.0, 0.8])
@pytest.mark.parametrize("what", FOLDED)
def test_folded(what: str, sparsity: float) -> None:
    layer, shape, around, given = FOLDED[what]
    model, x = sparse(Held(layer, shape, around), sparsity), torch.randn(given)
    assert {node.op for node in network(model, x).graph.nodes} <= {"conv", "aten.relu.default"}
    right(model, aerogel.compile(model, x, tune="off"), x)


@pytest.mark.parametrize("what", LEFT)
def test_left_as_it_is(what: str) -> None:
    layer, shape, around, given = LEFT[what]
    model, x = Held(layer, shape, around).eval(), torch.randn(given)
    assert {node.op for node in network(model, x).graph.nodes} > {"conv"}
    right(model, aerogel.compile(model, x, tune="off"), x)


def a_gelu(path: Path, order: str, by: float, half: float, other: str = "x") -> Path:
    """x * (1 + erf(x / sqrt(2))) / 2 as exporters write it, or nearly so."""
    n = helper.make_node
    made = [
        n("Div", [other, "by"], ["a"]) if by > 1 else n("Mul", ["by", other], ["a"]),
        n("Erf", ["a"], ["b"]),
        n("Add", ["b", "one"], ["c"]),
    ]
    first, second, third = list(order)
    made += [n("Mul", [first, second], ["d"]), n("Mul", [third, "d"], ["y"])]
    alone = {"by": by, "one": 1.0, "h": half}
    arrays = {name: np.array(value, np.float32) for name, value in alone.items()}
    arrays["z"] = numbers(3, 8, seed=1)
    return written(path, made, {"x": [3, 8]}, {"y": [3, 8]}, arrays)


@pytest.mark.parametrize("order", ["xch", "hxc", "cxh", "hcx"])
@pytest.mark.parametrize("by", [2**0.5, 0.5**0.5])
def test_gelu_in_any_order(order: str, by: float, tmp_path: Path) -> None:
    path, x = a_gelu(tmp_path / "gelu.onnx", order, by, 0.5), numbers(3, 8)
    model = aerogel.OnnxModel(path)
    (node,) = network_of(model.as_graph(), ((torch.from_numpy(x),), {}), None)[0].graph.nodes
    assert node.op == "aten.gelu.default"
    assert np.allclose(model(torch.from_numpy(x)).detach(), answers(path, x)[0], atol=1e-6)


@pytest.mark.parametrize(("by", "half", "other"), [(1.5, 0.5, "x"), (2**0.5, 0.4, "x"), (2**0.5, 0.5, "z")])
def test_nearly_gelu(by: float, half: float, other: str, tmp_path: Path) -> None:
    path, x = a_gelu(tmp_path / "gelu.onnx", "xch", by, half, other), numbers(3, 8)
    model = aerogel.OnnxModel(path)
    assert np.allclose(model(torch.from_numpy(x)).detach(), answers(path, x)[0], atol=1e-6)
    assert not np.allclose(F.gelu(torch.from_numpy(x)), answers(path, x)[0], atol=1e-6)


def decayed(shape: tuple[int, ...]) -> Tensor:
    """Weights of which weight decay has left half."""
    weight = torch.randn(shape)
    return torch.where(torch.rand(shape) < 0.5, weight * 1e-39, weight)


def test_weights_too_small_to_multiply_count_as_zeros() -> None:
    layer, x = nn.Conv2d(16, 32, 1), torch.randn(1, 16, 8, 8)
    layer.weight.data = decayed((32, 16, 1, 1))
    small, model = int((layer.weight.abs() < 1e-37).sum()), nn.Sequential(layer, nn.ReLU()).eval()
    fast = aerogel.compile(model, x, tune="off")
    right(model, fast, x)
    assert fast.network is not None
    (node,) = fast.network.convs()
    assert int((fast.network.weight(node).array == 0).sum()) == small
    assert f"{small} weights are below 1.2e-38" in fast.notes[0]
    assert int((layer.weight == 0).sum()) == 0, "the user's model is as it was"


def test_a_small_number_alone_may_be_an_epsilon() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.least = nn.Conv2d(3, 4, 1, bias=False), nn.Buffer(torch.tensor(1e-40))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x).relu()
            return y / (y.sum(1, keepdim=True) + self.least)

    model, x = Shares().eval(), torch.zeros(1, 3, 4, 4)
    assert aerogel.compile(model, x, tune="off")(x).isfinite().all()
    assert network(model, x).constants["least"] > 0


def test_half_precision_keeps_its_own() -> None:
    model, x = nn.Conv2d(4, 4, 1, bias=False).half().eval(), torch.randn(1, 4, 3, 3).half()
    model.weight.data.fill_(1e-6)
    fast = aerogel.compile(model, x, tune="off")
    assert fast.network is not None
    assert all(bool((w != 0).all()) for w in fast.network.real().values())


def test_a_file_is_read_without_them(tmp_path: Path) -> None:
    weight = decayed((4, 3, 1, 1)).numpy()
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], name="conv")]
    path = written(tmp_path / "a.onnx", nodes, {"x": [1, 3, 5, 5]}, {"y": [1, 4, 5, 5]}, {"w": weight})
    model = aerogel.OnnxModel(path)
    held: Any = model.get_submodule("conv")
    assert int((held.weight == 0).sum()) == int((np.abs(weight) < 1e-37).sum()) > 0
    x = numbers(1, 3, 5, 5)
    assert np.allclose(model(torch.from_numpy(x)).detach(), answers(path, x)[0], atol=1e-6)
