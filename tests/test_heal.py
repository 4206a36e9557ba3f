"""heal(): nearer to the teacher, never further; zeros stay; nothing is touched but the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torchs
from torch.utils.data import DataLoader

import aerogel
from aerogel import AerogelError
from aerogel.pruning.loss import _apart

pytestmark = pytest.mark.usefixtures("one_thread")


def net() -> Any:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()
    second = nn.Conv2d(24, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
    made: Any = nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    with torch.no_grad():
        made.train()
        made(images(64))  # statistics that mean something
        made[8].weight.mul_(5)
    return made.eval()


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 10, 10, generator=torch.Generator().manual_seed(seed))


def pruned(**options: Any) -> tuple[Any, Any]:
    """A dense network, and the same at 80 %."""
    teacher = net()
    return teacher, aerogel.prune(copy.deepcopy(teacher), 0.8, **options)


def away(model: Any, teacher: Any, x: Tensor | None = None) -> float:
    """Mean squared error over variance, on images that nobody learned from."""
    x = images(128, 99) if x is None else x
    with torch.no_grad():
        wanted = teacher(x)
        return float((model(x) - wanted).square().mean() / wanted.var())


def zeros(model: Any) -> list[Tensor]:
    return [m.weight == 0 for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]


CALLS = [images(16, seed) for seed in range(1, 13)]


def test_nearer_and_no_zero_is_lost() -> None:
    teacher, model = pruned()
    before, held, taught = away(model, teacher), zeros(model), copy.deepcopy(teacher.state_dict())
    gone = aerogel.heal(model, CALLS, teacher=teacher, steps=80, progress=False)
    assert gone is model
    assert away(model, teacher) < before / 3
    assert all(torch.equal(a, b) for a, b in zip(zeros(model), held, strict=True))
    assert all(torch.equal(v, taught[k]) for k, v in teacher.state_dict().items()), "the teacher is as it was"
    aerogel.finalize(model)
    assert set(model.state_dict()) == set(taught)
    assert all(torch.equal(a, b) for a, b in zip(zeros(model), held, strict=True))


@pytest.mark.parametrize("tool", ["weights", "torch.nn.utils.prune"])
def test_zeros_that_another_tool_made(tool: str) -> None:
    teacher, model = pruned()
    if tool == "weights":
        aerogel.finalize(model)
    else:
        model = copy.deepcopy(teacher)
        for layer in (model[0], model[3], model[8]):
            torchs.l1_unstructured(layer, "weight", 0.8)  # type: ignore[no-untyped-call]
    before, held = away(model, teacher), zeros(model)
    aerogel.heal(model, CALLS, teacher=teacher, steps=40, progress=False)
    assert away(model, teacher) < before / 1.5
    assert all(torch.equal(a, b) for a, b in zip(zeros(model), held, strict=True))


def test_never_worse() -> None:
    """A rate that destroys the model: what it was before stays, bit for bit."""
    teacher, model = pruned()
    for norm in (model[1], model[4]):
        norm.track_running_stats = False  # settling alone would gain
        norm.running_mean = norm.running_var = None
    before = copy.deepcopy(model.state_dict())
    aerogel.heal(model, CALLS, teacher=teacher, steps=1, rate=0.9, progress=False)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    same = copy.deepcopy(teacher)  # nothing to gain, only to lose
    aerogel.heal(same, CALLS, teacher=teacher, steps=5, rate=0.5, progress=False)
    assert all(torch.equal(v, teacher.state_dict()[k]) for k, v in same.state_dict().items())


def test_a_rate_that_leads_away_is_left_for_a_slower_one() -> None:
    teacher, model = pruned()
    before = away(model, teacher)
    aerogel.heal(model, CALLS, teacher=teacher, steps=60, rate=0.9, progress=False)
    assert away(model, teacher) < before / 1.5


def test_it_stops_when_nothing_is_gained() -> None:
    teacher = net()
    walked = []

    class Counted(list[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            for x in super().__iter__():
                walked.append(x)
                yield x

    aerogel.heal(copy.deepcopy(teacher), Counted(CALLS), teacher=teacher, steps=400, progress=False)
    assert len(walked) < 250, "three looks of ten, and the walks that skip what is held out"


def test_the_same_inputs_give_the_same_weights_and_random_numbers_stay() -> None:
    found = []
    for seed in (1, 2):
        teacher, model = pruned()
        torch.manual_seed(seed)
        rows: Any = torch.cat(CALLS)
        loader: Any = torch.utils.data.DataLoader(rows, 16, shuffle=True)
        state = torch.get_rng_state()
        model.insert(2, nn.Dropout(0.5))
        teacher.insert(2, nn.Dropout(0.5))
        aerogel.heal(model, loader, teacher=teacher, steps=12, progress=False)
        assert torch.equal(torch.get_rng_state(), state)
        found.append(model.state_dict())
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])


def test_modes_and_frozen_parameters_stay() -> None:
    teacher, model = pruned()
    teacher.train()
    model.train()
    model[1].eval()
    model[8].bias.requires_grad_(False)
    bias = model[8].bias.clone()
    with torch.no_grad():  # as a caller may have it
        aerogel.heal(model, CALLS, teacher=teacher, steps=10, progress=False)
    assert [model.training, model[1].training, model[4].training, teacher.training] == [
        True,
        False,
        True,
        True,
    ]
    assert all(m.training for m in teacher.modules())
    assert torch.equal(model[8].bias, bias)
    assert all(p.grad is None for p in [*model.parameters(), *teacher.parameters()])
    assert not any(m._forward_hooks for m in [*model.modules(), *teacher.modules()])


def test_in_bf16() -> None:
    teacher, model = pruned()
    before = away(model, teacher)
    aerogel.heal(model, CALLS, teacher=teacher, steps=50, dtype=torch.bfloat16, progress=False)
    assert away(model, teacher) < before / 2
    assert {p.dtype for p in model.parameters()} == {torch.float32}


class Several(nn.Module):
    """Maps and classes in a dict; arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 1)

    def forward(self, image: Tensor, scale: Tensor) -> dict[str, Tensor]:
        maps = self.body(image).relu() * scale
        return {"maps": maps, "one": self.head(maps.mean((2, 3))), "most": maps.argmax(1)}


def test_several_outputs_and_arguments_by_name() -> None:
    torch.manual_seed(0)
    teacher = Several()
    model = aerogel.prune(copy.deepcopy(teacher), 0.6)
    calls = [{"image": x, "scale": torch.tensor(2.0)} for x in CALLS]

    def apart(key: str) -> float:
        with torch.no_grad():
            wanted = teacher(**calls[0])[key]
            return float((model(**calls[0])[key] - wanted).square().mean() / wanted.var())

    before = apart("maps"), apart("one")
    aerogel.heal(model, calls, teacher=teacher, steps=60, rate=3e-3, progress=False)
    assert apart("maps") < 1.01 * before[0], "of noise nothing can be made up for"
    assert apart("one") < 0.8 * before[1]


def test_one_number_is_no_class() -> None:
    """Softmax of one number is 1 whatever it is: such answers would all be alike."""
    wanted = torch.arange(8.0)[:, None]
    assert float(_apart(wanted + 3, wanted)) == pytest.approx(9 / float(wanted.var(correction=0)))
    assert float(_apart(torch.eye(8), torch.eye(8))) == pytest.approx(0, abs=1e-6)
    assert float(_apart(torch.eye(8), torch.eye(8).flip(0))) > 0.1


def test_a_softmax_at_the_end_is_seen_through() -> None:
    """Probabilities are compared as what they are: nearly one against nearly zero is far, not at most two."""
    wanted, other = torch.tensor([[9.0, -9.0]]), torch.tensor([[-9.0, 9.0]])
    near, far = (float(_apart(t.softmax(1), wanted.softmax(1))) for t in (wanted, other))
    assert near == pytest.approx(0, abs=1e-6)
    assert far == pytest.approx(18, rel=0.1)
    steps = torch.stack([wanted, other], 1).softmax(2)
    assert float(_apart(steps.flip(1), steps)) == pytest.approx(18, rel=0.1)


def test_few_calls_and_single_images() -> None:
    """Statistics of one value a channel do not exist: those that are there stay."""
    teacher, model = pruned()
    before = away(model, teacher, CALLS[0])
    aerogel.heal(model, CALLS[:1], teacher=teacher, steps=30, progress=False)
    assert away(model, teacher, CALLS[0]) < before
    small = nn.Sequential(nn.Flatten(), nn.Linear(300, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    student = aerogel.prune(copy.deepcopy(small), 0.5)
    aerogel.heal(student, [images(1)], teacher=small, steps=5, progress=False)


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aerogel.pruning.heal.KEPT", 0)  # else a generator's calls are kept
    teacher, model = pruned()
    pairs = [(x, torch.zeros(16)) for x in CALLS]
    other = nn.Sequential(*net()[:8], nn.Linear(128, 12))
    dense = aerogel.finalize(copy.deepcopy(model))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (model, {"teacher": model}, r"copy\.deepcopy\(model\) before pruning"),
        (model, {"teacher": copy.copy(model)}, "the model's own weights"),
        (model, {"teacher": "resnet50"}, "a torch.nn.Module, not a str"),
        (dense, {"teacher": other}, "the model answers 16 x 10, the teacher 16 x 12"),
        (model, {"inputs": []}, "inputs has no call"),
        (model, {"inputs": CALLS[0]}, r"for example heal\(model, \[x1, x2, \.\.\.\]"),
        (model, {"inputs": pairs}, r"take the images, \[x for x, _ in loader\]"),
        (model, {"inputs": (x for x in CALLS), "steps": 30}, "cannot be walked again: give a list"),
        (model, {"steps": 0}, "steps is a whole number of at least 1"),
        (model, {"rate": -1.0}, "rate is a learning rate"),
        (model, {"dtype": torch.float16}, "dtype is None or torch.bfloat16"),
        (copy.deepcopy(model).requires_grad_(False), {}, r"requires_grad_\(True\)"),
        (nn.ReLU(), {}, "no parameter"),
        (lambda x: x, {}, "a function has no layers"),
    ]
    for given, options, says in cases:
        with pytest.raises(AerogelError, match=says):
            aerogel.heal(given, **({"inputs": CALLS, "teacher": teacher, "progress": False} | options))
    assert all("parametrizations" not in key for key in dense.state_dict()), "looked at before it was masked"


def test_what_is_held_out_is_not_learned_from() -> None:
    """A loader that shuffles gives other calls first on each walk."""
    from aerogel.pruning.heal import _parted

    random = torch.Generator().manual_seed(0)
    numbers: Any = range(64)
    loader: Any = DataLoader(numbers, batch_size=4, shuffle=True, generator=random)
    held, calls, _ = _parted(loader)
    learned = {int(i) for call in islice(calls, 60) for i in call}
    assert learned == set(range(64)) - {int(i) for call in held for i in call}
