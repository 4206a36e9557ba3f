"""The tables of docs/scale.md: what a process costs, what an engine around it costs, and what follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness.machines import name_machines

RESULTS = Path(__file__).parent.parent / "results"
LOAD = 0.7
"""Share of its cores that a service should use: above it queues grow faster than answers."""
CORES = 8
"""Of a pod, in the table of sizes."""


def processes(results: list[dict[str, Any]]) -> str:
    """benchmarks/harness/scale.py: what a process costs, before and after."""
    lines = [
        "| ResNet-50 at 90 %, MB beyond processes that only import aerogel | files read | files mapped |",
        "|---|---|---|",
    ]
    before, now = (
        next(r["processes"] for r in reversed(results) if r["what"] == "memory" and r["old"] == old)
        for old in (True, False)
    )
    counts = sorted(map(int, now))
    for count in counts:
        cells = (f"{_over(seen, count) / 1e6:.0f}" for seen in (before, now))
        lines.append(f"| {count} processes | {' | '.join(cells)} |")
    few, many = counts[-2:]
    further = [(_over(s, many) - _over(s, few)) / (many - few) / 1e6 for s in (before, now)]
    lines.append(f"| each further one ({few} to {many}) | {further[0]:.0f} | {further[1]:.0f} |")
    workspace = now[str(few)]["workspace"] / 1e6
    lines.append(f"| of it workspace | {workspace:.0f} | {workspace:.0f} |")
    found = {r["what"]: r for r in results}
    start, batches = found["start"], found["batches"]
    ratios = sorted(float(r["ratio"]) for r in results if r["what"] == "calls")
    said = [
        f"Start after `import torch`, with a warm cache: loaded after {start['load_s']:.2f} s of CPU, "
        f"first answer after {start['first_s']:.2f} s.",
        f"Old call / new call, interleaved: {', '.join(f'{r:.3f}' for r in ratios)}.",
        f"{batches['calls']:,} calls of 64 batch sizes (SqueezeNet, 96 x 96, by rule): "
        f"{batches['binds']} programs for {batches['points']} sizes; {batches['ms_p50']:.2f} ms of CPU "
        f"an image in the middle, {batches['ms_p99']:.2f} at the 99th percentile.",
    ]
    return "\n".join([*lines, "", " ".join(said), f"({start['date']}, {name_machines(start['target'])})"])


def _over(seen: dict[str, Any], count: int) -> float:
    own = seen[str(count)]
    return float(own["pss"] - own["imported"])


def engines(results: list[dict[str, Any]]) -> str:
    """benchmarks/harness/engines.py: measured, then what it comes to for more."""
    model = "resnet50-90"
    data = [r for r in results if r["what"] == "ray data" and r["model"] == model]
    served = [r for r in results if r["what"] == "ray serve" and r["model"] == model]
    last = data[-1]
    core = sorted(r["actors"] for r in data)[len(data) // 2] / 2
    lines = ["| measured: ResNet-50 at 90 %, 224 x 224, batches of 32 | |", "|---|---|"]
    lines.append(f"| images a second of a core, by Ray Data (two actors of one thread) | {core:.1f} |")
    ratios = ", ".join(f"{r['ratio']:.3f}" for r in data)
    lines.append(f"| over two bare processes on the same cores, in turn | {ratios} |")
    for kind, name in (
        ("served_ms", "Ray Serve, client and server on a core each"),
        ("bare_ms", "the bare call"),
    ):
        each = "; ".join(f"{r[kind]['p50']:.1f} / {r[kind]['p99']:.1f}" for r in served)
        lines.append(f"| {name}: p50 / p99, ms | {each} |")
    lines += ["", f"({last['date']}, {name_machines(last['target'])}, 2 shared cores)", ""]
    lines += [
        "| extrapolated: images a second | cores, at 70 % load | pods of 8 cores | memory of a pod |",
        "|---|---|---|---|",
    ]
    memory = _load_memory()
    for wanted in (10, 100, 1_000, 10_000, 100_000):
        cores = max(1, round(wanted / core / LOAD))
        lines.append(f"| {wanted:,} | {cores:,} | {-(-cores // CORES):,} | {memory / 2**30:.1f} GiB |")
    hours = 1e6 / core / 3600
    said = (
        f"A million images take {hours:.1f} hours of one such core (extrapolated; the start of Ray, about "
        "20 s, is not in it). Multiply by what a core-hour costs you, and by the speedup `aerogel bench` "
        "measures for what the same images cost without aerogel."
    )
    return "\n".join([*lines, "", said])


def _load_memory() -> float:
    """Bytes of eight processes with one file, as measured."""
    lines = (RESULTS / "scale.jsonl").read_text().splitlines()
    found = [r for r in map(json.loads, lines) if r["what"] == "memory" and not r["old"]]
    return float(found[-1]["processes"][str(CORES)]["pss"])
