"""Schedule: sparsity that grows while a model trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from aerogel.errors import AerogelError
from aerogel.pruning.prune import attached, prunable, prune


class Schedule:
    """Call step() after every optimizer step. Once in `every` of them the model loses weights, fast at first and slowly at the end
    (final x (1 - (1 - t)^3)), until after `steps` it has the `final` sparsity; the rest is prune()'s.

    Make it before the model is wrapped in DistributedDataParallel: masks are buffers, and rank 0's are everyone's. For a resume,
    make model and Schedule as before, then load both states.
    """

    def __init__(
        self,
        model: nn.Module,
        final: float | Mapping[str, float],
        steps: int,
        *,
        every: int = 100,
        pattern: str = "unstructured",
        scope: str = "uniform",
        score: str = "magnitude",
        exclude: Iterable[str] = (),
    ) -> None:
        if steps < 1 or every < 1:
            raise AerogelError(f"a schedule has at least one step, and prunes every 1 or more; not {steps} and {every}")
        self.model, self.final, self.steps, self.every, self.count = model, final, steps, every, 0
        self._options: dict[str, Any] = {"pattern": pattern, "scope": scope, "score": score, "exclude": tuple(exclude)}
        prune(model, dict.fromkeys(final, 0.0) if isinstance(final, Mapping) else 0.0, pattern=pattern, exclude=exclude)
        for name, module in prunable(model):
            if name not in self._options["exclude"] and (not isinstance(final, Mapping) or name in final):
                attached(module)

    def step(self) -> None:
        """One optimizer step is done."""
        self.count += 1
        if self.count > self.steps or (self.count % self.every and self.count < self.steps):
            return
        grown = 1 - (1 - self.count / self.steps) ** 3
        now = {n: s * grown for n, s in self.final.items()} if isinstance(self.final, Mapping) else self.final * grown
        prune(self.model, now, **self._options)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.count = int(state["count"])
