"""The network as it runs, in a model file: its fused graph, and each weight as its kernel reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from aerogel.backends.cpu.backend import Cpu
from aerogel.capture.captured import Captured
from aerogel.capture.half import Half
from aerogel.capture.network import Network
from aerogel.errors import InvalidFile
from aerogel.ir import GRAPH, Array, Config, Dtypes, Graph, Node, Packed, Stats, Weight
from aerogel.ir.tensors import TORCH
from aerogel.methods import cpu_form
from aerogel.runtime.module import Compiled
from aerogel.saved.container import PACKED, Arrays
from aerogel.saved.structure import stored, tensor

OWN = "network:"
"""The names of its other constants, where the model as it was captured has not the same."""


def described(
    points: Sequence[Compiled], known: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any] | None, str, dict[str, tuple[str, Array]]]:
    """What a file says of the network, its graph, and arrays. None where points run different networks, or
    torch runs them."""
    networks = [p.network for p in points if p.network is not None and p.how == GRAPH]
    reserved = any(name.startswith((PACKED, OWN)) for name in known)
    if reserved or not networks or not all(isinstance(p.backend, Cpu) for p in points):
        return None, "", {}
    first = networks[0]
    if any(n.graph != first.graph or n.half != first.half for n in networks):
        return None, "", {}
    packed, arrays = _weights(points, first)
    weights, constants = {one["weight"] for one in packed}, {}
    for name, value in first.constants.items():
        if name in weights:
            continue
        same = name in known and known[name].dtype == value.dtype and torch.equal(known[name], value)
        constants[name] = name if same else OWN + name
        if not same:
            arrays[OWN + name] = stored(value)
    half = None
    if first.half is not None:
        half = {"dtypes": str(first.half.dtypes), "stored": dict(first.half.stored)}
        half["stay"] = sorted(first.half.stay)
    return {"packed": packed, "constants": constants, "half": half}, first.graph.to_json(), arrays


def _weights(
    points: Sequence[Compiled], network: Network
) -> tuple[list[dict[str, Any]], dict[str, tuple[str, Array]]]:
    """Every weight as each configuration chosen for it packs it; arrays that two share stand once."""
    nodes = {node.name: node for node in network.convs()}
    said: dict[tuple[str, str], dict[str, Any]] = {}
    arrays: dict[str, tuple[str, Array]] = {}
    names: dict[int, str] = {}
    for choice in (c for p in points if p.network is not None for c in p.plan.choices):
        weight, form = nodes[choice.node].conv_inputs()[1], cpu_form(choice.config.method)
        if (key := (weight, str(choice.config))) in said:
            continue
        made = network.weights[weight].packed(form.pack, choice.conv, choice.config)
        for name, array in made.arrays.items():
            if id(array) not in names:
                names[id(array)] = f"{PACKED}{len(said)}.{name}"
                arrays[names[id(array)]] = array.dtype.name, array
        said[key] = {
            "weight": weight,
            "stats": _numbers(network.weights[weight].stats),
            "config": str(choice.config),
            "format": made.format,
            "version": made.version,
            "meta": dict(made.meta),
            "arrays": {name: names[id(array)] for name, array in made.arrays.items()},
        }
    return list(said.values()), arrays


def weights_of(said: Mapping[str, Any], graph: Graph, arrays: Arrays) -> dict[str, Weight]:
    """The weights, none of them dense; each is looked at before a kernel has it."""
    nodes: dict[str, Node] = {n.conv_inputs()[1]: n for n in graph.nodes if n.conv is not None}
    made: dict[str, Weight] = {}
    for one in said["packed"]:
        config, version, meta = Config.parse(str(one["config"])), one["version"], one["meta"]
        if not all(type(number) is int for number in (version, *meta.values(), *one["stats"])):
            raise InvalidFile(f"a packed weight says '{str(meta)[:80]}'")
        held = {str(name): arrays[str(place)][1] for name, place in one["arrays"].items()}
        packed = Packed(str(one["format"]), version, held, {str(n): v for n, v in meta.items()})
        name, form = str(one["weight"]), cpu_form(config.method)
        conv = nodes[name].conv
        assert conv is not None
        form.check(packed, conv)
        if name not in made:
            made[name] = Weight.of(partial(form.unpack, packed, conv), Stats(*one["stats"]))
        made[name].have(config, packed)
    return made


def _numbers(stats: Stats) -> list[int]:
    """What is known of a weight. It only says which configurations a plan may name, each of them a bounded
    one: a file that lies about it harms nobody."""
    counted = (stats.weights, stats.nonzeros, stats.empty_filters, stats.longest_filter)
    return [*counted, stats.shared, stats.alike]


def network_of(
    said: Mapping[str, Any],
    graph: Graph,
    weights: Mapping[str, Weight],
    arrays: Arrays,
    captured: Captured,
) -> Network:
    """The network of a captured model over weights that are there already."""
    outside = captured.graph
    if graph.inputs != outside.inputs or len(graph.outputs) != len(outside.outputs):
        raise InvalidFile("the network has other inputs and outputs than the model")
    constants = {str(name): tensor(*arrays[str(place)]) for name, place in said["constants"].items()}
    for node in graph.nodes:
        if node.conv is not None and (name := node.conv_inputs()[1]) in weights:
            dtype = TORCH[node.conv.dtypes.weight]
            constants[name] = torch.empty(node.conv.weight_shape, dtype=dtype, device="meta")
    if set(constants) != set(graph.constants):
        raise InvalidFile("the network's constants are not those of the file")
    half, raw = None, said["half"]
    if raw is not None:
        types = {str(name): str(dtype) for name, dtype in raw["stored"].items()}
        half = Half(Dtypes.parse(str(raw["dtypes"])), types, frozenset(map(str, raw["stay"])))
    return Network(captured, graph, constants, half, weights=weights)
