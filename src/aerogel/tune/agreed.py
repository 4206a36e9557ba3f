"""What several measurements of one thing say together, whatever order they are listed in.

A fleet's records come from many machines of one kind: some were noisy, one may be forged. Of a layer, each
configuration counts with the median of its lower quartiles; of a model, the choices that most records have.
Among three or more, what only one of them says decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aerogel.ir import Choice, Config, Plan, Tried, Way

SEVERAL = 3
"""Records from which one alone is not believed."""


@dataclass(frozen=True)
class Known:
    """A whole model's record: its plan, who runs it ("graph" or a torch layout), what was said, and when."""

    plan: Plan
    how: Way
    notes: tuple[str, ...]
    measured: str


def layer(records: Sequence[Choice]) -> Choice | None:
    """One choice of several of the same layer."""
    if len(records) < 2:
        return records[0] if records else None
    timed: dict[Config, list[Tried]] = {}
    for record in records:
        for tried in record.tried:
            timed.setdefault(tried.config, []).append(tried)
    least = 2 if len(records) >= SEVERAL else 1
    seen = {config: _middle(found) for config, found in timed.items() if len(found) >= least}
    if not seen:
        return sorted(records, key=lambda r: (r.tried[0].timing.p25_us if r.tried else 0.0, str(r.config)))[
            (len(records) - 1) // 2
        ]
    ordered = sorted(seen.values(), key=lambda t: (t.timing.p25_us, str(t.config)))
    first = next((r for r in records if r.config == ordered[0].config), records[0])
    return replace(first, config=ordered[0].config, tried=tuple(ordered))


def _middle(found: Sequence[Tried]) -> Tried:
    return sorted(found, key=lambda t: t.timing.p25_us)[(len(found) - 1) // 2]


def model(records: Sequence[Known]) -> Known | None:
    """One whole model's record: of those whose choices most have, the one with the median time."""
    groups: dict[str, list[Known]] = {}
    for record in records:
        same = f"{record.how} {record.plan.image_by_image} {[str(c.config) for c in record.plan.choices]}"
        groups.setdefault(same, []).append(record)
    most = max((len(group) for group in groups.values()), default=0)
    alike = [record for group in groups.values() if len(group) == most for record in group]
    ordered = sorted(alike, key=lambda r: (_whole_us(r), str(r.plan.to_json())))
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def _whole_us(record: Known) -> float:
    return 0.0 if record.plan.model is None else record.plan.model.p25_us
