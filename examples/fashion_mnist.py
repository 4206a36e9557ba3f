"""Train, prune in four ways, fine-tune, compile: what each costs in accuracy and gains in time, on real images.

    python examples/fashion_mnist.py FOLDER            FOLDER has Fashion-MNIST's four .gz files (Debian: dataset-fashion-mnist)
    python examples/fashion_mnist.py FOLDER --seeds 3 --json fashion.json --plot fashion.png
    python examples/fashion_mnist.py --quick           a minute, on made-up images: shows the way, not the accuracy

A ResNet of a million weights is trained dense. Then from the same weights: magnitude (90 % of single weights), tilewise (TW-2D,
75 %), tew (the same with the best single weights given back), blocks (80 % in blocks of 16 filters, then re-pruned where that saves
time). Sparsity grows while training goes on (aerogel.Schedule), masks hold (no special loop), and the result is compiled as it is.
Accuracy is on the 10,000 test images; speedup is one image over the faster of torch's two layouts, as aerogel.compile measures it.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import aerogel

BATCH = 256
WAYS = {"magnitude": ("unstructured", 0.9), "tilewise": ("tilewise", 0.75), "tew": ("tew", 0.75), "blocks": ("16x1", 0.8)}


class Block(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, c: int, k: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(c, k, 3, stride, 1, bias=False), nn.Conv2d(k, k, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(k), nn.BatchNorm2d(k)
        self.around = nn.Conv2d(c, k, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + self.around(x))


class ResNet(nn.Module):
    """1,011,130 weights: 48, 96, 256 channels at 14, 7, 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 48, 3, 2, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU())
        self.blocks = nn.Sequential(Block(48, 48, 1), Block(48, 96, 2), Block(96, 256, 2))
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


def read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images in f32 around zero, and labels: `part` is train or t10k."""
    images, labels = (
        np.frombuffer(gzip.decompress((folder / f"{part}-{what}-ubyte.gz").read_bytes()), np.uint8, offset=offset)
        for what, offset in (("images-idx3", 16), ("labels-idx1", 8))
    )
    x = torch.from_numpy(images.copy()).view(-1, 1, 28, 28).float()
    return (x - 73) / 90, torch.from_numpy(labels.copy()).long()


def made_up(count: int) -> tuple[Tensor, Tensor]:
    """Ten kinds of stripes in noise: enough to see whether learning works."""
    labels = torch.randint(10, (count,))
    stripes = torch.sin(torch.arange(28) * (labels[:, None] + 1) * 0.2)
    return stripes[:, None, None, :] + torch.randn(count, 1, 28, 28), labels


def train(model: nn.Module, data: tuple[Tensor, Tensor], steps: int, rate: float, what: str, schedule: Any = None) -> None:
    """Any loop will do; `schedule.step()` is the only line that pruning adds."""
    x, labels = data
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.2)
    model.train()
    for _ in track(range(steps), what, transient=True, console=Console(stderr=True)):
        chosen = torch.randint(len(x), (BATCH,))
        images = x[chosen]
        images = torch.where(torch.rand(BATCH, 1, 1, 1) < 0.5, images.flip(3), images)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels[chosen], label_smoothing=0.05).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rates.step()
        if schedule is not None:
            schedule.step()
    model.eval()


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    x, labels = data
    with torch.no_grad():
        right = [model(x[i : i + 500]).argmax(1) == labels[i : i + 500] for i in range(0, len(x), 500)]
    return torch.cat(right).float().mean().item()


def one_seed(seed: int, data: Any, test: Any, steps: int, tuning: int) -> dict[str, tuple[float, nn.Module]]:
    """Accuracy and model of each way."""
    torch.manual_seed(seed)
    dense = ResNet()
    train(dense, data, steps, 4e-3, f"seed {seed}: dense")
    found: dict[str, tuple[float, nn.Module]] = {"dense": (accuracy(dense, test), dense)}
    for name, (pattern, sparsity) in WAYS.items():
        model = copy.deepcopy(dense)
        schedule = aerogel.Schedule(
            model, sparsity, max(1, tuning // 2), every=max(1, tuning // 20), pattern=pattern, exclude=["stem.0", "head"]
        )
        train(model, data, tuning, 2e-3, f"seed {seed}: {name}", schedule)
        if name == "blocks":
            aerogel.reprune(model, test[0][:1])
            train(model, data, max(1, tuning // 4), 5e-4, f"seed {seed}: re-pruned")
        found[name] = accuracy(model, test), aerogel.finalize(model)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--quick", action="store_true", help="few steps on made-up images")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1400, help="of 256 images, dense")
    parser.add_argument("--tuning", type=int, default=500, help="steps while and after pruning")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if given.quick:
        given.steps, given.tuning = 20, 10
    elif given.folder is None:
        parser.error("where is Fashion-MNIST? Give its folder, or --quick")
    torch.manual_seed(given.first_seed)
    data, test = (made_up(2000), made_up(500)) if given.quick else (read(given.folder, "train"), read(given.folder, "t10k"))
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    runs = [one_seed(seed, data, test, given.steps, given.tuning) for seed in seeds]
    torch.set_num_threads(1)
    result: dict[str, Any] = {"accuracy": {}, "speedup": {}, "zeros": {}, "each": {}}
    for name in ("dense", *WAYS):
        model = runs[0][name][1]
        fast = aerogel.compile(model, test[0][:1])
        weights = [p for p in model.parameters() if p.dim() > 1]
        result["accuracy"][name] = float(np.mean([run[name][0] for run in runs]))
        result["each"][name] = [run[name][0] for run in runs]
        result["speedup"][name] = fast.speedup
        result["zeros"][name] = 1 - sum(int(p.count_nonzero()) for p in weights) / sum(p.numel() for p in weights)
    result |= {"images": "made up" if given.quick else "Fashion-MNIST", "seeds": given.seeds, "target": str(fast.plan.target)}
    result |= {"parameters": sum(p.numel() for p in runs[0]["dense"][1].parameters()), "date": date.today().isoformat()}
    show(result)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))
    if given.plot:
        plot(result, given.plot)


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['images']}, {result['seeds']} seeds, one thread ({result['target']})")
    for heading in ("", "zeros", "accuracy", "of dense", "speedup over torch"):
        table.add_column(heading, justify="right")
    for name, right in result["accuracy"].items():
        change = f"{100 * (right - result['accuracy']['dense']):+.2f} points"
        table.add_row(name, f"{result['zeros'][name]:.0%}", f"{right:.2%}", change, f"{result['speedup'][name]:.2f}x")
    Console(width=100).print(table)


def plot(result: dict[str, Any], path: Path) -> None:
    """Accuracy over speedup: up and to the right is better."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    _, ax = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, right in result["accuracy"].items():
        ax.scatter(result["speedup"][name], 100 * right, label=f"{name} ({result['zeros'][name]:.0%} zeros)", s=60)
    ax.legend()
    ax.set(
        xlabel="speedup over torch, one image, one thread",
        ylabel="accuracy, %",
        title=f"{result['images']}, {result['seeds']} seeds",
    )
    pyplot.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
