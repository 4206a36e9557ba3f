"""How much of a weight a packed form stores: what its kernel multiplies."""

from __future__ import annotations

from aerogel.ir import Packed

VALUE_ARRAYS = ("weight", "value", "panel", "dense")
"""Arrays of a packed weight that hold values; the others say where those stand."""


def count_values(packed: Packed) -> int:
    """Return how many values of the weight are stored, zeros that fill up a tile among them."""
    return sum(int(array.size) for name, array in packed.arrays.items() if name in VALUE_ARRAYS)
