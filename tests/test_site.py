"""The site builds without a warning, its snippets and docstrings run, and so do the notebooks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sphinx")
ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
SMALL = {"STEPS": "15", "IMAGES": "500", "TUNE": "6"}
"""Sizes of CI; a reader's are larger."""


def built(kind: str, out: Path) -> str:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", kind, "docs", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    built("html", tmp_path)
    for page in ("index", "api", "cli", "methods/direct", "guides/sparsity", "about/faq", "notebooks/why"):
        assert (tmp_path / f"{page}.html").stat().st_size > 5_000, page
    text = (tmp_path / "api.html").read_text()
    assert "aerogel.compile" in text
    assert "calibration" in text


def test_snippets_and_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEROGEL_CACHE", str(tmp_path / "cache"))
    here = tmp_path / "here"
    here.mkdir()
    script = f"import os, sys, sphinx.cmd.build as b; os.chdir({str(here)!r}); sys.exit(b.main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "-q", "-b", "doctest", str(ROOT / "docs"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    said = (tmp_path / "out" / "output.txt").read_text()
    assert done.returncode == 0, said[-4000:] + done.stderr[-2000:]
    ran = int(said.split("Doctest summary")[1].split()[1])
    assert ran >= 30, said[-500:]


def _fashion_mnist() -> Path | None:
    """Debian's package of it, where that is installed."""
    if shutil.which("dpkg") is None:
        return None
    listed = subprocess.run(["dpkg", "-L", "dataset-fashion-mnist"], capture_output=True, text=True)
    files = [Path(line) for line in listed.stdout.splitlines() if line.endswith(".gz")]
    return files[0].parent if files else None


@pytest.mark.turns(2)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    if path.stem == "ocr":
        pytest.importorskip("rapidocr")
    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)
    if (images := _fashion_mnist()) is not None:
        monkeypatch.setenv("FASHION_MNIST", str(images))
    monkeypatch.setenv("AEROGEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    read: Any = nbformat.read
    book = read(path, as_version=4)
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = json.dumps([cell.get("outputs", []) for cell in book.cells])
    assert "aerogel: done" in shown, "progress in a notebook"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_stored_whole_and_without_noise(path: Path) -> None:
    """With no outputs, or with all of them as docs/notebooks/execute.py writes them: small, of no machine in
    particular, without errors."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    if not outputs:
        assert all(cell["execution_count"] is None for cell in cells)
        return
    assert "aerogel: done" in json.dumps(outputs), f"python docs/notebooks/execute.py {path.stem}"
    assert all(cell["execution_count"] for cell in cells), "executed from its first cell to its last"
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)
    assert path.stat().st_size < 300_000
    assert not re.search(r"/(root|home|opt|tmp|work|usr)/", json.dumps(outputs))
