"""Prune while training on several processes, with checkpoints; killed and started again, it goes on.

    torchrun --nproc-per-node 2 examples/prune_torchrun.py --out runs/ddp
    torchrun --nproc-per-node 2 examples/prune_torchrun.py --out runs/fsdp --fsdp

Made-up images, a small network, CPUs (gloo). Three lines are aerogel's: a Schedule made before the model is
wrapped, its step(), and its state in the checkpoint. With --fsdp parameters and optimizer are in pieces
(FSDP2, `fully_shard`); masks are buffers, whole on every rank, and the Schedule puts weights together while
it chooses what goes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import aerogel

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(first, second, nn.Flatten(), nn.Linear(32, 10))


def images(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The batch of a step: others on every rank, the same after a restart."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    labels = torch.randint(10, (8,), generator=random)
    return torch.randn(8, 3, 16, 16, generator=random) + labels[:, None, None, None] / 5, labels


def save(path: Path, **parts: Any) -> None:
    """A file that is there whole or not at all."""
    torch.save(parts, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def train(out: Path, steps: int, every: int, fsdp: bool) -> None:
    rank = dist.get_rank()
    model: nn.Module = network()
    schedule = aerogel.Schedule(model, 0.9, steps // 2, every=every, exclude=["0.0"])
    if fsdp:
        for block in (model[0], model[1]):  # type: ignore[index]
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    check = out / "checkpoint.pt"
    if check.exists():
        held = torch.load(check)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=held["model"],
            optim_state_dict=held["optimizer"],
            options=WHOLE,
        )
        schedule.load_state_dict(held["schedule"])
    for step in range(schedule.count, steps):
        x, labels = images(step, rank)
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if schedule.count % every == 0 or schedule.count == steps:
            own, moments = get_state_dict(model, optimizer, options=WHOLE)  # every rank takes part
            if rank == 0:
                save(check, model=own, optimizer=moments, schedule=schedule.state_dict())
            dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=4, help="steps between two prunings and checkpoints")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead of DistributedDataParallel")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    train(given.out, given.steps, given.every, given.fsdp)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
