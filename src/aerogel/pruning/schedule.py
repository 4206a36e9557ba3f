"""Schedule: sparsity that grows while a model trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from aerogel.errors import InvalidArgument
from aerogel.pruning.asked import chosen
from aerogel.pruning.held import attached
from aerogel.pruning.mistakes import a_count, a_module, several
from aerogel.pruning.prune import prune

EVERY, TIMES = 100, 20
"""Steps between two prunings at most, and prunings at least, where the user leaves it to us."""


class Schedule:
    """Call step() after every optimizer step. Once in `every` of them the model loses weights, fast at first
    and slowly at the end (final x (1 - (1 - t)^3)), until after `steps` it has the `final` sparsity. By
    default that is every hundredth step, oftener where `steps` are few: at least twenty times in all, or at
    every step. The rest is prune()'s.

    Example:
        >>> schedule = aerogel.Schedule(model, 0.9, steps=40)
        >>> for _ in range(40):
        ...     schedule.step()    # after optimizer.step()

    Make it before the model is wrapped in DistributedDataParallel: masks are buffers, and rank 0's are
    everyone's. For a resume, make model and Schedule as before, then load both states.
    """

    def __init__(
        self,
        model: nn.Module,
        final: float | Mapping[str, float],
        steps: int,
        *,
        every: int | None = None,
        pattern: str = "unstructured",
        scope: str = "uniform",
        score: str = "magnitude",
        exclude: Iterable[str] = (),
    ) -> None:
        if hasattr(final, "recipe"):
            raise InvalidArgument(
                "a Schedule has one pattern: give {layer: share} of the advice's recipe, and pattern="
            )
        left_out = tuple(several(exclude, "exclude", "exclude=['head']"))
        asked = chosen(a_module(model, "Schedule"), final, pattern, scope, score, left_out)
        self.model, self.final, self.count = model, final, 0
        self.steps = a_count(steps, "steps")
        self.every = a_count(max(1, min(EVERY, self.steps // TIMES)) if every is None else every, "every")
        self._options: dict[str, Any] = {
            "pattern": pattern,
            "scope": scope,
            "score": score,
            "exclude": left_out,
        }
        for one in asked.values():
            attached(one.module)

    def step(self) -> None:
        """One optimizer step is done."""
        self.count += 1
        if self.count > self.steps or (self.count % self.every and self.count < self.steps):
            return
        grown = 1 - (1 - self.count / self.steps) ** 3
        now = (
            {n: s * grown for n, s in self.final.items()}
            if isinstance(self.final, Mapping)
            else self.final * grown
        )
        prune(self.model, now, **self._options)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if not isinstance(state, Mapping) or not isinstance(count := state.get("count"), int) or count < 0:
            raise InvalidArgument(
                "this is no state of a Schedule: give what its state_dict() gave, {'count': steps done}"
            )
        self.count = count
