"""All methods against cuDNN on a GPU, layer by layer, on all real patterns: ready for the first person who
has one.

    pip install 'aerogel[cuda]' && python -m benchmarks.experiments.gpu --json gpu.jsonl
        a CUDA device: half an hour
    python -m benchmarks.experiments.gpu --device opencl --quick
        the same path on any OpenCL device: what CI runs
    python -m benchmarks.experiments.gpu --show gpu.jsonl
        the table of an earlier run

Dense is torch's convolution (cuDNN) in fp32, tf32 and fp16, the faster of both layouts, with the epilogue as
torch's calls. Ours are in fp32 and fp16; the first configurations of each method are timed, conversions of
layout not counted. Times are medians of interleaved rounds on the device's own events. Patterns come from
../shared/patterns; elsewhere seeded random masks of the same sparsity take their place, and the rows say so.
No row of this benchmark has come from a physical GPU yet.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from aerogel.backends.gpu.cuda import Cuda
from aerogel.backends.gpu.device import FORMAT, Device
from aerogel.backends.gpu.layer import Layer
from aerogel.backends.gpu.opencl import OpenCL
from aerogel.ir import NUMPY, Array, Conv, Dtypes, Stats, Weight
from aerogel.ir.tensors import TORCH, plain
from aerogel.methods import METHODS, gpu_form
from aerogel.tune.measure import interleaved
from benchmarks.zoo.patterns import Layer as Pruned
from benchmarks.zoo.patterns import distinct, load

PATTERNS = Path(__file__).parents[3] / "shared" / "patterns"
SUMS = {"direct": "f16", "stridepack": "f16"}
FORMS = [(name, Dtypes()) for name in METHODS[1:]]
FORMS += [(name, Dtypes("f16", "f16", SUMS.get(name, "f32"), "f16")) for name in METHODS[1:]]
"""Ours in f32 (tilewise and blockgemm: tf32) and in f16; actsparse is never among them, for it needs real
inputs."""
PRECISIONS = {"fp32": (torch.float32, False), "tf32": (torch.float32, True), "fp16": (torch.float16, False)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "opencl"), default="cuda")
    parser.add_argument("--batch", type=int, action="append", help="1 and 16 if left out")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--configs", type=int, default=8, help="of each method that are timed")
    parser.add_argument("--quick", action="store_true", help="two small layers, few rounds")
    parser.add_argument("--json", type=Path, help="rows are added as they are measured")
    parser.add_argument("--show", type=Path)
    given = parser.parse_args()
    if given.show:
        show([json.loads(line) for line in given.show.read_text().splitlines()])
        return
    device: Device = Cuda() if given.device == "cuda" else OpenCL()
    if given.quick:
        given.rounds, given.configs, given.batch = 3, 2, given.batch or [1]
    work = [(*one, b) for one in layers(given.quick) for b in given.batch or [1, 16]]
    rows = []
    for name, layer, count, batch in track(work, str(device.target), console=Console(stderr=True)):
        rows.append(
            measured(device, layer, batch, given)
            | {"pattern": name, "count": count, "target": str(device.target)}
        )
        if given.json:
            with given.json.open("a") as out:
                out.write(
                    json.dumps(rows[-1] | {"date": date.today().isoformat(), "torch": torch.__version__})
                    + "\n"
                )
    show(rows)


def layers(quick: bool) -> list[tuple[str, Pruned, int]]:
    """Each problem of each pattern once, with how often it is there."""
    found = [
        (p.stem, layer, count) for p in sorted(PATTERNS.glob("*.npz")) for layer, count in distinct(load(p))
    ]
    if not found:
        rng = np.random.default_rng(0)
        convs = [
            Conv.parse(t) for t in ("n1c64h56w56k64r3s3u1p1+bias+relu", "n1c256h14w14k256r3s3u1p1+bias+relu")
        ]
        found = [
            ("random masks, 90 %", Pruned(str(c), c, rng.random(c.weight_shape) < 0.1), 1) for c in convs
        ]
    return sorted(found, key=lambda one: one[1].conv.dense_flops)[:2] if quick else found


def measured(device: Device, layer: Pruned, batch: int, given: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of every form, the best configuration of each method by name, and how far its answer is
    from torch's."""
    conv, rng = layer.conv.at(batch, *layer.conv.size), np.random.default_rng(0)
    weight = layer.weight(rng)
    x, bias = (
        rng.standard_normal(conv.x_shape).astype(np.float32),
        rng.standard_normal(conv.k).astype(np.float32),
    )
    calls: dict[str, Callable[[], object]] = {}
    for precision in PRECISIONS:
        for layout in FORMAT:
            calls[f"dense {precision} {layout}"] = dense(device, conv, weight, x, bias, precision, layout)
    errors = dict[str, float]()
    wanted = plain(torch.from_numpy(x), torch.from_numpy(weight), conv, torch.from_numpy(bias), None)
    for (name, dtypes), stats in product(FORMS, [Stats.of(weight)]):
        own, typed = gpu_form(name), replace(conv, dtypes=dtypes)
        if own.refuse(typed, device.target, stats) is not None:
            continue
        there, bias_there = (
            device.here(torch.from_numpy(x).to(TORCH[dtypes.input])),
            device.here(torch.from_numpy(bias)),
        )
        label = name if dtypes == Dtypes() else f"{name} f16"
        for config in islice(own.configs(typed, device.target, stats), given.configs):
            there = there.contiguous(memory_format=FORMAT[own.layout(config)])
            run = Layer(device, typed, config, Weight(weight.astype(NUMPY[dtypes.weight])))
            form = f"{label}/{str(config).partition('/')[2]}"
            calls[form] = lambda run=run, there=there, bias=bias_there: run(there, bias, None)  # type: ignore[misc]
            y = run(there, bias_there, None).cpu().float()
            errors[label] = max(
                errors.get(label, 0.0), float((y - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9))
            )
    times = interleaved(list(calls.values()), given.rounds, clock=device.clock)
    us = {name: float(np.median(t)) for name, t in zip(calls, times, strict=True)}
    return {"conv": str(conv), "nonzeros": layer.nonzeros, "us": us, "error": errors}


def dense(
    device: Device, conv: Conv, weight: Array, x: Array, bias: Array, precision: str, layout: str
) -> Callable[[], object]:
    dtype, tf32 = PRECISIONS[precision]
    given, held = (
        device.here(torch.from_numpy(a)).to(dtype).contiguous(memory_format=FORMAT[layout])
        for a in (x, weight)
    )
    own = device.here(torch.from_numpy(bias))

    def run() -> object:
        torch.backends.cudnn.allow_tf32 = tf32
        with torch.no_grad():
            return plain(given, held, conv, own, None)

    return run


def best(row: dict[str, Any], name: str) -> float | None:
    """The fastest of "dense fp32", "direct" and so on."""
    own = [t for form, t in row["us"].items() if form.startswith((f"{name} ", f"{name}/"))]
    return min(own) if own else None


def show(rows: list[dict[str, Any]]) -> None:
    ours = (name if dtypes == Dtypes() else f"{name} f16" for name, dtypes in FORMS if name != "actsparse")
    names = ("dense fp32", "dense tf32", "dense fp16", *ours)
    table = Table(
        title=f"microseconds of all layers, each as often as the network has it; {rows[0]['target']}"
    )
    for heading in ("pattern", "batch", *names, "worst error"):
        table.add_column(heading, justify="right")
    for pattern, batch in dict.fromkeys((r["pattern"], Conv.parse(r["conv"]).batch) for r in rows):
        own = [r for r in rows if r["pattern"] == pattern and Conv.parse(r["conv"]).batch == batch]
        dense_us = [best(r, "dense fp32") or 0.0 for r in own]
        cells = []
        for name in names:
            # a layer that is refused stays dense
            times = [best(r, name) or d for r, d in zip(own, dense_us, strict=True)]
            cells.append(f"{sum(r['count'] * t for r, t in zip(own, times, strict=True)):.0f}")
        error = max((e for r in own for e in r["error"].values()), default=0.0)
        table.add_row(pattern, str(batch), *cells, f"{error:.0e}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
