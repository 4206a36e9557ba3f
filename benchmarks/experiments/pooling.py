"""Convolution and pooling in one kernel beside the two apart: VGG-19's five pairs under a real pruning
pattern.

    python -m benchmarks.experiments.pooling --json pooling.json       needs the pattern files

Each pair runs `direct` and `stridepack` in a few configurations, unfused (two kernels of one segment) and
fused (PECR: the convolution's output stays in the cache), all in the same rounds. A method's unfused form is
its fastest configuration, and so is its fused form. `ratio` is the five pairs' time apart over their time
together, of the method that is fastest apart; `arena` has the bytes that hold activations in the whole
network, with and without fusing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import aerogel
from aerogel.backends.cpu import threads as pool
from aerogel.backends.cpu.lower import pooling
from aerogel.backends.cpu.lower.pooled import kernel as with_pool
from aerogel.backends.cpu.runner import program
from aerogel.codegen.cpu.abi import Kernel, native
from aerogel.ir import Conv, Layout, Pool, Stats, Target, host
from aerogel.methods import cpu_form
from aerogel.tune.measure import interleaved
from benchmarks.zoo.patterns import load

PAIRS = (1, 3, 7, 11, 15)
"""Of VGG-19's sixteen convolutions, those before a pooling."""
MAX = Pool("max", (2, 2), (2, 2), (0, 0), (1, 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--patterns", type=Path, default=Path(__file__).parents[3] / "shared" / "patterns")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--configs", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    target, layers = replace(host(), threads=1), load(given.patterns / "vgg19-92.npz")
    rows = [
        measure(layers[i].conv, layers[i].mask, target, given)
        for i in track(PAIRS, "VGG-19", console=Console(stderr=True))
    ]
    apart, together = (sum(min(r["us"].values(), key=lambda t: t[0])[i] for r in rows) for i in (0, 1))
    each = {name: [sum(r["us"][name][i] for r in rows) for i in (0, 1)] for name in ("direct", "stridepack")}
    result: dict[str, Any] = {
        "ratio": apart / together,
        "methods": {n: a / b for n, (a, b) in each.items()},
        "pairs": rows,
    }
    result |= {"arena": arena(), "target": str(target), "date": date.today().isoformat()}
    show(result)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


def measure(conv: Conv, mask: Any, target: Target, given: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of one pair: {method: [apart, together]}."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal(conv.weight_shape) * mask).astype(np.float32)
    x, bias = (
        rng.standard_normal(conv.x_shape).astype(np.float32),
        rng.standard_normal(conv.k).astype(np.float32),
    )
    stats, calls, kept = Stats.of(weight), list[tuple[str, int, pool.Segment]](), list[object]()
    y_shape = (1, conv.k, conv.out[0] // 2, conv.out[1] // 2)
    for name in ("direct", "stridepack"):
        module = cpu_form(name)
        for config in islice(module.configs(conv, target, stats), given.configs):
            reads, writes = module.layouts(conv, config, target)
            writes, after = (
                replace(writes, slack=max(16, writes.slack)),
                Layout("planar", y_shape[3] + 1, (1, 1, 1, 1), 16),
            )
            packed = module.pack(weight, conv, config)
            together = with_pool(packed, conv, config, target, reads, MAX, y_shape, after)
            assert together is not None
            buffers = reads.allocate(conv.x_shape), writes.allocate(conv.y_shape), after.allocate(y_shape)
            reads.write(buffers[0], x)
            steps = [(k, 0, 1) for k in native(module.build(packed, conv, config, target, reads, writes))]
            steps.append((pooling.kernel(MAX, conv.y_shape, y_shape, writes, after, target), 1, 2))
            calls += [
                (name, 0, _segment(steps, buffers, bias, kept)),
                (name, 1, _segment([(together, 0, 2)], buffers, bias, kept)),
            ]
    times = interleaved([segment for _, _, segment in calls], given.rounds)
    us: dict[str, list[float]] = {"direct": [np.inf, np.inf], "stridepack": [np.inf, np.inf]}
    for (name, form, _), spent in zip(calls, times, strict=True):
        us[name][form] = min(us[name][form], float(np.median(spent)))
    return {"conv": str(conv), "sparsity": stats.sparsity, "us": us}


def _segment(
    steps: list[tuple[Kernel, int, int]], buffers: Any, bias: Any, kept: list[object]
) -> pool.Segment:
    scratch = np.empty(max(k.scratch_bytes for k, _, _ in steps) + 64, np.uint8)
    kept += [scratch, buffers, bias]
    start = scratch.ctypes.data + -scratch.ctypes.data % 64
    places = {"bias": bias.ctypes.data, "scratch": start}
    return pool.Segment(
        [(k, k.bind(x=buffers[i].ctypes.data, y=buffers[j].ctypes.data, **places)) for k, i, j in steps], 1
    )


def arena() -> dict[str, int]:
    """Bytes of activations of VGG-19's convolutions at 224 x 224, all of ours, pooling apart and together."""
    widths, model, channels = (
        (64, 64, 0, 128, 128, 0, *[256] * 4, 0, *[512] * 4, 0, *[512] * 4, 0),
        nn.Sequential(),
        3,
    )
    for width in widths:
        model.extend([nn.MaxPool2d(2)] if not width else [nn.Conv2d(channels, width, 3, 1, 1), nn.ReLU()])
        channels = width or channels
    aerogel.prune(model, 0.9)
    x = torch.zeros(1, 3, 224, 224)
    fast = aerogel.compile(model.eval(), x, tune="off")
    assert fast.network is not None
    shapes, plan = fast.network.shapes([x]), {c.node: c.config for c in fast.plan.choices}
    programs = [program(fast.network, shapes, plan, host(), joined) for joined in ((), plan)]
    return dict(zip(("apart", "together"), (p.arena_bytes for p in programs), strict=True))


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"convolution + max pooling 2x2, one thread ({result['target']})")
    for heading in (
        "layer",
        "zeros",
        "direct apart us",
        "together",
        "",
        "stridepack apart us",
        "together",
        "",
    ):
        table.add_column(heading, justify="left" if heading == "layer" else "right", no_wrap=True)
    for r in result["pairs"]:
        cells = [c for a, b in r["us"].values() for c in (f"{a:.0f}", f"{b:.0f}", f"{a / b:.2f}x")]
        table.add_row(r["conv"], f"{r['sparsity']:.0%}", *cells)
    Console(width=140).print(table)
    methods = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in result["methods"].items())
    held = " -> ".join(f"{result['arena'][n] / 1e6:.1f}" for n in ("apart", "together"))
    print(f"all five: {result['ratio']:.2f}x ({methods}); activations of the whole network {held} MB")


if __name__ == "__main__":
    main()
