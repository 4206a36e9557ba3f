"""A trained ResNet on Fashion-MNIST: how often half precision changes the answer, beside what dense bf16
changes.

    python -m benchmarks.experiments.fashion FOLDER --json fashion.json
        FOLDER holds the four .gz files (Debian: dataset-fashion-mnist)

Trains 78,000 parameters for 800 steps (two minutes), prunes 90 % of each convolution by magnitude, fine-tunes
under the masks, and compiles it as it is, in fp16 and in bf16. Agreement is the share of the 10,000 test
images with the same first answer as the f32 model in torch. Measured; training is seeded, but its last digits
depend on the machine.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

import aerogel
from aerogel.runtime.eager import InType
from examples.fashion_mnist import Block, read

Masks = dict[str, Tensor]


class ResNet(nn.Module):
    """16, 32, 64 channels at 28, 14, 7 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


def train(model: nn.Module, x: Tensor, labels: Tensor, steps: int, rate: float, masks: Masks) -> None:
    """Steps of 256 images; masked weights stay zero."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    parameters = dict(model.named_parameters())
    for _ in track(range(steps), "pruned, fine-tuning" if masks else "training", transient=True):
        chosen = torch.randint(len(x), (256,))
        loss = F.cross_entropy(model(x[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for name, mask in masks.items():
                parameters[name].mul_(mask)
    model.eval()


def prune(model: nn.Module, sparsity: float) -> Masks:
    """The smallest weights of each convolution are set to zero; what was kept."""
    masks = {}
    for name, weight in model.named_parameters():
        if weight.dim() == 4 and weight.shape[1] > 1:
            smallest = weight.detach().abs().flatten().kthvalue(int(weight.numel() * sparsity)).values
            masks[name] = (weight.detach().abs() > smallest).float()
            weight.data.mul_(masks[name])
    return masks


def answers(model: Any, x: Tensor) -> Tensor:
    """The first answer to each image."""
    with torch.no_grad():
        return torch.cat([model(x[i : i + 100]).argmax(1) for i in range(0, len(x), 100)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    x, labels = read(given.folder, "train")
    test, right = read(given.folder, "t10k")
    model = ResNet()
    train(model, x, labels, given.steps, 1e-2, {})
    dense = answers(model, test)
    masks = prune(model, given.sparsity)
    train(model, x, labels, given.steps // 2, 5e-3, masks)
    plain = answers(model, test)
    example, calibration = (test[:1],), [x[i : i + 16] for i in range(0, 64, 16)]
    halves = (torch.float16, torch.bfloat16)
    forms: dict[str, Any] = {"aerogel float32": aerogel.compile(model, example, store=mkdtemp())}
    for dtype in halves:
        name = str(dtype).removeprefix("torch.")
        forms[f"aerogel {name}"] = aerogel.compile(
            model, example, dtype=dtype, calibration=calibration, tune="off"
        )
        forms[f"torch {name}"] = InType(model, dtype)
    result = {
        "dense_accuracy": (dense == right).float().mean().item(),
        "pruned_accuracy": (plain == right).float().mean().item(),
        "agreement": {
            name: (answers(form, test) == plain).float().mean().item() for name, form in forms.items()
        },
        "sparsity": given.sparsity,
        "date": date.today().isoformat(),
        "torch": torch.__version__,
    }
    for key in ("dense_accuracy", "pruned_accuracy"):
        print(f"{key.replace('_', ' ')}: {result[key]:.2%}")
    for name, share in result["agreement"].items():
        print(f"{name}: {share:.2%} of {len(test)} answers as torch in float32")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
