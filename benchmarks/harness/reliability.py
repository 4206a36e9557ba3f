"""Make docs/reliability.md from benchmarks/results/reliability.jsonl:

    python -m benchmarks.harness.reliability [--check]

Each line there was written by one part of a night's run (`pytest --nightly --part k/n`), or by another kind
of run, named in its "kind". The page says what has been run at full counts, and what has not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from aerogel.methods import METHODS, method
from tests.counts import FULL
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


def newest(lines: list[dict[str, Any]]) -> tuple[dict[int, dict[str, Any]], int]:
    """Of the run that wrote the last line, the newest line of each part; and how many parts it has."""
    nights = [line for line in lines if line["kind"] == "nightly"]
    if not nights:
        return {}, 0
    world = _world(nights[-1])
    return {int(line["part"].split("/")[0]): line for line in nights if _world(line) == world}, world[-1]


def _world(line: dict[str, Any]) -> tuple[str, bool, int, int]:
    return line["commit"], line["changed"], line["seed"], int(line["part"].split("/")[1])


def done(parts: dict[int, dict[str, Any]], name: str) -> tuple[int, int]:
    """How many passed (of the method that has fewest) and how many stand in tests that failed."""
    passed, failed = dict.fromkeys(each(name) or ("",), 0), 0
    for line in parts.values():
        for key, own in line["counts"].items():
            what, _, method = key.partition(": ")
            if what == name:
                passed[method] = passed.get(method, 0) + own["passed"]
                failed += own["failed"]
    return min(passed.values()), failed


def _long(lines: list[dict[str, Any]], commits: set[str]) -> dict[str, dict[str, int]]:
    """What the long runs of these commits count, as a night's part counts it."""
    found: dict[str, dict[str, int]] = {}
    for line in lines:
        if line.get("commit") not in commits or line["kind"] not in ("stress", "soak"):
            continue
        wrong = sum(line.get(what, 0) for what in ("wrong", "errors", "hangs")) or len(line.get("grew", ()))
        own = {"soak calls": line["calls"], "soak compiles": line["compiles"]}
        own = {"stress, seconds": round(60 * line["minutes"])} if line["kind"] == "stress" else own
        found |= {
            name: {"passed": 0 if wrong else many, "failed": wrong and many} for name, many in own.items()
        }
    return found


def row(parts: dict[int, dict[str, Any]], name: str) -> tuple[str, str]:
    """A line of the table, and what is missing, in words."""
    passed, failed = done(parts, name)
    of = f" for each of {len(each(name))} methods" if len(each(name)) > 1 else ""
    said = "all" if passed >= FULL[name] and not failed else f"{passed:,}"
    said += f", {failed:,} in tests that failed" if failed else ""
    missing = max(0, FULL[name] - passed)
    return (
        f"| {name} | {WHAT[name]} | {FULL[name]:,}{of} | {said} |",
        f"{name}: {missing:,}{of}" if missing else "",
    )


def page(lines: list[dict[str, Any]], plot: bool) -> str:
    parts, of = newest(lines)
    text = [
        "# What has been tested, and how often",
        "",
        "Made by `python -m benchmarks.harness.reliability` from what the runs wrote down.",
        "",
    ]
    text += [_said(parts, of), ""]
    counted = {**parts, 0: {"counts": _long(lines, {line["commit"] for line in parts.values()})}}
    rows = {name: row(counted, name) for name in WHAT}
    text += [
        "| name | what, and how it passes | full count | passed at this commit |",
        "|---|---|---|---|",
        *(said for name, (said, _) in rows.items() if any(done(counted, name))),
        "",
        "Counts of kernels hold on every ISA of the machine. CI takes a tenth of all at most, with the "
        "same seeds for every commit; what stands below has been run by CI alone at this commit.",
        "",
    ]
    gone = [f"part {k} of {of}" for k in range(1, of + 1) if k not in parts]
    missing = [f"{why} ({WHAT[name]})" for name, (_, why) in rows.items() if why]
    text += ["## What is missing", "", *(f"- {one}" for one in (*gone, *missing) or ("nothing",)), ""]
    for kind in dict.fromkeys(line["kind"] for line in lines if line["kind"] != "nightly"):
        text += [
            f"## {kind.capitalize()}",
            "",
            *_others([line for line in lines if line["kind"] == kind]),
            "",
        ]
    if plot:
        text += ["## Memory and time over a long run", "", "![a long run](soak.png)", ""]
    return "\n".join(text)


def _said(parts: dict[int, dict[str, Any]], of: int) -> str:
    if not parts:
        return "No night has been run yet."
    last = list(parts.values())[-1]
    machines = sorted(
        {
            f"{p['machine']['cpu']}, {p['machine']['cores']} cores, {' '.join(p['machine']['isas'])}"
            for p in parts.values()
        }
    )
    dates = sorted({p["date"] for p in parts.values()})
    changed = " with changes" if last["changed"] else ""
    seconds = sum(p["seconds"] for p in parts.values())
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    tests = {k: sum(p["tests"][k] for p in parts.values()) for k in ("passed", "failed", "skipped")}
    ran = ", ".join(f"{many:,} {what}" for what, many in tests.items())
    return (
        f"Commit `{last['commit'][:12]}`{changed}, seed {last['seed']}, {when}, on {'; '.join(machines)}: "
        f"{len(parts)} of {of} parts, {seconds / 60:.0f} minutes, tests: {ran}."
    )


def _others(lines: list[dict[str, Any]]) -> list[str]:
    """Lines of other kinds as they are: a column for each of their values."""
    heads = [head for head in dict.fromkeys(key for line in lines for key in line) if head != "kind"]
    cells = [" | ".join(_cell(line.get(head, "")) for head in heads) for line in lines]
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {c} |" for c in cells)]


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_cell(v)}" for k, v in value.items())
    return ", ".join(map(_cell, value)) if isinstance(value, list) else str(value)


def written() -> str:
    lines = [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []
    return page(lines, PLOT.exists())


if __name__ == "__main__":
    if "--check" in sys.argv and written() != PAGE.read_text():
        sys.exit(f"{PAGE.name} does not show its lines; run python -m benchmarks.harness.reliability")
    PAGE.write_text(written())
