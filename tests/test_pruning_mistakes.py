"""What is wrong with a call of prune(), Schedule, finalize(), advise(), boost() or reprune() is one sentence
with the remedy."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aerogel
from aerogel import AerogelError

X = torch.zeros(1, 3, 12, 12)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 144, 10))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), head).eval()


def said(call: Callable[[], Any]) -> str:
    """The sentence of an AerogelError: one line, not only a figure."""
    with pytest.raises(AerogelError) as raised:
        call()
    text = str(raised.value)
    assert "\n" not in text
    assert len(text.split()) > 5, text
    return text


@pytest.fixture(scope="module")
def compiled() -> Any:
    return aerogel.compile(net(), X, tune="off")


CALLS: dict[str, Callable[[Any], Any]] = {
    "prune": lambda model: aerogel.prune(model, 0.5),
    "finalize": lambda model: aerogel.finalize(model),
    "Schedule": lambda model: aerogel.Schedule(model, 0.5, 10),
    "advise": lambda model: aerogel.advise(model, X),
    "boost": lambda model: aerogel.boost(model, [X]),
    "reprune": lambda model: aerogel.reprune(model, X),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's own
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_module(name: str, compiled: Any) -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda x: x, "a function has no layers. Give the nn.Module"),
        (net().state_dict(), r"load_state_dict\(\)"),
        ("model.onnx", "aerogel prune read files"),
        (Path("model.onnx"), "aerogel prune read files"),
        (compiled, r"the model it was compiled from"),
        (nn.Sequential, rf"make one first: {name}\(Sequential\(\)"),
        (torch.jit.trace(net(), X), "the model it was made from"),  # type: ignore[no-untyped-call]
        (123, "not a int"),
        (None, "not a NoneType"),
    ]
    for model, remedy in wrong:
        text = said(lambda model=model: CALLS[name](model))  # type: ignore[misc]
        assert text.startswith(f"{name}() takes a torch.nn.Module, not a "), text
        assert re.search(remedy, text), text


@pytest.mark.parametrize("call", [aerogel.prune, lambda model, share: aerogel.Schedule(model, share, 10)])
@pytest.mark.parametrize(
    "share", [1.5, 1, -0.1, math.nan, math.inf, True, "x", None, torch.tensor(0.5), [0.5], 90]
)
def test_a_sparsity_that_is_none(call: Any, share: Any) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    text = said(lambda: call(model, share))
    assert "sparsity is a share from 0 to less than 1" in text
    assert ("say 0.9" in text) == (share == 90 if isinstance(share, int) else False), text
    text = said(lambda: call(model, {"0": 0.5, "2": share}))
    assert "sparsity of '2' is a share" in text
    assert list(model.state_dict()) == list(before), "nothing was pruned"


def test_numpy_numbers_are_numbers() -> None:
    for share in (np.float32(0.5), np.float64(0.5), 0):
        aerogel.prune(net(), share)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pattern": "2x"}, "pattern is unstructured, NxM"),
        ({"pattern": 4}, "pattern is unstructured, NxM"),
        ({"pattern": None}, "pattern is unstructured, NxM"),
        ({"scope": "all"}, "scope is one of uniform, global, erk"),
        ({"score": ["magnitude"]}, "score one of magnitude, taylor"),
        ({"exclude": "0"}, r"exclude must be a list, for example exclude=\['head'\]"),
        ({"exclude": 3}, "exclude must be a list.*got a int"),
        ({"exclude": ["3"]}, "'3' is no convolution or Linear of the model; it holds 3.1: name those"),
        ({"exclude": ["3.2"]}, r"did you mean '3\.1'\?"),
        (
            {"exclude": ["backbone"]},
            r"'backbone' is no convolution or Linear of the model; it has 0, 2, 3\.1",
        ),
        ({"exclude": ["0", "2", "3.1"]}, "no layer is left to prune: exclude names them all"),
    ],
)
def test_options(options: dict[str, Any], says: str) -> None:
    for call in (
        lambda: aerogel.prune(net(), 0.5, **options),
        lambda: aerogel.Schedule(net(), 0.5, 10, **options),
    ):
        with pytest.raises(AerogelError, match=says):
            call()


def test_names_of_layers() -> None:
    long = nn.ModuleDict({f"convolution{i}": nn.Conv2d(1, 1, 1) for i in range(40)})
    assert "did you mean 'convolution7'?" in said(lambda: aerogel.prune(long, {"convolutoin7": 0.5}))
    assert "and 28 more" in said(lambda: aerogel.prune(long, {"x": 0.5}))
    assert "'1' is no convolution" in said(lambda: aerogel.prune(net(), {1: 0.5}))  # type: ignore[arg-type]
    assert "sparsity names none" in said(lambda: aerogel.prune(net(), {}))


def test_models_without_anything_to_prune() -> None:
    assert "no convolution" in said(lambda: aerogel.prune(nn.ReLU(), 0.5))
    assert "no convolution" in said(lambda: aerogel.Schedule(nn.ReLU(), 0.5, 10))
    assert "call the model once" in said(lambda: aerogel.prune(nn.LazyConv2d(8, 3), 0.5))
    assert "pruning it gains nothing" in said(lambda: aerogel.advise(nn.ReLU().eval(), X))
    assert "prune it first" in said(lambda: aerogel.reprune(nn.ReLU().eval(), X))


def test_an_advice_without_a_recipe() -> None:
    from aerogel.pruning.advice import Advice

    empty = Advice("", 1.0, {("tilewise", 0.5): 1.0}, (), None, {}, None)
    assert "speedup=1.5" in said(lambda: aerogel.prune(net(), empty))
    assert "speedup=1.5" in said(lambda: aerogel.Schedule(net(), empty, 10))
    model = net()
    other = Advice(
        "",
        1.0,
        {},
        (),
        2.0,
        {"0": ("tilewise", 0.5), "2": ("unstructured", 0.5), "9": ("unstructured", 0.5)},
        2.0,
    )
    assert "'9' is no convolution" in said(lambda: aerogel.prune(model, other))
    assert set(model.state_dict()) == set(net().state_dict()), (
        "nothing was pruned before the name was looked at"
    )
    held = Advice("", 1.0, {}, (), 2.0, {"0": ("tilewise", 0.5), "2": ("unstructured", 0.5)}, 2.0)
    aerogel.prune(model, held, exclude=["0"])
    assert [bool((model.get_submodule(n).weight == 0).any()) for n in ("0", "2")] == [False, True]  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [0, -3, 2.5, "10", True, None])
def test_a_schedule_counts(count: Any) -> None:
    assert "steps is a whole number of at least 1" in said(lambda: aerogel.Schedule(net(), 0.5, count))
    if count is not None:  # which leaves it to the schedule
        assert "every is a whole number of at least 1" in said(
            lambda: aerogel.Schedule(net(), 0.5, 10, every=count)
        )


@pytest.mark.parametrize("state", [{}, {"count": "2"}, {"count": -1}, None, {"count": None}])
def test_a_schedule_resumes_from_its_own_state(state: Any) -> None:
    schedule = aerogel.Schedule(net(), 0.5, 10)
    assert "no state of a Schedule" in said(lambda: schedule.load_state_dict(state))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sparsities": 0.9}, r"sparsities must be a list, for example sparsities=\(0.8, 0.9\)"),
        ({"sparsities": (0.5, 95)}, "say 0.95"),
        ({"sparsities": ()}, "at least one"),
        ({"sparsities": (math.nan,)}, "between 0 and 1"),
        ({"patterns": "tilewise"}, "patterns must be a list.*got a str"),
        ({"patterns": ("stripes",)}, "pattern is unstructured"),
        ({"patterns": ()}, "at least one"),
        ({"speedup": 0}, "such as 2.0, not 0"),
        ({"speedup": "fast"}, "such as 2.0, not 'fast'"),
        ({"speedup": math.nan}, "such as 2.0, not nan"),
        ({"tune": "fastest"}, "'off', 'fast', 'full' or seconds"),
        ({"dtype": torch.int16}, 'torch.bfloat16 or "int8"'),
    ],
)
def test_advise(options: dict[str, Any], says: str) -> None:
    with pytest.raises(AerogelError, match=says):
        aerogel.advise(net(), X, **options)


@pytest.mark.parametrize("calibration", [X, X.numpy(), "x", 3, {"x": X}, None, net()])
def test_boost_wants_a_list_of_inputs(calibration: Any) -> None:
    assert "must be a list, for example boost(model, [x1, x2, ...])" in said(
        lambda: aerogel.boost(net(), calibration)
    )


@pytest.mark.parametrize("number", [math.nan, "good", None, torch.zeros(3), math.inf])
def test_a_score_is_a_number(number: Any) -> None:
    assert "higher when better" in said(lambda: aerogel.boost(net(), [X], evaluate=lambda _: number))
    pruned = aerogel.prune(net(), 0.5)
    assert "higher when better" in said(
        lambda: aerogel.reprune(pruned, X, evaluate=lambda _: number, max_drop=0.1)
    )
    assert "evaluate is a function" in said(lambda: aerogel.boost(net(), [X], evaluate=0.5))  # type: ignore[arg-type]
    assert "evaluate is a function" in said(lambda: aerogel.reprune(pruned, X, evaluate=0.5, max_drop=0.1))  # type: ignore[arg-type]


@pytest.mark.parametrize("drop", [0, 1.5, math.nan, "x", True, None])
def test_budgets(drop: Any) -> None:
    assert "max_drop is a share between 0 and 1" in said(lambda: aerogel.boost(net(), [X], max_drop=drop))
    assert "max_weight_loss is a share between 0 and 1" in said(
        lambda: aerogel.reprune(net(), X, max_weight_loss=drop)
    )


@pytest.mark.parametrize("drop", [-1, math.nan, "x", math.inf])
def test_a_drop_of_a_score(drop: Any) -> None:
    pruned = aerogel.prune(net(), 0.5)
    assert "max_drop is how much" in said(
        lambda: aerogel.reprune(pruned, X, evaluate=lambda _: 1.0, max_drop=drop)
    )


def test_names_are_shown_and_not_obeyed() -> None:
    name = "\x1b[31mred\u202e\n"
    text = said(lambda: aerogel.prune(net(), {name: 0.5}))
    assert r"'\x1b[31mred\u202e '" in text or r"'\x1b[31mred\u202e'" in text
    assert text.isprintable()
