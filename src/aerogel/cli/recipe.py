"""A recipe in a file: how far each layer is pruned, and how."""

from __future__ import annotations

import json
from pathlib import Path

from aerogel.disk import read_small
from aerogel.errors import AerogelError

MOST_BYTES = 16 << 20
"""Of a recipe."""
_LOOKS = 'a recipe looks like {"layer1": ["unstructured", 0.8]}, with shares between 0 and 1'


def read_recipe(path: Path) -> dict[str, tuple[str, float]]:
    """A recipe from a JSON file: that itself, or what has it as "recipe" (`aerogel advise --json`)."""
    try:
        raw = json.loads(read_small(path, MOST_BYTES))
    except OSError as why:
        raise AerogelError(f"'{path}' cannot be read: {why.strerror or why}") from None
    except (ValueError, RecursionError):
        raise AerogelError(f"'{path}' is no JSON; {_LOOKS}") from None
    if isinstance(raw, dict) and isinstance(raw.get("recipe"), dict):
        raw = raw["recipe"]
    if not isinstance(raw, dict) or not raw:
        raise AerogelError(f"'{path}' holds no recipe; {_LOOKS}")
    for name, point in raw.items():
        whole = isinstance(point, list) and list(map(type, point)) in ([str, float], [str, int])
        if not whole or not 0 <= point[1] < 1:
            raise AerogelError(f"'{path}' says {point!r:.60} of '{name}'; {_LOOKS}")
    return {name: (pattern, float(share)) for name, (pattern, share) in raw.items()}
