"""aerogel in Hugging Face's Trainer: `Prune`, a callback. Needs `pip install "aerogel[huggingface]"`."""

from __future__ import annotations

import warnings
from typing import Any

from aerogel.errors import InvalidArgument
from aerogel.optional import install
from aerogel.pruning.asked import Sparsity
from aerogel.pruning.held import finalize, masks_of
from aerogel.pruning.schedule import Schedule, plain

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as why:
    raise ImportError(
        f"aerogel.huggingface needs transformers, which is not installed. Run: {install('huggingface')}"
    ) from why

__all__ = ["Prune"]


class Prune(TrainerCallback, ExportableState):  # type: ignore[misc]
    """A `Schedule` that the Trainer steps: sparsity grows with the optimizer's steps.

    Give it to the Trainer's constructor, and a model, not `model_init`: masks are attached there, before an
    optimizer is made and a checkpoint read. A checkpoint holds masks and schedule, and
    `train(resume_from_checkpoint=True)` goes on.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[Prune(0.9, exclude=["classifier"])])  # doctest: +SKIP

    Args:
        final: As in `Schedule`: a share, `{layer: share}`, `{layer: (pattern, share)}` or an `Advice`.
        steps: Optimizer steps until `final` is reached; by default all of the training.
        finalize: At the end make the zeros part of the weights and take the masks off.
        options: `every`, `pattern`, `scope`, `score` and `exclude` of `Schedule`.
    """

    def __init__(
        self, final: Sparsity, steps: int | None = None, *, finalize: bool = False, **options: Any
    ) -> None:
        self._final, self._steps, self._finalize, self._options = final, steps, finalize, options
        self._schedule: Schedule | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Masks, before the optimizer is made and a checkpoint is read."""
        Schedule(model, self._final, self._steps or 1, **self._options)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Only now it is known how long the training is; `state` is the checkpoint's, if there is one."""
        if state.global_step and not any(masks_of(module) for module in model.modules()):
            raise InvalidArgument(
                "a checkpoint was read before there were masks, so without its weights: give Prune to the "
                "Trainer's constructor, and a model in place of model_init"
            )
        if args.load_best_model_at_end:
            warnings.warn(
                "load_best_model_at_end may go back to a checkpoint from before all zeros were there: save "
                "checkpoints to compare from the step on at which the schedule ends",
                stacklevel=2,
            )
        self._schedule = Schedule(model, self._final, self._steps or state.max_steps, **self._options)
        saved = state.stateful_callbacks.get(type(self).__name__, {})
        if isinstance(saved, list):  # of several such callbacks
            saved = next((one for one in saved if one.get("args") == self.state()["args"]), {})
        held = saved.get("attributes", {}).get("held")
        if held and state.global_step:
            self._schedule.load_state_dict(held)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before gradients are set to zero: scores may look at them."""
        assert self._schedule is not None
        self._schedule.step()

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._finalize:
            finalize(model)

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into its checkpoints, as JSON."""
        final = plain(getattr(self._final, "recipe", self._final))
        args = {"final": final, "steps": self._steps, "finalize": self._finalize, **plain(self._options)}
        held = None if self._schedule is None else self._schedule.state_dict()
        return {"args": args, "attributes": {"held": held}}
