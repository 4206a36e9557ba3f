"""Programs of a model beside its first, and what torch runs itself: the same answers there too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aerogel
from aerogel.backends.cpu.runner import CpuRunner
from aerogel.runtime import others
from aerogel.tune import search, whole
from tests.small_models import sparse
from tests.test_same_answers import model_of, right


@pytest.mark.parametrize("far", [2**14, 2**24])
def test_pooling_with_large_numbers(far: int) -> None:
    """Our kernel keeps a padded line of the image: where that is long, torch pools."""
    for pool in (nn.MaxPool2d(2, far), nn.MaxPool2d((1, far), far, (0, far // 2)), nn.AvgPool2d(3, far)):
        model = sparse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), pool, nn.Conv2d(8, 8, 1)), 0.8)
        x = torch.randn(2, 3, 12, 12)
        fast = aerogel.compile(model, x, tune="off")
        right(fast, model, x)
        assert fast.workspace_bytes() < 1 << 20


def test_copies_of_a_model_that_answers_with_names() -> None:
    """torch has no text for the structure of `Tensor.max(1)`'s answer."""
    model, x = model_of(lambda m, x: m.first(x).relu().max(1)), torch.randn(2, 3, 12, 12)
    fast = aerogel.compile(model, x, tune="off")
    again = copy.deepcopy(fast)
    assert torch.equal(again(x).indices, fast(x).indices)
    assert type(again(x)) is type(model(x))


def test_a_graph_that_takes_nothing_is_captured_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second program takes nothing either, and does not look for programs of its own."""
    model, x = model_of(lambda m, x: m.second(m.first(x))), torch.randn(2, 3, 12, 12)
    fast = aerogel.compile(model, x, tune="off")

    def refuses(*_: Any) -> Any:
        raise aerogel.ShapeError("no")

    captures, again = 0, others.again

    def counted(*call: Any) -> Any:
        nonlocal captures
        captures += 1
        return again(*call)

    monkeypatch.setattr(others, "again", counted)
    monkeypatch.setattr(CpuRunner, "__call__", refuses)
    with pytest.warns(UserWarning, match="torch runs calls like"):
        right(fast, model, x)
    right(fast, model, x)
    assert captures == 1


def test_a_model_that_reads_many_values_is_compiled_in_parts() -> None:
    """torch.export takes minutes over 300 unknown numbers; what comes before them is a part."""

    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))

        def forward(self, x: Tensor) -> Tensor:
            best = self.net(x).flatten().topk(300).values.tolist()
            return torch.tensor([b for b in best if b > best[150]])

    model, x = sparse(Boxes(), 0.8), torch.randn(2, 3, 12, 12)
    fast = aerogel.compile(model, x, tune="off")
    assert str(fast.how) == "parts"
    assert "tolist" in fast.notes[0]
    right(fast, model, x)


def test_a_layout_that_changes_the_answer_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """`reshape` is a view of a map that lies plane by plane, and a copy of one that does not."""

    def written(m: Any, x: Tensor) -> Tensor:
        a = m.first(x)
        a.reshape(a.shape[0], -1).reshape(a.shape).fill_(0.25)
        return m.second(a)  # type: ignore[no-any-return]

    def later_is_faster(runs: list[Any], *_: Any) -> list[list[float]]:
        return [[100.0 - i] * 10 for i in range(len(runs))]

    model, x = model_of(written), torch.randn(2, 3, 12, 12)
    monkeypatch.setattr(whole, "interleaved", later_is_faster)
    monkeypatch.setattr(search, "keep", lambda _: False)
    fast = aerogel.compile(model, x, tune=0.05)
    assert str(fast.how) == "contiguous"
    assert "torch channels_last gives another answer" in fast.notes
    right(fast, model, x)
