"""What is the user's stays the user's: parameters and optimizers, gradients, random numbers, models that are
legal and odd; and what cannot be done is said before anything changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune as torchs

import aerogel
from aerogel import AerogelError
from aerogel.progress import Progress
from aerogel.pruning.asked import chosen
from aerogel.pruning.held import masks_of
from aerogel.pruning.permute import permuted
from tests.test_slim import tick

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def net() -> Any:
    torch.manual_seed(0)
    first = (
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.ReLU(),
    )
    return nn.Sequential(*first, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)).eval()


def calls(many: int = 4) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(16, 3, 12, 12, generator=random) for _ in range(many)]


def zeros(model: nn.Module) -> int:
    return sum(int((p == 0).sum()) for p in model.parameters())


def test_finalize_keeps_what_an_optimizer_holds() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    held = {id(p) for p in model.parameters()}
    aerogel.finalize(aerogel.prune(model, 0.5))
    assert {id(p) for p in model.parameters()} == held
    assert float((model[0].weight == 0).float().mean()) == 0.5
    before = model[0].weight.detach().clone()
    model(calls(1)[0]).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_finalize_of_weights_that_layers_share() -> None:
    """Under the same mask they stay one; what only one layer masks stays whole in the other."""
    for asked, one in ((0.5, True), ({"0": 0.5}, False)):
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        model[2].weight = model[0].weight
        dense = copy.deepcopy(model[0].weight)
        aerogel.finalize(aerogel.prune(model, asked))
        assert (model[0].weight is model[2].weight) == one
        assert int((model[0].weight == 0).sum()) == 32
        assert one or torch.equal(model[2].weight, dense)


def test_channels_take_their_gradients_along() -> None:
    model, x = net(), calls(1)[0]
    model(x).square().sum().backward()
    before = model[0].weight.detach().clone()
    permuted(model, x, chosen(model, {"3": 0.5}, "1x4", "uniform", "taylor", ()), Progress())
    assert not torch.equal(model[0].weight, before)
    carried = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for parameter, own in zip(model.parameters(), carried, strict=True):
        torch.testing.assert_close(own, parameter.grad, rtol=1e-3, atol=1e-3)


def test_permute_leaves_random_numbers_alone() -> None:
    model, x = net(), calls(1)[0]
    before = torch.get_rng_state()
    aerogel.prune(model, {"3": 0.5}, pattern="1x4", permute=x)
    assert torch.equal(torch.get_rng_state(), before)


def test_heal_leaves_gradients_alone() -> None:
    model, x = net(), calls(1)[0]
    teacher = copy.deepcopy(model)
    aerogel.prune(model, 0.5)
    model(x).square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    aerogel.heal(model, calls(), teacher=teacher, steps=2, progress=False)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


class Loader:
    """Says how many images it has, and gives batches."""

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[Tensor]:
        return iter(calls())


def test_a_loader_that_has_less_than_it_says() -> None:
    model = net()
    aerogel.heal(aerogel.prune(model, 0.5), Loader(), teacher=net(), steps=2, progress=False)


class Keeps(nn.Module):
    """Remembers what it computed last, as attention for a picture is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.body(x)
        return self.last * 2.0  # type: ignore[no-any-return]


def test_a_model_that_holds_what_it_computed() -> None:
    for options in (
        {"score": "obs", "calibration": calls()},
        {"pattern": "1x4", "permute": calls(1)[0], "exclude": ["body.7"]},
    ):
        model = Keeps()
        model(calls(1)[0])
        assert zeros(aerogel.finalize(aerogel.prune(model, 0.5, progress=False, **options))) > 1000


class Deaf(nn.Module):
    """Its answers have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def test_slim_of_models_that_cannot_learn() -> None:
    for model in (net().requires_grad_(False), Deaf().eval()):
        slimmed = aerogel.slim(model, calls(), sparsity=0.5, max_drop=0.9, budget_minutes=1, progress=False)
        assert slimmed.chosen is not None
    with pytest.raises(AerogelError, match="have no gradient"):
        aerogel.heal(aerogel.prune(Deaf(), 0.5), calls(), teacher=Deaf(), steps=2, progress=False)


def test_what_cannot_be_done_is_said_before_anything_changes() -> None:
    pairs = [(x, torch.zeros(16)) for x in calls()]
    empty = [torch.zeros(0, 3, 12, 12)]
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"score": "taylor", "scope": "error", "calibration": calls()}, "scope 'error' goes with"),
        ({"calibration": pairs}, "does not run on its first calibration input"),
        ({"calibration": {"x": 1}}, "calibration is a list"),
        ({"calibration": empty, "score": "obs"}, "hold no image"),
        ({"calibration": empty}, "hold no image"),
    )
    for options, said in wrong:
        model = net()
        with pytest.raises(AerogelError, match=said):
            aerogel.prune(model, 0.5, progress=False, **options)
        assert not any(masks_of(module) for module in model.modules())
    with pytest.raises(AerogelError, match="hold no image"):
        aerogel.slim(net(), empty, sparsity=0.5)


def test_reprune_says_what_it_cannot_mask_before_it_times() -> None:
    model = net()
    torchs.l1_unstructured(model[3], "weight", 0.8)  # type: ignore[no-untyped-call]
    aerogel.prune(model, {"0": 0.8})
    with pytest.raises(AerogelError, match="'3' computes its weight by a hook"):
        aerogel.reprune(model, (calls(1)[0],))


class Twice(nn.Module):
    """A layer that runs at two sizes, as the head of a pyramid does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.head(x)
        return y, self.head(F.avg_pool2d(y, 2))


def test_reprune_of_a_layer_that_runs_twice() -> None:
    model = aerogel.prune(Twice().eval(), 0.8)
    before = zeros(aerogel.finalize(copy.deepcopy(model)))
    found = aerogel.reprune(model, (torch.randn(1, 16, 12, 12),))
    assert [layer.layer for layer in found.layers] == ["head"]
    assert zeros(aerogel.finalize(model)) == before + sum(layer.removed for layer in found.layers)


def test_new_weights_for_int8() -> None:
    model = net()
    fast = aerogel.compile(model, (calls(1)[0],), dtype="int8", calibration=calls(), tune="off")
    with pytest.raises(AerogelError, match="compile again with calibration"):
        fast.load_state_dict(model.state_dict())


class Shifted(nn.Module):
    """Adds a size to a map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + x.shape[2]  # type: ignore[no-any-return]


def test_int8_of_a_map_and_a_size() -> None:
    model, x = Shifted().eval(), calls(1)[0]
    fast = aerogel.compile(model, (x,), dtype="int8", calibration=calls(), tune="off")
    assert float((fast(x) - model(x)).detach().abs().mean()) < 0.02


def test_slim_goes_on_from_every_step_that_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were judged cost no time again: the second call comes to the same though its time is up."""
    tick(monkeypatch)

    def evaluate(model: nn.Module) -> float:
        return float(zeros(model) < 3000)

    options: Any = {"sparsity": 0.8, "evaluate": evaluate, "state": tmp_path / "s", "progress": False}
    first = aerogel.slim(net(), calls(), budget_minutes=2, **options)
    assert len(first.tries) > 2
    assert first.chosen
    tick(monkeypatch, 60.0)
    again = aerogel.slim(net(), calls(), budget_minutes=1e-3, **options)
    assert again.recipe == first.recipe
    assert len(again.tries) == len(first.tries)


def test_times_of_another_machine_are_not_taken(tmp_path: Path) -> None:
    options: Any = {"max_drop": 0.9, "budget_minutes": 1, "state": tmp_path / "s", "progress": False}
    aerogel.slim(net(), calls(), speedup=1.2, **options)
    path = tmp_path / "s" / "question.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "cpu-neon-t64"}))
    with pytest.raises(AerogelError, match="another machine"):
        aerogel.slim(net(), calls(), speedup=1.2, **options)
