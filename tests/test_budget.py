"""`tune=SECONDS` bounds the whole call: what it does not reach goes by rule, and the result is as right as
ever."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aerogel
from aerogel.progress import Progress
from aerogel.tune import choose, search
from aerogel.tune.search import Effort, effort
from aerogel.zoo.models import prune
from tests.test_onnx import exported

X = torch.randn(1, 16, 28, 28)


def net(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    convs = [nn.Conv2d(16, 16, 3, padding=1) for _ in range(layers)]
    return nn.Sequential(*[m for conv in convs for m in (conv, nn.ReLU())]).eval()


def test_a_budget_that_is_over_leaves_layers_to_the_rule(tmp_path: Path) -> None:
    model = prune(net(3), 0.9)
    fast = aerogel.compile(model, X, tune=1e-4, store=tmp_path)
    assert "tune=0.0001 was over before every layer was timed" in str(aerogel.explain(fast))
    assert {c.reason for c in fast.plan.choices} == {"by rule, not timed"}
    assert fast.plan.model is not None, "the whole model is compared all the same"
    assert torch.allclose(fast(X), model(X), atol=1e-4)
    again = aerogel.compile(model, X, tune=1e-4, store=tmp_path)
    assert "from the store" not in str(aerogel.explain(again)), "half a tuning is no record"


def test_a_budget_that_is_large_times_everything(tmp_path: Path) -> None:
    fast = aerogel.compile(prune(net(2), 0.9), X, tune=1e6, store=tmp_path)
    assert all(c.tried for c in fast.plan.choices)


def test_layers_share_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    budget = effort(30)
    assert budget is not None
    assert budget.left() == 30
    assert budget.for_layer(2).seconds == pytest.approx(search.LAYERS * 10), "of three layers"
    monkeypatch.setattr(time, "monotonic", lambda: 140.0)
    assert budget.for_layer(0).seconds == 0
    assert Effort(3, 9).for_layer(5) == Effort(3, 9), "without a budget there is none"


def test_sizes_share_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    budget = effort(30)
    assert budget is not None
    assert budget.shared(2).left() == pytest.approx(10), "one of three"
    assert budget.shared(0).left() == pytest.approx(30), "the last has all of it"
    assert Effort(3, 9).shared(5) == Effort(3, 9), "without a budget there is none"


def test_every_size_of_a_list_has_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = exported(net(1), tmp_path / "m.onnx", *X.shape)
    given: list[int] = []
    shared = Effort.shared

    def noted(self: Effort, others: int) -> Effort:
        given.append(others)
        return shared(self, others)

    monkeypatch.setattr(Effort, "shared", noted)
    aerogel.compile(file, tune=1.0, shapes=[{"input": (n, *X.shape[1:])} for n in (1, 2, 4)], store=tmp_path)
    assert given == [2, 1, 0]


class Slow:
    """A backend of which a plan takes a second to build and a second to run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def in_network(self, network: Any, shapes: Any, plans: Any) -> Any:
        self.now += 1
        return [self.run for _ in plans]

    def run(self, inputs: Any) -> dict[str, float]:
        self.now += 1
        return {"conv": 1.0}


@pytest.mark.parametrize(
    ("seconds", "plans", "rounds"),
    [(None, 8, 9), (1000, 8, 9), (20, 6, 1), (0.0, 1, 1)],
)
def test_the_running_network_ends_in_time(
    seconds: float | None, plans: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building plans ends at a quarter of what is left, rounds at half of it; one of each is always there."""
    backend: Any = Slow(monkeypatch)
    nothing: Any = None
    said = list[str]()
    monkeypatch.setattr(Progress, "_show", lambda self, _: said.append(self.line()))
    times = choose._in_place(backend, nothing, {}, [{}] * 8, [], Effort(3, 9, until=seconds), Progress())
    assert times is not None
    assert len(times) == plans
    assert len(times[0]["conv"]) == rounds
    assert len(said) >= plans + rounds  # a line that moves: in a notebook nothing else draws it again
