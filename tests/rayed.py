"""Programs with Ray in them, which tests run as processes of their own.

python -m tests.rayed predict model.aero 2000 kill answers.npz
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aerogel.ray import Predict

SIDE = 32


def images(ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """The image of each number: one of 64, in another brightness each."""
    base = np.random.default_rng(0).standard_normal((64, 3, SIDE, SIDE), np.float32)
    made: NDArray[np.float32] = base[ids % 64] + (ids / 1024).astype(np.float32)[:, None, None, None]
    return made


def made(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "x": images(batch["id"])}


class Told(Predict):
    """Also says which process answered."""

    def __call__(self, batch: Any) -> dict[str, Any]:
        found = super().__call__(batch)
        return {**found, "pid": np.full(len(found["id"]), os.getpid())}


def predict(model: str, count: int, kill: bool, out: Path) -> None:
    """Ray Data with two actors of two threads; one is killed after a quarter of the rows."""
    import ray
    from ray import data

    ray.init(log_to_driver=False)
    data.DataContext.get_current().enable_progress_bars = False
    warnings.simplefilter("ignore")
    answers = (
        data.range(count, override_num_blocks=max(4, count // 250))
        .map_batches(made, batch_size=250)
        .map_batches(
            Told,
            fn_constructor_args=(model,),
            batch_size=32,
            num_cpus=2,
            compute=data.ActorPoolStrategy(size=2),
            max_restarts=3,
            max_task_retries=3,
        )
    )
    ids, rows, pids, killed = [], [], set[int](), 0
    for batch in answers.iter_batches(batch_size=None):
        ids.append(batch["id"])
        rows.append(np.asarray(batch["mean"]))
        pids |= set(batch["pid"].tolist())
        if kill and not killed and sum(map(len, ids)) >= count // 4:
            killed = int(batch["pid"][0])
            os.kill(killed, signal.SIGKILL)
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    aborts = sum(text in log.read_text(errors="replace") for log in logs.glob("worker-*") for text in ABORTS)
    np.savez(
        out, ids=np.concatenate(ids), rows=np.concatenate(rows), pids=sorted(pids), said=[killed, aborts]
    )
    ray.shutdown()


ABORTS = ("SIGABRT", "Assertion", "Fatal Python error", "terminate called", "SIGSEGV")

if __name__ == "__main__":
    began = time.monotonic()
    predict(sys.argv[2], int(sys.argv[3]), sys.argv[4] == "kill", Path(sys.argv[5]))
    print(f"{time.monotonic() - began:.1f} s")
