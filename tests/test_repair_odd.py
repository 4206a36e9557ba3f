"""Repair on models that are legal and odd: layers that pad by themselves, tied weights, layers that run
another number of times in each call, inputs changed in place, NaN, batch norm that no call reaches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils import prune as torchs

import aerogel
from aerogel import AerogelError
from aerogel.pruning.curves import LEVELS, _seen
from aerogel.pruning.gram import Pick, order
from aerogel.pruning.layers import prunable
from aerogel.pruning.masks import masks
from aerogel.pruning.norms import estimate

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def zeros(model: nn.Module) -> dict[str, float]:
    return {name: float((torch.as_tensor(m.weight) == 0).float().mean()) for name, m in prunable(model)}


def away(model: nn.Module, dense: nn.Module, x: Any) -> float:
    with torch.no_grad():
        wanted = dense(x)
        return float((model(x) - wanted).norm() / wanted.norm())


def compared(dense: nn.Module, sparsity: Any, calls: list[Any], x: Any) -> tuple[float, float]:
    """How far obs and magnitude are from the dense model."""
    obs = aerogel.prune(copy.deepcopy(dense), sparsity, score="obs", calibration=calls, progress=False)
    return away(obs, dense, x), away(aerogel.prune(copy.deepcopy(dense), sparsity), dense, x)


class Same(nn.Conv2d):
    """Pads by itself, as ports of TensorFlow's networks do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 1, 0, 1)))


def test_what_is_no_product_is_pruned_by_size() -> None:
    dense = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Same(8, 8, 3, stride=2)).eval()
    calls = [data(8, 3, 16, 16, seed=i) for i in range(4)]
    assert order(dense, dict(prunable(dense)), ((calls[0],), {})) == ["0"]
    obs, magnitude = compared(dense, {"2": 0.3}, calls, data(4, 3, 16, 16, seed=9))
    assert obs == magnitude


def test_tied_weights_are_masked_and_never_fitted() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Any:
            return self.head(self.table(x))

    model = Tied()
    before = model.table.weight.detach().clone()
    calls = [torch.arange(20).reshape(2, 10)]
    aerogel.prune(model, 0.5, score="obs", scope="uniform", calibration=calls, progress=False)
    assert torch.equal(model.table.weight, before)
    assert zeros(model) == {"head": 0.5}


class Frames(nn.Module):
    """A Linear for each frame: it runs as often as there are frames."""

    def __init__(self) -> None:
        super().__init__()
        self.frame = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.frame(one) for one in x.unbind(1)], 1).sum(1)


def test_each_call_has_its_own_number_of_targets() -> None:
    dense, mixed = Frames().eval(), data(16, 16) @ torch.diag(torch.linspace(0.1, 3, 16))
    calls = [data(16, frames, 16, seed=i) @ mixed for i, frames in enumerate((3, 1, 1, 2, 1))]
    obs, magnitude = compared(dense, 0.5, calls, data(8, 2, 16, seed=9) @ mixed)
    assert obs < 0.8 * magnitude


def test_inputs_changed_in_place_stay_the_users() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x.mul_(2.0))

    dense, calls = Scaling().eval(), [data(16, 16, seed=i) for i in range(4)]
    before = [x.clone() for x in calls]
    aerogel.prune(dense, 0.5, score="obs", calibration=calls, progress=False)
    assert all(map(torch.equal, calls, before))


@pytest.mark.parametrize("score", ["obs", "wanda"])
def test_what_is_no_number_is_said_and_nothing_changes(score: str) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval(), data(8, 3, 9, 9)
    x[0, 0, 0, 0] = torch.nan
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(AerogelError, match="'0' is given, or answers, NaN or infinity"):
        aerogel.prune(model, {"0": 0.5, "2": 0.5}, score=score, calibration=[x], progress=False)
    assert list(model.state_dict()) == list(before), "no mask is left on it"
    score_of = torch.tensor([[3.0, torch.nan, 1.0, torch.nan]])[..., None]
    assert masks({"a": score_of}, {"a": 0.5}, "unstructured")["a"].flatten().tolist() == [False, True] * 2


def test_a_failure_in_the_middle_leaves_the_model_as_it_was() -> None:
    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            if int((self.first.weight == 0).sum()):
                raise RuntimeError("pruned")
            return self.second(self.first(x))

    model = Choosy().eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="pruned"):
        aerogel.prune(model, {"first": 0.5, "second": 0.5}, score="obs", calibration=[data(32, 8)])
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_batch_norm_weighs_images_and_keeps_what_no_call_reaches() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.aside = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Any:
            return self.main(x)

    model: Any = Twice()
    model.aside.running_mean.fill_(7)
    x = data(65, 4)
    calls: Any = [((x[i : i + 32],), {}) for i in (0, 32, 64)]  # 32, 32 and 1
    estimate(model, calls)
    assert torch.allclose(model.main.running_mean, x[:64].mean(0), atol=1e-6)
    assert torch.equal(model.aside.running_mean, torch.full((4,), 7.0))
    few: Any = [((data(40, 4),), {}), ((data(2, 4, seed=1) + 50,), {})]
    estimate(model, few)
    every = torch.cat([args[0] for args, _ in few])
    assert torch.allclose(model.main.running_mean, every.mean(0), rtol=1e-4)
    broken: Any = [*few, ((data(40, 5),), {})]
    with pytest.raises(RuntimeError):
        estimate(model, broken)
    assert torch.allclose(model.main.running_mean, every.mean(0), rtol=1e-4), "as before the failure"


def test_of_many_tokens_some_are_looked_at() -> None:
    layer, x = nn.Linear(4, 3), data(64, 1000, 4)
    found = Pick([((x,), {})]).patches(layer, 0, x)
    assert found.shape[1] == 64 * 256


def test_a_name_that_begins_with_module_is_a_name() -> None:
    model = nn.Module()
    model.add_module("one", nn.Linear(4, 4))
    model.add_module("module", nn.ModuleDict({"one": nn.Linear(4, 4)}))
    assert [name for name, _ in prunable(model)] == ["one", "module.one"]


def test_weights_that_are_computed() -> None:
    normed = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)))
    with pytest.raises(AerogelError, match=r"'0' computes its weight .*remove_parametrizations"):
        aerogel.prune(normed, 0.5, score="obs", calibration=[data(16, 8)])
    hooked = nn.Sequential(nn.Linear(8, 8))
    torchs.l1_unstructured(hooked[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    with pytest.raises(AerogelError, match=r"by a hook .*torch.nn.utils.prune.remove\(layer, 'weight'\)"):
        aerogel.prune(hooked, 0.5)
    with pytest.raises(AerogelError, match="meta device"):
        aerogel.prune(nn.Linear(8, 8, device="meta"), 0.5)


def test_frozen_weights_stay_frozen() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
    aerogel.finalize(aerogel.prune(model, 0.5))
    assert not model[0].weight.requires_grad


def test_a_block_larger_than_the_layer_takes_no_memory() -> None:
    kept = masks({"a": torch.rand(8, 3, 3, 3)}, {"a": 0.5}, "9999x9999")["a"]
    assert kept.shape == (8, 3, 3, 3)
    assert kept.flatten(2).all(0).all(0).sum() == 5


def test_how_much_is_looked_at_is_counted_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the same model and images give the same masks on every machine."""
    model = nn.Linear(8, 8).eval()
    calls: Any = [((data(16, 8),), {})] * 6
    each = 2 * 16 * 8 * 8
    for work, many, levels in ((6 * 9, 6, 9), (6 * 5, 6, 5), (6 * 3, 6, 3), (6, 2, 3), (0, 1, 3)):
        monkeypatch.setattr("aerogel.pruning.curves.WORK", work * each)
        seen, some = _seen(model, calls, 1)
        assert (len(seen), len(some)) == (many, levels)
        assert some[-1] == LEVELS[-1]
