"""Schedule: sparsity that grows while a model trains."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

from torch import nn

from aerogel.errors import InvalidArgument
from aerogel.pruning.asked import FROM_DATA, Sparsity, chosen
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

    Args:
        model: What is trained.
        final: As prune()'s `sparsity`. Shares of a recipe, `{layer: (pattern, share)}` or an `Advice`, all
            grow by the same law.
        steps: Optimizer steps until `final` is reached.
        every: Steps between two prunings.
        pattern: As in `prune`; likewise `scope`, `exclude`, and `score` ("magnitude" or "taylor").
    """

    def __init__(
        self,
        model: nn.Module,
        final: Sparsity,
        steps: int,
        *,
        every: int | None = None,
        pattern: str = "unstructured",
        scope: str = "uniform",
        score: str = "magnitude",
        exclude: Iterable[str] = (),
    ) -> None:
        left_out = tuple(several(exclude, "exclude", "exclude=['head']"))
        asked = chosen(a_module(model, "Schedule"), final, pattern, scope, score, left_out)
        if score in FROM_DATA or scope == "error":
            raise InvalidArgument(
                f"a Schedule looks at no calibration data, which {score if score in FROM_DATA else scope} "
                "needs: take score='magnitude' or 'taylor', and scope 'uniform', 'global' or 'erk'"
            )
        self.model, self.count = model, 0
        self.final = plain(getattr(final, "recipe", final))
        self.steps = a_count(steps, "steps")
        self.every = a_count(max(1, min(EVERY, self.steps // TIMES)) if every is None else every, "every")
        self._options: dict[str, Any] = {
            "pattern": pattern,
            "scope": scope,
            "score": score,
            "exclude": list(left_out),
        }
        for one in asked.values():
            attached(one.module)

    def step(self) -> None:
        """One optimizer step is done."""
        self.count += 1
        if self.count > self.steps or (self.count % self.every and self.count < self.steps):
            return
        grown = 1 - (1 - self.count / self.steps) ** 3
        with _whole(self.model):
            prune(self.model, _scaled(self.final, grown), **self._options)

    def state_dict(self) -> dict[str, Any]:
        """How far it is, and all that it was made with, as plain values (JSON will do)."""
        made = {"steps": self.steps, "every": self.every, "final": self.final, **self._options}
        return {"count": self.count, **copy.deepcopy(made)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another Schedule was, which was made with the same arguments."""
        if not isinstance(state, Mapping) or not isinstance(count := state.get("count"), int) or count < 0:
            raise InvalidArgument(
                "this is no state of a Schedule: give what its state_dict() gave, {'count': steps done, ...}"
            )
        own = self.state_dict()
        missing = [name for name in own if name not in state]
        if missing:
            raise InvalidArgument(
                f"this state of a Schedule is an older one and does not say {', '.join(missing)}: if "
                f"they are the same as here, set schedule.count = {count}"
            )
        for name in own:
            if name != "count" and plain(state[name]) != own[name]:
                raise InvalidArgument(
                    f"this state is of a Schedule with {name}={state[name]!r}, and here it is {own[name]!r}: "
                    "make the Schedule as it was made then"
                )
        self.count = count


@contextmanager
def _whole(model: nn.Module) -> Iterator[None]:
    """FSDP2 has weights in pieces, masks are whole on every rank: so scores are taken of whole weights too.
    Whoever uses FSDP2 has imported it."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    parts: list[Any] = [module for module in model.modules() if isinstance(module, kind)]
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


def plain(value: Any) -> Any:
    """Numbers, words, lists and dicts of them: what JSON gives back as it was given."""
    if isinstance(value, Mapping):
        return {name: plain(own) for name, own in value.items()}
    if isinstance(value, tuple | list):
        return [plain(own) for own in value]
    return float(value) if isinstance(value, Real) and not isinstance(value, int) else value


def _scaled(final: Any, grown: float) -> Any:
    """Every share times the same number."""
    if isinstance(final, Mapping):
        return {name: _scaled(own, grown) for name, own in final.items()}
    return (final[0], final[1] * grown) if isinstance(final, list) else final * grown
