"""The folder of slim(): it is of one question, and whatever stands in it is read or refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

import aerogel
from aerogel import AerogelError
from aerogel.pruning.stages import Stages, digest
from aerogel.pruning.steps import Steps
from tests.test_slim import Half, calls, net, weights
from tests.test_slim import little_healing as little_healing

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_is_damaged_in_a_folder_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands in any of its files."""
    monkeypatch.setattr(Steps, "compiled", lambda _, model: model)
    monkeypatch.setattr(Steps, "_timed", lambda *_: (1.0, 1.0))
    folder, inputs = tmp_path / "state", [torch.randn(8, 9)]

    def slim() -> Any:
        return aerogel.slim(Half(), inputs, sparsity=0.5, max_drop=0.99, budget_minutes=1, state=folder)

    first = slim()
    assert slim().to_dict() == first.to_dict()
    curve = '{"runs": {"unstructured": [[0.5, %s]]}}'
    wrong = {
        "question.json": ["3", "{", "[1]"],
        "spent.json": ['"x"', "-1", "true", "1e999"],
        "score.json": ['"abc"', "[]", "NaN", "[" * 100_000],
        "curves.json": [
            "[]",
            curve % '"x"',
            curve % "NaN",
            '{"idle": 3}',
            curve.replace("runs", "other") % "0.1",
        ],
        "step-1-recipe.json": [
            "{}",
            '[{"runs": ["unstructured", 7]}, null]',
            '[{"runs": ["no", 0.5]}, null]',
        ],
        "step-1-judged.json": ["{}", "[1]", '[0.5, "x", 1, 1, 1]'],
        "step-1-healed.safetensors": ["xx"],
    }
    for name, texts in wrong.items():
        path = folder / name
        whole = path.read_bytes()
        for text in texts:
            path.write_text(text)
            with pytest.raises(AerogelError, match=rf"{name}' is damaged; remove it"):
                slim()
        path.unlink()
        path.mkdir()
        with pytest.raises(AerogelError, match=rf"{name}' is damaged; remove it"):
            slim()
        path.rmdir()
        path.write_bytes(whole)
    (folder / "step-1-healed.safetensors").write_bytes(save({"runs.weight": torch.zeros(2)}))
    with pytest.raises(AerogelError, match=r"healed\.safetensors' is damaged"):
        slim()


def test_a_question_is_known_by_what_it_holds() -> None:
    """The weights, what is made of them, and the inputs call by call; rounding is not another answer."""
    model, one = net(), calls(1)[0]

    def of(*given: Tensor) -> dict[str, Any]:
        return digest(model, [((x,), {}) for x in given])

    first = of(one)
    assert {**first, "network": 0} == {**of(one.clone()), "network": 0}
    others = [of(one + 1), of(one[:8], one[8:]), of(one.reshape(16, 3, 16, 64))]
    assert first["inputs"] not in [other["inputs"] for other in others]
    model[1] = nn.Tanh()
    assert of(one)["model"] != first["model"]
    model[1] = nn.ReLU()
    assert of(one)["model"] == first["model"]
    with torch.no_grad():
        weights(model)[0][0, 0, 0, 0] += 1e-6
    assert of(one)["model"] != first["model"]


def test_the_same_weights_in_another_network(tmp_path: Path) -> None:
    """It is seen in the answers where nothing else shows it."""

    class Net(nn.Module):
        def __init__(self, slope: float) -> None:
            super().__init__()
            self.body, self.slope = net(), slope

        def forward(self, x: Tensor) -> Any:
            return F.leaky_relu(self.body(x), self.slope)

    def begin(model: nn.Module) -> None:
        Stages(tmp_path).begin(digest(model, [((calls(1)[0],), {})]))

    begin(Net(0.1))
    begin(Net(0.1 + 1e-7))
    with pytest.raises(AerogelError, match="with another network"):
        begin(Net(0.2))


def test_the_score_of_another_judge_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aerogel.pruning.slim._search", lambda *_: None)

    def slim(**more: Any) -> None:
        aerogel.slim(net(), calls(1), sparsity=0.5, state=tmp_path, **more)

    slim()
    slim(budget_minutes=1)
    with pytest.raises(AerogelError, match="another evaluate: say state="):
        slim(evaluate=lambda model: 0.5)
    with pytest.raises(AerogelError, match="another goal: say state="):
        slim(max_drop=0.8)
