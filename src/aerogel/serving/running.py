"""Ray Serve with one model: begun, drained and ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from ray import serve

from aerogel.disk import write_whole
from aerogel.serving.deployment import application, config

NAME = "aerogel"
DRAINED_S = 60.0
"""How long requests that are running may take."""


def written(args: dict[str, Any], host: str, port: int, out: Path) -> None:
    write_whole(out, yaml.safe_dump(config(args, host, port), sort_keys=False).encode())


@contextmanager
def running(args: dict[str, Any], host: str, port: int) -> Iterator[None]:
    """The model answers within. Afterwards the application is taken away, which waits for requests that
    replicas have. Other applications of the cluster stay."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(http_options={"host": host, "port": port})
    serve.run(application(args), name=NAME, route_prefix="/")
    try:
        yield
    finally:
        serve.delete(NAME)
        until = time.monotonic() + DRAINED_S
        while NAME in serve.status().applications and time.monotonic() < until:
            time.sleep(0.1)
