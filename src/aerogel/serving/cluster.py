"""Ray, as aerogel's own verbs need it: begun here, or the cluster that RAY_ADDRESS names."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from aerogel.errors import AerogelError
from aerogel.optional import install

SLOW_START_S = "180"
"""How long Ray may take to start on a busy machine; its own limit is shorter."""


def check_ray() -> None:
    """Raise where Ray, or what its Data and Serve need, is not installed."""
    if any(find_spec(name) is None for name in ("ray", "pyarrow", "yaml", "starlette")):
        raise AerogelError(f"Batch and serving run on Ray, which is not installed. Run: {install('ray')}")


@contextmanager
def cluster(wanted: int) -> Iterator[None]:
    """Ray with as many CPUs as wanted, or an error that says how many there are. Nothing of Ray's is sent
    anywhere; its logs stay in its folder."""
    check_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", SLOW_START_S)
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    import ray

    begun = not ray.is_initialized()
    if begun:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        own = {} if os.environ.get("RAY_ADDRESS") else {"address": "local", "include_dashboard": False}
        ray.init(**quiet, **own)
    try:
        there = int(ray.cluster_resources().get("CPU", 0))
        if there < wanted and not os.environ.get("RAY_ADDRESS"):  # a cluster may grow
            raise AerogelError(
                f"{wanted} CPUs are asked for (processes times threads), and Ray has {there}: say fewer "
                "--workers, --replicas or --threads, or set RAY_ADDRESS to a larger cluster"
            )
        yield
    finally:
        if begun:
            ray.shutdown()


def cpus() -> int:
    """Threads for the actor that asks: its CPUs, at least one."""
    check_ray()
    import ray

    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
