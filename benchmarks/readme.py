"""Write README's tables from result files: python benchmarks/readme.py [--check]

Each table stands between `<!-- table:NAME -->` and `<!-- /table -->` and comes from benchmarks/results/NAME.json, nothing else.
"""

from __future__ import annotations

import json
import re
import sys
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


TABLES = {"layers": layers}


def written(readme: str) -> str:
    """README's text with every table made anew."""
    for name, table in TABLES.items():
        body = table(json.loads((RESULTS / f"{name}.json").read_text()))
        pattern = re.compile(f"(<!-- table:{name} -->\n).*?(<!-- /table -->)", re.DOTALL)
        readme = pattern.sub(lambda m, body=body: f"{m[1]}{body}\n{m[2]}", readme)  # type: ignore[misc]
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    new = written(path.read_text())
    if "--check" in sys.argv and new != path.read_text():
        sys.exit("README.md does not show its result files; run python benchmarks/readme.py")
    path.write_text(new)
