"""Sparse feature maps, dense weights: `actsparse` beside the fastest dense convolution as the zeros of x
grow.

    python -m benchmarks.experiments.actsparse --json actsparse.json

Zeros come in vectors of 16 pixels of one channel, either anywhere (`scattered`: a window that starts within a
vector meets two or three, so fewer windows are empty than vectors) or as whole channels (`channels`: what a
dead ReLU leaves). `ratio` is dense over ours at 80 % zero vectors, summed over the layers; `break_even` the
share of zero vectors, by a line between the two measured around it, from which ours is faster.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from datetime import date
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from aerogel.backends.cpu.trial import candidate
from aerogel.ir import Conv, Idle, Stats, Target, Weight, host
from aerogel.methods.actsparse import cpu as actsparse
from aerogel.methods.dense import cpu as dense
from aerogel.tune.measure import interleaved

LAYERS = ("c64h56w56k64", "c128h28w28k128", "c256h14w14k256", "c512h14w14k512", "c512h7w7k512")
ZEROS = (0.0, 0.4, 0.6, 0.8, 0.9)
KINDS = ("scattered", "channels")
SHOWN = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--configs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    target = replace(host(), threads=1)
    work = [(kind, text) for kind in KINDS for text in LAYERS]
    rows = [
        measure(kind, Conv.parse(f"n1{text}r3s3u1p1+bias+relu"), target, given)
        for kind, text in track(work, "layers", console=Console(stderr=True))
    ]
    result: dict[str, Any] = {
        "ratio": {},
        "rows": rows,
        "target": str(target),
        "date": date.today().isoformat(),
    }
    for kind in KINDS:
        at = [r["us"][ZEROS.index(SHOWN)] for r in rows if r["kind"] == kind]
        result["ratio"][kind] = sum(d for d, _ in at) / sum(o for _, o in at)
    show(result)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


def measure(kind: str, conv: Conv, target: Target, given: argparse.Namespace) -> dict[str, Any]:
    """[dense us, ours us] for each share of zero vectors."""
    rng = np.random.default_rng(0)
    weight, bias = (
        rng.standard_normal(conv.weight_shape).astype(np.float32),
        rng.standard_normal(conv.k).astype(np.float32),
    )
    us = []
    for share in ZEROS:
        x = maps(rng, conv, kind, share)
        stats = Stats.of(weight, Idle.of(x))
        configs = [
            *dense.configs(conv, target, stats),
            *islice(actsparse.configs(conv, target, stats), given.configs),
        ]
        with torch.inference_mode():
            calls = [candidate(conv, c, Weight(weight), x, bias, target) for c in configs]
            times = interleaved(calls, given.rounds)
        middle = [(c.method, float(np.median(t))) for c, t in zip(configs, times, strict=True)]
        us.append([min(t for name, t in middle if name == wanted) for wanted in ("dense", "actsparse")])
    return {"kind": kind, "conv": str(conv), "us": us, "break_even": _break_even([d / o for d, o in us])}


def maps(rng: np.random.Generator, conv: Conv, kind: str, share: float) -> Any:
    """What ReLU might leave: positive numbers, and this share of zero vectors."""
    n, c, h, w = conv.x_shape
    x = np.abs(rng.standard_normal((n, c, h * w))).astype(np.float32)
    count = -(-h * w // 16) if kind == "scattered" else 1
    kept = np.repeat(rng.random((n, c, count)) >= share, 16 if kind == "scattered" else h * w, axis=2)
    return (x * kept[:, :, : h * w]).reshape(conv.x_shape)


def _break_even(ratios: list[float]) -> float | None:
    """None where ours is never faster."""
    if ratios[0] >= 1:
        return 0.0
    for (low, a), (high, b) in pairwise(zip(ZEROS, ratios, strict=True)):
        if a < 1 <= b:
            return low + (1 - a) / (b - a) * (high - low)
    return None


def show(result: dict[str, Any]) -> None:
    table = Table(
        title=f"dense / actsparse by zero vectors of x, dense weights 3x3, one thread ({result['target']})"
    )
    for heading in ("zeros", "layer", *(f"{z:.0%}" for z in ZEROS), "break-even"):
        table.add_column(heading, justify="left" if heading in ("zeros", "layer") else "right", no_wrap=True)
    for r in result["rows"]:
        even = "never" if r["break_even"] is None else f"{r['break_even']:.0%}"
        table.add_row(r["kind"], r["conv"], *(f"{d / o:.2f}x" for d, o in r["us"]), even)
    Console(width=120).print(table)
    for kind, ratio in result["ratio"].items():
        print(f"{kind}, {SHOWN:.0%} zero vectors: {ratio:.2f}x over all layers")


if __name__ == "__main__":
    main()
