"""Execute the notebooks and store what they show, so that readers of the site and of GitHub see it:

    python docs/notebooks/execute.py [quickstart why ...]

Each runs in an empty folder with a cache of its own. Run it on a quiet machine, and look at the outputs.
`FASHION_MNIST` names the folder with the four .gz files for `prune`. What a cell writes to standard error is
dropped, and names of folders of this machine are shortened.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
KEEP = ("text/plain", "text/html", "image/png")
"""Kinds of output that are stored."""


def execute(path: Path) -> None:
    """Run a notebook and write it back with its outputs."""
    book: Any = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AEROGEL_CACHE"] = f"{folder}/cache"
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        NotebookClient(book, timeout=900, resources={"metadata": {"path": folder}}).execute()
        for cell in book.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs = [out for one in cell.outputs if (out := _clean(one, folder)) is not None]
    book.metadata.pop("widgets", None)
    nbformat.write(book, path)  # type: ignore[no-untyped-call]


def _clean(output: Any, folder: str) -> Any:
    """Return an output without what differs between machines; None where nothing is left."""
    if output.output_type == "stream":
        output.text = _shorten(output.text, folder)
        return output if output.name == "stdout" else None
    if output.output_type not in ("display_data", "execute_result"):
        return None
    output.metadata = {}
    output.data = {
        kind: _shorten(data, folder) if kind.startswith("text") else data
        for kind, data in output.data.items()
        if kind in KEEP
    }
    return output if output.data else None


def _shorten(text: str, folder: str) -> str:
    text = text.replace(f"{folder}/", "").replace(str(Path.home()), "~").replace(f"{ROOT}/", "")
    return re.sub(r"/(?:[\w.-]+/)+site-packages/", "", text)


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in names:
        execute(FOLDER / f"{name}.ipynb")
        print(name, (FOLDER / f"{name}.ipynb").stat().st_size // 1024, "KiB")
