"""The same answers for every model that compiles, whatever its Python looks at: sizes, aliases, buffers,
training mode."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aerogel
from aerogel.backends.cpu.runner import CpuRunner
from aerogel.ir import EAGER
from aerogel.runtime import others
from aerogel.runtime.module import Compiled
from tests.small_models import sparse


class Model(nn.Module):
    """Two sparse convolutions around something."""

    def __init__(self, around: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.around = around
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.register_buffer("count", torch.ones(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        return self.around(self, x)


def model_of(around: Callable[[Any, Tensor], Any]) -> nn.Module:
    return sparse(Model(around), 0.8)


def right(fast: nn.Module, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Answers of both on the same call: float64's within rounding, and nothing of the call changed."""
    before = [a.clone() for a in args if isinstance(a, Tensor)]
    with torch.no_grad():
        wanted = model(*args, **kwargs)
    got = fast(*args, **kwargs)
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    assert (got.double() - wanted.double()).abs().max() <= 1e-5 * wanted.abs().max() + 1e-6
    assert all(
        torch.equal(a, b) for a, b in zip(before, [a for a in args if isinstance(a, Tensor)], strict=True)
    )


def odd_rows(m: Any, x: Tensor) -> Tensor:
    if x.shape[2] % 2:
        x = F.pad(x, (0, 0, 0, 1))
    return m.second(m.first(x).relu())  # type: ignore[no-any-return]


def wide(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    return m.second(y * 2 if x.shape[3] > 16 else y)  # type: ignore[no-any-return]


def wider_than_high(m: Any, x: Tensor) -> Tensor:
    return m.second(m.first(x)) + (1 if x.shape[3] > x.shape[2] else 0)  # type: ignore[no-any-return]


def tried(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    try:
        y = y * y.view(2, -1, *y.shape[1:]).mean((0, 1))
    except RuntimeError:
        y = y + 1
    return m.second(y)  # type: ignore[no-any-return]


def many(m: Any, x: Tensor) -> Tensor:
    return m.second(m.first(x)) * (3 if x.shape[0] > 4 else 1)  # type: ignore[no-any-return]


def single(m: Any, x: Tensor) -> Tensor:
    y = m.second(m.first(x))
    return y * 2 if x.shape[0] == 1 else y  # type: ignore[no-any-return]


def squeezed(m: Any, x: Tensor) -> Tensor:
    return m.second(m.first(x)).mean((2, 3)).squeeze().sum(-1)  # type: ignore[no-any-return]


CALLS = [(1, 12, 12), (2, 13, 12), (5, 12, 20), (1, 13, 24), (1, 20, 12), (6, 9, 9), (1, 1, 12)]


@pytest.mark.parametrize(
    "around", [odd_rows, wide, wider_than_high, many, single, squeezed, tried], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("batch", [1, 2])
def test_branches_on_sizes(around: Callable[[Any, Tensor], Any], batch: int) -> None:
    model = model_of(around)
    fast = aerogel.compile(model, torch.randn(batch, 3, 12, 12), tune="off")
    assert str(fast.how) == "graph"
    for n, h, w in CALLS + CALLS[:2]:
        right(fast, model, torch.randn(n, 3, h, w))


def test_programs_are_not_made_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number of kinds of calls torch runs, with one warning."""
    monkeypatch.setattr(others, "MAX_PROGRAMS", 3)
    model = model_of(lambda m, x: m.second(m.first(x)) * (x.shape[3] if x.shape[3] in (5, 6, 7, 8) else 1))
    fast = aerogel.compile(model, torch.randn(1, 3, 12, 5), tune="off")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for w in (5, 6, 7, 8, 6, 9, 8, 7):
            right(fast, model, torch.randn(1, 3, 12, w))
    assert [str(w.message) for w in said if "more than 3 kinds" in str(w.message)]
    assert len([w for w in said if "torch runs" in str(w.message)]) == 1


def test_a_saved_file_names_the_guard(tmp_path: Any) -> None:
    model = model_of(odd_rows)
    fast = aerogel.compile(model, torch.randn(1, 3, 12, 12), tune="off")
    aerogel.save(fast, tmp_path / "m.aero")
    loaded = aerogel.load(tmp_path / "m.aero")
    right(loaded, model, torch.randn(2, 3, 14, 9))
    with pytest.raises(aerogel.ShapeError, match=r"x\.shape\[2\] % 2\) == 0"):
        loaded(torch.randn(1, 3, 13, 12))


def dropped(m: Any, x: Tensor) -> Tensor:
    a = m.first(x)
    b = F.dropout(a, training=False)
    b.add_(1)
    return a * b  # type: ignore[no-any-return]


def expanded(m: Any, x: Tensor) -> Tensor:
    a = m.first(x)
    a.expand_as(m.second(a)).mul_(2)
    return a + 1  # type: ignore[no-any-return]


def sliced(m: Any, x: Tensor) -> Tensor:
    a = m.first(x)
    a[:, 2:4] = 0
    a.view(-1)[0] = 7.0
    return m.second(a)  # type: ignore[no-any-return]


def chunked(m: Any, x: Tensor) -> Tensor:
    a = m.first(x)
    left, _, right = a.chunk(3, 1)  # three, three and two channels
    left.relu_()
    return m.second(a) + right.mean()  # type: ignore[no-any-return]


def rewritten(m: Any, x: Tensor) -> Tensor:
    a = m.first(x)
    b = a.relu_()
    c = m.second(a)
    c += b
    return a * c  # type: ignore[no-any-return]


def same_type(m: Any, x: Tensor) -> Tensor:
    a = m.first(x)
    a.float().contiguous().type_as(x).mul_(3)
    return m.second(a)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "around", [dropped, expanded, sliced, chunked, rewritten, same_type], ids=lambda f: f.__name__
)
def test_aliases(around: Callable[[Any, Tensor], Any]) -> None:
    model = model_of(around)
    fast = aerogel.compile(model, torch.randn(1, 3, 12, 12), tune="off")
    assert str(fast.how) == "graph", "a graph that answers otherwise than torch is not kept"
    for n, h, w in CALLS[:4]:
        right(fast, model, torch.randn(n, 3, h, w))


def uneven(m: Any, x: Tensor) -> Tensor:
    first, second, third = torch.cat([m.first(x), x], 1)[:, :7].chunk(3, 1)
    return m.second(torch.cat([third, first, second, x[:, :1]], 1))  # type: ignore[no-any-return]


def test_uneven_chunks() -> None:
    """Seven channels are three, three and one; five convolved ones two, two and one."""
    model = model_of(uneven)
    right(aerogel.compile(model, torch.randn(1, 3, 12, 12), tune="off"), model, torch.randn(1, 3, 10, 9))
    layers = sparse(_Uneven(), 0.95)
    fast = aerogel.compile(layers, torch.randn(1, 32, 12, 12), tune="off", methods=["direct"])
    assert str(fast.how) == "graph"
    assert [c.config.method for c in fast.plan.choices] == ["direct", "direct"]
    right(fast, layers, torch.randn(1, 32, 10, 9))


class _Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(32, 35, 3, padding=1), nn.Conv2d(35, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.stem(x).chunk(3, 1)
        return self.head(torch.cat([c, b, a], 1))  # type: ignore[no-any-return]


def counted(m: Any, x: Tensor) -> Tensor:
    m.count.add_(1)
    return m.first(x) * m.count  # type: ignore[no-any-return]


def numbered(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.first(x) * m.calls  # type: ignore[no-any-return]


def halving(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.first.bias.mul_(0.5)
    return m.first(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("around", [counted, numbered, halving], ids=lambda f: f.__name__)
@pytest.mark.parametrize("tune", ["off", 0.05])
def test_state_stays_torchs(around: Callable[[Any, Tensor], Any], tune: Any) -> None:
    model = model_of(around)
    x = torch.randn(1, 3, 12, 12)
    fast = aerogel.compile(model, x, tune=tune)
    assert model.count == 1
    assert model.calls == 0
    fresh = copy.deepcopy(model)
    for _ in range(3):
        right(fast, fresh, x)


class Norm(nn.Module):
    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), *more)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "more",
    [nn.BatchNorm2d(8), nn.Dropout2d(0.5), nn.Dropout(0.1), nn.InstanceNorm2d(8, track_running_stats=True)],
)
def test_training_mode_that_matters_is_an_error(more: nn.Module) -> None:
    model = sparse(Norm(more)).train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(aerogel.AerogelError, match=r"model\.eval\(\)"):
        aerogel.compile(model, torch.randn(4, 3, 12, 12), tune="off")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training


def test_training_mode_that_does_not_matter_compiles() -> None:
    model = sparse(Norm(nn.ReLU(), nn.Dropout(0.0))).train()
    fast = aerogel.compile(model, torch.randn(1, 3, 12, 12), tune="off")
    right(fast, model, torch.randn(2, 3, 12, 13))
    assert model.training


def test_dropout_that_is_on_stays_random_and_is_named() -> None:
    model = model_of(lambda m, x: m.second(F.dropout(m.first(x), 0.5, training=True)))
    fast = aerogel.compile(model, torch.randn(1, 3, 12, 12), tune="off")
    x = torch.randn(1, 3, 12, 12)
    assert str(fast.how) == "graph"
    assert not torch.equal(fast(x), fast(x))
    assert "is random" in str(aerogel.explain(fast))
    torch.manual_seed(7)
    wanted = model(x)
    torch.manual_seed(7)
    assert (fast(x) - wanted).abs().max() < 1e-5


def test_compile_takes_no_random_numbers() -> None:
    model = model_of(wide)
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    aerogel.compile(model, torch.zeros(1, 3, 12, 12), tune="off")
    assert torch.equal(torch.rand(3), wanted)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("tune", ["off", 0.05])
def test_later_changes_of_the_original_change_nothing(tune: Any, tmp_path: Any) -> None:
    model, x = sparse(Mixed(), 0.8), torch.randn(1, 3, 12, 12)
    fast = aerogel.compile(model, x, tune=tune)
    before = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    right(fast, before, x)
    for value in fast.state_dict().values():
        value.zero_()
    right(fast, before, x)
    aerogel.save(fast, tmp_path / "m.aero")
    right(aerogel.load(tmp_path / "m.aero"), before, x)


def test_outputs_can_be_written_to() -> None:
    """Views of inputs and constants are copies."""
    model = model_of(
        lambda m, x: (
            m.second(m.first(x)),
            x[:, :1],
            m.first.bias[:2],
            x.view(-1),
            m.count.expand(3),
            x.shape[2],
        )
    )
    x = torch.randn(1, 3, 12, 12)
    fast, kept = aerogel.compile(model, x, tune="off"), x.clone()
    *first, rows = (y.clone() if isinstance(y, Tensor) else y for y in fast(x))
    assert rows == 12
    for y in fast(x)[:-1]:
        y.fill_(9.0)
    assert torch.equal(x, kept)
    assert all(torch.equal(a, b) for a, b in zip(fast(x)[:-1], first, strict=True))
    whole = Compiled(fast.original, None, fast.plan, EAGER, (), None, fast.captured)
    for y in whole(x)[2:3]:
        y.fill_(9.0)
    assert torch.equal(whole(x)[2], first[2]), "nor where torch runs the model"


def _traced(f: Any, x: Tensor) -> Any:
    return torch.jit.trace(f, x)  # type: ignore[no-untyped-call]


def _exported(f: Any, x: Tensor) -> Any:
    return torch.onnx.export(f, (x,), "/dev/null", dynamo=False)


@pytest.mark.parametrize("export", [_traced, _exported])
def test_tracing_raises(export: Callable[[Any, Tensor], Any]) -> None:
    x = torch.randn(1, 3, 12, 12)
    fast = aerogel.compile(model_of(wide), x, tune="off")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(aerogel.AerogelError, match="original"):
            export(fast, x)


def test_half_and_back_rounds() -> None:
    """Two layers of ours with a round trip through fp16 between them: each kept weight is one, so answers are
    exact."""
    model = nn.Sequential(nn.Conv2d(32, 32, 1), _Rounds(), nn.Conv2d(32, 32, 1)).eval()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(torch.eye(32)[:, :, None, None])  # type: ignore[operator]
            layer.bias.zero_()  # type: ignore[operator]
    x = torch.randn(1, 32, 24, 24)
    fast = aerogel.compile(model, x, tune="off")
    assert [c.config.method for c in fast.plan.choices] == ["direct", "direct"]
    assert torch.equal(fast(x), x.half().float())


class _Rounds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.half().float()


def test_autocast_is_torchs() -> None:
    model, x = model_of(wide), torch.randn(1, 3, 12, 12)
    fast = aerogel.compile(model, x, tune="off")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(fast(x), model(x))


def test_an_answer_that_differs_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at with tune="off" too: on the example, and at another batch."""
    model, x = model_of(wide), torch.randn(1, 3, 12, 12)
    real, bad = CpuRunner.__call__, [1]

    def wrong(self: CpuRunner, inputs: list[Any]) -> list[Any]:
        return [y + (y.abs().max() if len(y) == bad[0] else 0) for y in real(self, inputs)]

    monkeypatch.setattr(CpuRunner, "__call__", wrong)
    for batch, words in ((1, "on the example"), (2, "at other sizes")):
        bad[0] = batch
        fast = aerogel.compile(model, x, tune="off")
        assert str(fast.how) == "contiguous"
        assert f"answers differed from torch's {words}" in str(aerogel.explain(fast))
        right(fast, model, x)
