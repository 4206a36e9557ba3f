"""Where temporary buffers live: one block of memory, parts of it reused once nothing reads them any more."""

from __future__ import annotations

from dataclasses import dataclass

LINE = 64


@dataclass(frozen=True)
class Need:
    """A buffer: its bytes, and the first and last step that touches it."""

    name: str
    size: int
    first: int
    last: int


def place(needs: list[Need]) -> tuple[dict[str, int], int]:
    """Offsets of the buffers and the arena's size. Largest first, each at the lowest offset free during its life."""
    placed: list[tuple[int, int, Need]] = []
    offsets: dict[str, int] = {}
    for need in sorted(needs, key=lambda n: (-n.size, n.first, n.name)):
        size = -(-need.size // LINE) * LINE
        busy = sorted((o, o + s) for o, s, other in placed if other.first <= need.last and need.first <= other.last)
        at = 0
        for low, high in busy:
            if at + size <= low:
                break
            at = max(at, high)
        offsets[need.name] = at
        placed.append((at, size, need))
    return offsets, max((o + s for o, s, _ in placed), default=0)
