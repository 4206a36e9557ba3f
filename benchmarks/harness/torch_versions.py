r"""Every supported version of torch: does aerogel capture, compile and answer?

    python -m benchmarks.harness.torch_versions installed
    python -m benchmarks.harness.torch_versions each 2.6.0 2.8.0 2.15.0 --folder SCRATCH

`installed` runs every network of torch_networks.py with the torch of this Python, and appends a line per
network to benchmarks/results/torch_versions.jsonl. `each` makes an environment per version below SCRATCH
(torch_environment.py), runs `installed` in it, and deletes it. Of several lines about one network and version
the last counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "torch_versions.jsonl"
_APART = ("bfloat16", "int8")
"""Networks whose error is that of fewer bits."""


def run_installed(results: Path, names: list[str]) -> bool:
    """Run the networks with the installed torch, append their rows, and return whether all passed."""
    import torch

    from aerogel.ir import host
    from benchmarks.harness.torch_networks import NETWORKS, run_check

    passed = True
    print(f"torch {torch.__version__}", flush=True)
    for name in names or NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            row = {"torch": str(torch.__version__), **run_check(name, Path(folder))}
        row |= {"python": platform.python_version(), "isa": host().isa, "date": str(date.today())}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        passed &= row["passed"]
        print(f"  {name}: {row['error'] if row['passed'] else row['reason']}", flush=True)
    return passed


def run_each(versions: list[str], folder: Path, results: Path, names: list[str], keep: bool) -> list[str]:
    """Run the networks with each version in an environment of its own; return the versions that failed."""
    from benchmarks.harness.torch_environment import prepare

    failed = []
    for version in versions:
        python = prepare(version, folder)
        command: list[str | Path] = [python, "-m", "benchmarks.harness.torch_versions", "installed"]
        command += ["--json", results, "--networks", ",".join(names)]
        environment = {**os.environ, "AEROGEL_CACHE": str(folder / f"cache-{version}")}
        environment.pop("PYTHONPATH", None)
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            failed.append(version)
        if not keep:
            shutil.rmtree(folder / version)
    return failed


def latest_rows(rows: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, dict[str, Any]]]:
    """Return the last row of each minor version and network, oldest version first."""
    latest: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        major, minor = row["torch"].split(".")[:2]
        latest.setdefault((int(major), int(minor)), {})[row["network"]] = row
    return dict(sorted(latest.items()))


def table(rows: list[dict[str, Any]]) -> str:
    """Write the table of docs/about/platforms.md: a line per minor version."""
    lines = ["| torch | tested release | networks that pass | largest error in float32 | date |"]
    lines.append("|---|---|---|---|---|")
    latest = latest_rows(rows)
    for (major, minor), by_network in latest.items():
        several = list(by_network.values())
        failing = [row["network"] for row in several if not row["passed"]]
        passing = f"{len(several) - len(failing)} of {len(several)}"
        passing += f" (not {', '.join(failing)})" if failing else ""
        error = max(row.get("error", 0.0) for row in several if row["network"] not in _APART)
        releases = sorted({row["torch"] for row in several})
        day = max(row["date"] for row in several)
        lines.append(f"| {major}.{minor} | {', '.join(releases)} | {passing} | {error:.0e} | {day} |")
    names = dict.fromkeys(name for by_network in latest.values() for name in by_network)
    return "\n".join([*lines, "", f"The networks and entry points: {', '.join(names)}."])


def main() -> None:
    """Run the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=("installed", "each"))
    parser.add_argument("versions", nargs="*", help="each: releases of torch")
    parser.add_argument("--folder", type=Path, help="each: where environments are made")
    parser.add_argument("--keep", action="store_true", help="each: keep the environments")
    parser.add_argument("--networks", default="", help="only these, separated by commas")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the result file")
    options = parser.parse_args()
    names = [name for name in options.networks.split(",") if name]
    results = options.json.resolve()
    if options.what == "installed":
        sys.exit(0 if run_installed(results, names) else 1)
    if options.folder is None or not options.versions:
        parser.error("each needs versions and --folder")
    failed = run_each(options.versions, options.folder.resolve(), results, names, options.keep)
    if failed:
        sys.exit(f"failed with torch {', '.join(failed)}")


if __name__ == "__main__":
    main()
