"""How often each promise is tried, and with which seeds.

`--nightly` takes the full counts, a plain run (CI) a tenth of them at most, `--quick` a fiftieth at most.

CI and `--quick` take the seed in `seeds.json`, so that every commit runs the same tests on the same cases and
its verdict is about the change. That file is changed deliberately, in a commit of its own. A night explores:
its seed follows the commit's hash, so that all parts of a night agree and the next commit meets other cases.
`--seed` overrides both and repeats a run.

What CI leaves out is the same for every commit too: of a test with `@pytest.mark.turns(n)` it runs one case
in n, the first among them, so that every such test runs; of long lists it takes `some`. A long test without
cases is either run always or skipped by day (`BY_NIGHT`). A night runs everything.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
FIXED: dict[str, Any] = json.loads((Path(__file__).parent / "seeds.json").read_text())
"""What CI and `--quick` take: `seed`, the names of the `faults` that CI tries, and the seeds of the fuzzer's
`networks`, each with what must come of it."""
APART = 1_000_003
"""Between the first cases of two seeds. A prime, so that the walk over the pairwise cover begins elsewhere
too."""

FULL = {
    "exact": 20_000,
    "real": 20_000,
    "edges": 3_000,
    "special": 2_000,
    "half": 2_000,
    "half-edges": 2_000,
    "half-special": 1_000,
    "idle": 2_000,
    "idle-special": 1_000,
    "bytes": 20_000,
    "bytes-edges": 3_000,
    "depthwise": 20_000,
    "depthwise-edges": 3_000,
    "bytemaps": 6_000,
    "threads": 1_000,
    "workspaces": 500,
    "fork": 200,
    "whole networks": 24,
    "file mutants": 300_000,
    "hostile ONNX": 60,
    "kill -9": 2_000,
    "disk full": 40,
    "16 processes": 7_680,
    "32 threads, seconds": 60,
    "faults": 200,
    "fuzz networks": 3_000,
    "structural mutants": 20_000,
    "mapping": 50,
    "opencl": 600,
    "triton": 600,
    "neon": 36,
    "copies": 1_200,
    "stress, seconds": 600,
    "soak calls": 20_000,
    "ray images": 20_000,
    "batch images": 5_000,
    "malformed requests": 500,
    "triton requests": 640,
    "soak compiles": 200,
}
"""The counts of a whole run. Those of the suite's kinds are for each method, on every ISA; opencl, triton and
neon are for each method, all kinds together."""
CI = {
    "hostile ONNX": 60,
    "exact": 200,
    "real": 150,
    "edges": 175,
    "half": 50,
    "half-edges": 50,
    "bytes": 60,
    "bytes-edges": 60,
    "depthwise": 120,
    "depthwise-edges": 80,
    "threads": 60,
    "opencl": 40,
    "fuzz networks": 32,
    "structural mutants": 500,
    "stress, seconds": 12,
    "faults": 12,
}
CI |= {"soak calls": 300, "soak compiles": 8}
"""Where a plain run takes something else than a tenth; `--quick` takes no more."""
LEAST = {"kill -9": 100}
"""What even --quick takes: a writer that tears files is not seen with fewer."""
SCALES = {"nightly": 1.0, "ci": 0.1, "quick": 0.02}

BY_NIGHT = "minutes: by night only"
"""The reason for which `by_day` skips a test."""

_chosen: tuple[str, int] = ("ci", FIXED["seed"])


def choose(mode: str, seed: int) -> None:
    """For the whole process; conftest does it before anything is collected."""
    assert mode in SCALES, mode
    assert seed >= 0, "a seed is a whole number, not below zero"
    global _chosen
    _chosen = mode, seed


def mode() -> str:
    return _chosen[0]


def seed() -> int:
    return _chosen[1]


def by_day() -> bool:
    """Return whether a test that takes minutes is skipped: `--quick` runs what it is asked for."""
    return mode() == "ci"


def count(name: str, share: float = 1.0) -> int:
    """How many of them this run takes, at least one; `share` of them where they are dealt out to several
    tests."""
    usual = FULL[name] * SCALES[mode()]
    many = usual
    if mode() != "nightly" and name in CI:
        many = CI[name] if mode() == "ci" else min(usual, CI[name])
    return max(LEAST.get(name, 1), round(many * share))


def first() -> int:
    """The first case's seed; those that follow are numbered on."""
    return seed() * APART


def seeds(name: str, share: float = 1.0, skip: int = 0) -> range:
    """The seeds of this run's cases. `skip` gives one of several tests of the same name other cases than its
    neighbours."""
    start = first() + skip
    return range(start, start + count(name, share))


def some(every: Sequence[T], many: int | None = None) -> list[T]:
    """So many of a list (a run's share of it, at least one), evenly spread and others for another seed."""
    wanted = max(1, round(len(every) * SCALES[mode()]) if many is None else many)
    step = -(-len(every) // wanted)
    return list(every[seed() % step :: step]) or list(every[:1])


def turn(case: int, of: int) -> bool:
    """Return whether this run takes a case of a long test; only CI leaves any out.

    CI runs one of `of` neighbours and begins with the first. The place among them moves on from each group to
    the next, so that cases of two parameters do not all have the same value of one.
    """
    return mode() != "ci" or (case + case // of) % of == 0


def commit() -> str:
    """The hash of what is checked out; nothing where git does not know (an unpacked archive)."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def default_seed(mode: str, commit: str) -> int:
    """Return the seed of a run without `--seed`: a night's is the first seven digits of the commit's hash."""
    return int(commit[:7], 16) if mode == "nightly" and commit else int(FIXED["seed"])
