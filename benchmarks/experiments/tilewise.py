"""Tile-wise sparsity on the shapes of real networks: `tilewise` beside the fastest dense convolution, layer
by layer.

    python -m benchmarks.experiments.tilewise --json tilewise.json
        needs the pattern files for their shapes; OpenVINO if installed

Weights are seeded and pruned as `aerogel.prune(pattern="tilewise")` does (TW-2D, 75 %). Dense is the fastest
of torch's layouts and OpenVINO; ours is the fastest of a few configurations, timed in the same rounds. A
network's chosen layers are those where tile-wise wins most, down to 70 % of its dense convolution time;
`ratio` is summed over those, `all` over every layer. bf16 is measured where the CPU has AMX, or where it is
asked for (`--dtypes fp32,bf16`; without AMX it is stored in bf16 and summed with FMAs).
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

from aerogel.backends.cpu.trial import candidate
from aerogel.ir import Conv, Dtypes, Stats, Target, Weight, from_float64, host
from aerogel.methods.dense import cpu as dense
from aerogel.methods.direct import cpu as direct
from aerogel.methods.tilewise import cpu as tilewise
from aerogel.pruning.masks import masks
from aerogel.tune.measure import interleaved
from benchmarks.harness.opponents import prepare
from benchmarks.zoo.patterns import distinct, load

CHOSEN = 0.7
"""The share of the dense time that the chosen layers hold."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--patterns", type=Path, default=Path(__file__).parents[3] / "shared" / "patterns")
    parser.add_argument(
        "--networks", default="resnet50-90,vgg19-92", help="pattern files whose shapes are used"
    )
    parser.add_argument("--sparsity", type=float, default=0.75)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--configs", type=int, default=6)
    parser.add_argument("--only", type=int, help="so many layers of each network, for a quick look")
    known = "fp32,bf16" if "amx_bf16" in host().extras else "fp32"
    parser.add_argument("--dtypes", default=known, help=f"fp32, bf16 or both (here: {known})")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    target = replace(host(), threads=1)
    result: dict[str, Any] = {
        "target": str(target),
        "sparsity": given.sparsity,
        "date": date.today().isoformat(),
        "networks": {},
    }
    result |= {"ratio": {}, "all": {}}
    for dtype in given.dtypes.split(","):
        held: list[dict[str, Any]] = []
        for name in given.networks.split(","):
            layers = distinct(load(given.patterns / f"{name}.npz"))[: given.only]
            label = f"{name.partition('-')[0]}{'' if dtype == 'fp32' else f' {dtype}'}"
            kinds = Dtypes.of({"fp32": "f32"}.get(dtype, dtype))
            rows = [
                measure(replace(layer.conv, dtypes=kinds), count, target, given)
                for layer, count in track(layers, label, console=Console(stderr=True))
            ]
            result["networks"][label] = summed(rows)
            held += rows
        result["ratio"][dtype] = _over([r for r in held if r["chosen"]])
        result["all"][dtype] = _over(held)
    show(result)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


def measure(conv: Conv, count: int, target: Target, given: argparse.Namespace) -> dict[str, Any]:
    """Medians of one layer in all forms."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(conv.weight_shape).astype(np.float32)
    weight *= masks({"": torch.from_numpy(np.abs(weight))}, {"": given.sparsity}, "tilewise")[""].numpy()
    x, bias = (
        rng.standard_normal(conv.x_shape).astype(np.float32),
        rng.standard_normal(conv.k).astype(np.float32),
    )
    kind = conv.dtypes.input
    held, x_held = (from_float64(array.astype(np.float64), kind) for array in (weight, x))
    stats = Stats.of(held)
    configs = [
        *islice(tilewise.configs(conv, target, stats), given.configs),
        *islice(direct.configs(conv, target, stats), 2),
    ]
    configs += dense.configs(conv, target, stats)
    calls = [candidate(conv, config, Weight(held), x_held, bias, target) for config in configs]
    names = [config.method for config in configs]
    others, absent = prepare(
        ["openvino" if kind == "f32" else "openvino-bf16"],
        _module(conv, weight, bias),
        ((torch.from_numpy(x),), {}),
        1,
    )
    with torch.inference_mode():
        times = interleaved([*calls, *others.values()], given.rounds)
    best: dict[str, float] = {}
    for name, spent in zip([*names, *others], times, strict=True):
        best[name] = min(best.get(name, np.inf), float(np.median(spent)))
    fastest = min(("dense", *others), key=lambda n: best[n])
    ours = {f"{n}_us": best[n] for n in ("tilewise", "direct")}
    return {
        "conv": str(conv),
        "count": count,
        "dense": fastest,
        "dense_us": best[fastest],
        **ours,
        "absent": absent,
        "chosen": False,
    }


def _module(conv: Conv, weight: Any, bias: Any) -> torch.nn.Module:
    layer = torch.nn.Conv2d(
        conv.c, conv.k, (conv.r, conv.s), conv.stride, (conv.pad[0], conv.pad[1]), groups=conv.groups
    )
    assert layer.bias is not None
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight))
        layer.bias.copy_(torch.from_numpy(bias))
    return torch.nn.Sequential(layer, torch.nn.ReLU()).eval()


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A network's layers with the chosen ones marked."""
    total, held = sum(r["count"] * r["dense_us"] for r in rows), 0.0
    for row in sorted(rows, key=lambda r: -r["dense_us"] / r["tilewise_us"]):
        if held < CHOSEN * total:
            row["chosen"] = True
            held += row["count"] * row["dense_us"]
    chosen = [r for r in rows if r["chosen"]]
    return {"ratio": _over(chosen), "share": held / total, "all": _over(rows), "layers": rows}


def _over(rows: list[dict[str, Any]]) -> float:
    dense, ours = (sum(float(r["count"] * r[name]) for r in rows) for name in ("dense_us", "tilewise_us"))
    return dense / ours


def show(result: dict[str, Any]) -> None:
    for name, network in result["networks"].items():
        table = Table(
            title=f"{name}: tile-wise at {result['sparsity']:.0%} beside the fastest dense "
            f"({result['target']})"
        )
        for heading in ("layer", "times", "dense us", "by", "tilewise us", "direct us", "ratio", "chosen"):
            table.add_column(heading, justify="left" if heading in ("layer", "by") else "right", no_wrap=True)
        for r in network["layers"]:
            figures = (f"{r['dense_us']:.0f}", r["dense"], f"{r['tilewise_us']:.0f}", f"{r['direct_us']:.0f}")
            table.add_row(
                r["conv"], str(r["count"]), *figures, f"{r['dense_us'] / r['tilewise_us']:.2f}x", "yes" if
                r["chosen"] else ""
            )  # fmt: skip
        Console(width=140).print(table)
        share = f"{network['share']:.0%} of dense time"
        print(
            f"{name}: {network['ratio']:.2f}x over the chosen layers ({share}), "
            f"{network['all']:.2f}x over all"
        )
    for dtype, ratio in result["ratio"].items():
        print(f"{dtype}: {ratio:.2f}x over the chosen layers, {result['all'][dtype]:.2f}x over all")


if __name__ == "__main__":
    main()
