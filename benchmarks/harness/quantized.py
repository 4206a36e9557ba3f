"""The table of benchmarks/experiments/quantized_files.py."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.machines import name_machines


def files(rows: list[dict[str, Any]]) -> str:
    """A line for each file: its layers in integers and the others, and what it reads."""
    lines = [
        "| file | layers in integers | different, worst layer, by "
        "| other layers | different, worst layer, by | same text |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = [_apart(r, ""), str(r["layers"] - r["integers"]), _apart(r, "_floats")]
        lines.append(
            f"| {r['file']} | {r['integers']} of {r['layers']} | {' | '.join(cells)} | "
            f"{r['same']:.0%} of {r['lines']} |"
        )
    dates = sorted({r["date"] for r in rows})
    return "\n".join([*lines, "", f"{dates[-1]}, {name_machines(rows[-1]['target'])}."])


def _apart(r: dict[str, Any], after: str) -> str:
    if not r[f"outputs{after}"]:
        return ""
    return f"{r[f'apart{after}']:.4%}, {r[f'worst{after}']:.3%}, {r[f'most{after}']}"
