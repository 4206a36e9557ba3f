"""Schedule: recipes grow by one law, a state is refused where another recipe is, and a training that was
killed goes on bit for bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import aerogel
from aerogel import AerogelError
from tests.test_pruning import net, trained, zeros

RECIPE = {"0": ("4x1", 0.8), "2": ("unstructured", 0.6)}


@pytest.mark.parametrize("given", [RECIPE, SimpleNamespace(recipe=RECIPE), {"0": ["4x1", 0.8], "2": 0.6}])
def test_every_share_of_a_recipe_grows_by_the_same_law(given: Any) -> None:
    model = net()
    schedule = aerogel.Schedule(model, given, 20, every=5)
    for t in (0.25, 0.5, 0.75, 1.0):
        trained(model, 5, schedule)
        grown = 1 - (1 - t) ** 3
        assert [zeros(model[i]) for i in (0, 2)] == pytest.approx([0.8 * grown, 0.6 * grown], abs=2e-3)
    assert zeros(model[6]) == 0
    blocks = (model[0].weight != 0).reshape(75, 4, -1).sum(1)
    assert set(blocks.unique().tolist()) == {0, 4}


def test_a_state_is_plain_and_says_what_differs() -> None:
    schedule = aerogel.Schedule(net(), RECIPE, 20, every=5, exclude=["6"])
    schedule.count = 7
    state = json.loads(json.dumps(schedule.state_dict()))
    again = aerogel.Schedule(net(), RECIPE, 20, every=5, exclude=["6"])
    again.load_state_dict(state)
    assert again.count == 7
    others: dict[str, Any] = {
        "final": aerogel.Schedule(net(), 0.5, 20, every=5, exclude=["6"]),
        "steps": aerogel.Schedule(net(), RECIPE, 30, every=5, exclude=["6"]),
        "every": aerogel.Schedule(net(), RECIPE, 20, every=4, exclude=["6"]),
        "scope": aerogel.Schedule(net(), RECIPE, 20, every=5, exclude=["6"], scope="erk"),
        "score": aerogel.Schedule(net(), RECIPE, 20, every=5, exclude=["6"], score="taylor"),
        "exclude": aerogel.Schedule(net(), RECIPE, 20, every=5),
    }
    for name, other in others.items():
        with pytest.raises(AerogelError, match=f"of a Schedule with {name}="):
            other.load_state_dict(state)
        assert other.count == 0
    with pytest.raises(AerogelError, match=r"an older one .* set schedule\.count = 3"):
        again.load_state_dict({"count": 3})


def test_scores_from_data_are_refused_at_once() -> None:
    for options in ({"score": "obs"}, {"score": "wanda"}, {"scope": "error"}):
        with pytest.raises(AerogelError, match="looks at no calibration data"):
            aerogel.Schedule(net(), 0.5, 10, **options)  # type: ignore[arg-type]


_LOOP = """
import os, signal, sys
import torch
import aerogel
from tests.test_schedule import small, batch

check, out, killed_after = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = small()
schedule = aerogel.Schedule(model, {"0": ("4x1", 0.8), "3": ("unstructured", 0.9)}, 20, every=3)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
if os.path.exists(check):
    held = torch.load(check)
    model.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])
    schedule.load_state_dict(held["schedule"])
for step in range(schedule.count, 30):
    optimizer.zero_grad()
    model(batch(step)).square().mean().backward()
    optimizer.step()
    schedule.step()
    if schedule.count % 4 == 0:
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        torch.save({name: part.state_dict() for name, part in parts.items()}, check + ".part")
        os.replace(check + ".part", check)
    if schedule.count == killed_after:
        os.kill(os.getpid(), signal.SIGKILL)
torch.save(model.state_dict(), out)
"""


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 8))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))


def test_a_loop_that_was_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    (tmp_path / "loop.py").write_text(_LOOP)

    def run(name: str, killed_after: int = 0) -> int:
        command = [sys.executable, tmp_path / "loop.py", tmp_path / f"{name}.check", tmp_path / name]
        script = [*map(str, command), str(killed_after)]
        before = f"import sys, runpy; sys.path.insert(0, {str(root)!r}); sys.argv = {script[1:]!r}; "
        code = before + f"runpy.run_path({script[1]!r}, run_name='__main__')"
        return subprocess.run([sys.executable, "-c", code], timeout=100).returncode

    assert run("whole") == 0
    assert run("broken", 10) == -signal.SIGKILL
    assert run("broken") == 0
    whole, broken = torch.load(tmp_path / "whole"), torch.load(tmp_path / "broken")
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[key], broken[key]) for key in whole)
    masks = [v for k, v in whole.items() if k.endswith(".mask")]
    assert [float((~m).float().mean()) for m in masks] == pytest.approx([0.8, 0.9], abs=0.01)


@pytest.mark.parametrize(("module", "package"), [("lightning", "lightning"), ("huggingface", "transformers")])
def test_without_the_package_it_is_said_how_to_get_it(module: str, package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import aerogel.{module}"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f'pip install "aerogel[{module}]"' in said.stderr.splitlines()[-1]
