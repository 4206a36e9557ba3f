"""int8 of models that are odd: filters without weights, several maps at once, pixels woven of channels."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aerogel
from aerogel.capture import interpret
from aerogel.errors import InvalidArgument


def images() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(2, 3, 8, 8)


def in_eight(model: nn.Module, x: Tensor) -> tuple[Any, float]:
    """Compiled in int8, and how far it is from the model, as a share of the output's range."""
    torch.manual_seed(0)
    fast = aerogel.compile(model.eval(), x, dtype="int8", calibration=[x], tune="off")
    with torch.no_grad():
        wanted = model(x)
    return fast, float((fast(x) - wanted).abs().max() / (wanted.max() - wanted.min()))


@pytest.mark.parametrize("left", [0.0, 1e-9, 1e-42])
@pytest.mark.parametrize("reach", [1.0, 255.0])
def test_a_filter_without_weights_keeps_its_bias(left: float, reach: float) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 32, 3, padding=1)
    conv.weight.data /= 0.2 * reach
    conv.weight.data[0] = left
    assert conv.bias is not None
    conv.bias.data[0] = 0.45
    fast, far = in_eight(nn.Sequential(conv), torch.rand(2, 4, 8, 8) * reach)
    assert far < 0.01
    assert any(note.startswith("1 layers in int8") for note in fast.notes)


class Reshapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 1), nn.Linear(16 * 64, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        return self.b(y.view(y.size(0), -1))  # type: ignore[no-any-return]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.relu(self.a(x)).chunk(2, 1)
        return self.b(left) + self.c(right)  # type: ignore[no-any-return]


class Places(nn.Module):
    """Pooling that gives two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = nn.functional.max_pool2d(self.a(x), 2, return_indices=True)
        return self.b(y)  # type: ignore[no-any-return]


WOVEN = nn.Sequential(nn.Conv2d(3, 16, 1), nn.PixelShuffle(2), nn.Conv2d(4, 16, 1))
TURNED = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ConvTranspose2d(16, 16, 2, 2), nn.ReLU(), nn.Conv2d(16, 16, 1))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "model", [Reshapes(), Parts(), Places(), WOVEN, TURNED], ids=lambda m: type(m).__name__
)
def test_what_stands_between_layers_in_int8(model: nn.Module, batch: int) -> None:
    """Numbers, several maps, pixels woven of channels: the program runs, and not torch in its place."""
    fast, far = in_eight(copy.deepcopy(model), images()[:batch])
    assert far < 0.05
    assert len(fast.notes) == 1, fast.notes
    assert "layers in int8; one alone loses at most" in fast.notes[0]


class Waves(nn.Module):
    """One dimension: pooled, added, laid side by side, looked up, enlarged."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(4, 16, 5, 2, 2), nn.Conv1d(16, 16, 3, 1, 1)
        self.each, self.c = nn.Conv1d(16, 16, 3, 1, 1, groups=16), nn.Conv1d(32, 12, 3, 1, 2, 2)
        self.d = nn.Conv1d(12, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool1d(torch.relu(self.a(x)), 2)
        z = torch.relu(self.b(y) + y)
        z = F.interpolate(torch.cat([z, F.silu(self.each(z))], 1), scale_factor=2)
        return self.d(F.silu(self.c(z))).mean(2)  # type: ignore[no-any-return]


def test_layers_of_one_dimension(tmp_path: Path) -> None:
    x = torch.randn(3, 4, 64)
    fast, far = in_eight(Waves(), x)
    assert far < 0.1
    assert fast.notes[0].startswith("5 layers in int8"), fast.notes
    graph, constants = fast.network.graph, fast.network.real()
    assert torch.equal(fast(x), fast.network.outputs(interpret.run(graph, constants, [x]))[0])
    aerogel.save(fast, tmp_path / "waves.aero")
    assert torch.equal(aerogel.load(tmp_path / "waves.aero")(x[:2]), fast(x[:2]))


def test_calibration_without_images_is_said() -> None:
    x = images()
    with pytest.raises(InvalidArgument, match="batches of no images only"):
        aerogel.compile(Parts().eval(), x, dtype="int8", calibration=[x[:0]], tune="off")


class Scaled(nn.Module):
    """An input in order, one by name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * scale  # type: ignore[no-any-return]


def test_calibration_in_order_or_by_name() -> None:
    model, x, scale = Scaled().eval(), torch.randn(2, 4, 9, 9), torch.ones(1, 1, 1, 1)
    samples: tuple[Any, ...] = ((x, scale), {"scale": scale, "x": x})
    found = [
        aerogel.compile(model, (x,), {"scale": scale}, dtype="int8", calibration=[one], tune="off")
        for one in samples
    ]
    assert torch.equal(*(fast(x, scale=scale) for fast in found))
    for wrong in ((x,), {"x": x}, {"x": x, "other": scale}):
        with pytest.raises(aerogel.ShapeError, match="the model takes 'x', 'scale'"):
            aerogel.compile(model, (x,), {"scale": scale}, dtype="int8", calibration=[wrong], tune="off")
