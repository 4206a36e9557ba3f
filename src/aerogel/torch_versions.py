"""Which versions of torch aerogel supports.

torch.export, private operators and the dynamo backend change between minor releases. The range below passes
every network of `benchmarks/harness/torch_versions.py`; `docs/about/platforms.md` has the table.
"""

from __future__ import annotations

import re
import warnings

from aerogel.errors import UnsupportedTorch, UntestedTorchWarning, printable
from aerogel.locks import Lock

OLDEST_TORCH = (2, 6)  # aerogel refuses anything older
NEWEST_TESTED_TORCH = (2, 15)  # aerogel warns once about anything newer

_WARNED: list[str] = []
"""The version this process has warned about, if it has."""
_WARNING_LOCK = Lock()


def minor_version(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version such as "2.14.1+cpu", or None where it starts otherwise."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def dotted(minor: tuple[int, int]) -> str:
    """Write a minor version as people do: "2.6"."""
    return ".".join(map(str, minor))


def is_untested(version: str) -> bool:
    """Tell whether this torch is newer than every tested one, or has a version that cannot be read."""
    minor = minor_version(version)
    return minor is None or minor > NEWEST_TESTED_TORCH


def require_supported_torch(version: str) -> None:
    """Raise UnsupportedTorch if this torch is too old."""
    minor = minor_version(version)
    if minor is not None and minor < OLDEST_TORCH:
        raise UnsupportedTorch(
            f"aerogel needs torch {dotted(OLDEST_TORCH)} or newer, and this is torch {printable(version)}. "
            f'Run: pip install --upgrade "torch>={dotted(OLDEST_TORCH)}"'
        )


def warn_if_untested(version: str, stacklevel: int = 3) -> None:
    """Warn once per process where torch is newer than every tested one."""
    with _WARNING_LOCK:
        if _WARNED or not is_untested(version):
            return
        _WARNED.append(version)
    warnings.warn(
        f"aerogel is tested with torch {dotted(OLDEST_TORCH)} to {dotted(NEWEST_TESTED_TORCH)}, and this is "
        f"torch {printable(version)}. Please report what fails.",
        UntestedTorchWarning,
        stacklevel=stacklevel,
    )
