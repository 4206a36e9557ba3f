"""Structural mutants of model files: python -m tests.fuzz.files --seed 7 --count 100

Takes files that are good, changes what they say (nodes, operators, arguments, sizes, types, plans, the index
of arrays; not their bytes), makes the digest right again, loads each and calls it on its own example. Each
must be refused in words or give an answer, within 2 GB and 20 s of CPU. What is not, is printed with its
seed; --keep FOLDER writes it there.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import os
import re
import resource
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aerogel.ir import INTS, OPS
from aerogel.saved import container
from tests.fuzz.samples import samples
from tests.limited import CPU_SECONDS, MORE_BYTES, loaded

BATCH = 64
"""Mutants that one child looks at, one after the other."""
WILD: list[Any] = [
    0, 1, -1, 2, 3, 7, 12, 64, 255, 2**15, 2**20, 2**31 - 1, 2**31, 2**40, 2**62, 2**63, -(2**31), 10**30,
    0.0, 0.5, -1.5, 1e308, 1e-300, float("inf"), float("nan"), None, True, False, "", "x", "x" * 5000,
    "float16", "graph", "\x1b[2J", [], [0], [1, 2, 3], [[1]], {}, {"a": 1}, [2**31, 2**31], [-1, -1], [1] *
    70,
]  # fmt: skip
Parsed = dict[str, Any]
Arrays = dict[str, tuple[str, Any]]


def mutant(rng: np.random.Generator, content: bytes) -> bytes:
    """One to three changes."""
    texts, arrays = container.from_bytes(content)
    parsed: Parsed = {name: json.loads(text) for name, text in texts.items()}
    own: Arrays = dict(arrays)
    if rng.random() < 0.3:  # as a file of an older version: packed when it is loaded
        parsed["model"]["network"] = None
        own = {name: held for name, held in own.items() if not name.startswith(container.PACKED)}
    for _ in range(int(rng.integers(1, 4))):
        [_node, _node, _argument, _argument, _value, _value, _value, _key, _plan, _index][
            int(rng.integers(10))
        ](rng, parsed, own)
    return container.to_bytes({name: json.dumps(p) for name, p in parsed.items()}, own)


def _pick(rng: np.random.Generator, items: Any) -> Any:
    return items[int(rng.integers(len(items)))]


GRAPHS = ("graph", "network")


def _graph(rng: np.random.Generator, parsed: Parsed) -> Any:
    """As it was captured, or as it runs."""
    found = parsed[_pick(rng, GRAPHS[: 1 + ("network" in parsed)])]
    return found if isinstance(found, dict) else {}


def _node(rng: np.random.Generator, parsed: Parsed, _: Arrays) -> None:
    """Nodes dropped, twice, swapped, renamed, or with another operator."""
    nodes = _graph(rng, parsed).get("nodes")
    if (
        not isinstance(nodes, list)
        or not nodes
        or not all(isinstance(n, dict) and "name" in n for n in nodes)
    ):
        return
    i, j = (int(v) for v in rng.integers(0, len(nodes), 2))
    match int(rng.integers(8)):
        case 0:
            del nodes[i]
        case 1:
            nodes.insert(j, copy.deepcopy(nodes[i]))
        case 2:
            nodes[i], nodes[j] = nodes[j], nodes[i]
        case 3:
            nodes[i]["name"] = _pick(rng, [nodes[j]["name"], "x", "", "new\n", 5])
        case 4:
            nodes[i]["op"], nodes[i]["conv"] = f"int.{_pick(rng, INTS)}", None
        case 5:
            base = _pick(
                rng,
                [
                    *sorted(OPS),
                    "empty",
                    "new_empty",
                    "rand",
                    "resize_",
                    "relu_",
                    "set_",
                    "copy_",
                    "from_file",
                    "item",
                ],
            )
            overloads = torch.ops.aten.__getattr__(base).overloads()  # type: ignore[no-untyped-call]
            nodes[i]["op"], nodes[i]["conv"] = f"aten.{base}.{_pick(rng, overloads)}", None
        case 6:
            nodes[i]["op"] = _pick(
                rng, ["getitem", "onnx", "conv", "aten.relu.nothing", "aten", "", "int.pow", "os.system"]
            )
        case 7:
            made = copy.deepcopy(nodes[i]) | {"name": "made", "op": _pick(rng, nodes)["op"]}
            nodes.insert(i + 1, made)
            for place, key in _places(nodes[i + 2 :]):
                if key == "ref" and place[key] == nodes[i]["name"]:
                    place[key] = "made"


def _places(raw: Any) -> list[tuple[Any, Any]]:
    """Every container within, with each of its keys."""
    found: list[tuple[Any, Any]] = []
    if isinstance(raw, dict | list):
        for key in raw if isinstance(raw, dict) else range(len(raw)):
            found.append((raw, key))
            found += _places(raw[key])
    return found


def _argument(rng: np.random.Generator, parsed: Parsed, _: Arrays) -> None:
    """Arguments of a node: another number, another value, one more, one less, in a list, by name."""
    graph = _graph(rng, parsed)
    nodes = graph.get("nodes")
    known = (
        [n for n in nodes if isinstance(n, dict) and isinstance(n.get("args"), list)]
        if isinstance(nodes, list)
        else []
    )
    if not known:
        return
    node = _pick(rng, known)
    others = [*(n.get("name") for n in known), *map(str, graph.get("constants") or []), "x"]
    new = {"ref": _pick(rng, others)} if rng.random() < 0.5 else _pick(rng, WILD)
    special = {
        _pick(rng, ["dtype", "device", "layout", "memory_format", "float"]): _pick(
            rng, ["float64", "int8", "meta", "sparse_coo", "inf"]
        )
    }
    new = special if rng.random() < 0.1 else new
    args, i = node["args"], int(rng.integers(len(node["args"]) + 1))
    last = min(i, len(args) - 1)
    match int(rng.integers(7)):
        case 0 if args:
            del args[last]
        case 1:
            args.insert(i, new)
        case 2 if isinstance(node.get("kwargs"), dict):
            node["kwargs"][
                _pick(rng, ["out", "dtype", "device", "dim", "size", "memory_format", "training", "x"])
            ] = new
        case 3 if args:
            args[last] = [args[last]]
        case 4 if args and isinstance(args[last], list) and args[last]:
            args[last] = _pick(rng, args[last])
        case 5 if args and str(node.get("op")).startswith("aten.") and isinstance(node.get("kwargs"), dict):
            _, base, overload = node["op"].split(".")
            schema = getattr(torch.ops.aten.__getattr__(base), overload)._schema
            for argument, value in zip(schema.arguments[last:], args[last:], strict=False):
                node["kwargs"][argument.name] = value
            del args[last:]
        case _ if args:
            args[last] = new


def _value(rng: np.random.Generator, parsed: Parsed, _: Arrays) -> None:
    """Any one thing, anywhere, is something else."""
    places = _places(parsed[_pick(rng, ["model", "model", "plan0", *GRAPHS[: 1 + ("network" in parsed)]])])
    if places:
        container_, key = _pick(rng, places)
        container_[key] = (
            copy.deepcopy(_pick(rng, WILD)) if rng.random() < 0.7 else copy.deepcopy(_other(rng, places))
        )


def _other(rng: np.random.Generator, places: list[tuple[Any, Any]]) -> Any:
    container_, key = _pick(rng, places)
    return container_[key]


def _key(rng: np.random.Generator, parsed: Parsed, _: Arrays) -> None:
    """A key missing, or one more; a version."""
    places = [(c, k) for c, k in _places(parsed[_pick(rng, list(parsed))]) if isinstance(c, dict)]
    if places and rng.random() < 0.6:
        container_, key = _pick(rng, places)
        if rng.random() < 0.5:
            del container_[key]
        else:
            container_[_pick(rng, ["new", "format", "ref", "dtype", "tensor"])] = container_[key]
    elif rng.random() < 0.5:
        name = _pick(rng, list(parsed))
        if isinstance(parsed[name], dict):
            parsed[name]["format"] = _pick(
                rng, ["aerogel-model-2", "aerogel-model-4", "aerogel-graph-2", "aerogel-plan-2", 3, None]
            )
    else:
        parsed[_pick(rng, ["plan1", "more"])] = copy.deepcopy(parsed[_pick(rng, list(parsed))])


def _plan(rng: np.random.Generator, parsed: Parsed, _: Arrays) -> None:
    """Configurations, convolutions and machines with other numbers, or each other's."""
    texts = [
        (c, k)
        for c, k in _places(parsed["plan0"]) + _places(parsed["graph"])
        if k in ("config", "conv", "target", "node", "layer")
    ]
    texts = [(c, k) for c, k in texts if isinstance(c[k], str)]
    if not texts:
        return
    container_, key = _pick(rng, texts)
    numbers = list(re.finditer(r"\d+", container_[key]))
    if numbers and rng.random() < 0.8:
        at = _pick(rng, numbers)
        wild = _pick(rng, [0, 1, 2, 3, 5, 16, 33, 64, 1000, 4096, 2**20, 2**31 - 1, 2**31, 2**62, 10**20])
        container_[key] = container_[key][: at.start()] + str(wild) + container_[key][at.end() :]
    else:
        container_[key] = _other(rng, [(c, k) for c, k in texts if k == key])


def _index(rng: np.random.Generator, _: Parsed, arrays: Arrays) -> None:
    """Arrays of another type, shape or name; fewer, or each other's."""
    names = list(arrays)
    if not names:
        return
    name = _pick(rng, names)
    dtype, held = arrays[name]
    match int(rng.integers(6)):
        case 0:
            del arrays[name]
        case 1:
            arrays[name] = arrays[_pick(rng, names)]
        case 2:
            other = _pick(rng, [d for d in container.DTYPES if d != "bool"])
            with np.errstate(all="ignore"):
                arrays[name] = (other, held.astype(container.DTYPES[other]))
        case 3:
            shape = _pick(rng, [(-1,), (1, -1), (-1, 1, 1, 1), (1, 1, -1, 1)])
            arrays[name] = (dtype, held.reshape(shape))
        case 4:
            arrays[name] = (dtype, held.reshape(-1)[: int(rng.integers(held.size + 1))])
        case 5:
            filled = (
                held.astype(np.float64) * _pick(rng, [0, 1e30, np.nan, -1])
                if dtype.startswith("float")
                else held * 0
            )
            arrays[name] = (dtype, filled.astype(held.dtype))


def judged(seeds: list[int], good: list[bytes], folder: Path) -> dict[int, dict[str, Any]]:
    """What comes of each seed's mutant. A child looks at many; the one it dies of is known by the last line
    it wrote."""
    found: dict[int, dict[str, Any]] = {}
    while len(found) < len(seeds):
        left = [s for s in seeds if s not in found][:BATCH]
        log = folder / "log"
        log.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            _look(left, good, folder, log)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for line in log.read_text().splitlines() if log.exists() else []:
            seed, said = json.loads(line)
            found[seed] = said
        if status != 0:
            first = next(s for s in left if s not in found)
            found[first] = {"kind": f"ended with {signal.Signals(-status).name if status < 0 else status}"}
    return found


def _look(seeds: list[int], good: list[bytes], folder: Path, log: Path) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + MORE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    with log.open("w") as out:
        for seed in seeds:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            path = folder / "mutant.aero"
            path.write_bytes(made(seed, good))
            try:
                said = loaded(str(path), 1 << 20)
            except BaseException as why:
                said = {"kind": f"raised {type(why).__name__}", "says": str(why)[:300]}
            out.write(json.dumps([seed, said], allow_nan=True) + "\n")
            out.flush()
    os._exit(0)


def made(seed: int, good: list[bytes]) -> bytes:
    """The mutant of a seed."""
    rng = np.random.default_rng(seed)
    while True:
        try:
            return mutant(rng, good[int(rng.integers(len(good)))])
        except (
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            RecursionError,
            OverflowError,
        ):  # a change of a change
            continue


def ready() -> list[bytes]:
    """Good files, and everything imported that is imported once."""
    torch.set_num_threads(1)
    torch.relu(torch.empty(1, device="meta"))
    return samples()


GOOD = ("refused", "valid", "large", "out of memory")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args()
    good = ready()
    with tempfile.TemporaryDirectory() as folder:
        found = judged(list(range(asked.seed, asked.seed + asked.count)), good, Path(folder))
    for seed, said in sorted(found.items()):
        if said["kind"] not in GOOD or said.get("unchanged") is False:
            print(seed, said, flush=True)
            if asked.keep is not None:
                (asked.keep / f"{seed}.aero").write_bytes(made(seed, good))
    print(Counter(said["kind"] for said in found.values()))


if __name__ == "__main__":
    main()
