"""Instructions of a kernel's hot loop, counted in its machine code as nvdisasm shows it: what the cost model
is held to."""

from __future__ import annotations

import re
from collections import Counter

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
