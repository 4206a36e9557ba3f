"""Pruned and in int8 on Fashion-MNIST: what each of the two costs in accuracy, and what permuting channels
gives back.

    python -m benchmarks.experiments.int8 FOLDER --json int8.json --models trained
        FOLDER has Fashion-MNIST's four .gz files (Debian: dataset-fashion-mnist)
    python -m benchmarks.experiments.int8 FOLDER --tuning 1400 --json int8.json --models trained
        with labels too, where healing alone is not enough

The network, its dense training and the ways are those of benchmarks/experiments/slim.py: 1,011,130 weights,
stem and head stay dense, no labels, 512 training images to calibrate by. Zeros are in blocks of 1x4, the same
share of all layers together; `permuted` puts channels in the order in which such blocks lose least first.
Each model's accuracy on the 10,000 test images in percent, in f32 and compiled with dtype="int8" (the bytes
are the same on every machine).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import aerogel
from aerogel.progress import shown
from aerogel.pruning.asked import chosen
from aerogel.pruning.permute import permuted
from benchmarks.experiments.slim import BATCH, LEFT_OUT, Repair, Seed, run
from examples import fashion_mnist as example

SHARES = (0.8, 0.9)
CALIBRATORS = ("mean-square", "percentile", "min-max")
LABELLED, LONGER = 0.9, 750
"""A share that is trained with labels, and steps of healing longer."""


def main() -> None:
    run(__doc__, InBytes)


class InBytes(Seed):
    """One network in f32 and in int8, dense and pruned, its channels as trained and permuted."""

    def run(self) -> None:
        for how in CALIBRATORS:
            self.way(f"dense-int8-{how}", partial(self.in_bytes, self.dense, how))
        found = {"": self.dense, "-permuted": self.permuted()}
        for share in SHARES:
            for order, dense in found.items():
                self.both(f"magnitude-1x4-{100 * share:.0f}{order}", partial(self.smallest, dense, share))
        repairs = {order: Repair(dense, self.calls, LEFT_OUT) for order, dense in found.items()}
        for order, repair in repairs.items():
            for share in SHARES[-1:] if order else SHARES[::-1]:
                self.both(f"heal-1x4-{100 * share:.0f}{order}", partial(self.repaired, repair, share))
        share = SHARES[-1]
        self.both(f"longer-1x4-{100 * share:.0f}", partial(self.longer, repairs[""], share))
        if self.given.tuning:
            for order, repair in repairs.items():
                self.both(f"labels-1x4-{100 * LABELLED:.0f}{order}", partial(self.tuned, repair, LABELLED))

    def both(self, name: str, make: Callable[[], nn.Module]) -> None:
        """A way in f32 and in int8. Its model is kept beside the dense one."""
        kept = self.given.models / f"{name}-{self.seed}.safetensors"
        if name in self.done() and kept.exists():
            model: nn.Module = example.ResNet().eval()
            model.load_state_dict(load_file(kept))
        else:
            made = self.way(name, lambda: aerogel.finalize(make()))
            model = aerogel.finalize(make()) if made is None else made
            save_file(model.state_dict(), kept)
        self.way(f"{name}-int8", partial(self.in_bytes, model, CALIBRATORS[0]))

    def in_bytes(self, model: nn.Module, how: str) -> nn.Module:
        """Nothing is timed: bytes are the same whatever runs the layers."""
        x = self.calls[0][:1]
        return aerogel.compile(
            model, x, dtype="int8", calibration=self.calls, ranges=how, tune="off", progress=False
        )

    def permuted(self) -> nn.Module:
        """The dense network with its channels in the order for the largest share."""
        model = copy.deepcopy(self.dense)
        asked = chosen(model, SHARES[-1], "1x4", "uniform", "magnitude", LEFT_OUT)
        with torch.no_grad():
            permuted(model, self.calls[0], asked, shown(False))
        return model

    def smallest(self, dense: nn.Module, share: float) -> nn.Module:
        model = copy.deepcopy(dense)
        more: Any = {"pattern": "1x4", "scope": "global", "exclude": LEFT_OUT, "calibration": self.calls}
        return aerogel.prune(model, share, **more)

    def repaired(self, repair: Repair, share: float) -> nn.Module:
        return self.healed(repair.pruned(share, "1x4"))

    def longer(self, repair: Repair, share: float) -> nn.Module:
        """Healed on all training images, without their labels."""
        images = list(self.data[0][self.order].split(BATCH))
        model = repair.pruned(share, "1x4")
        return aerogel.heal(model, images, teacher=self.dense, steps=LONGER, progress=False)

    def tuned(self, repair: Repair, share: float) -> nn.Module:
        """With labels, masks held, towards the dense network's answers too."""
        torch.manual_seed(self.seed)
        x, model = self.data[0], repair.pruned(share, "1x4")
        teacher = torch.stack([example.answers(self.dense, one) for one in (x, x.flip(3))])
        what, steps = f"labels {share}", self.given.tuning
        example.train(model, self.data, steps, example.BATCH, 4e-3, what, None, teacher, self.given.bf16)
        return model


if __name__ == "__main__":
    main()
