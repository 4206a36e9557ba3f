"""Trainings on several processes and in other people's loops: killed in the middle and started again, they
end with the same masks and weights, bit for bit, as those that nobody disturbed. By night only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aerogel import AerogelError
from tests import counts

ROOT = Path(__file__).parent.parent
AFTER = 10
"""Steps after which a training is killed; checkpoints are written every three or four."""

pytestmark = pytest.mark.skipif(counts.mode() != "nightly", reason="minutes: by night only")


def run(command: list[str], times: int) -> subprocess.CompletedProcess[str]:
    """Once, or again and again until it has not been killed."""
    here = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    for _ in range(times):
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | here, capture_output=True, text=True, timeout=600
        )
    return done


def same(one: Path, other: Path) -> dict[str, Any]:
    """Two files of weights that are alike to the last bit; what they hold."""
    a, b = torch.load(one), torch.load(other)
    a, b = a.get("model", a), b.get("model", b)
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key
    found: dict[str, Any] = a
    return found


def gone(state: dict[str, Any]) -> list[float]:
    return [float((~mask).float().mean()) for name, mask in state.items() if name.endswith(".mask")]


@pytest.mark.parametrize("how", ["lightning", "trainer", "accelerate"])
def test_other_loops(how: str, tmp_path: Path) -> None:
    pytest.importorskip({"trainer": "transformers"}.get(how, how))
    whole, broken, mark = tmp_path / "whole", tmp_path / "broken", tmp_path / "mark"
    whole.mkdir()
    broken.mkdir()
    done = run([sys.executable, "-m", "tests.trainers", how, str(whole)], 1)
    assert done.returncode == 0, done.stderr[-3000:]
    dying = [sys.executable, "-m", "tests.dying", str(AFTER), str(mark), str(ROOT / "tests" / "trainers.py")]
    killed = run([*dying, how, str(broken)], 1)
    assert mark.exists(), killed.stderr[-3000:]
    assert killed.returncode < 0
    assert not (broken / "weights.pt").exists()
    done = run([*dying, how, str(broken)], 1)
    assert done.returncode == 0, done.stderr[-3000:]
    assert gone(same(whole / "weights.pt", broken / "weights.pt")) == pytest.approx([0.75, 0.9], abs=0.01)


def test_a_trainer_that_makes_its_model_late(tmp_path: Path) -> None:
    """It reads a checkpoint before there are masks; several callbacks each go on with their own."""
    transformers = pytest.importorskip("transformers")
    from aerogel.huggingface import Prune
    from tests.trainers import Net, Rows

    class Late(Net):
        _keys_to_ignore_on_save = None  # as transformers' own models have

    def trainer(folder: str, steps: int, **more: Any) -> Any:
        args = transformers.TrainingArguments(
            str(tmp_path / folder),
            max_steps=steps,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        return transformers.Trainer(args=args, train_dataset=Rows(), **more)

    trainer("late", 4, model_init=Late, callbacks=[Prune(0.5)]).train()
    with pytest.raises(AerogelError, match="a model in place of model_init"):
        trainer("late", 6, model_init=Late, callbacks=[Prune(0.5)]).train(resume_from_checkpoint=True)
    for steps, resumed in ((4, False), (6, True)):
        model: Any = Net()
        both = [Prune({"body.0": 0.5}), Prune({"body.3": 0.75})]
        trainer("both", steps, model=model, callbacks=both).train(resume_from_checkpoint=resumed)
        zeros = [float((model.body[at].weight == 0).float().mean()) for at in (0, 3)]
        assert zeros == pytest.approx([0.5, 0.75], abs=0.01)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_torchrun(how: str, tmp_path: Path) -> None:
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(ROOT / "examples" / "prune_torchrun.py"), *(["--fsdp"] if how == "fsdp" else [])]
    mark = tmp_path / "mark"
    done = run([*started, *program, "--out", str(tmp_path / "whole")], 1)
    assert done.returncode == 0, done.stderr[-3000:]
    dying = [
        *started,
        "-m",
        "tests.dying",
        str(AFTER),
        str(mark),
        *program,
        "--out",
        str(tmp_path / "broken"),
    ]
    assert run(dying, 1).returncode != 0
    assert mark.exists()
    held = torch.load(tmp_path / "broken" / "checkpoint.pt")
    assert 0 < held["schedule"]["count"] < AFTER
    done = run(dying, 1)
    assert done.returncode == 0, done.stderr[-3000:]
    found = same(tmp_path / "whole" / "checkpoint.pt", tmp_path / "broken" / "checkpoint.pt")
    assert gone(found) == pytest.approx([0.9, 0.9], abs=0.01)


def test_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch")
    for name in ("whole", "broken"):
        done = run([sys.executable, "-m", "tests.trainers", "ray", str(tmp_path / name)], 1)
        assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "broken" / "mark").exists()
    found = same(tmp_path / "whole" / "weights.pt", tmp_path / "broken" / "weights.pt")
    assert gone(found) == pytest.approx([0.9, 0.9], abs=0.01)
