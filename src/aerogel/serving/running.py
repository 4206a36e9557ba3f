"""Ray Serve with one model: begun, drained and ended."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from ray import serve

from aerogel.disk import write_whole
from aerogel.errors import AerogelError
from aerogel.serving.deployment import NAME, application, config, http_options

DRAINED_S = 75.0
"""How long requests that are running may take: a replica has 60 s, and is then ended."""


def written(args: dict[str, Any], host: str, port: int, out: Path) -> None:
    write_whole(out, yaml.safe_dump(config(args, host, port), sort_keys=False).encode())


@contextmanager
def running(args: dict[str, Any], host: str, port: int) -> Iterator[None]:
    """The model answers within. Afterwards the application is taken away, which waits for requests that
    replicas have. Other applications of the cluster stay."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if serve.status().proxies:
        raise AerogelError(
            "Ray Serve runs on this cluster already, with an address of its own: write the config with "
            "-o serve.yaml, and give it to 'serve deploy'"
        )
    serve.start(http_options=http_options(host, port))
    try:
        serve.run(application(args), name=NAME, route_prefix="/")
        yield
    finally:
        serve.delete(NAME, _blocking=False)
        until = time.monotonic() + DRAINED_S
        while NAME in serve.status().applications and time.monotonic() < until:
            time.sleep(0.1)
        if os.environ.get("RAY_ADDRESS") and not serve.status().applications:
            serve.shutdown()  # the cluster is as it was
