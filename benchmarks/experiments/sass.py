"""Instructions of a kernel's hot loop, counted in its machine code as nvdisasm shows it: what the cost model
is held to."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

CLASSES = {
    "mac": r"FFMA|HFMA2",
    "matrix": r"HMMA|HGMMA|UTCHMMA",
    "shared": r"LDS|LDSM|STS",
    "global": r"LDG|LDGSTS|LD\.",
}
"""Everything else is `other`."""
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)([^;]*);", re.MULTILINE)
_LABEL = re.compile(r"^\s*(\.L_x_\d+):", re.MULTILINE)


def hot_loop(text: str) -> Counter[str]:
    """Of the innermost loops the one with most multiplications: its instructions by class."""
    found = [(m.start(), int(m[1], 16), m[2], m[3]) for m in _LINE.finditer(text)]
    at = {
        m[1]: next((number for number, one in enumerate(found) if one[0] > m.start()), len(found))
        for m in _LABEL.finditer(text)
    }
    loops = []
    for number, (_, _, name, rest) in enumerate(found):
        if (
            name.startswith("BRA")
            and (target := re.search(r"(\.L_x_\d+)", rest))
            and at.get(target[1], number + 1) <= number
        ):
            loops.append((at[target[1]], number))
    inner = [one for one in loops if not any(o != one and one[0] <= o[0] and o[1] <= one[1] for o in loops)]
    counted = [Counter(kind(name) for _, _, name, _ in found[low : high + 1]) for low, high in inner]
    return max(counted, key=lambda c: (c["mac"] + 100 * c["matrix"], sum(c.values())), default=Counter())


def kind(name: str) -> str:
    return next((own for own, names in CLASSES.items() if re.match(names, name)), "other")


@dataclass(frozen=True)
class Piece:
    """Instructions of a part, and among them FMAs, copies into shared memory, and words read from there."""

    instructions: int = 0
    macs: int = 0
    copies: int = 0
    words: int = 0


@dataclass(frozen=True)
class Part:
    """A kernel by what is passed how often: before all loops, its hot loop, copies, all between loops, and
    all behind them; `straight` is what stands between staging and stores where there is no hot loop."""

    before: int
    hot: Piece
    copies: Piece
    between: int
    after: int
    straight: Piece


def parts(text: str) -> Part:
    """A kernel taken to pieces."""
    found = [(m.start(), m[2], m[3]) for m in _LINE.finditer(text)]
    end = next(
        (n for n, one in enumerate(found) if one[1] == "BRA" and n and found[n - 1][1] == "EXIT"), len(found)
    )
    found = found[:end]
    labels = {m[1]: sum(one[0] < m.start() for one in found) for m in _LABEL.finditer(text)}
    loops = set[tuple[int, int]]()
    for number, (_, name, rest) in enumerate(found):
        if name.startswith("BRA") and (target := re.search(r"(\.L_x_\d+)", rest)):
            low = labels.get(target[1], len(found))
            if low <= number:
                loops.add((low, number))
    inner = [one for one in loops if not any(o != one and one[0] <= o[0] and o[1] <= one[1] for o in loops)]
    pieces = {one: _piece(found[one[0] : one[1] + 1]) for one in inner}
    copying = max(
        (p for p in pieces.values() if p.copies and not p.macs), key=lambda p: p.copies, default=Piece()
    )
    hot = max((one for one in inner if pieces[one].macs), key=lambda one: pieces[one].macs, default=None)
    staged = [n for n, one in enumerate(found) if _COPY.match(one[1])]
    if hot is None or (staged and pieces[hot].copies):
        macs = [n for n, one in enumerate(found) if one[1] == "FFMA"]
        copies = copying if copying.copies else Piece(16, 0, 1)
        outside = macs[0] - _straight_copies(found[: macs[0]], copying, pieces)
        return Part(
            outside,
            Piece(),
            copies,
            0,
            len(found) - macs[-1],
            _piece(found[macs[0] : macs[-1] + 1]),
        )
    enclosing = sorted(
        (o for o in loops if o[0] <= hot[0] and hot[1] <= o[1] and o != hot), key=lambda o: o[1] - o[0]
    )
    covered = {n for low, high in inner for n in range(low, high + 1)}
    between = 0
    first = enclosing[-1][0] if enclosing else hot[0]
    if enclosing:
        outer = range(first, hot[1] + 1)
        between = sum(n not in covered for n in outer)
    if staged:
        straight = [n for n in staged if n not in covered]
        each = copying.instructions / copying.copies if copying.copies else 16
        between = max(0, between - round(each * sum(n >= first for n in straight)))
    before = sum(n not in covered for n in range(first))
    copies = copying if copying.copies else Piece(16, 0, 1)
    return Part(before, pieces[hot], copies, between, len(found) - hot[1] - 1, Piece())


_COPY = re.compile(r"LDGSTS|STS")


def _straight_copies(
    found: list[tuple[int, str, str]], copying: Piece, pieces: dict[tuple[int, int], Piece]
) -> int:
    """Instructions of loops, and of copies that stand outside of them."""
    inside = {n for low, high in pieces for n in range(low, high + 1)}
    outside = sum(bool(_COPY.match(one[1])) for n, one in enumerate(found) if n not in inside)
    each = copying.instructions / copying.copies if copying.copies else 16
    return round(each * outside) + sum(n < len(found) for n in inside)


def _piece(found: list[tuple[int, str, str]]) -> Piece:
    width = {"128": 4, "64": 2}
    words = sum(width.get(name.rpartition(".")[2], 1) for _, name, _ in found if name.startswith("LDS"))
    macs = sum(kind(name) == "mac" for _, name, _ in found)
    return Piece(len(found), macs, sum(bool(_COPY.match(name)) for _, name, _ in found), words)
