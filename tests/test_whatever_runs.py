"""Whatever runs in torch compiles, and answers the same: odd element types, unbatched inputs, weights that
hooks compute."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aerogel
from tests.small_models import sparse
from tests.test_same_answers import model_of, right, wide


def plus_mask(m: Any, x: Tensor) -> Tensor:
    return m.first(x) + (x[:, :1] > 0).expand(-1, 8, -1, -1)  # type: ignore[no-any-return]


def plus_whole_numbers(m: Any, x: Tensor) -> Tensor:
    return m.first(x) + torch.ones_like(m.second(m.first(x)), dtype=torch.int64)  # type: ignore[no-any-return]


def plus_doubles(m: Any, x: Tensor) -> Tensor:
    return m.first(x) + m.second(m.first(x)).double()  # type: ignore[no-any-return]


def endless(m: Any, x: Tensor) -> Tensor:
    return F.threshold(m.first(x), float("inf"), 0.0) + F.threshold(m.second(m.first(x)), 0.1, 0.0)


def leaky(m: Any, x: Tensor) -> Tensor:
    return F.leaky_relu(m.first(x), 2) + F.hardtanh(m.first(x), 0, float("inf"))


@pytest.mark.parametrize(
    "around", [plus_mask, plus_whole_numbers, plus_doubles, endless, leaky], ids=lambda f: f.__name__
)
def test_odd_neighbours_of_a_convolution(around: Callable[[Any, Tensor], Any]) -> None:
    model = model_of(around)
    fast = aerogel.compile(model, torch.randn(1, 3, 12, 12), tune="off")
    assert str(fast.how) == "graph"
    right(fast, model, torch.randn(1, 3, 12, 12))
    right(fast, model, torch.randn(2, 3, 9, 14))


UNBATCHED = {
    "conv2d": (
        nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.AdaptiveAvgPool2d(1)),
        (3, 12, 14),
    ),
    "conv1d": (nn.Sequential(nn.Conv1d(3, 32, 3), nn.ReLU(), nn.Conv1d(32, 8, 3)), (3, 30)),
    "transposed": (nn.Sequential(nn.Conv2d(3, 32, 3), nn.ConvTranspose2d(32, 4, 2, 2)), (3, 12, 14)),
    "pooled": (
        nn.Sequential(nn.Conv2d(3, 32, 3), nn.MaxPool2d(2), nn.Conv2d(32, 8, 1), nn.Flatten(0)),
        (3, 12, 14),
    ),
    "linear": (nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), (8,)),
}


@pytest.mark.parametrize("name", UNBATCHED)
def test_one_image_without_a_batch(name: str) -> None:
    layers, shape = UNBATCHED[name]
    model, x = sparse(layers, 0.9), torch.randn(shape)
    right(aerogel.compile(model, x, tune="off"), model, x)
    right(aerogel.compile(model, x, tune=0.05), model, x)


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 16, 3), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).mean((2, 3)).squeeze())  # type: ignore[no-any-return]


def test_squeeze_before_a_linear_at_batch_one() -> None:
    model = sparse(Squeezed())
    fast = aerogel.compile(model, torch.randn(1, 3, 12, 12), tune="off")
    for n in (1, 3, 1, 2):
        right(fast, model, torch.randn(n, 3, 12, 12))


def test_nothing_to_tune() -> None:
    model = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)).eval()
    fast = aerogel.compile(model, torch.randn(1, 3, 12, 12), tune=1.0)
    right(fast, model, torch.randn(1, 3, 12, 12))


class Floats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).float()
        return self.second(y * x.mean().float()) + y  # type: ignore[no-any-return]


@pytest.mark.turns(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tune", ["off", 0.05])
def test_half_precision_with_float_inside(dtype: torch.dtype, tune: Any) -> None:
    model, x = sparse(Floats(), 0.9), torch.randn(1, 3, 12, 12)
    fast = aerogel.compile(model, x, tune=tune, dtype=dtype)
    with torch.no_grad():
        wanted = model(x)
    assert (fast(x) - wanted).abs().max() < 5e-2 * wanted.abs().max()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return F.relu(self.second(y) + y)


@pytest.mark.turns(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tune", ["off", 0.05])
def test_models_in_other_types(dtype: torch.dtype, tune: Any) -> None:
    """bf16's add and ReLU in oneDNN's fused operator is an internal error of torch's."""
    model, x = sparse(Residual(), 0.0).to(dtype), torch.randn(1, 3, 12, 12).to(dtype)
    fast = aerogel.compile(model, x, tune=tune)
    with torch.no_grad():
        wanted = model(x)
    got = fast(x)
    assert got.dtype == wanted.dtype
    assert (got - wanted).abs().max() <= 3e-2 * wanted.abs().max()


def test_old_weight_norm_and_spectral_norm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = [
            nn.utils.weight_norm(nn.Conv2d(3, 16, 3)),
            nn.ReLU(),
            nn.utils.spectral_norm(nn.Conv2d(16, 8, 3)),
        ]
    model, x = nn.Sequential(*layers).eval(), torch.randn(1, 3, 12, 12)
    for training in (False, True):
        model(x)  # weights are now computed ones, which no deepcopy takes
        names = set(model.state_dict())
        fast = aerogel.compile(model.train(training).eval(), x, tune="off")
        assert [c.layer for c in fast.plan.choices] == ["0", "2"]
        right(fast, model, x)
        assert set(model.state_dict()) == names


def test_lazy_layers() -> None:
    model = nn.Sequential(nn.LazyConv2d(16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)).eval()
    x = torch.randn(1, 3, 8, 8)
    torch.manual_seed(0)
    fast = aerogel.compile(model, x, tune="off")
    assert fast(x).shape == (1, 4)
    assert isinstance(model[0].weight, nn.UninitializedParameter), "the user's stays as it was"


def test_scripted_modules() -> None:
    model = sparse(Residual(), 0.8)
    x = torch.randn(1, 3, 12, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted: Any = torch.jit.script(model)
    around = nn.Sequential(scripted, nn.ReLU()).eval()  # torch.jit alone is refused in words
    right(aerogel.compile(around, x, tune="off"), nn.Sequential(model, nn.ReLU()), x)
    right(aerogel.compile(around, x, tune=0.05), nn.Sequential(model, nn.ReLU()), x)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y: Tensor = self.conv(x) * scale
        return y if mask is None else y * mask


def test_a_call_while_another_thread_compiles() -> None:
    """Whether torch.export looks on is asked of the call's own tensors: the process-wide flag is another
    thread's."""
    model, x = sparse(Optional(), 0.9), torch.randn(1, 3, 12, 12)
    fast, stop, wrong = aerogel.compile(model, (x, None), tune="off"), threading.Event(), list[str]()
    wanted = fast(x, None)

    def call() -> None:
        while not stop.is_set():
            try:
                if not torch.equal(fast(x, None), wanted):
                    wrong.append("another answer")
            except Exception as why:
                wrong.append(f"{type(why).__name__}: {why}")

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        aerogel.compile(sparse(Residual(), 0.8), x, tune="off")
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]


def test_other_arguments_are_other_programs() -> None:
    model, x = sparse(Optional(), 0.9), torch.randn(2, 3, 12, 12)
    fast = aerogel.compile(model, x, tune="off")
    mask = (torch.rand(2, 1, 12, 12) > 0.5).float()
    calls: list[tuple[Any, Any]] = [((x,), {}), ((x, mask), {}), ((x,), {"mask": mask}), ((x, None, 2.0), {})]
    for args, kwargs in (*calls, ((), {"x": x, "scale": 2}), ((x, mask), {})):
        for _ in range(2):
            right(fast, model, *args, **kwargs)


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y = y.view(y.shape[0], 16, y.shape[2] // 2, y.shape[3])
        return self.head(y).view_as(y[:, :8])  # type: ignore[no-any-return]


def test_views_of_what_a_library_laid_out_its_own_way() -> None:
    """A dense convolution may give its maps in channels_last, which view() does not take."""
    model, x = sparse(Viewed(), 0.0), torch.randn(2, 3, 12, 12)
    fast = aerogel.compile(model, x, tune="off")
    assert str(fast.how) == "graph"
    right(fast, model, x)


class Named(nn.Module):
    """Buffers called as the input and as what torch calls a result."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x", torch.full((8, 1, 1), 3.0))
        self.register_buffer("mean", torch.full((8, 1, 1), 2.0))
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x) * self.x + self.mean
        return y - y.mean() * float(x.shape[2])  # type: ignore[no-any-return]


def test_names_that_mean_two_things(tmp_path: Any) -> None:
    model, x = sparse(Named(), 0.5), torch.randn(2, 3, 12, 12)
    fast = aerogel.compile(model, x, tune="off")
    assert str(fast.how) == "graph"
    right(fast, model, x)
    aerogel.save(fast, tmp_path / "m.aero")
    right(aerogel.load(tmp_path / "m.aero"), model, x)
    state = {name: value * 2 for name, value in model.state_dict().items()}
    fast.load_state_dict(state)
    model.load_state_dict(state)
    right(fast, model, x)


def test_calls_alike_in_sizes_only_are_told_apart() -> None:
    fast = aerogel.compile(model_of(wide), torch.randn(1, 3, 12, 12), tune="off")
    fast(torch.randn(1, 3, 12, 12))
    with pytest.raises(aerogel.ShapeError, match="float64"):
        fast(torch.randn(1, 3, 12, 12).double())


class _Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)

    def forward(self, x: Tensor) -> Tensor:
        a = self.second(F.relu(self.norm(self.first(x))))
        flat = a.view(a.shape[0], -1)
        flat.clamp_(-0.5, 0.5)
        return a.mean(1)  # type: ignore[no-any-return]


def test_sizes_that_torch_wrote_into_the_graph_as_numbers() -> None:
    """A view that is written to is taken back with the example's sizes: the graph is kept for those."""
    model = sparse(_Clamped(), 0.5)
    fast = aerogel.compile(model, torch.randn(1, 4, 21, 28), tune="off")
    assert str(fast.how) == "graph"
    for size in ((1, 4, 21, 28), (1, 4, 10, 13), (6, 4, 8, 12)):
        x = torch.randn(size)
        right(fast, model, x)
