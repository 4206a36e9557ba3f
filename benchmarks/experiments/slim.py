"""Pruning without labels, and with them, on Fashion-MNIST: what each way keeps of the accuracy.

    python -m benchmarks.experiments.slim FOLDER --json slim.json --models trained
        FOLDER has Fashion-MNIST's four .gz files (Debian: dataset-fashion-mnist)
    python -m benchmarks.experiments.slim FOLDER --tuning 1400 --json slim.json --models trained
        with labels instead: as many steps as dense training took

The network is examples/fashion_mnist.py's, 1,011,130 weights; stem and head stay dense. Without labels, from
512 training images: `magnitude` is global magnitude with batch norm estimated again, `obs` is
prune(score="obs"), `heal` is obs and then 250 steps of heal on unlabelled training images (about a minute).
With labels: obs, and then training with its masks held, towards the labels and the dense network's answers.
Accuracy on the 10,000 test images, in percent; `seconds` is the CPU time of each way, one thread. A run that
was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn

import aerogel
from aerogel.backends import backend_of
from aerogel.progress import shown
from aerogel.pruning.curves import curves
from aerogel.pruning.layers import prunable
from aerogel.pruning.shares import Curve, even
from examples import fashion_mnist as example

POINTS = {"": (0.7, 0.8, 0.9), "1x4-": (0.5, 0.7, 0.8)}
"""Shares, by the beginning of their name."""
HEALED = ("80", "90", "1x4-80")
LABELLED = {
    "labels-90": ("unstructured", 0.9),
    "labels-95": ("unstructured", 0.95),
    "labels-tilewise-75": ("tilewise", 0.75),
    "labels-1x4-80": ("1x4", 0.8),
}
IMAGES, STEPS, BATCH = 512, 250, 128
LEFT_OUT = ("stem.0", "head")


def main() -> None:
    run(__doc__, Seed)


def run(about: str | None, network: type[Seed]) -> None:
    """An experiment over all seeds; `about` is its help. What was measured already is not done again."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", default="0,1,2", help="which networks")
    parser.add_argument("--tuning", type=int, default=0, help="steps with labels; 0: without labels")
    parser.add_argument("--bf16", action="store_true", help="train in half precision: AMX does that faster")
    parser.add_argument("--models", type=Path, default=Path("trained"), help="where dense models are kept")
    parser.add_argument("--json", type=Path, required=True, help="results, and what is done so far")
    given = parser.parse_args()
    torch.set_num_threads(1)
    data, test = example.read(given.folder, "train"), example.read(given.folder, "t10k")
    found = json.loads(given.json.read_text()) if given.json.exists() else {"each": {}, "seconds": {}}
    for seed in map(int, given.seeds.split(",")):
        network(seed, data, test, given, found).run()
    show(found)


class Repair:
    """prune(score="obs") as it does it, but the layers' curves are measured once for all shares."""

    def __init__(self, dense: nn.Module, calls: list[torch.Tensor], left_out: Sequence[str] = ()) -> None:
        self.dense, self.calls, self.curves = dense, calls, dict[str, dict[str, Curve]]()
        self.layers = {name: module for name, module in prunable(dense) if name not in left_out}

    def pruned(self, share: float, pattern: str = "unstructured", progress: bool = False) -> nn.Module:
        if pattern not in self.curves:
            calls: Any = [((x,), {}) for x in self.calls]
            found = curves(self.dense, self.layers, [pattern], calls, shown(progress))
            self.curves[pattern] = {name: own[pattern] for name, own in found.items()}
        sizes = {name: int(torch.as_tensor(module.weight).numel()) for name, module in self.layers.items()}
        points = {
            name: (pattern, own) for name, own in even(self.curves[pattern], sizes, share, 0.99).items()
        }
        model = copy.deepcopy(self.dense)
        return aerogel.prune(model, points, score="obs", calibration=self.calls, progress=progress)


class Seed:
    """One network. What was measured already is in the file of results."""

    def __init__(self, seed: int, data: Any, test: Any, given: argparse.Namespace, found: Any) -> None:
        self.seed, self.data, self.test, self.given, self.found = seed, data, test, given, found
        self.dense = example.ResNet()
        kept = given.models / f"dense-{seed}.safetensors"
        torch.manual_seed(seed)
        if kept.exists():
            self.dense.load_state_dict(load_file(kept))
        else:
            example.train(self.dense, data, 1400, example.BATCH, 4e-3, f"seed {seed}: dense", bf16=given.bf16)
            kept.parent.mkdir(parents=True, exist_ok=True)
            save_file(self.dense.state_dict(), kept)
        self.dense.eval()
        random = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(len(data[0]), generator=random)
        self.calls = list(data[0][self.order[:IMAGES]].split(64))
        self.repair = Repair(self.dense, self.calls, LEFT_OUT)
        self.way("dense", lambda: self.dense)

    def run(self) -> None:
        if self.given.tuning:
            self.with_labels()
        else:
            self.without_labels()

    def way(self, name: str, make: Callable[[], nn.Module]) -> nn.Module | None:
        """Make it, look at it, write it down; nothing where that is done."""
        key = str(self.seed)
        if key in self.found["each"].get(name, {}):
            return None
        began = time.process_time()
        model = make()
        seconds = time.process_time() - began
        right = 100 * example.accuracy(model, self.test)
        self.found["each"].setdefault(name, {})[key] = right
        self.found["seconds"].setdefault(name, {})[key] = seconds
        self.write()
        print(f"seed {key} {name}: {right:.2f} ({seconds:.0f} s)", flush=True)
        return model

    def write(self) -> None:
        each = self.found["each"]
        self.found |= {
            "accuracy": {name: float(np.mean(list(own.values()))) for name, own in each.items()},
            "seeds": len(each.get("dense", {})),
            "images": IMAGES,
            "target": str(backend_of(((torch.zeros(1),), {})).target),
            "date": date.today().isoformat(),
        }
        self.given.json.write_text(json.dumps(self.found, indent=1))

    def without_labels(self) -> None:
        for begin, shares in POINTS.items():
            pattern = begin.strip("-") or "unstructured"
            for share in shares:
                name = f"{begin}{100 * share:.0f}"
                self.way(f"magnitude-{name}", partial(self.magnitude, pattern, share))
                pruned = self.way(f"obs-{name}", partial(self.obs, pattern, share))
                if name in HEALED and f"heal-{name}" not in self.done():
                    start = pruned if pruned is not None else self.obs(pattern, share)
                    self.way(f"heal-{name}", partial(self.healed, start))

    def done(self) -> list[str]:
        return [name for name, own in self.found["each"].items() if str(self.seed) in own]

    def magnitude(self, pattern: str, share: float) -> nn.Module:
        return aerogel.prune(
            copy.deepcopy(self.dense),
            share,
            pattern=pattern,
            scope="global",
            exclude=LEFT_OUT,
            calibration=self.calls,
        )

    def obs(self, pattern: str, share: float) -> nn.Module:
        return self.repair.pruned(share, pattern)

    def healed(self, model: nn.Module) -> nn.Module:
        many = self.data[0][self.order[: STEPS * BATCH]]
        return aerogel.heal(model, list(many.split(BATCH)), teacher=self.dense, steps=STEPS, progress=False)

    def with_labels(self) -> None:
        x = self.data[0]
        teacher: list[Any] = []
        for name, (pattern, share) in LABELLED.items():
            if name in self.done():
                continue
            if not teacher:
                teacher.append(torch.stack([example.answers(self.dense, one) for one in (x, x.flip(3))]))
            self.way(name, partial(self.trained, pattern, share, teacher[0]))

    def trained(self, pattern: str, share: float, teacher: torch.Tensor) -> nn.Module:
        torch.manual_seed(self.seed)
        model = self.repair.pruned(share, pattern)
        what, steps = f"{pattern} {share}", self.given.tuning
        bf16 = self.given.bf16
        example.train(model, self.data, steps, example.BATCH, 3e-3, what, None, teacher, bf16)
        return aerogel.finalize(model)


def show(found: Any) -> None:
    table = Table(title=f"Fashion-MNIST, {found['seeds']} seeds, one thread ({found['target']})")
    for heading in ("", "accuracy, %", "points of dense", "each seed", "seconds"):
        table.add_column(heading, justify="right")
    dense = found["accuracy"]["dense"]
    for name, right in found["accuracy"].items():
        each = ", ".join(f"{v:.2f}" for v in found["each"][name].values())
        spent = float(np.median(list(found["seconds"][name].values())))
        table.add_row(name, f"{right:.2f}", f"{right - dense:+.2f}", each, f"{spent:.0f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
