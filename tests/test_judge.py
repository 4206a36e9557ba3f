"""How far answers are from the dense model's: every kind of answer has a distance and an agreement."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import aerogel
from aerogel import AerogelError
from aerogel.pruning.judge import FAR, agreement, classes, distance
from aerogel.pruning.steps import Steps

LOGITS = torch.tensor([[3.0, 1.0], [0.0, 2.0]])


class Largest(nn.Module):
    """Answers whole numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        largest: Tensor = self.body(x).argmax(1)
        return largest


def both(wanted: list[Tensor], got: list[Tensor]) -> tuple[float, float]:
    return distance([wanted], [got]), agreement([wanted], [got])


def test_whole_numbers_by_how_many_are_the_same() -> None:
    some, other = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 0])
    assert both([some], [some]) == (0.0, 1.0)
    assert both([some], [other]) == (0.25, 0.75)
    assert both([LOGITS, some], [LOGITS, other]) == (0.0, 0.75), "floats say how far it is"


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5)])
def test_probabilities_are_classes(shape: tuple[int, ...]) -> None:
    """A network that ends in softmax is as far as the same network without, also a row for each step of a
    text, or classes of pixels."""
    random = torch.Generator().manual_seed(0)
    wanted, got = (torch.randn(shape, generator=random) for _ in range(2))
    rows = both([wanted.reshape(-1, 5)], [got.reshape(-1, 5)])
    pixels = [t.softmax(-1).movedim(-1, 1)[..., None] for t in (wanted, got)]
    assert both([wanted.softmax(-1)], [got.softmax(-1)]) == pytest.approx(rows, rel=1e-4)
    assert both([pixels[0]], [pixels[1]]) == pytest.approx(rows, rel=1e-4)
    assert rows[0] > 0.1
    assert rows[1] < 1


def test_maps_are_no_classes() -> None:
    some = torch.rand(2, 4, 5)
    assert classes(some) is classes(some - 1) is classes(torch.ones(3, 1)) is classes(some[:0]) is None


def test_sizes_that_follow_the_data() -> None:
    """Boxes that were found: fewer of them, more tensors, or none at all."""
    assert both([LOGITS], [LOGITS[:1]]) == (FAR, 0.0)
    assert both([LOGITS], [LOGITS, LOGITS]) == (FAR, 0.0)
    assert both([LOGITS[:0]], [LOGITS[:0]]) == (0.0, 1.0)
    assert both([LOGITS[0]], [LOGITS[0] * torch.nan])[0] == pytest.approx(FAR)
    assert both([LOGITS[0]], [LOGITS[0] * torch.nan])[1] == 0.0
    assert both([LOGITS[0]], [LOGITS[0] * -50])[1] == 0.0


def test_a_model_without_floats_is_refused_before_any_work() -> None:
    inputs = [torch.randn(8, 16) for _ in range(4)]
    with pytest.raises(AerogelError, match=r"the model answers no floats.*without its ArgMax"):
        aerogel.slim(Largest(), inputs, sparsity=0.5)
    with pytest.raises(AerogelError, match="the model answers no floats"):
        aerogel.prune(Largest(), 0.5, score="obs", scope="error", calibration=inputs)


def test_ones_own_training_may_answer_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The score is how many are the same."""
    monkeypatch.setattr(Steps, "compiled", lambda _, model: model)
    monkeypatch.setattr(Steps, "_timed", lambda *_: (1.0, 1.0))
    model, inputs = Largest(), [torch.randn(8, 16) for _ in range(4)]

    def train(model: nn.Module, schedule: object) -> None:
        aerogel.prune(model, 0.9)

    slimmed = aerogel.slim(model, inputs, sparsity=0.9, max_drop=0.99, train=train, budget_minutes=0.01)
    same = float((slimmed.model(inputs[-1]) == model(inputs[-1])).float().mean())
    assert slimmed.tries[0].score == same < 1


class Found(Largest):
    """Answers as many rows as it finds something in."""

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.body(x)
        return rows[rows[:, 0] > 0]


def test_answers_whose_size_follows_the_data_are_not_healed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "compiled", lambda _, model: model)
    monkeypatch.setattr(Steps, "_timed", lambda *_: (1.0, 1.0))
    monkeypatch.setattr("aerogel.pruning.steps.heal", lambda *_, **__: pytest.fail("nothing to follow"))
    torch.manual_seed(1)
    inputs = [torch.randn(64, 16) for _ in range(4)]
    slimmed = aerogel.slim(Found(), inputs, sparsity=0.9, max_drop=0.5, budget_minutes=0.1)
    assert slimmed.tries[0].score == 0.0
    assert slimmed.chosen is None or slimmed.tries[slimmed.chosen].score >= 0.5
