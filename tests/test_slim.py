"""slim(): one call from dense to fast; it never spends more of the score than it may, and can be killed."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aerogel
from aerogel import AerogelError
from aerogel.backends import using
from aerogel.pruning import steps
from aerogel.pruning.stages import Stages, finite
from aerogel.pruning.steps import Steps, timed_on
from aerogel.runtime.eager import first_image
from tests import counts
from tests.reference_backend import ClockedCpu, by_nonzeros

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def little_healing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a budget that a busy machine does not use up: each look at the clock takes a millisecond."""
    monkeypatch.setattr("aerogel.pruning.steps.STEPS", 20)
    tick(monkeypatch)


def tick(monkeypatch: pytest.MonkeyPatch, seconds: float = 1e-3) -> None:
    """Let the clock of slim() move by so much with each look at it."""
    looks = itertools.count()
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic=lambda: seconds * next(looks)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()
    return nn.Sequential(*first, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10)).eval()


def calls(many: int = 8) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [F.interpolate(torch.randn(16, 3, 6, 6, generator=random), (32, 32)) for _ in range(many)]


def weights(model: Any) -> list[Tensor]:
    return [model[i].weight for i in (0, 2, 6)]


def test_a_share_of_zeros_and_a_recipe_that_is_replayed() -> None:
    model = net()
    slimmed = aerogel.slim(model, calls(), sparsity=0.8, max_drop=0.2, budget_minutes=1)
    assert slimmed.chosen is not None
    gone = sum(int((w == 0).sum()) for w in weights(slimmed.model))
    assert gone == pytest.approx(0.8 * sum(w.numel() for w in weights(model)), rel=0.02)
    x = calls()[0][:1]
    assert torch.allclose(slimmed.fast(x), slimmed.model(x), atol=1e-3)
    assert all(torch.equal(w, v) for w, v in zip(weights(model), weights(net()), strict=True)), "as it was"
    recipe = json.loads(json.dumps(slimmed.to_dict()))["recipe"]
    replayed = aerogel.finalize(aerogel.prune(net(), recipe, score="obs", calibration=calls()[:6]))
    assert all(
        torch.equal(w == 0, v == 0) for w, v in zip(weights(replayed), weights(slimmed.model), strict=True)
    )
    assert "<- this one" in str(slimmed)
    assert slimmed.plot().get_xlabel() == "measured latency, ms"


def test_the_score_is_kept_or_the_model_stays_dense() -> None:
    """evaluate says that any zero is one too many."""
    seen = []

    def evaluate(model: nn.Module) -> float:
        assert not model.training
        seen.append(sum(int((w == 0).sum()) for w in weights(model)))
        return float(seen[-1] == 0)

    slimmed = aerogel.slim(
        net(), calls(4), sparsity=0.5, evaluate=evaluate, budget_minutes=0.01, exclude=["0"]
    )
    assert slimmed.chosen is None
    assert slimmed.recipe == {}
    assert "the model is dense" in slimmed.why
    assert seen[1] > 0
    assert weights(slimmed.model)[1].count_nonzero() == weights(net())[1].numel()
    assert "0" not in slimmed.tries[0].recipe


def test_less_is_tried_where_it_was_too_much() -> None:
    def evaluate(model: nn.Module) -> float:
        found = weights(model)
        return 1 - max(0.0, sum(int((w == 0).sum()) for w in found) / sum(w.numel() for w in found) - 0.6)

    slimmed = aerogel.slim(net(), calls(4), sparsity=0.9, evaluate=evaluate, max_drop=0.03, budget_minutes=3)
    assert len(slimmed.tries) > 2
    assert slimmed.chosen is not None
    good = [one.zeros for one in slimmed.tries if one.zeros <= 0.63]
    assert slimmed.tries[slimmed.chosen].zeros == max(good) > 0.5
    assert slimmed.tries[0].zeros == pytest.approx(0.9, abs=0.02)


def test_a_training_of_ones_own() -> None:
    def train(model: nn.Module, schedule: Any) -> None:
        assert model.training
        steps = schedule(steps=4, every=1)
        for _ in range(4):
            steps.step()

    slimmed = aerogel.slim(net(), calls(4), sparsity=0.5, max_drop=0.9, train=train, budget_minutes=1)
    assert slimmed.tries[0].zeros == pytest.approx(0.5, abs=0.02)
    assert not any(module.training for module in slimmed.model.modules())
    kept = weights(slimmed.model)[1]
    assert torch.equal(kept[kept != 0], weights(net())[1][kept != 0]), "no repair behind its back"


def test_a_speedup_is_measured_and_predicted() -> None:
    with using(ClockedCpu(by_nonzeros)):
        slimmed = aerogel.slim(
            net(),
            calls(4),
            speedup=1.5,
            pattern="unstructured",
            max_drop=0.9,
            budget_minutes=1,
            progress=False,
        )
    assert slimmed.chosen is not None
    last = slimmed.tries[slimmed.chosen]
    assert last.predicted is not None
    assert last.speedup == ClockedCpu.THEIRS / ClockedCpu.OURS


class Half(nn.Module):
    """Of its two layers one runs, which has nine weights in a row: of the last one no four are whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.runs, self.idle = nn.Linear(9, 16), nn.Linear(9, 16)

    def forward(self, x: Tensor) -> Any:
        return self.runs(x)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"sparsity": 0.4}, "The goal was reached."),
        ({"sparsity": 0.5, "pattern": "2:4"}, "The layers have 44.4% zeros, less than the 50.0% asked for."),
    ],
)
def test_a_goal_is_reached_only_where_it_is(
    asked: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Steps, "compiled", lambda _, model: model)
    monkeypatch.setattr(Steps, "_timed", lambda *_: (1.0, 1.0))
    assert aerogel.slim(Half(), [torch.randn(8, 9)], max_drop=0.99, budget_minutes=0.01, **asked).why == why


KILLED = """
import sys, torch, aerogel, aerogel.pruning.steps
torch.set_num_threads(1)
aerogel.pruning.steps.STEPS = 20
from tests.test_slim import calls, net, weights
slimmed = aerogel.slim(net(), calls(4), sparsity=0.8, max_drop=0.9, budget_minutes=1, state=sys.argv[1])
print(sum(int((w != 0).flatten().nonzero().sum()) for w in weights(slimmed.model)))
"""


def run(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", KILLED, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=counts.ROOT)


@pytest.mark.skipif(counts.by_day(), reason=counts.BY_NIGHT)
def test_killed_and_resumed_it_ends_with_the_same_masks(tmp_path: Path) -> None:
    """Killed once each of the stages is there."""
    for stage in ("curves.json", "step-1-pruned.safetensors", "step-1-healed.safetensors"):
        process, until = run(tmp_path / "killed"), time.monotonic() + 120
        while not (tmp_path / "killed" / stage).exists():
            assert time.monotonic() < until
            assert process.poll() is None or (tmp_path / "killed" / stage).exists()
            time.sleep(0.01)
        process.kill()
        process.communicate()
    ends = [run(tmp_path / name).communicate(timeout=300)[0] for name in ("killed", "whole")]
    assert ends[0] == ends[1] != ""


def test_state_of_another_question_is_refused(tmp_path: Path) -> None:
    question = {"model": "a", "inputs": "b", "goal": [3.0, None]}
    Stages(tmp_path).begin(question)
    Stages(tmp_path).begin(question)
    with pytest.raises(AerogelError, match="another goal: say state="):
        Stages(tmp_path).begin({**question, "goal": [2.0, None]})
    with pytest.raises(AerogelError, match="another model and inputs"):
        Stages(tmp_path).begin({**question, "model": "b", "inputs": "c"})
    assert Stages(tmp_path).once("score", lambda: 1.5, finite) == 1.5
    assert Stages(tmp_path).once("score", lambda: 2.5, finite) == 1.5


def test_only_patterns_that_are_chosen_from_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr("aerogel.pruning.slim._search", lambda steps, *_: looked.append(steps.patterns))
    for asked in ({"sparsity": 0.5}, {"speedup": 2}, {"sparsity": 0.5, "pattern": "4x1"}):
        aerogel.slim(net(), calls(1), **asked)
    assert looked == [("unstructured",), ("unstructured", "tilewise"), ("4x1",)]


def test_one_image_is_timed_where_the_model_takes_one() -> None:
    """Of numbers and of tensors that are no batch there is no first image."""
    x, basis, scale = torch.randn(8, 9), torch.randn(9, 9), torch.tensor(2.0)
    (one, same, number), named = first_image(((x, basis, scale), {"y": x, "z": None}))
    assert torch.equal(one, x[:1])
    assert torch.equal(named["y"], x[:1])
    assert same is basis
    assert number is scale

    class Fixed(Half):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.reshape(8, 9))

    assert timed_on(Half(), ((x,), {}))[0][0].shape == (1, 9)
    assert timed_on(Fixed(), ((x,), {}))[0][0].shape == (8, 9)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"speedup": 2, "sparsity": 0.5}, "not both"),
        ({"speedup": 0.5}, "more than 1"),
        ({"sparsity": 90}, "say 0.9"),
        ({"budget_minutes": 0}, "a number of minutes"),
        ({"evaluate": 3}, "evaluate is a function"),
        ({"train": 3}, "train is a function"),
        ({"pattern": "2 of 4"}, "pattern is"),
        ({"pattern": "2:4", "sparsity": 0.9}, "2:4 has 50% zeros at most, not 90%"),
        ({"exclude": ["none"]}, "is no convolution"),
        ({"inputs": []}, "empty"),
        ({"inputs": [torch.randn(2, 4, 8, 8)]}, "does not run on its first calibration input"),
    ],
)
def test_mistakes(given: dict[str, Any], said: str) -> None:
    with pytest.raises(AerogelError, match=said):
        aerogel.slim(net(), given.pop("inputs", calls(1)), **given)
