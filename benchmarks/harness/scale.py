r"""What a process costs that there are a thousand of: memory, batches of every size, start.

    python -m benchmarks.harness.scale memory model.aero --processes 1,2,4,8 --append scale.jsonl
    python -m benchmarks.harness.scale batches --append scale.jsonl
    python -m benchmarks.harness.scale start model.aero --append scale.jsonl
    python -m benchmarks.harness.scale calls old.aero new.aero --old ../old/src --append scale.jsonl

`memory` is PSS, by which pages that processes share count in parts, and that of as many that only imported
aerogel. `batches` makes 2,000 calls of 64 sizes in random order. `start` is CPU seconds after `import torch`,
with the object cache as `aerogel warm` left it. `calls` compares two versions of aerogel, interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

_CHILD = """
    import json, sys, time
    import torch
    torch.set_num_threads(1)
    def rollup():
        said = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
        return {name: int(said[name].split()[0]) * 1024 for name in ("Pss", "Anonymous")}
    began = time.process_time()
    import aerogel
    found = {}
    if sys.argv[1]:
        fast = aerogel.load(sys.argv[1])
        found["load_s"] = time.process_time() - began
        x, _ = fast.captured.filled()
        fast(*x)
        found["first_s"] = time.process_time() - began
        found["workspace"] = fast.workspace_bytes()
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "look\\n":
            print(json.dumps(found | rollup()), flush=True)
        elif line == "call\\n":
            before = time.perf_counter()
            for _ in range(5):
                fast(*x)
            print(time.perf_counter() - before, flush=True)
"""


class Process:
    """A process that loaded a file, or nothing, and answers when it is asked."""

    def __init__(self, path: str, source: str = "") -> None:
        env = {**os.environ, "PYTHONPATH": source} if source else dict(os.environ)
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_CHILD), path]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
        self._running = subprocess.Popen(command, **pipes)
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._running.stdout is not None
        return str(self._running.stdout.readline()).strip()

    def ask(self, what: str) -> Any:
        assert self._running.stdin is not None
        self._running.stdin.write(f"{what}\n")
        self._running.stdin.flush()
        return json.loads(self._read())

    def end(self) -> None:
        self._running.kill()
        self._running.wait()


def memory(path: str, processes: list[int], source: str = "") -> dict[str, Any]:
    """Bytes of processes that hold one file, over as many that only imported aerogel."""
    found = {}
    for count in processes:
        pss = {}
        for held in ("", path):
            running = [Process(held, source) for _ in range(count)]
            seen = [one.ask("look") for one in running]
            pss[held] = sum(one["Pss"] for one in seen)
            for one in running:
                one.end()
        found[count] = {"pss": pss[path], "imported": pss[""], "workspace": seen[0]["workspace"]}
    return {"file": Path(path).stat().st_size, "processes": found}


def calls_of_every_size() -> dict[str, Any]:
    """CPU time an image over 2,000 calls of 64 batch sizes, programs made, and memory after each quarter; by
    rule, so that the batch of eight is no batch of eight times one."""
    import torch

    import aerogel
    from aerogel.backends.cpu.runner import CpuRunner, batches
    from aerogel.zoo.models import make, prune

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fast = aerogel.compile(prune(make("squeezenet"), 0.9), torch.randn(8, 3, 96, 96), tune="off")
    assert fast.network is not None
    runner = fast.ready()
    assert isinstance(runner, CpuRunner)
    made, build = [0], runner._program

    def counted(*given: Any) -> Any:
        made[0] += 1
        return build(*given)

    vars(runner)["_program"] = counted
    rng, times, resident = np.random.default_rng(0), [], []
    for i in range(2000):
        if i % 500 == 0:
            resident.append(_resident())
        x = torch.randn(int(rng.integers(1, 65)), 3, 96, 96)
        before = time.process_time()
        fast(x)
        times.append((time.process_time() - before) / len(x))
    resident.append(_resident())
    warm = np.array(times[20:]) * 1e3
    middle, slow = np.quantile(warm, [0.5, 0.99])
    return {
        "image_by_image": fast.plan.image_by_image, "points": len(batches(fast.network, fast.plan)),
        "binds": made[0], "calls": 2000, "ms_p50": float(middle), "ms_p99": float(slow),
        "resident": resident,
    }  # fmt: skip


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def start(path: str) -> dict[str, Any]:
    """CPU seconds from `import torch` to a loaded model and to its first answer, the least of three."""
    each = []
    for _ in range(3):
        one = Process(path)
        each.append(one.ask("look"))
        one.end()
    return {name: min(e[name] for e in each) for name in ("load_s", "first_s")}


def calls(old: str, new: str, old_source: str, rounds: int = 60) -> dict[str, Any]:
    """Old time / new time of a call, pair by pair, in two processes that wait for each other."""
    before, after = Process(old, old_source), Process(new)
    ratios = []
    for i in range(rounds):
        pair = [(one, one.ask("call")) for one in ((before, after) if i % 2 else (after, before))]
        ratios.append(dict(pair)[before] / dict(pair)[after])
    for one in (before, after):
        one.end()
    return {"ratio": float(np.median(ratios)), "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("memory", "batches", "start", "calls"))
    parser.add_argument("files", nargs="*")
    parser.add_argument("--processes", default="1,2,4,8")
    parser.add_argument("--old", default="", help="the source folder of another version")
    parser.add_argument("--append", type=Path)
    given = parser.parse_args()
    if given.what == "memory":
        result = memory(given.files[0], [int(n) for n in given.processes.split(",")], given.old)
    elif given.what == "batches":
        result = calls_of_every_size()
    elif given.what == "start":
        result = start(given.files[0])
    else:
        result = calls(given.files[0], given.files[1], given.old)
    said = {"what": given.what, "model": [Path(f).stem for f in given.files], "old": bool(given.old)}
    from aerogel.ir import host
    from benchmarks.harness.promises import commit

    where = {"target": str(host()), "date": date.today().isoformat(), "commit": commit()}
    line = json.dumps({**said, **result, **where, "torch": version("torch")})
    print(line)
    if given.append:
        with given.append.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
