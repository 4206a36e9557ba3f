"""A batch image by image: only where no image can see another, the same answers, and whichever is faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import aerogel
from aerogel.capture.export import capture
from aerogel.capture.separate import separate
from aerogel.tune import whole
from tests.small_models import Skip, Small, right, runs, sparse


class Made(nn.Module):
    """A convolution, then whatever the case does with it."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.conv, self.then = nn.Conv2d(3, 8, 3, padding=1), then

    def forward(self, x: Any) -> Any:
        return self.then(self.conv(x))


ALONE = {
    "relu": F.relu,
    "cat channels": lambda y: torch.cat([y, y], 1),
    "mean of a map": lambda y: y.mean((2, 3)),
    "mean of a map, from the end": lambda y: y.mean((-1, -2)),
    "softmax over channels": lambda y: y.softmax(1),
    "flatten": lambda y: y.flatten(1),
    "reshape within": lambda y: y.reshape(y.shape[0], -1),
    "chunks of channels": lambda y: torch.chunk(y, 2, 1)[1] * 2,
    "sizes of a map": lambda y: y * y.shape[2],
}
MIXED = {
    "mean of the batch": lambda y: y - y.mean(0, keepdim=True),
    "mean of everything": lambda y: y * y.mean(),
    "softmax over the batch": lambda y: y.softmax(0),
    "softmax over the batch, from the end": lambda y: y.softmax(-4),
    "cat of the batch": lambda y: torch.cat([y, y]),
    "flatten everything": lambda y: y.flatten(),
    "reshape across": lambda y: y.reshape(8, -1),
    "batch in another place": lambda y: y.transpose(0, 1),
    "norm over the batch": lambda y: F.batch_norm(y, None, None, training=True),
    "turned around": lambda y: y.flip(0),
    "half of the batch": lambda y: torch.chunk(y, 2, 0)[0],
    "an answer without images": lambda y: (y, y.sum()),
    "running sums": lambda y: y.cumsum(0),
    "how many there are": lambda y: y * y.shape[0],
}


@pytest.mark.parametrize("name", [*ALONE, *MIXED])
def test_who_can_run_alone(name: str) -> None:
    model = Made((ALONE | MIXED)[name]).eval()
    assert separate(capture(model, (torch.randn(2, 3, 8, 8),), {})) == (name in ALONE)


def test_models_with_several_inputs() -> None:
    class Both(nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return F.relu(x + y)

    both, one = torch.randn(2, 3, 8, 8), torch.randn(3, 8, 8)
    assert separate(capture(Both(), (both, both), {}))
    spec = ({0: torch.export.Dim("n")}, None)
    assert not separate(capture(Both(), (both, one), {}, spec)), "one of them has no batch"


@pytest.mark.parametrize("make", [Small, Skip])
def test_the_same_answers(make: Any) -> None:
    model, x = sparse(make()), torch.randn(5, 3, 40, 40)
    fast = aerogel.compile(model, x[:1], tune="off")
    plan = replace(fast.plan, image_by_image=True)
    apart = aerogel.compile(model, x, plan=plan)
    assert apart.plan.image_by_image
    assert torch.equal(apart(x), torch.cat([fast(image) for image in x.split(1)]))  # type: ignore[no-untyped-call]
    right(model, apart, x)
    assert apart(x[:0]).shape == fast(x[:0]).shape
    assert len(runs(apart).programs) == 2, "one image, and none"


def test_a_plan_cannot_take_images_apart_that_are_not() -> None:
    model, x = sparse(Made(MIXED["mean of the batch"])), torch.randn(2, 3, 8, 8)
    fast = aerogel.compile(model, x, tune="off")
    with pytest.raises(aerogel.PlanMismatch, match="image by image"):
        aerogel.compile(model, x, plan=replace(fast.plan, image_by_image=True))


@pytest.mark.parametrize(("first", "second", "apart"), [(900.0, 700.0, True), (700.0, 900.0, False)])
def test_the_faster_way_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: float, second: float, apart: bool
) -> None:
    """Timings put in by hand."""
    model, x = sparse(Small()), torch.randn(4, 3, 40, 40)

    def timed(calls: list[Any], rounds: int, *_: int) -> list[list[float]]:
        return (
            [[1000.0] * rounds, [1000.0] * rounds, [500.0] * rounds]
            if len(calls) == 3
            else [[first] * 5, [second] * 5]
        )

    monkeypatch.setattr(whole, "interleaved", timed)
    fast = aerogel.compile(model, x, tune="fast", store=tmp_path)
    assert fast.plan.image_by_image == apart
    assert "a batch at once 0.9 ms, image by image 0.7 ms" in fast.notes or not apart
    assert all(c.conv.n == 1 for c in fast.plan.choices), "tuned on one image either way"
    right(model, fast, x)
    again = aerogel.compile(model, x, tune="fast", store=tmp_path)
    assert again.plan.image_by_image == apart
    assert "from the store" in str(aerogel.explain(again))


@pytest.mark.parametrize(("us", "apart"), [(5000.0, True), (500.0, False)])
def test_for_one_image_its_time_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, us: float, apart: bool
) -> None:
    model, x = sparse(Small()), torch.randn(1, 3, 40, 40)
    monkeypatch.setattr(
        whole,
        "interleaved",
        lambda calls, rounds, *_: [[us * 3] * rounds] * (len(calls) - 1) + [[us] * rounds],
    )
    fast = aerogel.compile(model, x, tune=0.01, store=tmp_path)
    assert fast.plan.image_by_image == apart
    assert ("image by image" in str(aerogel.explain(fast))) == apart
