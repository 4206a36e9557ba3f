"""What a test draws at random follows from the run's seed and its own name, whatever ran before it."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import counts, randomness

ROOT = Path(__file__).parent.parent
DRAWS = """
import random
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st


def draw():
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


AT_IMPORT = draw()


@pytest.fixture(scope="module")
def shared():
    return draw()


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_draws(name, shared):
    print("drawn", name, AT_IMPORT, shared, draw())


@given(st.integers())
def test_examples(number):
    print("drawn", number)
"""


def drawn(folder: Path, *words: str) -> set[str]:
    """Return what the tests of DRAWS draw in a run of their own."""
    (folder / "test_draws.py").write_text(DRAWS)
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q -s -p no:cacheprovider -p no:xdist\n")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed 77, ci counts, commit ")
    return {line[line.index("drawn") :] for line in done.stdout.splitlines() if "drawn" in line}


def test_draws_do_not_depend_on_order_or_on_other_tests(tmp_path: Path) -> None:
    every = drawn(tmp_path, "--seed", "77")
    assert len([line for line in every if "[" in line]) == 3, "each test draws its own"
    names = [f"test_draws.py::test_draws[{name}]" for name in ("third", "first")]
    assert drawn(tmp_path, "--seed", "77", *names) == {
        line for line in every if "third" in line or "first" in line
    }


def test_another_seed_is_another_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    here = randomness.seed_for("a test")
    assert randomness.seed_for("another test") != here
    monkeypatch.setattr(counts, "_chosen", (counts.mode(), counts.seed() + 1))
    assert randomness.seed_for("a test") != here


def test_what_is_drawn_apart_moves_nobody() -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    randomness.seed_everything("a test")
    undisturbed = draw()
    randomness.seed_everything("a test")
    with randomness.drawing_apart("a fixture"):
        assert draw() != undisturbed
    assert draw() == undisturbed
