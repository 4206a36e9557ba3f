"""Dense blocks and re-pruning (PACT'20): `blockgemm` beside `direct`, before and after `aerogel.reprune` took
5 % of the weight.

    python -m benchmarks.experiments.blockgemm --pattern resnet50-80.npz --json rows.json

A matrix with planted blocks first, then every distinct layer under its real mask. Magnitudes are not in the
pattern files: `gaussian` draws all of them from a normal distribution, `pruned` only from its tails, as
magnitude pruning leaves them. The clustering is compared with filters taken at random.
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

from aerogel.backends.cpu.backend import Cpu
from aerogel.formats import clusters
from aerogel.ir import Array, Conv, Stats, Target, Weight, host, majority
from aerogel.methods import cpu_form
from aerogel.methods.blockgemm import cpu as blockgemm
from aerogel.pruning.reprune import leftovers
from aerogel.tune import search
from benchmarks.zoo.patterns import distinct, load


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pattern", type=Path, required=True)
    parser.add_argument(
        "--loss", type=float, default=0.05, help="share of each layer's weight (L1) that may go"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    target, rng = replace(host(), threads=1), np.random.default_rng(0)
    rows = [
        measure("planted", planted(rng), Conv.parse("n1c256h28w28k256r3s3u1p1+bias+relu"), 1, target, given)
    ]
    layers = distinct(load(given.pattern))
    for kind, (layer, count) in track(
        [(k, pair) for k in ("gaussian", "pruned") for pair in layers], console=Console(stderr=True)
    ):
        size = rng.standard_normal(layer.conv.weight_shape)
        if kind == "pruned":  # the largest of as many as there are weights
            size.reshape(-1)[np.flatnonzero(layer.mask)] = rng.permutation(
                np.sort(np.abs(size), axis=None)[-layer.nonzeros :]
            )
        rows.append(measure(kind, (size * layer.mask).astype(np.float32), layer.conv, count, target, given))
    result = {
        "pattern": given.pattern.stem,
        "loss": given.loss,
        "target": str(target),
        "date": date.today().isoformat(),
    }
    result["layers"] = rows
    show(result)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


def planted(rng: np.random.Generator) -> Array:
    """256 filters in 4 shuffled clusters, each with a dense block of 15 % of the positions; one weight in 200
    anywhere else."""
    weight = rng.standard_normal((256, 2304)) * (rng.random((256, 2304)) < 0.005)
    for own in np.split(rng.permutation(256), 4):
        block = np.ix_(own, rng.permutation(2304)[:345])
        weight[block] = rng.standard_normal((64, 345))
    return weight.reshape(256, 256, 3, 3).astype(np.float32)


def measure(
    kind: str, weight: Array, conv: Conv, count: int, target: Target, given: argparse.Namespace
) -> dict[str, Any]:
    cut = weight.copy()
    cut.reshape(-1)[leftovers(weight, conv, given.loss)] = 0
    pairs, names = list[Any](), list[str]()
    for form, own in (("before", weight), ("after", cut)):
        for name, many in (("direct", 2), ("blockgemm", 3)):
            found = list(islice(cpu_form(name).configs(conv, target, Stats.of(own)), many))
            pairs += [(Weight(own), config) for config in found]
            names += [f"{name}_{form}"] * len(found)
    best: dict[str, float] = {}
    for name, us in zip(names, search.medians(Cpu(target), pairs, conv, given.rounds), strict=True):
        best[name] = min(best.get(name, np.inf), us)
    mask = (weight != 0).reshape(conv.k, -1)
    shuffled = np.array_split(np.random.default_rng(0).permutation(conv.k), max(1, conv.k // clusters.SIZE))
    return {
        "kind": kind, "conv": str(conv), "count": count, "us": best, "alike": Stats.of(weight).alike,
        "refused": blockgemm.refuse(conv, target, Stats.of(weight)), "removed": 1 - np.count_nonzero(cut) /
        np.count_nonzero(weight), "in_blocks": {"before": _inside(weight, conv), "after": _inside(cut, conv)},
        "random_groups": sum(int(majority(mask[group]).sum()) for group in shuffled) / max(1,
        int(mask.sum())),
    }  # fmt: skip


def _inside(weight: Array, conv: Conv) -> float:
    kept = (weight != 0).reshape(conv.k, -1)
    return sum(int(kept[np.ix_(f, p)].sum()) for f, p in clusters.tiles(weight, conv)) / max(
        1, int(kept.sum())
    )


def show(result: dict[str, Any]) -> None:
    table = Table(
        title=f"{result['pattern']}: {result['loss']:.0%} of each layer's weight may go ({result['target']})"
    )
    headings = (
        "",
        "layer",
        "in blocks",
        "after",
        "random",
        "gone",
        "direct us",
        "after",
        "block us",
        "after",
        "block after / direct before",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("", "layer") else "right", no_wrap=True)
    for r in result["layers"]:
        us, inside = r["us"], r["in_blocks"]
        figures = [
            f"{us[n]:.0f}" for n in ("direct_before", "direct_after", "blockgemm_before", "blockgemm_after")
        ]
        ratio = us["direct_before"] / us["blockgemm_after"]
        shares = [
            f"{share:.0%}" for share in (inside["before"], inside["after"], r["random_groups"], r["removed"])
        ]
        table.add_row(r["kind"], r["conv"], *shares, *figures, f"{ratio:.2f}x")
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
