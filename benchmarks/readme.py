"""Write README's tables from result files: python benchmarks/readme.py [--check]

Each table stands between `<!-- table:NAME -->` and `<!-- /table -->` and comes from benchmarks/results/NAME.json
or NAME.jsonl, nothing else.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def layers(result: dict[str, Any]) -> str:
    """The table of benchmarks/layers.py."""
    lines = ["| layer | times | dense, us | direct, us | dense / direct |", "|---|---|---|---|---|"]
    lines += [
        f"| `{row['conv']}` | {row['count']} | {row['dense_us']:.0f} | {row['direct_us']:.0f} | {row['ratio']:.2f}x |"
        for row in result["layers"]
    ]
    total = f"**{result['ratio']:.2f}x** over the stride-1 layers, each as often as the network has it"
    return "\n".join([*lines, "", f"{total} ({result['date']}, torch {result['torch']}, `{result['target']}`)."])


def models(results: list[dict[str, Any]]) -> str:
    """The table of benchmarks/run.py: of several runs of one thing, the one whose ratio to the fastest is in the middle."""
    names = list(dict.fromkeys(n for r in results for n in r["ratio"] if n != "fastest"))
    runs: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        batch = "" if r["batch"] == 1 else f", batch {r['batch']}"
        threads = "" if r["threads"] == 1 else f", {r['threads']} threads"
        runs.setdefault(f"{r['model']} {r['pruning']}, {r['size']} x {r['size']}{batch}{threads}", []).append(r)
    lines = [f"| | runs | aerogel, ms | {' | '.join(names)} |", "|---|---|---|" + "---|" * len(names)]
    for what, several in runs.items():
        r = sorted(several, key=lambda r: float(r["ratio"]["fastest"]))[(len(several) - 1) // 2]
        cells = " | ".join(f"{r['ratio'][n]:.2f}x" if n in r["ratio"] else "" for n in names)
        lines.append(f"| {what} | {len(several)} | {r['ms']['aerogel']['p50']:.1f} | {cells} |")
    last = results[-1]
    return "\n".join([*lines, "", f"{last['date']}, torch {last['torch']}, `{last['target']}`."])


TABLES: dict[str, Callable[[Any], str]] = {"layers": layers, "models": models}


def _load(name: str) -> Any:
    """A result file: one JSON value, or a list of them line by line."""
    lines = RESULTS / f"{name}.jsonl"
    if lines.exists():
        return [json.loads(line) for line in lines.read_text().splitlines()]
    return json.loads((RESULTS / f"{name}.json").read_text())


def written(readme: str) -> str:
    """README's text with every table made anew."""
    for name, table in TABLES.items():
        body = table(_load(name))
        pattern = re.compile(f"(<!-- table:{name} -->\n).*?(<!-- /table -->)", re.DOTALL)
        readme = pattern.sub(lambda m, body=body: f"{m[1]}{body}\n{m[2]}", readme)  # type: ignore[misc]
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    new = written(path.read_text())
    if "--check" in sys.argv and new != path.read_text():
        sys.exit("README.md does not show its result files; run python benchmarks/readme.py")
    path.write_text(new)
