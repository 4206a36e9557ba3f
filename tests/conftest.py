"""Test runs keep compiled kernels in the checkout, never in the user's own cache; the network is out of reach."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

os.environ.setdefault("AEROGEL_CACHE", str(Path(__file__).parent.parent / ".pytest_cache" / "aerogel"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="a fiftieth of the suite's cases, to see a change work")
    parser.addoption("--nightly", action="store_true", help="ten times the suite's cases")


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
