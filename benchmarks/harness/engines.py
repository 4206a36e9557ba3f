r"""What an engine around a model costs: Ray Data beside bare processes, Ray Serve beside a bare call.

    python -m benchmarks.harness.engines data model.aero --images 2000 --append scale.jsonl
    python -m benchmarks.harness.engines serve model.aero --requests 500 --append scale.jsonl

`data`: images a second of two actors of one thread over those of two processes of one thread with the same
arrays in their memory, in turn on the same two cores, four seconds each; from their second batches on.
`serve`: one client on one core, everything of Ray's on the other; beside it the same call without a server,
on that core.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import aerogel
from aerogel.ir import host
from aerogel.ray import Predict

BATCH = 32


def shape_of(model: str) -> tuple[int, ...]:
    captured = aerogel.load(model).captured
    assert captured is not None
    args, kwargs = captured.example
    return tuple((*args, *kwargs.values())[0].shape[1:])


Span = tuple[float, float, int]
"""When a batch began and ended, and its images."""


def pace(own: list[Span], phases: list[tuple[float, float]]) -> float:
    """Images a second of a process from its second batch on, of the time it was let run."""
    began, ended = own[1][0], own[-1][1]
    running = sum(max(0.0, min(ended, stop) - max(began, start)) for start, stop in phases)
    return sum(count for _, _, count in own[1:]) / running


def bare(model: str, core: int) -> None:
    """One process: batches from memory, each with when it began and ended."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    fast = aerogel.load(model)
    name = fast.input_names[0]
    batch = np.random.default_rng(0).standard_normal((BATCH, *shape_of(model)), np.float32)
    while True:
        began = time.time()
        fast.run(None, {name: batch})
        print(began, time.time(), BATCH, flush=True)


def _span(line: str) -> Span:
    began, ended, count = line.split()
    return float(began), float(ended), int(count)


def _actors() -> list[int]:
    """Ray Data's processes that have a model."""
    paths = Path("/proc").glob("[0-9]*/cmdline")
    return [int(p.parent.name) for p in paths if b"ray::MapWorker" in p.read_bytes()]


class Timed(Predict):
    """Also says when each batch began and ended, and in which process."""

    def __call__(self, batch: Any) -> dict[str, Any]:
        began = time.time()
        found = super().__call__(batch)
        many = len(next(iter(found.values())))
        return {"began": [began], "ended": [time.time()], "count": [many], "pid": [os.getpid()]}


def actors(model: str, images: int) -> list[list[Span]]:
    """Two actors over images that Ray holds; the spans of each."""
    from ray import data

    shape = shape_of(model)

    def made(batch: dict[str, Any]) -> dict[str, Any]:
        return {"image": np.random.default_rng(0).standard_normal((len(batch["id"]), *shape), np.float32)}

    there = (
        data.range(images, override_num_blocks=images // 128).map_batches(made, batch_size=128).materialize()
    )
    READY.set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = there.map_batches(
            Timed,
            fn_constructor_args=(model,),
            batch_size=BATCH,
            num_cpus=1,
            compute=data.ActorPoolStrategy(size=2),
            max_restarts=3,
            max_task_retries=3,
        ).take_all()
    found: dict[int, list[Span]] = {}
    for row in sorted(answers, key=lambda row: float(row["began"])):
        span = float(row["began"]), float(row["ended"]), int(row["count"])
        found.setdefault(int(row["pid"]), []).append(span)
    return list(found.values())


READY = threading.Event()


def data_(given: argparse.Namespace) -> dict[str, Any]:
    """Both run at once, and one of them is stopped: in turn, some seconds each."""
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2)
    ray.data.DataContext.get_current().enable_progress_bars = False
    phases: dict[str, list[tuple[float, float]]] = {"actors": [], "bare": []}
    with ThreadPoolExecutor(1) as beside:
        coming = beside.submit(actors, given.model, given.images)
        READY.wait()
        words = [sys.executable, "-m", "benchmarks.harness.engines", "bare", given.model, "--core"]
        alone = [subprocess.Popen([*words, str(core)], stdout=subprocess.PIPE, text=True) for core in (0, 1)]
        time.sleep(30)  # all have begun
        while not coming.done():
            for name, stopped in (("actors", [p.pid for p in alone]), ("bare", _actors())):
                for pid in stopped:
                    os.kill(pid, signal.SIGSTOP)
                began = time.time()
                while time.time() < began + PHASE_S and not coming.done():
                    time.sleep(0.05)
                phases[name].append((began, time.time()))
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)
    spans = coming.result()
    ray.shutdown()
    for process in alone:
        process.terminate()
    others = [[_span(line) for line in process.communicate()[0].splitlines()] for process in alone]
    first, last = phases["actors"][0][0], phases["actors"][-1][1]
    within = [[s for s in own if s[0] >= first and s[1] <= last] for own in (*spans, *others)]
    rates = [pace(own, phases["actors" if i < 2 else "bare"]) for i, own in enumerate(within)]
    ratio = sum(rates[:2]) / sum(rates[2:])
    return {"what": "ray data", "ratio": ratio, "actors": sum(rates[:2]), "bare": sum(rates[2:])}


PHASE_S = 4.0
"""Seconds that each runs alone."""


def serve(given: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, {0})
    words = ["from aerogel.cli.main import app; app()", "serve", given.model, "--port", str(given.port)]
    server = subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert "ready" in server.stdout.readline()
    raw = io.BytesIO()
    np.save(raw, np.random.default_rng(0).standard_normal((1, *shape_of(given.model)), np.float32))
    headers = {"content-type": "application/x-npy", "accept": "application/x-npy"}
    os.sched_setaffinity(0, {1})
    served = []
    for _ in range(given.requests):
        began = time.perf_counter()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{given.port}/", data=raw.getvalue(), headers=headers
        )
        with urllib.request.urlopen(asked) as answer:
            answer.read()
        served.append(1e3 * (time.perf_counter() - began))
    server.terminate()
    server.wait()
    os.sched_setaffinity(0, {0})
    torch.set_num_threads(1)
    fast, array = aerogel.load(given.model), np.load(io.BytesIO(raw.getvalue()))
    alone = []
    for _ in range(given.requests):
        began = time.perf_counter()
        fast.run(None, {fast.input_names[0]: array})
        alone.append(1e3 * (time.perf_counter() - began))
    return {"what": "ray serve", "served_ms": _quantiles(served), "bare_ms": _quantiles(alone)}


def _quantiles(times: list[float]) -> dict[str, float]:
    return {"p50": median(times), "p99": float(np.percentile(times, 99))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["data", "serve", "bare"])
    parser.add_argument("model")
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--append", type=Path)
    given = parser.parse_args()
    if given.what == "bare":
        bare(given.model, given.core)
        return
    result = {"data": data_, "serve": serve}[given.what](given)
    result |= {"model": Path(given.model).stem, "date": date.today().isoformat(), "target": str(host())}
    print(json.dumps(result))
    if given.append:
        with given.append.open("a") as held:
            held.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
