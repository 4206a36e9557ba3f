"""The modelled table: what each method would take on an A100 and an H100, by the cost model of
aerogel/codegen/gpu/cost.py.

    python -m benchmarks.experiments.gpu_model --json benchmarks/results/gpu_model.json
        a minute; needs the patterns and two result files

Modelled, not measured: no kernel has run on a GPU. For each layer of each real pattern of ResNet-50, VGG-19
and YOLOv3 every method in its best configuration by the model; padded slots and wavefronts of stridepack are
those of results/gpu_facts.json. Tile-wise sparsity has no real pattern: its row assumes 75 % zeros, all in
tiles, on ResNet-50. Zeros of feature maps are those of results/activity.json (full size, real photos). Dense
is modelled by the same rules.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from aerogel.codegen.gpu import cost
from aerogel.formats import panels
from aerogel.ir import Config, Conv, Dtypes, Gpu, Idle, Stats
from aerogel.methods import gpu_form
from aerogel.methods.actsparse import gpu as actsparse
from aerogel.methods.direct import gpu as direct
from aerogel.methods.stridepack import gpu as stridepack
from benchmarks.experiments.gpu_facts import PATTERNS
from benchmarks.zoo import patterns

RESULTS = Path(__file__).parents[1] / "results"
NETWORKS = ("resnet50", "vgg19", "yolov3")
MACHINES = {
    "A100": (cost.A100, Gpu("cuda", "sm_80", 108, 166912, tf32=True)),
    "H100": (cost.H100, Gpu("cuda", "sm_90", 132, 232448, tf32=True)),
}
SIMULATED = cost.Machine(1, 1.0, 2, 2, 512, 64, 32, 25, 98304, asynchronous=False, launch_us=0)
"""One multiprocessor of a V100 and its share of L2 and DRAM at 1 GHz: a microsecond is a thousand cycles."""
BATCHES = (1, 16)
MODELLED = ("direct", "stridepack", "tilewise", "blockgemm", "actsparse")
CONFIGS = 12
"""Of a method that are modelled with its exact counts: the first by its estimate."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    facts = json.loads((RESULTS / "gpu_facts.json").read_text())["patterns"]
    names = [p.stem for p in sorted(PATTERNS.glob("*.npz")) if p.stem.startswith(NETWORKS)]
    work = [(name, batch, on) for name in names for batch in BATCHES for on in MACHINES]
    rows = [
        network(name, batch, on, facts[name])
        for name, batch, on in track(work, "modelled", console=Console(stderr=True))
    ]
    rows += [tiled(batch, on) for batch in BATCHES for on in MACHINES]
    rows += [
        skipping(name, batch, on) for name in ("vgg19", "resnet50") for batch in BATCHES for on in MACHINES
    ]
    show(rows)
    if given.json:
        given.json.write_text(json.dumps({"rows": rows}, indent=1))


def network(name: str, batch: int, on: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of all layers: dense in each precision, every method (dense where it refuses), and the
    best of each layer."""
    counted = {row["layer"]: row for row in facts["layers"]}
    us: dict[str, float] = dict.fromkeys(
        ("dense f32", "dense tf32", "dense f16", "best f32", "direct f16", "stridepack f16"), 0.0
    )
    chosen: dict[str, int] = {}
    for layer in patterns.load(PATTERNS / f"{name}.npz"):
        conv, stats = layer.conv.at(batch, *layer.conv.size), Stats.of(layer.mask.astype(np.float32))
        own = {f"dense {kind}": cost.dense(conv, MACHINES[on][0], kind) for kind in ("f32", "tf32", "f16")}
        times = {
            m: t for m in MODELLED if (t := modelled(m, conv, stats, on, counted.get(layer.name))) is not None
        }
        half = replace(conv, dtypes=Dtypes("f16", "f16", "f16", "f16"))
        for m in ("direct", "stridepack"):
            own[f"{m} f16"] = modelled(m, half, stats, on, counted.get(layer.name)) or own["dense f16"]
        if conv.r * conv.s == 1:
            us["1x1 dense f32"] = us.get("1x1 dense f32", 0.0) + own["dense f32"]
            us["1x1 stridepack"] = us.get("1x1 stridepack", 0.0) + times.get("stridepack", own["dense f32"])
        best = min({"dense": own["dense f32"], **times}.items(), key=lambda one: one[1])
        chosen[best[0]] = chosen.get(best[0], 0) + 1
        for key, value in {
            **own,
            **{m: times.get(m, own["dense f32"]) for m in MODELLED},
            "best f32": best[1],
        }.items():
            us[key] = us.get(key, 0.0) + value
    return {"network": name, "batch": batch, "on": on, "us": us, "chosen": chosen}


def modelled(name: str, conv: Conv, stats: Stats, on: str, counted: dict[str, Any] | None) -> float | None:
    """The best of a method's first configurations, or None where it refuses."""
    own, (machine, target) = gpu_form(name), MACHINES[on]
    if own.refuse(conv, target, stats) is not None:
        return None
    offered = [c for c in own.configs(conv, target, stats) if not dict(c.options).get("baked")][:CONFIGS]
    return min(
        cost.microseconds(work(name, conv, c, stats, counted), machine, conv.dtypes == Dtypes())
        for c in offered
    )


def work(name: str, conv: Conv, config: Config, stats: Stats, counted: dict[str, Any] | None) -> cost.Work:
    """With what packing was found to cost, where it was looked at with as many channels a stage."""
    if name == "direct":
        return direct.work(conv, config, stats)
    if name == "stridepack":
        known = None if counted is None else counted["by_channels"].get(str(config["channels"]))
        after = config["reorganized"]
        slots = known and known["slots" if after else "slots_before"] / max(1, stats.nonzeros)
        waves = known and known["after" if after else "before"] / max(1, stats.nonzeros)
        return stridepack.work(conv, config, stats, slots, waves)
    inside = stats.shared if name == "tilewise" else stats.nonzeros * stats.alike // 100
    return panels.work(
        conv, config, inside, stats.nonzeros - inside, min(128 if name == "tilewise" else 32, conv.k)
    )


def tiled(batch: int, on: str) -> dict[str, Any]:
    """ResNet-50 with 75 % zeros, all in tiles: tilewise in f16 and tf32 beside dense."""
    us = dict.fromkeys(("dense f32", "dense tf32", "dense f16", "tilewise tf32", "tilewise f16"), 0.0)
    for layer in patterns.load(PATTERNS / "resnet50-80.npz"):
        conv = layer.conv.at(batch, *layer.conv.size)
        for kind in ("f32", "tf32", "f16"):
            us[f"dense {kind}"] += cost.dense(conv, MACHINES[on][0], kind)
        for kind, dtypes in (("tf32", Dtypes()), ("f16", Dtypes.of("f16"))):
            own, machine = replace(conv, dtypes=dtypes), MACHINES[on][0]
            inside = int(np.prod(conv.weight_shape)) // 4
            offered = panels.configs("tilewise", own, MACHINES[on][1], inside, 0)
            times = [
                cost.microseconds(panels.work(own, c, inside, 0, min(128, conv.k)), machine, kind == "tf32")
                for c in offered
            ]
            us[f"tilewise {kind}"] += min(times)
    return {"network": "resnet50, tile-wise 75 % assumed", "batch": batch, "on": on, "us": us, "chosen": {}}


def skipping(name: str, batch: int, on: str) -> dict[str, Any]:
    """Dense weights, and the zeros that real photos leave in the feature maps."""
    known = json.loads((RESULTS / "activity.json").read_text())["networks"]
    found = next(n for n in known if n["network"] == name and n["on"] == "photos")
    us, chosen = dict.fromkeys(("dense f32", "actsparse", "best f32"), 0.0), {"dense": 0, "actsparse": 0}
    for layer in found["layers"]:
        conv = Conv.parse(layer["conv"])
        if conv.r * conv.s * conv.c == 0 or min(conv.size) < 2:
            continue
        conv, size = conv.at(batch, *conv.size), int(np.prod(conv.weight_shape))
        stats = Stats(size, size, 0, size // conv.k, size, 100, Idle(*layer["zeros"]))
        dense, (machine, target) = cost.dense(conv, MACHINES[on][0], "f32"), MACHINES[on]
        times = [
            cost.microseconds(actsparse.work(conv, c, stats), machine)
            for c in actsparse.configs(conv, target, stats)
        ]
        own = min(times, default=dense)
        chosen["actsparse" if own < dense else "dense"] += 1
        for key, value in (("dense f32", dense), ("actsparse", own), ("best f32", min(own, dense))):
            us[key] += value
    return {"network": f"{name}, zeros of photos", "batch": batch, "on": on, "us": us, "chosen": chosen}


def cycles(run: dict[str, Any]) -> float:
    """Modelled, of a run of results/gpu_simulated.json."""
    if run["kernel"] == "dense":
        return 1e3 * cost.dense(Conv.parse(run["conv"]), SIMULATED, "f32")
    return 1e3 * cost.microseconds(cost.Work(**run["work"]), SIMULATED)


def show(rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(n for r in rows for n in r["us"]))
    table = Table(title="microseconds of all layers, MODELLED, not measured")
    for heading in ("network", "batch", "on", *names, "best of each layer"):
        table.add_column(heading, justify="right")
    for r in rows:
        cells = [f"{r['us'][n]:.0f}" if n in r["us"] else "" for n in names]
        table.add_row(
            r["network"],
            str(r["batch"]),
            r["on"],
            *cells,
            ", ".join(f"{n} {m}" for m, n in sorted(r["chosen"].items())),
        )
    Console(width=220).print(table)


if __name__ == "__main__":
    main()
