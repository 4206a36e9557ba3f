"""Where temporary buffers live: one block of memory, parts of it reused once nothing reads them any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aerogel.ir import round_up

LINE = 64


@dataclass(frozen=True)
class Touch:
    """The buffers of one step: what it reads, what it writes, what it adds, and the gate it multiplies with.
    A name with "@" is no buffer of ours."""

    x: str
    y: str
    residual: str | None
    gate: str | None = None


@dataclass
class _Life:
    first: int
    last: int


def place(
    steps: list[Touch], sizes: Mapping[str, int], inside: Mapping[str, tuple[str, int]]
) -> tuple[dict[str, int], int]:
    """Byte offsets of all buffers and the arena's size. `inside` says which stand in another, and how many
    bytes from its start.

    Largest first, each at the lowest offset free during its life. The last reader of a residual writes over
    it.
    """

    def holder(name: str) -> str:
        return inside[name][0] if name in inside else name

    lives: dict[str, _Life] = {}
    for i, step in enumerate(steps):
        for name in (step.x, step.y, step.residual, step.gate):
            if name is not None and not name.startswith("@"):
                lives.setdefault(holder(name), _Life(i, i)).last = i
    shared: dict[str, str] = {}
    for i, step in enumerate(steps):
        old, new = step.residual, step.y
        if old is None or old in inside or new in inside or new in shared or holder(step.x) == old:
            continue
        if lives[old].last == i and lives[new].first == i:
            shared[new] = shared.get(old, old)
            lives[shared[new]].last = lives[new].last
    placed: list[tuple[int, int, _Life]] = []
    offsets: dict[str, int] = {}
    alone = [name for name in lives if name not in shared]
    for name in sorted(alone, key=lambda n: (-sizes[n], lives[n].first, n)):
        life, size = lives[name], round_up(sizes[name], LINE)
        busy = sorted(
            (o, o + s) for o, s, other in placed if other.first <= life.last and life.first <= other.last
        )
        at = 0
        for low, high in busy:
            if at + size <= low:
                break
            at = max(at, high)
        offsets[name] = at
        placed.append((at, size, life))
    offsets |= {name: offsets[owner] for name, owner in shared.items()}
    offsets |= {name: offsets[whole] + more for name, (whole, more) in inside.items() if whole in offsets}
    return offsets, max((o + s for o, s, _ in placed), default=0)
