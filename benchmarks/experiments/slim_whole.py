"""slim(speedup=3) as a user calls it, on a trained network and real images; then again, killed three times.

    python -m benchmarks.experiments.slim_whole FOLDER --models trained --json slim_whole.json
        FOLDER has Fashion-MNIST's four .gz files (Debian: dataset-fashion-mnist)

The network is examples/fashion_mnist.py's, as `benchmarks.experiments.slim` leaves it in `trained`; inputs
are 512 training images without labels. The second run starts with the first one's timings and is killed with
SIGKILL once its curves, its pruned and its healed weights are there; then it is run to its end. `off` is how
far the speedup that the shares predicted is from what was measured, for each step. One thread. Measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file

import aerogel
from aerogel.ir import host
from examples import fashion_mnist as example

IMAGES, BATCH, GOAL, MINUTES = 512, 64, 3.0, 30.0
KILLED_AT = ("curves.json", "step-1-pruned.safetensors", "step-1-healed.safetensors")
TIMED = ("question.json", "score.json", "advice.json")
"""What the second run has of the first: decisions follow from timings."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", type=Path, default=Path("trained"))
    parser.add_argument("--speedup", type=float, default=GOAL)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.state:
        print(json.dumps(slimmed(given)))
        return
    states = Path(mkdtemp())
    whole = json.loads(child(given, states / "whole").communicate()[0].splitlines()[-1])
    (states / "killed").mkdir()
    for name in TIMED:
        shutil.copy(states / "whole" / name, states / "killed" / name)
    kills = sum(killed(given, states / "killed", stage) for stage in KILLED_AT)
    again = json.loads(child(given, states / "killed").communicate()[0].splitlines()[-1])
    found = whole | {
        "killed": kills,
        "same_masks": whole["masks"] == again["masks"],
        "target": str(host()),
        "date": date.today().isoformat(),
    }
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


def slimmed(given: argparse.Namespace) -> dict[str, Any]:
    """One run of slim(), and what it says of itself."""
    data, test = example.read(given.folder, "train"), example.read(given.folder, "t10k")
    model = example.ResNet()
    model.load_state_dict(load_file(given.models / "dense-0.safetensors"))
    model.eval()
    chosen = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(0))[:IMAGES]
    began = time.monotonic()
    made = aerogel.slim(
        model,
        list(torch.split(data[0][chosen], BATCH)),
        speedup=given.speedup,
        max_drop=0.02,
        budget_minutes=MINUTES,
        state=given.state,
        progress=False,
    )
    weights = dict(made.model.named_parameters())
    masks = b"".join((weights[name] != 0).numpy().tobytes() for name in sorted(weights))
    return {
        "minutes": (time.monotonic() - began) / 60,
        "budget_minutes": MINUTES,
        "why": made.why,
        "speedup": made.fast.speedup,
        "zeros": made.tries[made.chosen].zeros if made.chosen is not None else 0.0,
        "steps": [
            {"predicted": t.predicted, "measured": t.speedup, "off": abs(t.predicted / t.speedup - 1)}
            for t in made.tries
            if t.predicted
        ],
        "accuracy": {
            "dense": 100 * example.accuracy(model, test),
            "slim": 100 * example.accuracy(made.model, test),
        },
        "masks": hashlib.sha256(masks).hexdigest(),
    }


def child(given: argparse.Namespace, state: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.experiments.slim_whole", str(given.folder)]
    command += ["--models", str(given.models), "--speedup", str(given.speedup), "--state", str(state)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def killed(given: argparse.Namespace, state: Path, stage: str) -> int:
    """A run that is killed when a stage is there; whether it was."""
    process = child(given, state)
    while not (state / stage).exists() and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    return int(process.returncode < 0)


if __name__ == "__main__":
    main()
