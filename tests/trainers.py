"""Trainings in other people's loops, which tests run as processes of their own.

python -m tests.trainers lightning FOLDER       begins, or goes on from the last checkpoint there
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import aerogel

BATCH, SUMMED, EPOCHS, ROWS = 4, 2, 5, 32
"""32 rows in batches of four, gradients of two summed up: four optimizer steps an epoch, twenty in all."""
RECIPE: Any = {"body.0": ("4x1", 0.75), "body.3": ("unstructured", 0.9)}


class Net(nn.Module):
    """As the Trainer calls it: a dict with the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 8))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        answers = self.body(x)
        return {"loss": F.cross_entropy(answers, labels), "logits": answers}


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= ROWS:
            raise IndexError
        x = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": torch.tensor(index % 8)}


def in_lightning(folder: Path) -> nn.Module:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from aerogel.lightning import Prune

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.net(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        accumulate_grad_batches=SUMMED,
        callbacks=[
            Prune({f"net.{name}": own for name, own in RECIPE.items()}, every=3),
            ModelCheckpoint(folder, save_last=True),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = folder / "last.ckpt"
    trainer.fit(module, DataLoader(Rows(), BATCH), ckpt_path=last if last.exists() else None)
    return module.net


def in_trainer(folder: Path) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    from aerogel.huggingface import Prune

    model = Net()
    args = TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=SUMMED,
        learning_rate=1e-2,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=Rows(), callbacks=[Prune(RECIPE, every=3)])
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    return model


def in_accelerate(folder: Path) -> nn.Module:
    """A loop of one's own: masks before prepare(), and the schedule registered for checkpoints."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=SUMMED)
    model: nn.Module = Net()
    schedule = aerogel.Schedule(model, RECIPE, 20, every=3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(), BATCH))
    accelerator.register_for_checkpointing(schedule)
    saved = sorted(folder.glob("epoch-*"))
    if saved:
        accelerator.load_state(str(saved[-1]))
    for epoch in range(schedule.count // 4, EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                schedule.step()
        accelerator.save_state(str(folder / f"epoch-{epoch}"), safe_serialization=False)
    return model


def in_ray(folder: Path) -> nn.Module:
    """One of two workers kills itself after ten steps, if FOLDER is called `broken`; Ray goes on."""
    import ray

    from examples.prune_ray import loop, network, trained

    def dying(config: dict[str, Any]) -> None:
        from tests.dying import mortal

        if ray.train.get_context().get_world_rank() == 0 and folder.name == "broken":
            mortal(10, folder / "mark")
        loop(config)

    folder.mkdir(parents=True, exist_ok=True)
    ray.init(num_cpus=4, log_to_driver=False, include_dashboard=False)
    found = trained(folder, {"steps": 24, "every": 4}, dying)
    model = network()
    aerogel.prune(model, 0.0, exclude=["0"])
    model.load_state_dict(torch.load(found / "checkpoint.pt")["model"])
    ray.shutdown()
    return model


WAYS = {"lightning": in_lightning, "trainer": in_trainer, "accelerate": in_accelerate, "ray": in_ray}

if __name__ == "__main__":
    where = Path(sys.argv[2])
    torch.save(WAYS[sys.argv[1]](where).state_dict(), where / "weights.pt")
