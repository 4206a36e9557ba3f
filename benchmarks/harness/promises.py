r"""The promises that only a quiet machine can show: never slower, the same choice each time, no queue for the
GIL.

    python -m benchmarks.harness.promises slower --models resnet50,unet --sparsities 0,0.8,0.95 \
        --rounds 200 --append slower.jsonl
    python -m benchmarks.harness.promises stable --pattern resnet50-90.npz
    python -m benchmarks.harness.promises busy
    python -m benchmarks.harness.promises scaling --pattern resnet50-90.npz

`slower` passes where the 95 % interval of the median of aerogel / fastest torch stays below 1.02. `stable`
compiles three times: total time within 5 %, at least 90 % of the layers on the same method. `busy` passes
where the median latency beside a Python thread that never sleeps is within 1.5 times the idle one plus 10 ms.
`scaling` passes where two threads are 1.85 times as fast as one, or 0.95 of what a loop of FMAs gains on the
same two cores in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

import aerogel
from aerogel.backends.cpu.probe import multiply
from aerogel.errors import UnsupportedModel
from aerogel.ir import host
from aerogel.tune.measure import interleaved
from aerogel.zoo.models import MODELS, example, make, prune
from benchmarks.run import compare
from benchmarks.zoo.patterns import prune_pattern

SMALLER = {"vgg19": 112, "unet": 192, "yolov3": 192, "yolov3spp": 192, "yolov8s": 256, "detector": 256}
"""Image sides that let 200 rounds of the large models fit an hour; the others run at their usual size."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("promise", choices=["slower", *PROMISES])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sparsities", default="0,0.8,0.95")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--dtype", choices=("int8",), help="of aerogel, for slower; torch stays in f32")
    parser.add_argument(
        "--pattern",
        type=Path,
        help="a .npz of real masks for resnet50 (all but slower); else 90 %% by magnitude",
    )
    parser.add_argument("--append", type=Path, help="add each result as a line of this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: Iterator[dict[str, Any]]
    if given.promise == "slower":
        results = (
            slower(m, float(s), given.rounds, given.dtype)
            for m in given.models.split(",")
            for s in given.sparsities.split(",")
        )
    else:
        model = make("resnet50")
        model = prune_pattern(model, given.pattern) if given.pattern else prune(model, 0.9)
        results = iter([PROMISES[given.promise](model)])
    for result in results:
        result |= {
            "promise": given.promise,
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "commit": commit(),
        }
        print(json.dumps(result), flush=True)
        if given.append:
            with given.append.open("a") as file:
                file.write(json.dumps(result) + "\n")


def commit() -> str:
    """The commit that is measured: a file of results grows over several."""
    ran = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return ran.stdout.strip()


def slower(name: str, sparsity: float, rounds: int, dtype: str | None = None) -> dict[str, Any]:
    """One model at one sparsity beside torch in both layouts. In int8 what an answer loses is said and not
    judged: seeded weights have no accuracy."""
    model = make(name)
    model = prune(model, sparsity) if sparsity else model
    size = SMALLER.get(name, MODELS[name][1])
    stored = getattr(torch, dtype) if dtype else None
    try:
        r = compare(model, example(name, 1, size), ["torch"], 1, rounds, "fast", None, stored)
    except UnsupportedModel as why:
        return {"model": name, "sparsity": sparsity, "dtype": dtype, "refused": str(why), "kept": True}
    low, high = r["interval"][r["fastest"]]
    right = dtype is not None or r["error"]["aerogel"] <= 2 * r["error"]["eager"]
    return {
        "model": name, "sparsity": sparsity, "size": size, "ratio": r["ratio"]["fastest"],
        "aerogel_over_torch": [1 / high, 1 / low], "kept": 1 / low < 1.02, "sparse_flops": r["sparse_flops"],
        "error": r["error"], "right": right, "how": r["how"],
        "compile_s": r["compile_s"], "rounds": rounds, "target": r["target"],
    } | ({"dtype": dtype, "notes": r["notes"]} if dtype else {})  # fmt: skip


def stable(model: torch.nn.Module) -> dict[str, Any]:
    """Three compiles of one model, timed in one run."""
    x = torch.randn(1, 3, 224, 224)
    compiled = [aerogel.compile(model, x, store=mkdtemp()) for _ in range(3)]  # each measures for itself
    with torch.no_grad():
        times = np.array(interleaved([partial(f, x) for f in compiled], 60), dtype=np.float64)
    middle = np.median(times / times[:1], axis=1)
    methods = [[c.config.method for c in f.plan.choices] for f in compiled]
    same = float(np.mean([len(set(layer)) == 1 for layer in zip(*methods, strict=True)]))
    spread = float(middle.max() / middle.min() - 1)
    return {
        "times_to_first": middle.tolist(),
        "spread": spread,
        "same_method": same,
        "kept": spread < 0.05 and same >= 0.9,
    }


def busy(model: torch.nn.Module) -> dict[str, Any]:
    """Latency alone and beside a Python thread that holds the GIL whenever it can."""
    x = torch.randn(1, 3, 224, 224)
    fast = aerogel.compile(model, x, store=mkdtemp())
    idle = _latency(fast, x)
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        beside = _latency(fast, x)
    finally:
        stop.set()
        thread.join()
    return {"idle_ms": idle, "busy_ms": beside, "kept": beside <= 1.5 * idle + 10}


def scaling(model: torch.nn.Module) -> dict[str, Any]:
    """One thread and two, and beside them a loop of FMAs that needs no memory."""
    x, compiled = torch.randn(1, 3, 224, 224), {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        compiled[threads] = aerogel.compile(model, x, store=mkdtemp())
    spent = dict[str, list[float]]()
    with ThreadPoolExecutor(2) as pool, torch.no_grad():
        for threads, _ in product((1, 2), range(3)):
            torch.set_num_threads(threads)
            compiled[threads](x)
        for _, threads in product(range(60), (1, 2)):
            torch.set_num_threads(threads)
            began = time.perf_counter()
            compiled[threads](x)
            middle = time.perf_counter()
            list(pool.map(lambda _: multiply(host().isa), range(threads)))
            spent.setdefault(f"aerogel {threads}", []).append(middle - began)
            spent.setdefault(f"fma {threads}", []).append((time.perf_counter() - middle) / threads)
    torch.set_num_threads(1)
    gained = {
        name: float(np.median(np.array(spent[f"{name} 1"]) / np.array(spent[f"{name} 2"])))
        for name in ("aerogel", "fma")
    }
    ms = {name: float(np.median(t)) * 1e3 for name, t in spent.items()}
    kept = gained["aerogel"] >= min(1.85, 0.95 * gained["fma"])
    return {"scaling": gained, "ms": ms, "kept": kept}


PROMISES = {"stable": stable, "busy": busy, "scaling": scaling}


def _latency(fast: torch.nn.Module, x: torch.Tensor) -> float:
    times = []
    for _ in range(60):
        began = time.perf_counter()
        fast(x)
        times.append(1e3 * (time.perf_counter() - began))
    return float(np.median(times))


if __name__ == "__main__":
    main()
