"""Packages that aerogel itself does not install: one way to import them, one sentence if one is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from aerogel.errors import AerogelError, printable

NAMES = {"PIL": "Pillow", "cuda": "cuda-core"}
"""What people call a package where its module has another name."""


def install(extra: str) -> str:
    """Return the command that installs an extra, quoted: some shells expand square brackets."""
    return f'pip install "aerogel[{extra}]"'


def import_optional(name: str, extra: str, feature: str, kind: type[AerogelError] = AerogelError) -> Any:
    """Import a package that only some features need.

    Args:
        name: The module to import.
        extra: The extra of aerogel that installs its package.
        feature: What needs the package, as the subject of a sentence.
        kind: The type of the error.

    Raises:
        AerogelError: The package is not installed, or cannot be imported.
    """
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
        problem = "is not installed" if missing else f"cannot be imported: {printable(error)[:200]}"
        needed = NAMES.get(package, package)
        raise kind(f"{feature} needs {needed}, which {problem}. Run: {install(extra)}") from error
