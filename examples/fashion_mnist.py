"""Train, prune in four ways, fine-tune, compile: what each costs in accuracy and gains in time, on real
images.

    python examples/fashion_mnist.py FOLDER
        FOLDER has Fashion-MNIST's four .gz files (Debian: dataset-fashion-mnist)
    python examples/fashion_mnist.py FOLDER --seeds 3 --json fashion.json --plot fashion.png --models trained
        trained/ keeps every model; a run that was stopped goes on from there
    python examples/fashion_mnist.py --quick
        a minute, on made-up images: shows the way, not the accuracy

A ResNet of a million weights is trained dense. Then from the same weights: magnitude (90 % of single
weights), tilewise (TW-2D, 75 %), tew (the same with the best single weights given back), blocks (80 % in
blocks of 16 filters, then re-pruned where that saves time). Sparsity grows while training goes on
(aerogel.Schedule), masks hold (no special loop), and the result is compiled as it is. Shares are of the whole
network (scope "global"); a pruned model learns from the labels and from the dense model's answers. Accuracy
is on the 10,000 test images; speedup is one image over the faster of torch's two layouts, as aerogel.compile
measures it.
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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import aerogel

BATCH, TUNED = 256, 128
"""Images of a step of dense training, and while pruned."""
SOFT = 3.0
"""The temperature at which the dense model's answers are learned (distillation)."""
WAYS = {
    "magnitude": ("unstructured", 0.9),
    "tilewise": ("tilewise", 0.75),
    "tew": ("tew", 0.75),
    "blocks": ("16x1", 0.8),
}

Data = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, c: int, k: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(c, k, 3, stride, 1, bias=False),
            nn.Conv2d(k, k, 3, 1, 1, bias=False),
        )
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


def read(folder: Path, part: str) -> Data:
    """Images in f32 around zero, and labels: `part` is train or t10k."""
    images, labels = (
        np.frombuffer(
            gzip.decompress((folder / f"{part}-{what}-ubyte.gz").read_bytes()), np.uint8, offset=offset
        )
        for what, offset in (("images-idx3", 16), ("labels-idx1", 8))
    )
    x = torch.from_numpy(images.copy()).view(-1, 1, 28, 28).float()
    return (x - 73) / 90, torch.from_numpy(labels.copy()).long()


def made_up(count: int) -> Data:
    """Ten kinds of stripes in noise: enough to see whether learning works."""
    labels = torch.randint(10, (count,))
    stripes = torch.sin(torch.arange(28) * (labels[:, None] + 1) * 0.2)
    return stripes[:, None, None, :] + torch.randn(count, 1, 28, 28), labels


def train(
    model: nn.Module,
    data: Data,
    steps: int,
    batch: int,
    rate: float,
    what: str,
    schedule: Any = None,
    teacher: Tensor | None = None,
    bf16: bool = False,
) -> None:
    """Any loop will do; `schedule.step()` is the only line that pruning adds. `teacher` has a dense model's
    answers for every image as it is and flipped; `bf16` multiplies in half precision, which AMX does
    more than twice as fast."""
    x, labels = data
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.2)
    model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    for _ in track(range(steps), what, transient=True, console=Console(stderr=True)):
        chosen = torch.randint(len(x), (batch,))
        images = x[chosen].to(memory_format=torch.channels_last)
        flipped = torch.rand(batch) < 0.5
        images = torch.where(flipped[:, None, None, None], images.flip(3), images)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            answers = model(images)
        answers = answers.float()
        loss = F.cross_entropy(answers, labels[chosen], label_smoothing=0.05)
        if teacher is not None:
            loss = loss + SOFT**2 * F.cross_entropy(
                answers / SOFT, (teacher[flipped.long(), chosen] / SOFT).softmax(1)
            )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rates.step()
        if schedule is not None:
            schedule.step()
    model.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]


def answers(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        return torch.cat([model(x[i : i + 500]) for i in range(0, len(x), 500)])


def accuracy(model: nn.Module, data: Data) -> float:
    return (answers(model, data[0]).argmax(1) == data[1]).float().mean().item()


def one_seed(
    seed: int, data: Data, test: Data, given: argparse.Namespace
) -> dict[str, tuple[float, nn.Module]]:
    """Accuracy and model of each way."""
    found: dict[str, tuple[float, nn.Module]] = {}
    teacher = None
    for name in ("dense", *WAYS):
        torch.manual_seed(seed)
        kept = given.models / f"{name}-{seed}.safetensors" if given.models else None
        model: nn.Module = ResNet()
        if kept and kept.exists():
            model.load_state_dict(load_file(kept))
        elif name == "dense":
            train(model, data, given.steps, BATCH, 4e-3, f"seed {seed}: dense")
        else:
            if teacher is None:
                teacher = torch.stack([answers(found["dense"][1], x) for x in (data[0], data[0].flip(3))])
            model = pruned(
                copy.deepcopy(found["dense"][1]), name, data, given.tuning, f"seed {seed}: {name}", teacher
            )
        if kept and not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            save_file(model.state_dict(), kept)
        found[name] = accuracy(model, test), model
    return found


def pruned(model: nn.Module, name: str, data: Data, steps: int, what: str, teacher: Tensor) -> nn.Module:
    """Sparsity grows over half of the steps."""
    pattern, sparsity = WAYS[name]
    schedule = aerogel.Schedule(
        model,
        sparsity,
        max(1, steps // 2),
        every=max(1, steps // 40),
        pattern=pattern,
        scope="global",
        exclude=["stem.0", "head"],
    )
    train(model, data, steps, TUNED, 3e-3, what, schedule, teacher)
    if name == "blocks":
        aerogel.reprune(model, data[0][:1])
        train(model, data, max(1, steps // 4), TUNED, 1e-3, f"{what}, re-pruned", None, teacher)
    return aerogel.finalize(model)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--quick", action="store_true", help="few steps on made-up images")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1400, help=f"of {BATCH} images, dense")
    parser.add_argument(
        "--tuning", type=int, default=800, help=f"steps of {TUNED} images while and after pruning"
    )
    parser.add_argument(
        "--models", type=Path, help="a folder to keep trained models in, and to take them from"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if given.quick:
        given.steps, given.tuning = 6, 6
    elif given.folder is None:
        parser.error("where is Fashion-MNIST? Give its folder, or --quick")
    torch.manual_seed(given.first_seed)
    data, test = (
        (made_up(600), made_up(200))
        if given.quick
        else (read(given.folder, "train"), read(given.folder, "t10k"))
    )
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    runs = [one_seed(seed, data, test, given) for seed in seeds]
    torch.set_num_threads(1)
    result: dict[str, Any] = {"accuracy": {}, "speedup": {}, "zeros": {}, "each": {}}
    for name in ("dense", *WAYS):
        model = runs[0][name][1]
        fast = aerogel.compile(model, test[0][:1], tune=0.5 if given.quick else "fast")
        weights = [p for p in model.parameters() if p.dim() > 1]
        result["accuracy"][name] = float(np.mean([run[name][0] for run in runs]))
        result["each"][name] = [run[name][0] for run in runs]
        result["speedup"][name] = fast.speedup or 1.0  # None: torch runs it
        result["zeros"][name] = 1 - sum(int(p.count_nonzero()) for p in weights) / sum(
            p.numel() for p in weights
        )
    result |= {
        "images": "made up" if given.quick else "Fashion-MNIST",
        "seeds": given.seeds,
        "target": str(fast.plan.target),
    }
    result |= {
        "parameters": sum(p.numel() for p in runs[0]["dense"][1].parameters()),
        "date": date.today().isoformat(),
    }
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
        table.add_row(
            name, f"{result['zeros'][name]:.0%}", f"{right:.2%}", change, f"{result['speedup'][name]:.2f}x"
        )
    Console(width=100).print(table)


def plot(result: dict[str, Any], path: Path) -> None:
    """Accuracy over speedup: up and to the right is better."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    _, ax = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, right in result["accuracy"].items():
        ax.scatter(
            result["speedup"][name], 100 * right, label=f"{name} ({result['zeros'][name]:.0%} zeros)", s=60
        )
    ax.legend()
    ax.set(
        xlabel="speedup over torch, one image, one thread",
        ylabel="accuracy, %",
        title=f"{result['images']}, {result['seeds']} seeds",
    )
    pyplot.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
