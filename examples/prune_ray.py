"""Prune while Ray Train trains on two workers; one that dies is replaced, and all go on from the checkpoint.

    python examples/prune_ray.py --out runs/ray

As in prune_torchrun.py three lines are aerogel's. The checkpoint is Ray's: `ray.train.report` keeps it, and
`ray.train.get_checkpoint` gives the last one after a failure. Needs `pip install aerogel[ray] "ray[train]"`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aerogel


def network() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32, 10))


def images(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The batch of a step: others on every worker, the same after a restart."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    labels = torch.randint(10, (8,), generator=random)
    return torch.randn(8, 3, 16, 16, generator=random) + labels[:, None, None, None] / 5, labels


def loop(config: dict[str, Any]) -> None:
    """What every worker runs."""
    rank, steps, every = ray.train.get_context().get_world_rank(), config["steps"], config["every"]
    model = network()
    schedule = aerogel.Schedule(model, 0.9, steps // 2, every=every, exclude=["0"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    last = ray.train.get_checkpoint()
    if last is not None:
        with last.as_directory() as folder:
            held = torch.load(Path(folder) / "checkpoint.pt")
        for name, part in parts.items():
            part.load_state_dict(held[name])
    wrapped = ray.train.torch.prepare_model(model)  # DistributedDataParallel
    for step in range(schedule.count, steps):
        x, labels = images(step, rank)
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(x), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if schedule.count % every == 0 or schedule.count == steps:
            with tempfile.TemporaryDirectory() as made:
                own = None
                if rank == 0:
                    state = {name: part.state_dict() for name, part in parts.items()}
                    torch.save(state, Path(made) / "checkpoint.pt")
                    own = ray.train.Checkpoint.from_directory(made)
                ray.train.report({"loss": float(loss.detach())}, checkpoint=own)


def trained(out: Path, config: dict[str, Any], body: Any = loop) -> Path:
    """The folder of the last checkpoint."""
    trainer = ray.train.torch.TorchTrainer(
        body,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="pruned",
            storage_path=str(out.absolute()),
            failure_config=ray.train.FailureConfig(max_failures=2),
        ),
    )
    found = trainer.fit().checkpoint
    assert found is not None
    return Path(found.path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for checkpoints")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=4, help="steps between two prunings and checkpoints")
    given = parser.parse_args()
    print(trained(given.out, {"steps": given.steps, "every": given.every}))


if __name__ == "__main__":
    main()
