"""How near each layer is to what the core can do, in the running network.

    python -m benchmarks.experiments.limits resnet50 --pattern resnet50-90.npz

GF/s count the nonzeros only. The limit is the report's (aerogel/report/limits.py). Times, FMA rate and
bandwidths are measured here; bytes are counted.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import aerogel
from aerogel.backends.cpu.runner import program, workspace
from aerogel.ir import Choice, Target, host
from aerogel.report.limits import Rates, limit, rates
from aerogel.zoo.models import MODELS, make
from benchmarks.zoo.patterns import prune_pattern

ROUNDS = 40


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--pattern", type=Path, required=True, help="a .npz of real masks")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    size = MODELS[given.model][1]
    model, x = prune_pattern(make(given.model), given.pattern), torch.randn(1, 3, size, size)
    fast = aerogel.compile(model, x, store=mkdtemp())
    machine = rates(host())
    rows, other = measured(fast, x, machine)
    result = {
        "model": given.model, "pattern": given.pattern.stem, "limits": machine, "layers": rows, "other_us":
        other, "target": str(fast.plan.target), "date": date.today().isoformat(), "torch": torch.__version__,
    }  # fmt: skip
    show(result)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


def measured(fast: aerogel.Compiled, x: torch.Tensor, machine: Rates) -> tuple[list[dict[str, Any]], float]:
    """Each distinct layer with how often it occurs, and the time of what is no layer of ours: copies and
    pooling."""
    if fast.network is None:
        raise SystemExit("torch runs this model; there is nothing of ours to look at")
    network, target = fast.network, fast.plan.target
    assert isinstance(target, Target)
    configs = {c.node: c.config for c in fast.plan.choices}
    made = program(network, network.shapes([x]), configs, target)
    space, times = workspace(network, made, target), dict[str, list[float]]()
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, spent in space.timed([x]).items():
                times.setdefault(name, []).append(spent)
    middle = {name: float(np.median(t)) for name, t in times.items()}
    same: dict[str, list[tuple[Choice, float]]] = {}
    for choice in fast.plan.choices:
        if choice.node in middle:
            same.setdefault(str(choice.conv), []).append((choice, middle.pop(choice.node)))
    return [row(group, machine, target) for group in same.values()], sum(middle.values())


def row(group: list[tuple[Choice, float]], machine: Rates, target: Target) -> dict[str, Any]:
    """The mean of layers with one problem."""
    conv, config = group[0][0].conv, group[0][0].config
    us = float(np.mean([t for _, t in group]))
    sparsity = float(np.mean([c.sparsity for c, _ in group]))
    found = limit(conv, sparsity, target, machine)
    return {
        "conv": str(conv), "times": len(group), "config": str(config), "us": us,
        "gflops": found.flops / us / 1e3, "bytes": found.bytes, "bound": found.bound, "limit_us": found.us,
        "share": found.us / us,
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """The table a person reads."""
    m = result["limits"]
    rates = f"FMA {m['fma'] / 1e9:.0f} GF/s, L2 {m['l2'] / 1e9:.0f} GB/s, L3 {m['l3'] / 1e9:.0f} GB/s"
    table = Table(title=f"{result['model']} {result['pattern']}: {rates}")
    for heading in ("layer", "times", "us", "GF/s", "MB", "bound by", "limit, us", "share"):
        table.add_column(heading, justify="left" if heading == "layer" else "right", no_wrap=True)
    for r in result["layers"]:
        table.add_row(
            r["conv"], str(r["times"]), f"{r['us']:.0f}", f"{r['gflops']:.0f}", f"{r['bytes'] / 1e6:.2f}",
            r["bound"], f"{r['limit_us']:.0f}", f"{r['share']:.0%}",
        )  # fmt: skip
    Console(width=140).print(table)
    inside = sum(r["us"] * r["times"] for r in result["layers"])
    print(
        f"layers {inside / 1e3:.2f} ms, copies and pooling {result['other_us'] / 1e3:.2f} ms; the "
        "whole limit is "
        f"{sum(r['limit_us'] * r['times'] for r in result['layers']) / inside:.0%} of the layers' time"
    )


if __name__ == "__main__":
    main()
