"""Pruning that repairs: exact least squares on the mask, targets of the dense network, scores near greedy
OBS, any layer, any pattern, the same every time."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aerogel
from aerogel import AerogelError
from aerogel.progress import Progress
from aerogel.pruning.curves import curves, roughly
from aerogel.pruning.gram import Pick, Sums, gathered, targets
from aerogel.pruning.layers import as_weight, filters_first, results
from aerogel.pruning.masks import masks
from aerogel.pruning.obs import RIDGE, Problem, costs, fitted, mask
from tests import counts

pytestmark = pytest.mark.usefixtures("one_thread")


KINDS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "conv": (nn.Conv2d(6, 8, 3, 2, 1), (6, 9, 7)),
    "grouped": (nn.Conv2d(6, 9, (3, 2), groups=3, bias=False), (6, 5, 6)),
    "depthwise": (nn.Conv2d(5, 10, 3, padding="same", dilation=2, groups=5), (5, 6, 6)),
    "reflected": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (3, 6, 6)),
    "conv1d": (nn.Conv1d(4, 6, 5, stride=2, padding=2), (4, 17)),
    "conv3d": (nn.Conv3d(2, 4, (1, 2, 3)), (2, 3, 4, 5)),
    "linear": (nn.Linear(7, 5), (7,)),
    "tokens": (nn.Linear(7, 5), (3, 7)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), (4, 5, 4)),
    "transposed in groups": (nn.ConvTranspose2d(4, 6, (2, 3), stride=2, groups=2, dilation=2), (4, 3, 4)),
    "transposed1d": (nn.ConvTranspose1d(3, 4, 4, stride=3), (3, 6)),
}


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_its_matrix_times_its_patches(kind: str) -> None:
    module, shape = KINDS[kind]
    x = data(4, *shape)
    y = module(x).detach()
    pick = Pick([((x,), {})])
    patches = pick.patches(module, 0, x)
    weight = filters_first(module, torch.as_tensor(module.weight).detach())
    grouped = weight.reshape(len(patches), -1, patches.shape[2])
    product = (patches @ grouped.mT).transpose(0, 1).flatten(1)
    wanted = pick.answers(module, 0, y)
    assert torch.allclose(product, wanted, atol=1e-5)
    assert len(wanted) == results(module, y).shape[:-1].numel(), "all pixels of so few"
    back: Any = module.weight
    assert torch.equal(as_weight(module, weight, back.shape), back)


def test_some_pixels_are_the_same_ones_for_inputs_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aerogel.pruning.gram.PIXELS", 20)
    monkeypatch.setattr("aerogel.pruning.gram.EACH", 3)
    module, shape = KINDS["conv"]
    x = data(4, *shape)
    pick = Pick([((x,), {})])
    patches, wanted = pick.patches(module, 7, x), pick.answers(module, 7, module(x))
    assert len(wanted) == 20
    weight = torch.as_tensor(module.weight).detach().flatten(1)
    assert torch.allclose(patches[0] @ weight.T, wanted, atol=1e-5)
    assert not torch.equal(pick.answers(module, 8, module(x)), wanted), "others in another call"


def problem(
    filters: int = 6, positions: int = 20, pixels: int = 200
) -> tuple[Problem, Tensor, Tensor, Tensor]:
    """Inputs that hang together, a dense matrix, and targets that it does not quite give."""
    x = data(pixels, positions, seed=1) @ data(positions, positions, seed=2)
    dense = data(filters, positions, seed=3)
    y = x @ dense.T + 0.1 * data(pixels, filters, seed=4)
    sums = Sums(x.double().T[None] @ x.double(), y.double().T[None] @ x.double())
    return Problem.of(sums, dense), x.double(), y.double(), dense.double()


def test_least_squares_row_by_row() -> None:
    """As float64 lstsq has it, the ridge written as further pixels."""
    own, x, y, dense = problem()
    kept = data(6, 20, seed=5) > 0.3
    ridge = RIDGE * float((x.square().sum(0)).mean())
    found = fitted(own, kept)
    for row in range(6):
        at = kept[row].nonzero().flatten()
        held = torch.eye(20, dtype=torch.float64)[:, at] * ridge**0.5
        wanted = torch.linalg.lstsq(
            torch.cat([x[:, at], held]), torch.cat([y[:, row], dense[row] * ridge**0.5])
        )
        assert torch.allclose(found[row, at], wanted.solution, rtol=1e-6, atol=1e-8)
        assert found[row][~kept[row]].count_nonzero() == 0


def loss(own: Problem, weights: Tensor) -> float:
    """The squared error, but for a constant."""
    gram, cross = own.gram[0], own.cross[0]
    return float(((weights @ gram) * weights).sum() - 2 * (weights * cross).sum())


@pytest.mark.parametrize("pattern", ["unstructured", "1x4"])
def test_a_cost_is_what_fitting_again_costs(pattern: str) -> None:
    own, *_ = problem()
    kept = torch.ones(6, 20, dtype=torch.bool)
    before, cost, wide = loss(own, fitted(own, kept)), costs(own, kept, pattern), 4 if pattern == "1x4" else 1
    for row, at in ((0, 3), (2, 0), (5, 16)):
        without = kept.clone()
        first = at // wide * wide
        without[row, first : first + wide] = False
        rise = loss(own, fitted(own, without)) - before
        assert rise == pytest.approx(float(cost[row, first : first + wide].sum()), rel=1e-6)


def test_rounds_are_near_exact_greedy_obs() -> None:
    """One weight after the other, the cheapest each time, all others fitted again: within 10 %."""
    own, *_ = problem(4, 16)
    whole = torch.ones(4, 16, dtype=torch.bool)
    start = loss(own, fitted(own, whole))
    for share in (0.5, 0.75):
        greedy = whole.clone()
        for _ in range(int(share * 64)):
            cost = costs(own, greedy, "unstructured").masked_fill(~greedy, torch.inf)
            greedy.view(-1)[int(cost.argmin())] = False
        kept = mask(own, "unstructured", share, whole)
        assert int((~kept).sum()) == int(share * 64)
        best, found = (loss(own, fitted(own, m)) - start for m in (greedy, kept))
        assert found <= 1.1 * best, (share, found / best)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_better_than_magnitude_in_every_layer(share: float) -> None:
    own, _, _, dense = problem(16, 40, 400)
    large = masks({"": dense.abs()}, {"": share}, "unstructured")[""]
    kept = mask(own, "unstructured", share, torch.ones(16, 40, dtype=torch.bool))
    assert loss(own, fitted(own, kept)) < loss(own, fitted(own, large)) < loss(own, dense * large)


def net() -> Any:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    second = nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(24, 8, 2, 2), nn.ReLU()
    made = nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))
    made.train()
    for i in range(4):
        made(images(32, i))
    return made.eval()


def images(count: int, seed: int) -> Tensor:
    """Smooth ones: pixels that hang together, as in photos."""
    return F.interpolate(data(count, 3, 4, 4, seed=seed), (10, 10), mode="bilinear")


CALLS = [images(32, i) for i in range(4)]


def away(model: nn.Module, other: nn.Module) -> float:
    x = images(64, 99)
    with torch.no_grad():
        return float((model(x) - other(x)).norm() / other(x).norm())


@pytest.mark.parametrize("pattern", ["unstructured", "1x4", "4x1", "2:4", "tilewise", "tew"])
def test_repair_is_nearer_than_magnitude(pattern: str) -> None:
    share = 0.5
    dense, ours, plain = net(), net(), net()
    aerogel.prune(plain, share, pattern=pattern, scope="uniform", calibration=CALLS)
    given = aerogel.prune(ours, share, pattern=pattern, score="obs", scope="uniform", calibration=CALLS)
    assert given is ours
    assert away(ours, dense) < (0.8 if pattern in ("tilewise", "tew") else 0.6) * away(plain, dense)
    aerogel.finalize(ours)
    gone = sum(int((w == 0).sum()) for w in weights(ours))
    total = sum(w.numel() for w in weights(ours))
    assert gone <= share * total + 1
    if pattern in ("unstructured", "1x4", "4x1"):
        assert gone >= share * total - 40


def weights(model: nn.Module) -> list[Tensor]:
    return [
        torch.as_tensor(m.weight)
        for m in model.modules()
        if isinstance(m, nn.Conv2d | nn.Linear | nn.ConvTranspose2d)
    ]


def test_shares_by_error_beat_uniform_ones() -> None:
    dense, uniform, spread = net(), net(), net()
    aerogel.prune(uniform, 0.8, score="obs", scope="uniform", calibration=CALLS)
    aerogel.prune(spread, 0.8, score="obs", calibration=CALLS)
    zeros = [float((w == 0).double().mean()) for w in weights(aerogel.finalize(spread))]
    assert sum(int((w == 0).sum()) for w in weights(spread)) == pytest.approx(
        0.8 * sum(w.numel() for w in weights(spread)), rel=0.02
    )
    assert max(zeros) - min(zeros) > 0.1
    assert away(spread, dense) < away(uniform, dense)


def test_curves_rise_and_leave_the_network_as_it_was() -> None:
    dense = net()
    before = copy.deepcopy(dense.state_dict())
    calls: Any = [((x,), {}) for x in CALLS]
    layers = {"0": dense[0], "3": dense[3]}
    found = curves(dense, layers, ["unstructured", "2:4"], calls, Progress())
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())
    for own in found.values():
        errors = [error for _, error in sorted(own["unstructured"].items())]
        assert errors[0] < errors[4] < errors[-1]
        assert max(own["2:4"]) == 0.5
    sums = gathered(dense, dense[3], targets(dense, layers, calls)["3"], calls)
    own_problem = Problem.of(sums, dense[3].weight.detach())
    kept = dense[3].weight.detach().abs().flatten(1) > 0.03
    rough, exact = roughly(own_problem, kept, dense[3].weight.detach()), fitted(own_problem, kept)
    masked = dense[3].weight.detach().flatten(1) * kept
    lost = [loss(own_problem, w.double()) for w in (exact, rough, masked)]
    assert lost[0] <= lost[1] < lost[0] + 0.1 * (lost[2] - lost[0])


def test_the_same_every_time_and_the_user_undisturbed() -> None:
    found, state = [], torch.get_rng_state()
    for _ in range(2):
        model = net().train()
        torch.set_rng_state(state)
        aerogel.prune(model, 0.7, score="obs", calibration=CALLS)
        assert torch.equal(torch.get_rng_state(), state)
        assert model.training
        assert all(m.training for m in model.modules())
        found.append(aerogel.finalize(model).state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_layers_after_pruned_ones_have_the_dense_networks_targets() -> None:
    """The second layer makes good for what the first one lost: its sums are of the pruned network's inputs
    and the dense network's answers."""
    dense = net()
    pruned = copy.deepcopy(dense)
    aerogel.prune(pruned, {"0": 0.9})
    calls: Any = [((x,), {}) for x in CALLS]
    wanted = targets(dense, {"3": dense[3]}, calls)["3"]
    sums = gathered(pruned, pruned[3], wanted, calls)
    x = torch.cat([pruned[:3](c) for c in CALLS]).detach()
    y = torch.cat([dense[:4](c) - dense[3].bias.reshape(1, -1, 1, 1) for c in CALLS]).detach()
    patches = F.unfold(x, 3, padding=1, stride=2).transpose(1, 2).flatten(0, 1).double()
    answers = y.flatten(2).transpose(1, 2).flatten(0, 1).double()
    assert torch.allclose(sums.gram[0], patches.T @ patches, rtol=1e-6)
    assert torch.allclose(sums.cross[0], answers.T @ patches, rtol=1e-5, atol=1e-3)


def test_a_recipe_keeps_its_shares() -> None:
    model = net()
    aerogel.prune(model, {"3": ("1x4", 0.5), "9": ("unstructured", 0.25)}, score="obs", calibration=CALLS)
    zeros = [float((w == 0).double().mean()) for w in weights(aerogel.finalize(model))]
    assert zeros == [0, 0.5, 0, 0.25]


def test_what_was_pruned_stays_and_a_shared_layer_is_fitted_once() -> None:
    model = net()
    aerogel.prune(model, {"3": 0.5})
    before = model[3].weight == 0
    aerogel.prune(model, {"3": 0.8}, score="obs", calibration=CALLS, scope="uniform")
    assert (model[3].weight[before] == 0).all()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Any:
            return self.conv(self.conv(x).relu())

    twice = Twice()
    dense, x = copy.deepcopy(twice), data(8, 4, 6, 6)
    aerogel.prune(twice, 0.5, score="obs", calibration=[x])
    plain = aerogel.prune(copy.deepcopy(dense), 0.5)
    assert (twice(x) - dense(x)).norm() < (plain(x) - dense(x)).norm()


def test_wanda_looks_at_what_a_weight_meets() -> None:
    layer: Any = nn.Sequential(nn.Linear(2, 1, bias=False))
    layer[0].weight.data[:] = torch.tensor([[1.0, 2.0]])
    x = data(64, 2) * torch.tensor([10.0, 1.0])
    aerogel.prune(layer, 0.5, score="wanda", calibration=[x])
    assert layer[0].weight.tolist() == [[1.0, 0.0]]


def test_batch_norm_is_estimated_again() -> None:
    model = net()
    aerogel.prune(model, 0.8, calibration=CALLS)
    after = torch.cat([model[0](x) for x in CALLS]).detach()
    assert torch.allclose(model[1].running_mean, after.mean((0, 2, 3)), atol=1e-4)
    assert model[1].momentum == 0.1
    few = net()
    before = few[1].running_mean.clone()
    aerogel.prune(few, 0.8, calibration=[x[:4] for x in CALLS])  # too few images to estimate from
    assert torch.equal(few[1].running_mean, before)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "looks at real inputs"),
        ([], "calibration is empty"),
        ("images", "a list of the model's inputs, not a str"),
        ([1.0], "holds a float"),
        ([(data(2, 3, 10, 10), torch.zeros(2))], r"\[x for x, _ in loader\]"),
    ],
)
def test_mistakes(given: Any, said: str) -> None:
    with pytest.raises(AerogelError, match=said):
        aerogel.prune(net(), 0.5, score="obs", calibration=given)


LARGE = """
import resource, torch, aerogel
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Conv2d(512, 512, 3, padding=1)).eval()
calls = [torch.randn(8, 512, 8, 8) for _ in range(4)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
aerogel.prune(model, 0.9, score="obs", scope="uniform", calibration=calls)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.skipif(counts.mode() != "nightly", reason="minutes: by night only")
def test_a_large_layer_takes_less_than_a_gigabyte() -> None:
    ran = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 1000
