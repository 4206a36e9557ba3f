r"""Whether the tuner orders a layer's configurations as the network does.

    python -m benchmarks.experiments.in_network resnet50 \
        --pattern resnet50-90.npz --json in_network.json

Each layer's contenders are timed four ways: alone, at the pitch it would have by itself; alone, where its
maps stand in the network; as the tuner does it, in plans that give every layer its first contender, its
second and so on; and for reference in other plans, in which each layer's contenders stand in an order of
their own, so that its neighbours are others, with three times the rounds. The fastest round of each counts.
`spearman` is the rank correlation of the first three with the reference, by layer; `regret` is the reference
time of what each would choose over the best. Everything here is measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aerogel.backends.cpu.backend import Cpu
from aerogel.capture.network import Network
from aerogel.capture.nodes import problem
from aerogel.ir import ALONE, Choice, Config, Conv, Place, Weight
from aerogel.methods import demands, ranked
from aerogel.progress import Progress
from aerogel.runtime.reading import network_of
from aerogel.tune.inside import refined
from aerogel.tune.measure import interleaved
from aerogel.zoo.models import MODELS, example, make, prune
from benchmarks.zoo.patterns import prune_pattern
from tests.nightly import machine

Times = dict[str, list[list[float]]]
"""Microseconds: [layer][contender][round]."""
WAYS = ("alone", "alone in place", "tuner")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--pattern", type=Path, help="a .npz of real masks")
    parser.add_argument("--sparsity", type=float, default=0.9, help="where there is no pattern")
    parser.add_argument("--contenders", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="append the result there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = make(given.model)
    model = prune_pattern(model, given.pattern) if given.pattern else prune(model, given.sparsity)
    with torch.no_grad():
        found = measured(model, example(given.model), given.contenders, given.rounds)
    found |= {"model": given.model, "pruning": given.pattern.stem if given.pattern else given.sparsity}
    for way in WAYS:
        rows = [layer[way] for layer in found["layers"]]
        spearman, regret = ([row[name] for row in rows] for name in ("spearman", "regret"))
        found[way] = {
            "median spearman": round(float(np.median(spearman)), 3),
            "within 3 %": round(float(np.mean(np.array(regret) <= 1.03)), 3),
            "mean regret": round(float(np.mean(regret)), 4),
        }
        print(f"{given.model} {found['pruning']}, {len(rows)} layers, {way}: {found[way]}")
    if given.json:
        with given.json.open("a") as file:
            file.write(json.dumps({**found, "machine": machine()}) + "\n")


def measured(model: torch.nn.Module, call: Any, most: int, rounds: int) -> dict[str, Any]:
    backend = Cpu()
    network, _ = network_of(model, call, None, Progress())
    inputs = network.captured.flat(*call)
    shapes = network.shapes(inputs)
    convs = {node.name: problem(node, shapes) for node in network.convs()}
    places = backend.places(network, shapes)
    options = {name: _contenders(backend, network, name, convs[name], places[name], most) for name in places}
    options = {name: own for name, own in options.items() if len(own) > 2}
    rng = np.random.default_rng(0)
    orders = {name: rng.permutation(len(own)) for name, own in options.items()}
    weights = {node.name: network.weight(node) for node in network.convs()}
    times = {
        "alone": _alone(backend, convs, options, weights, {}, rounds),
        "alone in place": _alone(backend, convs, options, weights, places, rounds),
        "tuner": _in_network(backend, network, convs, options, {}, inputs, rounds),
    }
    reference = _in_network(backend, network, convs, options, orders, inputs, 3 * rounds)
    layers = []
    for name, own in options.items():
        truth = [min(t) for t in reference[name]]
        row: dict[str, Any] = {"conv": str(convs[name]), "us": dict(zip(map(str, own), truth, strict=True))}
        for way in WAYS:
            spent = [float(np.min(t)) for t in times[way][name]]
            best = int(np.argmin(spent))
            if way == "tuner":
                alike = [n for n in options if (convs[n], options[n]) == (convs[name], own)]
                several = [times[way][n] for n in dict.fromkeys([name, *alike])]
                best = own.index(refined(Choice("", name, convs[name], own[0]), own, several).config)
            row[way] = {"spearman": _spearman(spent, truth), "regret": truth[best] / min(truth)}
        layers.append(row)
    return {"layers": layers, "rounds": rounds, "target": str(backend.target)}


def _contenders(
    backend: Cpu, network: Network, name: str, conv: Conv, place: Place, most: int
) -> list[Config]:
    """Of the first method by rank that takes the layer, every third of the cost model's: good ones and
    others."""
    node = next(n for n in network.convs() if n.name == name)
    stats = replace(network.stats(node), place=place)
    forms = (backend.form(m) for m in ranked())
    form = next(f for f in forms if f.refuse(conv, backend.target, stats) is None)
    modest = (c for c in form.configs(conv, backend.target, stats) if not demands(c))
    return list(islice(modest, 0, 3 * most, 3))


def _alone(
    backend: Cpu,
    convs: dict[str, Conv],
    options: dict[str, list[Config]],
    weights: dict[str, Weight],
    places: Mapping[str, Place],
    rounds: int,
) -> Times:
    found: Times = {}
    for name, own in options.items():
        conv, rng = convs[name], np.random.default_rng(0)
        x, bias = rng.standard_normal(conv.x_shape).astype(np.float32), np.zeros(conv.k, np.float32)
        place = places.get(name, ALONE)
        calls = [backend.candidate(conv, config, weights[name], x, bias, place) for config in own]
        found[name] = interleaved(calls, rounds)
    return found


def _in_network(
    backend: Cpu,
    network: Network,
    convs: dict[str, Conv],
    options: dict[str, list[Config]],
    orders: dict[str, Any],
    inputs: list[Any],
    rounds: int,
) -> Times:
    count = max(map(len, options.values()))
    index: dict[str, Sequence[int]] = {n: orders.get(n, range(len(own))) for n, own in options.items()}
    plans = [
        {n: Choice("", n, convs[n], own[index[n][i % len(own)]]) for n, own in options.items()}
        for i in range(count)
    ]
    shapes = network.shapes(inputs)
    found: Times = {name: [[] for _ in own] for name, own in options.items()}
    runs = backend.in_network(network, shapes, plans)
    for round_ in range(rounds + 1):
        for i, run in enumerate(runs):
            spent = run(inputs)
            for name, own in options.items():
                if round_ and i < len(own):
                    found[name][index[name][i]].append(spent[name])
    return found


def _spearman(a: Sequence[float], b: Sequence[float]) -> float:
    first, second = (np.argsort(np.argsort(v)) for v in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


if __name__ == "__main__":
    main()
