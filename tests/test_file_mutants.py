"""Structural mutants of model files (tests/fuzz/files.py): refused in words or a valid answer, never a crash,
a hang, or 2 GB."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import counts
from tests.fuzz import files
from tests.limited import loaded

PIECES = 4


@pytest.fixture(scope="module")
def good() -> list[bytes]:
    return files.ready()


def test_the_samples_are_good(good: list[bytes], tmp_path: Path) -> None:
    for content in good:
        (tmp_path / "m.aero").write_bytes(content)
        assert loaded(str(tmp_path / "m.aero"))["kind"] == "valid"


@pytest.mark.parametrize("piece", range(PIECES))
def test_mutants(piece: int, good: list[bytes], tmp_path: Path, ran: Callable[[str, int], None]) -> None:
    many = counts.count("structural mutants", 1 / PIECES)
    ran("structural mutants", many)
    found = files.judged(list(counts.seeds("structural mutants", 1 / PIECES, piece * many)), good, tmp_path)
    wrong = {
        seed: said
        for seed, said in found.items()
        if said["kind"] not in files.GOOD or said.get("unchanged") is False
    }
    assert not wrong, "python -m tests.fuzz.files --count 1 --seed ..."
    assert sum(said["kind"] == "valid" for said in found.values()) > many // 20, (
        "some changes are another valid file"
    )
