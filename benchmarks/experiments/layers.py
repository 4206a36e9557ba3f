"""Each distinct layer of a pruned network: `direct` in its first configuration beside the fastest `dense`,
interleaved.

    python -m benchmarks.experiments.layers --pattern resnet50-90.npz --json layers.json

Buffers rotate so that x and y come from beyond L2, as they do in a running network. `ratio` is dense over
direct (medians), summed over the stride-1 layers, each as often as the network has it. Layout conversions are
not in these figures: between layers of ours there are none.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from aerogel.backends.cpu.trial import candidate
from aerogel.ir import Stats, Target, Timing, Weight, host
from aerogel.methods.dense import cpu as dense
from aerogel.methods.direct import cpu as direct
from aerogel.tune.measure import interleaved
from benchmarks.zoo.patterns import Layer, distinct, load


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pattern", type=Path, required=True, help="a .npz of real masks")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help="layers whose problem string contains this")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    target = replace(host(), threads=given.threads)
    chosen = [
        (one, count)
        for one, count in distinct(load(given.pattern))
        if not given.only or given.only in str(one.conv)
    ]
    rows = [
        measure(one, count, target, given.rounds)
        for one, count in track(chosen, "measuring", console=Console(stderr=True))
    ]
    counted = [row for row in rows if row["stride"] == 1]
    total = {name: sum(row["count"] * row[name] for row in counted) for name in ("dense_us", "direct_us")}
    result = {
        "pattern": given.pattern.stem, "ratio": total["dense_us"] / total["direct_us"], "summed": total,
        "layers": rows, "target": str(target), "torch": torch.__version__, "date": date.today().isoformat(),
        "rounds": given.rounds,
    }  # fmt: skip
    show(result)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


def measure(layer: Layer, count: int, target: Target, rounds: int) -> dict[str, Any]:
    """Medians of one layer's candidates, and what the best dense was."""
    conv, rng = layer.conv, np.random.default_rng(0)
    weight, bias = layer.weight(rng), rng.standard_normal(conv.k).astype(np.float32)
    x, stats = rng.standard_normal(conv.x_shape).astype(np.float32), Stats.of(weight)
    ours = next(direct.configs(conv, target, stats))
    theirs = list(dense.configs(conv, target, stats))
    held = Weight(weight)
    calls = [candidate(conv, config, held, x, bias, target) for config in (ours, *theirs)]
    with torch.inference_mode():
        times = interleaved(calls, rounds)
    first, *others = (Timing.of(t, times[0]) for t in times)
    best = min(range(len(others)), key=lambda i: others[i].p50_us)
    return {
        "layer": layer.name, "conv": str(conv), "count": count, "stride": conv.stride[0], "sparsity":
        stats.sparsity, "direct": str(ours), "direct_us": first.p50_us, "direct_min_us": first.min_us,
        "dense": str(theirs[best]), "dense_us": others[best].p50_us, "dense_min_us": others[best].min_us,
        "ratio": others[best].p50_us / first.p50_us, "gflops": 2 * stats.nonzeros * conv.out[0] * conv.out[1]
        / first.p50_us / 1e3,
    }  # fmt: skip


def show(result: dict[str, object]) -> None:
    """The table a person reads."""
    table = Table(title=f"{result['pattern']}: direct beside the fastest dense torch ({result['target']})")
    for heading in (
        "layer",
        "times",
        "zeros",
        "dense us",
        "direct us",
        "ratio",
        "GF/s",
        "direct's configuration",
    ):
        table.add_column(
            heading,
            justify="left" if heading in ("layer", "direct's configuration") else "right",
            no_wrap=True,
        )
    layers = result["layers"]
    assert isinstance(layers, list)
    for row in layers:
        table.add_row(
            row["conv"], str(row["count"]), f"{row['sparsity']:.1%}", f"{row['dense_us']:.0f}",
            f"{row['direct_us']:.0f}", f"{row['ratio']:.2f}x", f"{row['gflops']:.0f}",
            str(row["direct"]).partition("/")[2],
        )  # fmt: skip
    Console(width=150).print(table)
    print(f"stride-1 layers, each as often as the network has it: {result['ratio']:.2f}x")


if __name__ == "__main__":
    main()
