"""Fit a method's cost model to this machine: the named numbers of its COST table.

    python -m benchmarks.experiments.fit direct --pattern resnet50-90.npz --isa avx2

Every distinct layer is timed in many configurations. Then one number after another is made larger or smaller
as long as the configuration that the model puts first comes nearer to the fastest one (`regret`: its time
over the best, the mean of all layers). Layers left out of the fit say whether it holds elsewhere. Printed is
a table to put into the method's file; nothing is changed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from aerogel.backends.cpu.trial import candidate
from aerogel.formats import tiled
from aerogel.ir import Config, Conv, Stats, Target, Weight, here_levels, host
from aerogel.methods import CpuForm, cpu_form
from aerogel.tune.measure import interleaved
from benchmarks.zoo.patterns import Layer, distinct, load

Timed = tuple[Conv, Stats, dict[Config, float]]
"""A layer and microseconds of its configurations."""
STEPS = (0.1, 0.25, 0.5, 0.7, 0.85, 1.2, 1.4, 2.0, 4.0)
ROUNDS = 5
"""The fastest of them counts."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", help="direct, stridepack, tilewise, blockgemm or actsparse")
    parser.add_argument("--pattern", type=Path, nargs="+", required=True, help="files of real masks")
    parser.add_argument("--configs", type=int, default=24, help="timed of each layer")
    parser.add_argument("--sweeps", type=int, default=3, help="over all numbers")
    parser.add_argument("--isa", choices=here_levels(), default=host().isa, help="instructions to fit for")
    given = parser.parse_args()
    torch.set_num_threads(1)
    form, target = cpu_form(given.method), replace(host().lower(given.isa), threads=1)
    tables: dict[str, dict[str, float]] = getattr(form, "COST", tiled.COST)
    cost = tables.setdefault(target.isa, dict(tables["avx512"]))
    layers = [layer for path in given.pattern for layer, _ in distinct(load(path))]
    console = Console(stderr=True)
    timed = [time(form, layer, target, given.configs) for layer in track(layers, "timing", console=console)]
    fitted = [one for i, one in enumerate(timed) if i % 4]
    others = timed[::4]
    before = regret(form, target, fitted), regret(form, target, others)
    for _ in track(range(given.sweeps), "fitting", console=console):
        for name in cost:
            best, own = regret(form, target, fitted), cost[name]
            for step in STEPS:
                cost[name] = own * step
                if (found := regret(form, target, fitted)) < best:
                    best, own = found, cost[name]
            cost[name] = own
    after = regret(form, target, fitted), regret(form, target, others)
    said = {"isa": target.isa, "layers": len(timed), "regret_before": before, "regret_after": after}
    print(json.dumps({**said, "cost": {name: round(value, 3) for name, value in cost.items()}}, indent=1))


def time(form: CpuForm, layer: Layer, target: Target, most: int) -> Timed:
    """The model's first half and as many from further down."""
    rng = np.random.default_rng(0)
    weight, conv = layer.weight(rng), layer.conv
    stats = Stats.of(weight)
    if form.refuse(conv, target, stats) is not None:
        return conv, stats, {}
    every = list(islice(form.configs(conv, target, stats), 40 * most))
    chosen = dict.fromkeys([*every[: most // 2], *every[most // 2 :: max(1, len(every) // (most // 2))]])
    x, bias = rng.standard_normal(conv.x_shape).astype(np.float32), np.zeros(conv.k, np.float32)
    calls = [candidate(conv, config, Weight(weight), x, bias, target) for config in chosen]
    times = interleaved(calls, ROUNDS)
    return conv, stats, {c: min(t) for c, t in zip(chosen, times, strict=True)}


def regret(form: CpuForm, target: Target, timed: list[Timed]) -> float:
    """Time of the first timed configuration in the model's order over the fastest one's, the mean of all."""
    shares = []
    for conv, stats, times in timed:
        if times:
            first = next(c for c in form.configs(conv, target, stats) if c in times)
            shares.append(times[first] / min(times.values()))
    return float(np.mean(shares))


if __name__ == "__main__":
    main()
