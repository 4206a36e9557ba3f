"""What machine code and its callers agree on: nothing that shapes the code is outside the digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aerogel.codegen.cpu import abi
from aerogel.ir import conv, dtypes, target
from aerogel.tune import store


@pytest.mark.parametrize(
    ("room", "name", "value"),
    [
        (abi, "POINTERS", ("y", "x", "residual", "bias", "scratch")),
        (target, "VECTOR_BYTES", {**target.VECTOR_BYTES, "avx512": 32}),
        (dtypes, "ITEM_BYTES", {**dtypes.ITEM_BYTES, "bf16": 4}),
        (conv, "NUMBERED", ("leaky_relu",)),
        (conv, "ACTIVATIONS", conv.ACTIVATIONS[1:]),
    ],
)
def test_every_constant_that_shapes_code_is_in_the_digest(
    room: Any, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = abi.digest()
    monkeypatch.setattr(room, name, value)
    assert abi.digest() != before


def test_every_emitter_is_in_the_digest() -> None:
    """Code is emitted in one folder, all of which is read."""
    source = Path(abi.__file__).parents[2]
    emitting = [p for p in source.rglob("*.py") if "from llvmlite import ir" in p.read_text()]
    assert emitting
    assert {p.parent for p in emitting} == {Path(abi.__file__).parent}


def test_packing_is_not_in_the_digest_of_code_and_the_rest_not_in_that_of_times() -> None:
    folder = Path(abi.__file__).parent
    assert not [p.name for p in folder.glob("*.py") if "def pack(" in p.read_text()]
    assert set(store.TIMED) == {"codegen", "formats", "methods", "backends"}


def test_a_block_has_room_for_pointers_and_what_the_kernel_asks_for() -> None:
    names = (*abi.POINTERS, "rows", "row_bytes")
    assert abi.block(names, {"row_bytes": 7, "rows": 3}).tolist() == [0] * len(abi.POINTERS) + [3, 7]
    with pytest.raises(KeyError, match="rows"):
        abi.block(names, {"row_bytes": 7})
