"""Make docs/reliability.md from benchmarks/results/reliability.jsonl:

    python -m benchmarks.harness.reliability [--check]

Each line there was written by one part of a night's run (`pytest --nightly --part k/n`), or by another kind
of run, named in its "kind". The page shows what was run, with commit, date and machine, and how to run it
again. Of each check it shows the newest run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from aerogel.methods import METHODS, method
from tests.suite.sweep import BYTES, ON_GPUS, ONE_ISA

ROOT = Path(__file__).parents[2]
LINES = ROOT / "benchmarks" / "results" / "reliability.jsonl"
PAGE = ROOT / "docs" / "reliability.md"
PLOT = ROOT / "docs" / "soak.png"
LIBRARY, TRITON = ("dense",), ("tilewise", "blockgemm")
FLOATS = tuple(name for name in METHODS if name not in (*BYTES, *ON_GPUS))
NATIVE = tuple(name for name in FLOATS if name not in LIBRARY)

WHAT = {
    "exact": "random convolutions on small integers, guard pages around every buffer: bit-equal",
    "real": "random convolutions on wide-range numbers: inside the bound around float64",
    "edges": "every pair of awkward properties: both of the above",
    "special": "NaN, Inf, -0, subnormals, the largest floats",
    "half": "fp16 and bf16",
    "half-edges": "fp16 and bf16, every pair of awkward properties",
    "half-special": "fp16 and bf16 with NaN, Inf, the largest numbers",
    "idle": "feature maps with 0 to 100 % zeros",
    "idle-special": "the same with NaN and Inf",
    "bytes": "int8 convolutions in every form this machine has (with and without an instruction for four "
    "products), guard pages, saturating inputs, all zero points: bit-equal to the integer reference",
    "bytes-edges": "every pair of awkward properties in int8: bit-equal",
    "depthwise": "the same with a filter of its own for each channel",
    "depthwise-edges": "every pair of awkward properties of those: bit-equal",
    "bytemaps": "averages, sums and tables of maps of bytes: bit-equal",
    "threads": "1, 2, 3 and 8 threads: bit-equal",
    "workspaces": "the arena filled with rubbish before each call, sizes alternating: bit-equal",
    "fork": "children forked after use: one thread, the right answer",
    "whole networks": "networks x sparsities against float64",
    "file mutants": "model files changed at random, also with the checksum made right: a typed error or a "
    "valid result",
    "hostile ONNX": "files made to do harm, under limits of memory and time",
    "kill -9": "writers of the cache killed: no torn read",
    "disk full": "places that are full, read-only or forbidden: the right answer, one warning",
    "16 processes": "records written and read under the same keys by 16 processes",
    "32 threads, seconds": "32 threads on one module, mixed shapes: bit-equal",
    "faults": "faults seeded by hand: each caught",
    "fuzz networks": "random whole networks at changed sizes against float64",
    "structural mutants": "model files changed in their structure, under limits of memory and time",
    "mapping": "processes with large mappings and holes",
    "opencl": "the suite's cases on an OpenCL device",
    "triton": "the suite's cases in Triton's interpreter",
    "neon": "the suite's cases on AArch64, emulated",
    "stress, seconds": "32 threads, a compiler and forks at once, sizes on both sides of branches: no wrong "
    "answer, no hang",
    "soak calls": "calls at 640 sizes in one process: memory, files and linked code do not grow",
    "soak compiles": "modules compiled and dropped in one process: the same",
}


def each(name: str) -> tuple[str, ...]:
    """The methods for each of which a count holds; none where it is for all."""
    if name in ("idle", "idle-special"):
        return tuple(m for m in NATIVE if method(m).SKIPS_INPUT)
    if name in ("opencl", "triton"):
        return tuple(m for m in FLOATS if m not in ONE_ISA and (m in TRITON) == (name == "triton"))
    if name in ("half", "half-edges", "half-special", "neon"):
        return tuple(m for m in NATIVE if m not in ONE_ISA)
    if name == "exact":
        return FLOATS
    if name in ("bytes", "bytes-edges", "depthwise", "depthwise-edges"):
        return ("quads" if name.startswith("bytes") else "depthwise",)
    return NATIVE if name in ("real", "edges", "special", "threads") else ()


Line = dict[str, Any]
RERUN = """## Run it yourself

From a checkout, after `pip install -e '.[dev]'`. The tests open no connection to other machines.

```
pytest --quick -n 2                                     # small counts: two minutes
pytest -n 2                                             # what CI runs on every change: under half an hour
pytest --nightly --part 1/4 -n 2                        # full counts, one part of four: under 45 minutes each
python -m tests.fuzz.stress --minutes 10 --record       # threads, a compiler and forks at once
python -m tests.fuzz.soak --record                      # a long life of one process
python -m benchmarks.harness.reliability                # this page, from what the runs wrote
```

The first line of a run is its seed; a test that fails prints the command that repeats it.
"""


class Run(NamedTuple):
    """Lines of one run: the parts of a night at one commit, or a single line of another kind."""

    lines: tuple[Line, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(self.lines[-1].get(name) for name in ("kind", "commit", "seed", "date"))

    def counts(self) -> dict[str, dict[str, int]]:
        """Return what passed and what stands in tests that failed, by the name of the check."""
        total: dict[str, dict[str, int]] = {}
        for line in self.lines:
            for name, one in (line["counts"] if line["kind"] == "nightly" else _count_long(line)).items():
                sums = total.setdefault(name, {"passed": 0, "failed": 0})
                sums["passed"] += one["passed"]
                sums["failed"] += one["failed"]
        return total


def group_runs(lines: list[Line]) -> list[Run]:
    """Return the runs, the newest first. A part that was run twice counts once, as its later line says."""
    nights: dict[Any, dict[str, Line]] = {}
    runs: list[tuple[int, Run]] = []
    for place, line in enumerate(lines):
        if line["kind"] != "nightly":
            runs.append((place, Run((line,))))
            continue
        same = (line["commit"], line["changed"], line["seed"], line["part"].split("/")[1])
        nights.setdefault(same, {})[line["part"]] = line
    runs += [(max(map(lines.index, parts.values())), Run(tuple(parts.values()))) for parts in nights.values()]
    return [run for _, run in sorted(runs, key=lambda pair: -pair[0])]


def _count_long(line: Line) -> dict[str, dict[str, int]]:
    """Return what a long run counts, in the form of a night's part."""
    if line["kind"] == "stress":
        sizes = {"stress, seconds": round(60 * line["minutes"])}
    elif line["kind"] == "soak" and "calls" in line:
        sizes = {"soak calls": line["calls"], "soak compiles": line["compiles"]}
    else:
        return {}
    wrong = sum(line.get(what, 0) for what in ("wrong", "errors", "hangs")) or len(line.get("grew", ()))
    return {
        name: {"passed": 0 if wrong else size, "failed": size if wrong else 0} for name, size in sizes.items()
    }


def done(counts: dict[str, dict[str, int]], name: str) -> tuple[int, int]:
    """Return how many passed (of the method that has fewest) and how many stand in tests that failed."""
    passed, failed = dict.fromkeys(each(name) or ("",), 0), 0
    for key, sums in counts.items():
        what, _, method = key.partition(": ")
        if what == name:
            passed[method] = passed.get(method, 0) + sums["passed"]
            failed += sums["failed"]
    return min(passed.values()), failed


def _check_row(runs: list[Run], name: str) -> tuple[str, Run] | None:
    """Return the line of a check and the newest run that has it; None where no run has."""
    for run in runs:
        passed, failed = done(run.counts(), name)
        if passed or failed:
            of = f" for each of {len(each(name))} methods" if len(each(name)) > 1 else ""
            broken = f", and {failed:,} in tests that failed" if failed else ""
            line = run.lines[-1]
            when = f"{line['date']}, `{line['commit'][:12]}`"
            return f"| {name} | {WHAT[name]} | {passed:,}{of}{broken} | {when} |", run
    return None


def page(lines: list[Line], plot: bool) -> str:
    """Return the text of the page."""
    runs = group_runs(lines)
    rows = [row for name in WHAT if (row := _check_row(runs, name))]
    text = [
        "# What has been tested",
        "",
        "CI runs the tests on every change, with smaller counts and without the longest ones, and nothing "
        "lands that fails. This page shows the longer runs: of each check the newest, as the run itself "
        "wrote it into `benchmarks/results/reliability.jsonl`, with its commit and date.",
        "",
    ]
    if rows:
        text += ["| check | what is run, and how it passes | passed | when |", "|---|---|---|---|"]
        text += [*(row for row, _ in rows), ""]
        text += ["## The runs", "", "| run | when | length | result |", "|---|---|---|---|"]
        newest = dict.fromkeys(run.key for _, run in rows)
        shown = [run for run in runs if run.key in newest or not run.counts()]
        text += [*map(_run_row, shown), "", *_machines(shown), ""]
    if plot:
        text += ["Memory and time of the soak:", "", "![Memory and time over a long run](soak.png)", ""]
    return "\n".join([*text, RERUN])


def _run_row(run: Run) -> str:
    """Return a run's line: how long it was and what came of it."""
    line = run.lines[-1]
    when = f"{line['date']}, `{line['commit'][:12]}`{' with changes' if line.get('changed') else ''}"
    if line["kind"] == "nightly":
        tests = {k: sum(part["tests"][k] for part in run.lines) for k in ("passed", "failed", "skipped")}
        result = ", ".join(f"{many:,} {what}" for what, many in tests.items())
        parts = int(line["part"].split("/")[1])
        name = f"full counts, seed {line['seed']}"
        name += f", {len(run.lines)} of {parts} parts" if parts > 1 else ""
        return (
            f"| {name} | {when} | {sum(p['seconds'] for p in run.lines) / 60:.0f} minutes | tests: {result} |"
        )
    shown = {
        k: v for k, v in line.items() if k not in ("kind", "commit", "date", "machine", "seed", "minutes")
    }
    length = f"{line['minutes']:.0f} minutes" if "minutes" in line else ""
    result = ", ".join(
        LABELS.get(k, f"{{}} {k.replace('_', ' ')}").format(_cell(v)) for k, v in shown.items()
    )
    return f"| {line['kind']}, seed {line.get('seed', '')} | {when} | {length} | {result} |"


LABELS = {"mb_early": "memory {} MB early", "mb_end": "{} MB at the end", "grew": "what grew: {}"}
"""How the page writes the values of a line that are not plain counts."""


def _machines(runs: list[Run]) -> list[str]:
    """Return a sentence with the machines of these runs."""
    machines = [line["machine"] for run in runs for line in run.lines if "machine" in line]
    names = [f"{m['cpu']}, {m['cores']} cores, kernels for {', '.join(m['isas'])}" for m in machines]
    distinct = list(dict.fromkeys(names))
    return [f"Machine{'s' if len(distinct) > 1 else ''}: {'; '.join(distinct)}."] if distinct else []


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_cell(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) or "nothing"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def written() -> str:
    lines = [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []
    return page(lines, PLOT.exists())


if __name__ == "__main__":
    if "--check" in sys.argv and written() != PAGE.read_text():
        sys.exit(f"{PAGE.name} does not show its lines; run python -m benchmarks.harness.reliability")
    PAGE.write_text(written())
