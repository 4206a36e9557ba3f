"""Pruning: exactly as much as asked, what is least important first, and zeros that stay zeros whatever the
training does."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torchs

import aerogel
from aerogel import AerogelError
from aerogel.pruning.asked import erk
from aerogel.pruning.masks import GIVEN_BACK, TILE, masks, tiles
from tests.small_models import Small, right


def net() -> Any:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(8, 300, 3, padding=1), nn.ReLU(), nn.Conv2d(300, 40, 1), nn.ReLU()
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 10))


def pruned(*args: Any, **kwargs: Any) -> Any:
    return aerogel.prune(net(), *args, **kwargs)


def zeros(layer: Any) -> float:
    return float((layer.weight == 0).double().mean())


@pytest.mark.parametrize("pattern", ["unstructured", "4x1", "1x4", "7x5", "tw1d", "tilewise", "tew"])
@pytest.mark.parametrize("scope", ["uniform", "global", "erk"])
def test_as_much_as_asked(pattern: str, scope: str) -> None:
    """Never more than asked, and less by at most a block, a row of a tile or a filter."""
    model = pruned(0.75, pattern=pattern, scope=scope, exclude=["6"])
    weights = [model[i].weight for i in (0, 2)]
    gone, total = sum(int((w == 0).sum()) for w in weights), sum(w.numel() for w in weights)
    unit = {"unstructured": 1, "4x1": 4, "1x4": 4, "7x5": 35, "tew": 1}.get(pattern, 2 * TILE + 600)
    assert 0.75 * total - unit * (2 if scope != "global" else 1) <= gone <= 0.75 * total + 1e-3
    assert zeros(model[6]) == 0
    if scope == "uniform" and pattern == "unstructured":
        assert [zeros(model[i]) for i in (0, 2)] == [0.75, 0.75]


def test_the_least_important_goes() -> None:
    plain, model = net(), pruned(0.6, scope="global")
    gone = torch.cat([plain[i].weight[model[i].weight == 0].abs() for i in (0, 2, 6)])
    kept = torch.cat([plain[i].weight[model[i].weight != 0].abs() for i in (0, 2, 6)])
    assert gone.max() <= kept.min()


def test_blocks_go_whole() -> None:
    """Filters x channels, at one position of the kernel."""
    mask = pruned(0.5, pattern="4x2")[0].weight.detach() != 0
    assert set(mask.reshape(75, 4, 4, 2, 9).sum((1, 3)).unique().tolist()) == {0, 8}


def test_two_of_four_channels_stay() -> None:
    model = pruned(0.5, pattern="2:4", exclude=["6"])
    for layer in (model[0], model[2]):
        groups = (layer.weight != 0).unflatten(1, (-1, 4))
        assert set(groups.sum(2).unique().tolist()) == {2}
        assert (layer.weight.abs().unflatten(1, (-1, 4)).amax(2) > 0).all()
    half = pruned(0.25, pattern="2:4", exclude=["6"])
    assert zeros(half[0]) == 0.25
    assert set((half[0].weight != 0).unflatten(1, (-1, 4)).sum(2).unique().tolist()) == {2, 4}
    with pytest.raises(AerogelError, match="2:4 has 50% zeros at most"):
        pruned(0.6, pattern="2:4")


def test_transposed_convolutions_are_pruned_by_their_filters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(8, 12, 3, groups=2))
    aerogel.prune(model, 0.5, pattern="6x1")
    mask = torch.as_tensor(model[0].weight).reshape(2, 4, 6, 3, 3) != 0
    assert set(mask.sum(2).flatten().tolist()) == {0, 6}


def test_a_recipe_is_a_dict_too() -> None:
    model = pruned({"0": ("4x1", 0.5), "2": ["unstructured", 0.75]})
    assert [zeros(model[i]) for i in (0, 2, 6)] == [0.5, 0.75, 0.0]


def test_tiles_are_dense_after_dropping_rows_and_filters() -> None:
    mask = pruned(0.75, pattern="tilewise")[0].weight.detach().reshape(300, -1) != 0
    left = mask[mask.any(1)]
    assert len(left) == 150, "half of the filters, and half of each tile's rows"
    for tile in left.split(TILE):
        assert (tile == tile[0]).all()
    rows = pruned(0.75, pattern="tw1d")[0].weight.detach().reshape(300, -1) != 0
    assert rows.any(1).all()
    assert all((tile == tile[0]).all() for tile in rows.split(TILE))


def test_tew_gives_the_best_elements_back() -> None:
    scores = {"a": torch.rand(200, 50, generator=torch.Generator().manual_seed(0))}
    mask = masks(scores, {"a": 0.75}, "tew")["a"]
    tiled = tiles({"a": scores["a"].double()}, {"a": 0.75 + GIVEN_BACK}, both=True)["a"]
    assert (mask | ~tiled).all(), "what tiles keep is kept"
    back = mask & ~tiled
    assert back.sum() > 0.01 * mask.numel()
    assert scores["a"][back].min() >= scores["a"][~mask].max()


def test_erk_spares_small_layers() -> None:
    scores = {
        "big": torch.rand(256, 256, 3, 3),
        "small": torch.rand(16, 8, 1, 1),
        "middle": torch.rand(64, 64, 3, 3),
    }
    shares = erk(scores, 0.9)
    assert shares["small"] == 0 < shares["middle"] < shares["big"] < 1
    assert sum(shares[n] * s.numel() for n, s in scores.items()) == pytest.approx(
        0.9 * sum(s.numel() for s in scores.values())
    )


def trained(model: Any, steps: int, schedule: Any = None, momentum: float = 0.9) -> None:
    rng = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum, weight_decay=0.01)
    for _ in range(steps):
        x, y = torch.randn(4, 8, 6, 6, generator=rng), torch.randint(10, (4,), generator=rng)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if schedule is not None:
            schedule.step()


def test_masks_hold_through_training() -> None:
    model = net()
    trained(model, 3)  # momentum that would move what is masked
    aerogel.prune(model, 0.8)
    before = [(model[i].weight == 0).clone() for i in (0, 2, 6)]
    trained(model, 10)
    assert all(torch.equal(model[i].weight == 0, b) for i, b in zip((0, 2, 6), before, strict=True))
    aerogel.prune(model, 0.5)
    assert zeros(model[0]) == 0.8, "less than there is already changes nothing"
    names = set(net().state_dict())
    weights = [model[i].weight.clone() for i in (0, 2, 6)]
    aerogel.finalize(model)
    assert set(model.state_dict()) == names
    assert all(torch.equal(model[i].weight, w) for i, w in zip((0, 2, 6), weights, strict=True))
    assert isinstance(model[0].weight, nn.Parameter)


def test_taylor_scores_are_weight_times_gradient() -> None:
    model = net()
    with pytest.raises(AerogelError, match=r"call backward\(\)"):
        aerogel.prune(model, 0.5, score="taylor")
    model(torch.randn(2, 8, 6, 6)).square().sum().backward()
    score = (model[2].weight * model[2].weight.grad).abs().detach()
    aerogel.prune(model, 0.5, score="taylor", exclude=["0", "6"])
    mask = model[2].weight != 0
    assert score[mask].min() >= score[~mask].max()


def test_a_schedule_grows_to_what_was_asked_and_resumes() -> None:
    model = net()
    schedule = aerogel.Schedule(model, 0.9, 20, every=5, exclude=["6"])
    seen = []
    for _ in range(4):
        trained(model, 5, schedule)
        seen.append(zeros(model[0]))
    assert seen == sorted(seen)
    assert seen[0] == pytest.approx(0.9 * (1 - 0.75**3), abs=1e-3)
    assert seen[-1] == 0.9
    again = net()
    other = aerogel.Schedule(again, 0.9, 20, every=5, exclude=["6"])
    again.load_state_dict(model.state_dict())
    other.load_state_dict(schedule.state_dict())
    assert other.count == 20
    assert all(torch.equal(again[i].weight, model[i].weight) for i in (0, 2, 6))
    trained(again, 3, other)
    assert zeros(again[0]) == 0.9


def test_what_is_wrong_is_said() -> None:
    for call, says in (
        ({"sparsity": 1.0}, "less than 1"),
        ({"sparsity": 0.5, "pattern": "0x4"}, "pattern is unstructured"),
        ({"sparsity": 0.5, "scope": "all"}, "scope is one of"),
        ({"sparsity": 0.5, "score": "luck"}, "score one of"),
        ({"sparsity": {"nothing": 0.5}}, "'nothing' is no convolution"),
        ({"sparsity": 0.5, "exclude": ["head"]}, "'head' is no convolution"),
    ):
        with pytest.raises(AerogelError, match=says):
            pruned(**call)
    with pytest.raises(AerogelError, match="steps is a whole number of at least 1"):
        aerogel.Schedule(net(), 0.5, 0)


@pytest.mark.parametrize("how", ["ours", "torch's"])
def test_masked_models_compile_as_they_are(how: str) -> None:
    model = Small().eval()
    if how == "ours":
        aerogel.prune(model, 0.9, exclude=["head"])
    else:
        for layer in [m for m in model.modules() if isinstance(m, nn.Conv2d)]:
            torchs.l1_unstructured(layer, "weight", 0.9)  # type: ignore[no-untyped-call]
    x = torch.randn(1, 3, 64, 64)
    fast = aerogel.compile(model, x, tune="off")
    right(aerogel.finalize(copy.deepcopy(model)) if how == "ours" else fast.original, fast, x)
    assert torch.allclose(fast(x), model(x), atol=1e-4)
    assert sum(c.sparsity > 0.85 for c in fast.plan.choices) >= 5
    assert sum(c.config.method != "dense" for c in fast.plan.choices) >= 5


_RANKS = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
import aerogel
from tests.test_pruning import net, trained

def rank(number, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    model = net()
    torch.manual_seed(number)  # ranks see other data
    schedule = aerogel.Schedule(model, 0.8, 12, every=4)
    wrapped = DistributedDataParallel(model)
    trained(wrapped, 8, schedule)
    if number == 0:
        torch.save({"model": model.state_dict(), "schedule": schedule.state_dict()}, f"{folder}/check")
    dist.barrier()
    model = net()
    schedule = aerogel.Schedule(model, 0.8, 12, every=4)
    held = torch.load(f"{folder}/check")
    model.load_state_dict(held["model"])
    schedule.load_state_dict(held["schedule"])
    trained(DistributedDataParallel(model), 6, schedule)
    for layer in (model[0], model[2], model[6]):
        both = [torch.empty_like(layer.weight) for _ in range(2)]
        dist.all_gather(both, layer.weight.detach().contiguous())
        assert torch.equal(both[0], both[1])
        assert float((both[0] == 0).double().mean()) == 0.8
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1],), 2)
    print("alike")
"""


def test_two_ranks_keep_the_same_masks(tmp_path: Path) -> None:
    """DistributedDataParallel on gloo, a checkpoint in the middle: exact sparsity, the same weights on
    both."""
    (tmp_path / "ranks.py").write_text(_RANKS)
    root = Path(__file__).parent.parent
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import runpy, sys; sys.path.insert(0, {str(root)!r}); sys.argv = ['ranks', "
            f"{str(tmp_path)!r}]; "
            f"runpy.run_path({str(tmp_path / 'ranks.py')!r}, run_name='__main__')",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=root,
    )
    assert ran.stdout.strip().endswith("alike"), ran.stdout[-1000:] + ran.stderr[-3000:]


def test_of_equal_weights_the_first_go_and_no_more_than_asked() -> None:
    kept = masks({"": torch.ones(4, 10)}, {"": 0.3}, "unstructured")[""]
    assert kept.flatten().tolist() == [False] * 12 + [True] * 28


def test_few_steps_prune_gradually() -> None:
    """The default must not be one cut at the end."""
    model = net()
    schedule = aerogel.Schedule(model, 0.9, 40)
    seen = set[float]()
    for _ in range(40):
        schedule.step()
        weight: Any = model[0].weight
        seen.add(round(float((weight == 0).float().mean()), 2))
    assert len(seen) >= 15
    assert max(seen) == pytest.approx(0.9, abs=0.02)
    assert aerogel.Schedule(net(), 0.9, 100_000).every == 100
