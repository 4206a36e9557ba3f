"""Models that meet many image sizes: every size has a program, and programs share weights and memory."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aerogel
from aerogel.backends.cpu.lower import program
from tests.small_models import runs, sparse


class Grid(nn.Module):
    """A detector's head: it caches a grid for the size that it saw last, as ultralytics' Detect does."""

    shape = None
    grid = torch.empty(0)
    strides = torch.empty(0)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.stride = torch.tensor([2.0])

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.shape != y.shape:
            h, w = y.shape[2:]
            down, across = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            self.grid = torch.stack((across, down), -1).view(-1, 2).type_as(y)
            self.strides = y.new_full((h * w, 1), self.stride[0])
            self.shape = y.shape
        return y.flatten(2) + (self.grid * self.strides).sum(1)  # type: ignore[no-any-return]


def _right(fast: Any, model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        wanted = model(x)
    assert torch.allclose(fast(x), wanted, atol=1e-4)


def _kernels(fast: Any) -> int:
    """Return how many programs of the module and its specializations run on our kernels."""
    return sum(any(part.natives for part in made.parts) for made in _programs(fast))


def _programs(fast: Any) -> list[program.Program]:
    return [entry.program for entry in runs(fast).memory.entries.values()]


def test_fresh_model_that_caches_a_grid_compiles_whole_for_all_sizes() -> None:
    model = sparse(Grid())
    fast = aerogel.compile(model, torch.randn(1, 3, 32, 32), tune="off")
    assert str(fast.how) == "graph"
    assert model.shape is None, "the user's model stays fresh"
    for size in ((32, 32), (48, 32), (64, 96), (32, 32)):
        _right(fast, model, torch.randn(1, 3, *size))
    assert len(fast._others._made) == 0
    assert _kernels(fast) == 3


def test_model_with_a_cached_grid_gets_a_program_for_other_sizes() -> None:
    """It was called before: its graph holds the grid of one size, and what is shared are weights alone."""
    model = sparse(Grid())
    model(torch.randn(1, 3, 32, 32))
    fast = aerogel.compile(model, torch.randn(1, 3, 32, 32), tune="off")
    for size in ((32, 32), (48, 32), (64, 96), (48, 32), (32, 32)):
        _right(fast, model, torch.randn(1, 3, *size))
    (other,) = fast._others._made
    first, second = (one.network for one in (fast, other))
    assert first is not None
    assert second is not None
    assert all(second.weights[name] is weight for name, weight in first.weights.items())
    assert _kernels(fast) == 3


def test_reading_a_model_leaves_no_stand_ins_in_it() -> None:
    """torch.export writes fake tensors into attributes of what it runs: a later copy would fail on them."""
    model = sparse(Grid())
    fast = aerogel.compile(model, torch.randn(1, 3, 32, 32), tune="off")
    for owner in (model, fast.original):
        assert not [v for v in vars(owner).values() if "Fake" in type(v).__name__]
    copy.deepcopy(fast.original)(torch.randn(1, 3, 40, 40))


class Remembering(nn.Module):
    """Keeps what it computed, with its gradient, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale, self.cache = (
            nn.Conv2d(3, 8, 3),
            nn.Parameter(torch.ones(1)),
            dict[Any, Tensor](),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if y.shape not in self.cache:
            self.cache[y.shape] = self.scale * torch.ones_like(y[:1])
        return y + self.cache[y.shape]  # type: ignore[no-any-return]


def test_model_that_keeps_results_with_gradients_is_copied() -> None:
    model, x = sparse(Remembering()), torch.randn(1, 3, 12, 12)
    model(x)
    fast = aerogel.compile(model, x, tune="off")
    for width in (12, 14, 12):
        _right(fast, model, torch.randn(1, 3, 12, width))


def test_twenty_sizes_in_turn_keep_their_programs() -> None:
    model = sparse(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)))
    fast = aerogel.compile(model, torch.randn(1, 3, 24, 24), tune="off")
    images = [torch.randn(1, 3, 16 + i, 20 + 2 * (i % 5)) for i in range(20)]
    wanted = [fast(x) for x in images]
    before = _programs(fast)
    assert len(before) == 20
    assert all(torch.equal(fast(x), y) for x, y in zip(images, wanted, strict=True))
    assert {id(p) for p in _programs(fast)} == {id(p) for p in before}, "nothing was built twice"
    assert len(runs(fast).memory.arenas) == 1, "all sizes run in one arena"


def test_programs_stay_within_the_limit() -> None:
    model = sparse(nn.Sequential(nn.Conv2d(3, 128, 3), nn.Conv2d(128, 128, 3)))
    fast = aerogel.compile(model, torch.randn(1, 3, 12, 12), tune="off")
    for width in range(12, 22):
        fast(torch.randn(1, 3, 12, width))
    every = fast.workspace_bytes()
    fast.workspace_limit = every // 2
    fast(torch.randn(1, 3, 12, 12))
    assert fast.workspace_bytes() <= every // 2
    assert 1 < len(_programs(fast)) < 10
    fast.forget()
    assert fast.workspace_bytes() == 0


def test_captures_that_fail_in_a_row_end_the_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt costs seconds; the warning names the call by its sizes."""
    from aerogel.runtime import others

    attempts = []

    def fails(first: Any, args: Any, kwargs: Any) -> Any:
        attempts.append(args)
        raise aerogel.UnsupportedModel("no")

    model = sparse(Grid())
    model(torch.randn(1, 3, 32, 32))
    fast = aerogel.compile(model, torch.randn(1, 3, 32, 32), tune="off")
    monkeypatch.setattr(others, "again", fails)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for width in range(34, 54, 2):
            _right(fast, model, torch.randn(1, 3, 32, width))
    assert len(attempts) == others.MAX_FAILED_CAPTURES
    (message,) = [str(w.message) for w in said if "torch runs" in str(w.message)]
    assert "f(x=1x3x32x34)" in message


class Fusing(nn.Module):
    names = ("cat", "dog")

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))  # type: ignore[no-any-return]

    def fuse(self, verbose: bool = True) -> nn.Module:
        return self

    def predict(self, x: Tensor) -> Tensor:
        return self(x)  # type: ignore[no-any-return]


def test_methods_of_the_original_never_run_it_silently() -> None:
    fast = aerogel.compile(sparse(Fusing()), torch.randn(1, 3, 12, 12), tune="off")
    assert fast.fuse(verbose=False) is fast
    assert fast.names == ("cat", "dog")
    assert hasattr(fast, "predict")
    with pytest.raises(aerogel.AerogelError, match=r"compiled\.original\.predict\(\)"):
        fast.predict(torch.randn(1, 3, 12, 12))


def test_conversions_that_change_nothing_are_allowed() -> None:
    """Frameworks move every model to the device that it is on."""
    fast = aerogel.compile(sparse(Fusing()), torch.randn(1, 3, 12, 12), tune="off")
    assert fast.to("cpu") is fast
    assert fast.float() is fast
    for convert in (fast.half, fast.double, lambda: fast.to("meta")):
        with pytest.raises(aerogel.AerogelError, match="stays where it was compiled"):
            convert()
