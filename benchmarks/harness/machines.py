"""Names for the machines that results were measured on, and the runs that stand for them."""

from __future__ import annotations

import re
from typing import Any

from aerogel.ir import Target

Result = dict[str, Any]
ISAS = {"avx512": "AVX-512", "avx2": "AVX2", "generic": "x86-64", "neon": "NEON"}
FEATURES = (("amx_int8", "AMX"), ("avx512fp16", "FP16"), ("avx512vnni", "VNNI"))
"""Features that decide which kernels and which opponents are fast, as the name of a machine shows them."""


def machine_name(target: str) -> str:
    """Return the name of a target for people: its instruction set, what it has beyond, and its caches."""
    parsed = Target.parse(target)
    extras = [word for feature, word in FEATURES if feature in parsed.extras]
    if "AMX" in extras and "VNNI" in extras:
        extras.remove("VNNI")  # every CPU with AMX has it, and older records do not say so
    also = f" with {' and '.join(extras)}" if extras else ""
    megabytes = (f"{size / 2**20:.3g}" for size in (parsed.l2_bytes, parsed.l3_bytes))
    return f"{ISAS.get(parsed.isa, parsed.isa)}{also}, L2 {next(megabytes)} MB, L3 {next(megabytes)} MB"


def name_machines(text: str) -> str:
    """Return a text with every target in it replaced by its name."""
    return re.sub(r"cpu-[\w+]+-l1:\d+-l2:\d+-l3:\d+-t\d+", lambda match: machine_name(match[0]), text)


def same_machine(target: str) -> tuple[str, bool, int, int]:
    """Return what tells one kind of machine from another, whatever later releases record beside it."""
    parsed = Target.parse(target)
    return parsed.isa, "amx_int8" in parsed.extras, parsed.l2_bytes, parsed.l3_bytes


def newest(runs: list[Result]) -> list[Result]:
    """Return the runs of the last day on which there were any."""
    last = max(run["date"] for run in runs)
    return [run for run in runs if run["date"] == last]


def middle(runs: list[Result]) -> Result:
    """Return the run whose ratio to the fastest opponent is in the middle."""
    return sorted(runs, key=lambda run: float(run["ratio"]["fastest"]))[(len(runs) - 1) // 2]
