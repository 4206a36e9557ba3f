"""A network with one layer changed, run from that layer on: the same answers as the whole run's."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from aerogel.pruning.gram import inference
from aerogel.pruning.judge import answers
from aerogel.pruning.recall import Recall

GIVEN = torch.Generator().manual_seed(0)


class Odd(nn.Module):
    """In place, a product that is no module, a layer that runs twice, an answer of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.free = nn.Parameter(torch.randn(8, 8, 1, 1))
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu_(self.first(x))
        x = F.conv2d(x, self.free).add_(x)
        x = self.twice(F.relu_(self.twice(x)))
        return self.last(x.mean((2, 3))), x


class Changing(nn.Module):
    """Takes another way each time it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(6, 6)])
        self.last = nn.LazyLinear(3)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        way = self.ways[1 if self.runs == 1 else 0]
        answer: Tensor = way(x)[:, :4].sum(1, keepdim=True) * self.last(x)
        return answer


CALLS: Any = [((torch.randn(*shape, generator=GIVEN),), {}) for shape in ((2, 3, 9, 9), (1, 3, 7, 5))]


def same(a: Any, b: Any) -> bool:
    pairs = [(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True)]
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("kept", [0, 3000, 1 << 30])
def test_the_same_answers_to_the_bit(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aerogel.pruning.recall.MOST_BYTES", kept)
    model = Odd().eval()
    with inference(model):
        recall = Recall(model, CALLS)
        assert same(recall.wanted, answers(model, CALLS))
        for name in random.Random(0).sample(["first", "twice", "last"] * 2, 6):
            layer: Any = model.get_submodule(name)
            before = layer.weight.detach().clone()
            layer.weight.data.mul_(torch.rand_like(before) < 0.5)
            assert same(recall.answers(layer), answers(model, CALLS))
            layer.weight.data.copy_(before)
        assert same(recall.answers(model.last), recall.wanted)


def test_what_comes_before_is_not_computed() -> None:
    model = Odd().eval()
    with inference(model):
        recall = Recall(model, CALLS)
        whole = counted(lambda: answers(model, CALLS))
        each = [counted(partial(recall.answers, layer)) for layer in model.children()]
    assert whole == each[0] > each[1] > each[2] > 0


def counted(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    found: int = counter.get_total_flops()
    return found


def test_a_network_that_goes_another_way_is_computed() -> None:
    model = Changing().eval()
    call: Any = [((torch.randn(2, 6, generator=GIVEN),), {})]
    with inference(model):
        recall = Recall(model, call)
        got = recall.answers(model.last)
        assert same(got, answers(model, call))
        assert not same(got, recall.wanted)
