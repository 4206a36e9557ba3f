"""torch.compile(model, backend="aerogel")."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

import aerogel
from aerogel import dynamo
from aerogel.runtime.module import Compiled
from tests.small_models import Small, sparse


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """What the backend compiled."""
    made: list[Compiled] = []
    real = aerogel.compile

    def spy(*args: Any, **kwargs: Any) -> Compiled:
        made.append(real(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(dynamo, "compile", spy)
    torch._dynamo.reset()
    return made


def test_the_backend_has_a_name() -> None:
    from importlib.metadata import entry_points

    found = [e for e in entry_points(group="torch_dynamo_backends") if e.name == "aerogel"]
    if not found:
        pytest.skip("aerogel is not installed, only on the path")
    assert found[0].load() is dynamo.backend


def test_a_model_is_compiled_at_its_first_call(compiled: list[Compiled]) -> None:
    model, x = sparse(Small()), torch.randn(1, 3, 64, 64)
    fast = torch.compile(model, backend=dynamo.backend, options={"tune": "off"})
    assert not compiled
    with torch.no_grad():
        assert (fast(x) - model(x)).abs().max() < 1e-5
        fast(x)
    (one,) = compiled
    assert str(one.how) == "graph"
    assert sum(c.config.method != "dense" for c in one.plan.choices) > 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_other_shapes_are_right_whoever_runs_them(compiled: list[Compiled]) -> None:
    model = sparse(Small())
    fast = torch.compile(model, backend=dynamo.backend, options={"tune": "off"})
    with torch.no_grad():
        for shape in ((1, 3, 64, 64), (2, 3, 64, 64), (3, 3, 64, 64), (5, 3, 96, 40)):
            x = torch.randn(shape)
            assert (fast(x) - model(x)).abs().max() < 1e-5


def test_training_stays_torchs(compiled: list[Compiled], caplog: pytest.LogCaptureFixture) -> None:
    model, x = sparse(Small()), torch.randn(1, 3, 64, 64)
    with caplog.at_level(logging.WARNING, "aerogel"):
        torch.compile(model, backend=dynamo.backend)(x).sum().backward()
    assert not compiled
    assert "no_grad" in caplog.text
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tun": "off"}, "has no option 'tun'; did you mean 'tune'?"),
        ({"shapes": {}}, "has no option 'shapes'; there are dtype, tune"),
        ({"tune": "fastest"}, "tune is 'off', 'fast', 'full' or seconds, not 'fastest'"),
    ],
)
def test_options_that_are_wrong_are_said(
    options: dict[str, Any], says: str, compiled: list[Compiled]
) -> None:
    """They were swallowed: torch ran the graph, and nobody was told."""
    fast = torch.compile(torch.nn.Conv2d(3, 4, 3).eval(), backend=dynamo.backend, options=options)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=re.escape(says)):
        fast(torch.zeros(1, 3, 9, 9))
    assert not compiled


def test_a_value_that_compile_refuses_is_said_too(
    compiled: list[Compiled], caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"tune": "off", "methods": ("nope",)}
    fast = torch.compile(torch.nn.Conv2d(3, 4, 3).eval(), backend=dynamo.backend, options=options)
    with caplog.at_level(logging.WARNING, "aerogel"), torch.no_grad():
        fast(torch.zeros(1, 3, 9, 9))
    assert "refuses its options" in caplog.text
    assert "'nope' is none of them" in caplog.text
