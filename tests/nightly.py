"""A night's run in parts: which tests belong to a part, and the line that is written when it ends.

    pytest --nightly --part 3/4        the third of four parts, at full counts

Each part appends one line to benchmarks/results/reliability.jsonl, of which
`python -m benchmarks.harness.reliability` makes docs/reliability.md.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tests import counts

LINES = counts.ROOT / "benchmarks" / "results" / "reliability.jsonl"
SECONDS = {
    "test_suite.py": 20.0, "test_faults.py": 5.0, "test_gpu.py": 20.0, "test_triton.py": 60.0, "test_docs.py":
    20.0, "test_stress.py": 400.0, "test_fuzz.py": 2400.0, "test_file_mutants.py": 600.0,
    "test_distributed.py": 60.0,
}  # fmt: skip
"""What a test of a file takes at full counts, on one slow core; of the others most take less than USUAL."""
USUAL = 3.0


def fraction(text: str) -> tuple[int, int]:
    """`3/12`: the third of twelve."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    part, parts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= part <= parts:
        raise ValueError(f"a part is k/n with 1 <= k <= n, not {text}")
    return part, parts


def dealt(names: Sequence[str], parts: int) -> dict[str, int]:
    """The part (from 1) of each test: the longest first, always to the part that has least to do."""
    load, of = [0.0] * parts, {}
    for name in sorted(names, key=lambda n: (-_seconds(n), n)):
        least = load.index(min(load))
        load[least] += _seconds(name)
        of[name] = least + 1
    return of


def _seconds(name: str) -> float:
    return SECONDS.get(name.partition("::")[0].rpartition("/")[2], USUAL)


class Tally:
    """What was really run, by name: how many passed and how many stand in tests that failed."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.counts: dict[str, dict[str, int]] = {}
        self.tests = {"passed": 0, "failed": 0, "skipped": 0}

    def take(self, outcome: str, when: str, properties: Sequence[tuple[str, Any]]) -> None:
        """A test's report. What fails before or after the test itself is a failure too."""
        if when != "call" and outcome == "passed":
            return
        self.tests[outcome] += 1
        for key, value in properties if outcome != "skipped" else ():
            if key == "ran":
                name, many = value
                self.counts.setdefault(name, {"passed": 0, "failed": 0})[outcome] += many

    def line(self, commit: str, part: str) -> dict[str, Any]:
        return {
            "kind": "nightly", "commit": commit, "changed": _changed(), "date": date.today().isoformat(),
            "machine": machine(), "seed": counts.seed(), "part": part, "tests": self.tests, "counts":
            dict(sorted(self.counts.items())), "seconds": round(time.monotonic() - self.started),
        }  # fmt: skip


def append(line: dict[str, Any], path: Path = LINES) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def machine() -> dict[str, Any]:
    """The CPU's name, its cores, and the ISA levels that the suite runs on it."""
    import os

    from aerogel.ir.target import here_levels

    info = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*:\s*(.+)", info.read_text() if info.exists() else "")
    return {
        "cpu": name[1] if name else platform.machine(),
        "cores": os.cpu_count(),
        "isas": list(here_levels()),
    }


def _changed() -> bool:
    """Whether sources or tests are not those of the commit."""
    done = subprocess.run(
        ["git", "status", "--porcelain", "src", "tests"], cwd=counts.ROOT, capture_output=True, text=True
    )
    return done.returncode != 0 or bool(done.stdout.strip())
