"""aerogel in Lightning: `Prune`, a callback. Needs `pip install "aerogel[lightning]"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aerogel.errors import InvalidArgument
from aerogel.optional import install
from aerogel.pruning.asked import Sparsity
from aerogel.pruning.held import finalize
from aerogel.pruning.schedule import Schedule

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as why:
    raise ImportError(
        f"aerogel.lightning needs Lightning, which is not installed. Run: {install('lightning')}"
    ) from why

__all__ = ["Prune"]


class Prune(Callback):  # type: ignore[misc]
    """A `Schedule` that Lightning steps: sparsity grows with the optimizer's steps.

    Masks are part of the module's state and the callback has its own, so a checkpoint holds both and a resume
    goes on where it was. Layers have the names that the LightningModule gives them.

    Example:
        >>> trainer = Trainer(max_epochs=9, callbacks=[Prune(0.9, exclude=["net.head"])])  # doctest: +SKIP

    Args:
        final: As in `Schedule`: a share, `{layer: share}`, `{layer: (pattern, share)}` or an `Advice`.
        steps: Optimizer steps until `final` is reached; by default all of the training.
        finalize: At the end make the zeros part of the weights and take the masks off. Checkpoints
            have masks: to load one afterwards, in `trainer.test(ckpt_path="best")`, leave this off.
        options: `every`, `pattern`, `scope`, `score` and `exclude` of `Schedule`.
    """

    def __init__(
        self, final: Sparsity, steps: int | None = None, *, finalize: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self._final, self._steps, self._finalize, self._options = final, steps, finalize, options
        self._schedule: Schedule | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._seen = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Masks, before the optimizer is made and a checkpoint is read."""
        if stage == "fit":
            Schedule(pl_module, self._final, self._steps or 1, **self._options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Only now it is known how long the training is."""
        steps = self._steps or trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise InvalidArgument("this training has no end: say when to be done, Prune(0.9, steps=10000)")
        self._schedule = Schedule(pl_module, self._final, int(steps), **self._options)
        if self._loaded is not None:
            self._schedule.load_state_dict(self._loaded)
            self._loaded = None
        self._seen = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Of several batches whose gradients are summed up only the last is a step."""
        assert self._schedule is not None
        if trainer.global_step > self._seen:
            self._seen = trainer.global_step
            self._schedule.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._finalize:
            finalize(pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._schedule is None else self._schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict or None
