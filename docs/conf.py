"""The site: Sphinx with furo. Built in CI with `-W`, so that a broken link or a missing name fails."""

from __future__ import annotations

import inspect
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import aerogel  # noqa: E402
from aerogel.methods import METHODS, method  # noqa: E402

project = "aerogel"
author = "the aerogel authors"
copyright = "the aerogel authors, Apache-2.0"
version = release = aerogel.__version__
extensions = [
    "myst_nb",
    "sphinx_design",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_autodoc_typehints",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
html_theme = "furo"
html_title = "aerogel"
html_static_path = ["_static"]
templates_path: list[str] = []
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # shown as docs/notebooks/execute.py stored them
suppress_warnings = ["mystnb.unknown_mime_type"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_mock_imports = [name for name in ("lightning", "transformers") if find_spec(name) is None]
always_use_bars_union = True
typehints_defaults = "comma"
nitpicky = False
default_role = "code"
doctest_global_setup = """
import copy
import torch
from torch import nn
import aerogel
torch.manual_seed(0)
x = torch.randn(1, 3, 32, 32)
model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(1)).eval()
"""


def _methods() -> None:
    """A page for each method, from its own docstring."""
    folder = Path(__file__).parent / "methods"
    folder.mkdir(exist_ok=True)
    for name in METHODS:
        own = method(name)
        text = inspect.cleandoc(own.__doc__ or "")
        paper = f"**Paper:** {own.PAPER}\n\n" if own.PAPER else ""
        page = f"# {name}\n\n{own.SUMMARY[0].upper()}{own.SUMMARY[1:]}.\n\n{paper}{_markdown(text)}\n"
        place = folder / f"{name}.md"
        if not place.exists() or place.read_text() != page:
            place.write_text(page)


def _markdown(text: str) -> str:
    """A docstring's drawings, which are indented, as blocks."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        drawn = line.startswith("    ")
        if drawn != inside and (line or drawn):
            lines.append("```text" if drawn else "```")
            inside = drawn
        lines.append(line)
    return "\n".join([*lines, *(["```"] if inside else [])])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    _methods()
