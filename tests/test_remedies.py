"""What the library says in Python's words, the command line says in its own: flags, not arguments."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from aerogel.cli.words import in_shell

SOURCE = Path(__file__).parent.parent / "src" / "aerogel"


def _raised() -> list[tuple[str, str]]:
    """Every sentence that the library raises, with 7 for what is filled in; and the module it is in."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                pieces = {
                    id(v)
                    for part in ast.walk(node.exc)
                    if isinstance(part, ast.JoinedStr)
                    for v in part.values
                }
                for part in ast.walk(node.exc):
                    if isinstance(part, ast.JoinedStr):
                        texts = [v.value if isinstance(v, ast.Constant) else "7" for v in part.values]
                        found.append((path.relative_to(SOURCE).as_posix(), "".join(map(str, texts))))
                    elif (
                        isinstance(part, ast.Constant)
                        and isinstance(part.value, str)
                        and id(part) not in pieces
                    ):
                        found.append((path.relative_to(SOURCE).as_posix(), part.value))
    return found


PYTHONS = re.compile(
    r"aerogel\.(compile|load|prune|advise)\(|shapes=|\btune=|\btune is '|set_num_threads|dtype must be "
    r"None|\bload\("
)
ONLY_IN_PYTHON = (
    "boosting.py",
    "repruning.py",
    "pruning/heal.py",
    "pruning/mistakes.py",
    "pruning/schedule.py",
    "advice.py",
    "cli/doctor.py",
)


def test_no_sentence_keeps_pythons_remedy() -> None:
    raised = [(path, text) for path, text in _raised() if not path.startswith(ONLY_IN_PYTHON)]
    assert len(raised) > 150
    assert any(PYTHONS.search(text) for _, text in raised), "there is something to turn"
    left = [(path, in_shell(text)) for path, text in raised if PYTHONS.search(in_shell(text))]
    assert not left, left


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        (
            (
                "input 'images' has open sizes (batch). "
                "Call aerogel.compile(path, shapes={\"images\": (1, 3, 640, 640)})."
            ),
            "input 'images' has open sizes (batch). Say --shape images=1x3x640x640.",
        ),
        (
            "plan made for avx512 with 8 threads; this is avx2 with 4. load(path, tune=\"fast\") tunes here.",
            "plan made for avx512 with 8 threads; this is avx2 with 4. --tune fast tunes here.",
        ),
        ("nothing was timed (tune='off').", "nothing was timed (--tune off)."),
        (
            "prune it first: aerogel.prune(model, 0.8)",
            "prune it first: aerogel prune MODEL -o FILE --sparsity 0.8",
        ),
        ("prune with pattern='tilewise' for more", "prune with --pattern tilewise for more"),
        (
            "tune is 'off', 'fast', 'full' or seconds, not 'x'",
            "--tune is off, fast, full or seconds, not 'x'",
        ),
    ],
)  # fmt: skip
def test_remedies_as_flags(python: str, shell: str) -> None:
    assert in_shell(python) == shell
