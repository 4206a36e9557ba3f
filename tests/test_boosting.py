"""boost(): limits that empty vectors, within the budget, and the same answers when compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aerogel
from aerogel.errors import AerogelError


class Faint(nn.Module):
    """Half of the first map's channels are a thousand times weaker than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        with torch.no_grad():
            self.first.weight[::2] *= 1e-3
            bias = self.first.bias
            assert bias is not None
            bias[::2], bias[1::2] = 1e-3, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x))).mean((2, 3))  # type: ignore[no-any-return]


@pytest.fixture
def model() -> Faint:
    torch.manual_seed(0)
    return Faint().eval()


@pytest.fixture
def inputs() -> list[Tensor]:
    return [torch.randn(2, 3, 32, 32) for _ in range(3)]


def test_faint_channels_become_empty(model: Faint, inputs: list[Tensor]) -> None:
    boosted = aerogel.boost(model, inputs)
    (limit,) = boosted.layers
    assert limit.before < 0.02
    assert 0.48 < limit.after < 0.6
    assert 2e-3 < limit.limit < 0.5
    assert boosted.score[0] == 1
    assert 0.99 <= boosted.score[1] < 1
    with torch.no_grad():
        mid = F.relu(model.first(inputs[0]))
        wanted = model.second(torch.where(mid > limit.limit, mid, 0)).mean((2, 3))
        torch.testing.assert_close(boosted.model(inputs[0]), wanted)
    assert f"above {limit.limit:g}" in str(boosted)


def test_compiled_answers_are_the_boosted_models(model: Faint, inputs: list[Tensor]) -> None:
    boosted = aerogel.boost(model, inputs).model
    fast = aerogel.compile(boosted, (inputs[0],), calibration=inputs, tune="off", methods=("direct", "dense"))
    assert fast.network is not None
    assert [c.activation for n in fast.network.convs() if (c := n.conv)] == ["threshold", None]
    with torch.no_grad():
        torch.testing.assert_close(fast(inputs[1]), boosted(inputs[1]))


def test_the_budget_is_the_users(model: Faint, inputs: list[Tensor]) -> None:
    wanted = [model(x).detach() for x in inputs]

    def strict(other: nn.Module) -> float:
        return float(all(torch.equal(other(x), y) for x, y in zip(inputs, wanted, strict=True)))

    kept = aerogel.boost(model, inputs, evaluate=strict, max_drop=0.5)
    assert kept.score == (1, 1)
    assert [one.limit for one in kept.layers] == [0]
    free = aerogel.boost(model, inputs, evaluate=lambda _: 1.0)
    assert free.layers[0].limit > aerogel.boost(model, inputs).layers[0].limit, (
        "a budget that nothing spends is spent whole"
    )


def test_what_cannot_be_boosted_is_said(model: Faint, inputs: list[Tensor]) -> None:
    with pytest.raises(AerogelError, match="real inputs"):
        aerogel.boost(model, [])
    with pytest.raises(AerogelError, match="max_drop"):
        aerogel.boost(model, inputs, max_drop=2)
    with pytest.raises(AerogelError, match="no ReLU"):
        aerogel.boost(nn.Conv2d(3, 4, 3).eval(), inputs)
