"""Test runs keep compiled kernels in the checkout, never in the user's own cache; the network is out of reach."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("AEROGEL_CACHE", str(Path(__file__).parent.parent / ".pytest_cache" / "aerogel"))


HIDDEN = {
    "reorder": ("torch._C._nn", "mkldnn_reorder_conv2d_weight"),
    "fused": ("torch.ops.mkldnn", "_convolution_pointwise"),
    "onednn": ("torch._C", "_has_mkldnn"),
    "profiler": ("torch.autograd", "_profiler_enabled"),
}
"""What of torch is private and yet used, each with a fallback: `pytest --hide NAME` runs every test without it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="a fiftieth of the suite's cases, to see a change work")
    parser.addoption("--hide", choices=sorted(HIDDEN), help="run without this private part of torch")
    parser.addoption("--nightly", action="store_true", help="ten times the suite's cases")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--hide")
    if not name:
        return
    import torch

    owner, missing = HIDDEN[name]
    if name == "onednn":
        torch._C._has_mkldnn = False
    elif name == "profiler":
        real = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
        del torch.autograd._profiler_enabled  # type: ignore[attr-defined]
        torch.autograd.__getattr__ = lambda name: _for_torch_only(name, missing, real)  # type: ignore[method-assign]
    else:
        parent, _, last = owner.rpartition(".")
        place = torch._C if parent == "torch._C" else torch.ops
        setattr(place, last, Hidden(getattr(place, last), missing))


def _for_torch_only(name: str, hidden: str, real: object) -> object:
    """A name of torch.autograd that torch itself (dynamo asks for it too) still finds, and nobody else does."""
    if name == hidden and sys._getframe(2).f_globals["__name__"].startswith("torch."):
        return real
    raise AttributeError(name)


class Hidden:
    """Stands in for a torch namespace from which one name is missing."""

    def __init__(self, real: object, missing: str) -> None:
        self._real, self._missing = real, missing

    def __getattr__(self, name: str) -> object:
        if name == self._missing:
            raise AttributeError(name)
        return getattr(self._real, name)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """aerogel never opens a connection; a test that tries fails."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: object) -> None:
        if self.family == socket.AF_UNIX:
            connect(self, address)  # type: ignore[arg-type]
            return
        raise AssertionError(f"a connection to {address} was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test starts with an empty store: kernels may be kept between runs, timings may not."""
    from aerogel.tune import store

    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path / "unknown")


@pytest.fixture(scope="module")
def small() -> Any:
    """(model, compiled by rule, example): a small pruned residual network."""
    import torch

    import aerogel
    from tests.small_models import Small, sparse

    model, x = sparse(Small()), torch.randn(1, 3, 64, 64)
    return model, aerogel.compile(model, x, tune="off"), x
