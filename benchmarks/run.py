r"""A whole model: aerogel beside its opponents, interleaved in one run.

    python -m benchmarks.run resnet50 --sparsity 0.9 --against torch,inductor,onnxruntime,openvino
    python -m benchmarks.run unet --sparsity 0.9 --rounds 200 --json unet.json
    python -m benchmarks.run resnet50 --sparsity 0.95 --dtype float16 --against openvino-int8
    python -m benchmarks.run resnet50 --sparsity 0.9 --isa avx2 --against torch,inductor,openvino
    python -m benchmarks.run resnet50 --sparsity 0.9 --block 1x4 --dtype int8 \
        --against openvino-int8,onnxruntime,openvino
    python -m benchmarks.run resnet50 --pattern resnet50-90.npz --against torch,inductor,onnxruntime

A pattern is a file of masks; `python -m benchmarks.zoo.patterns resnet50 --sparsity 0.9 -o resnet50-90.npz`
makes one.

`ratio.NAME` is the median over the rounds of opponent / aerogel, each round's pair taken one after the other;
`interval` is its 95 % interval (bootstrap); `ratio.fastest` is to whichever opponent has the lowest median.
`error` is the largest difference to float64 over the largest output. Everything here is measured. With
`--isa avx2` everybody is held to AVX2, which on an AVX-512 CPU is AVX2 code on that CPU, not an older CPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import aerogel
from aerogel.backends import using
from aerogel.backends.cpu.backend import Cpu
from aerogel.ir import host
from aerogel.runtime.headline import count_sparse_flops
from aerogel.tune.measure import interleaved
from aerogel.zoo.models import MODELS, Call, example, make, prune
from benchmarks.harness.opponents import OPPONENTS, calibration, outputs, prepare
from benchmarks.zoo.patterns import prune_pattern

HELD = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # torch's oneDNN and OpenVINO's
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""What holds others to AVX2. onnxruntime cannot be held."""
_NAMES = {"avx512": "AVX-512", "avx2": "AVX2"}
REPRUNED = 0.9
"""The most of a layer's L1 norm that may go into other blocks."""
QUANTILES = {"min": 0.0, "p25": 0.25, "p50": 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--pattern", type=Path, help="a .npz of masks: benchmarks/zoo/patterns.py makes one")
    parser.add_argument(
        "--sparsity", type=float, default=0.0, help="magnitude pruning, where there is no pattern"
    )
    parser.add_argument(
        "--block",
        default="unstructured",
        help="what goes together under --sparsity, such as 1x4; masks of --pattern are repruned to it",
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", type=int, help="image side; each model has its usual one")
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "int8"),
        help="aerogel in half precision or int8; opponents say theirs by name",
    )
    parser.add_argument(
        "--without-amx",
        action="store_true",
        help="keep every oneDNN, torch's and OpenVINO's, from the matrix unit",
    )
    parser.add_argument("--isa", choices=("avx2",), help="hold us and the others to these instructions")
    parser.add_argument("--tune", default="fast")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--against", default="torch", help=f"any of {','.join(OPPONENTS)}")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--append", type=Path, help="add the result, without its plan, as a line of this file"
    )
    parser.add_argument("--explain", type=Path, help="write the report, layer by layer, to this file")
    given = parser.parse_args()
    if given.without_amx:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX10_1_512"  # read when oneDNN is first used
    if given.isa and not HELD.items() <= os.environ.items():  # read when libraries are loaded
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.run", *sys.argv[1:]], os.environ | HELD)
    torch.set_num_threads(given.threads)
    size = given.size or MODELS[given.model][1]
    call = example(given.model, given.batch, size)
    model = pruned(given, call)
    dtype = getattr(torch, given.dtype) if given.dtype else None
    against = given.against.split(",")
    if given.isa and "onnxruntime" in against:
        parser.error("onnxruntime cannot be held to AVX2: leave it out")
    with using(Cpu(replace(host().lower(given.isa or host().isa), threads=given.threads))):
        result = compare(model, call, against, given.threads, given.rounds, given.tune, given.explain, dtype)
    blocks = "" if given.block == "unstructured" else f" {given.block}"
    what = (given.pattern.stem if given.pattern else f"{given.sparsity:.0%}") + blocks
    result |= {
        "model": given.model,
        "pruning": what,
        "batch": given.batch,
        "size": size,
        "dtype": given.dtype or "float32",
        "held": f"{_NAMES[given.isa]} code on an {_NAMES[host().isa]} CPU" if given.isa else "",
    }
    result |= {"amx": "amx" in result["target"] and not given.without_amx, "date": date.today().isoformat()}
    show(result)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))
    if given.append:
        with given.append.open("a") as file:
            file.write(json.dumps({k: v for k, v in result.items() if k not in ("plan", "notes")}) + "\n")


def pruned(given: argparse.Namespace, call: Call) -> torch.nn.Module:
    """With its zeros: real masks, those repruned to blocks at the same sparsity, or by magnitude."""
    model, dense = make(given.model), make(given.model)
    if given.pattern:
        model = prune_pattern(model, given.pattern)
        if given.block == "unstructured":
            return model
        more: Any = {"pattern": given.block, "dense": dense, "max_weight_loss": REPRUNED}
        print(aerogel.reprune(model, call[0], **more))
        return aerogel.finalize(model)
    if not given.sparsity:
        return model
    if given.block == "unstructured":
        return prune(model, given.sparsity)
    return aerogel.finalize(aerogel.prune(model, given.sparsity, pattern=given.block))


def compare(
    model: torch.nn.Module,
    call: Call,
    against: list[str],
    threads: int,
    rounds: int,
    tune: str,
    report: Path | None = None,
    dtype: Any = None,
) -> dict[str, Any]:
    """Compile, check, and time against the opponents."""
    args, kwargs = call
    with torch.no_grad():
        began = time.perf_counter()
        seen = calibration(call) if dtype == torch.int8 else None
        fast = aerogel.compile(model, args, kwargs, tune=tune, store=mkdtemp(), dtype=dtype, calibration=seen)
        spent = time.perf_counter() - began
        runs, absent = prepare(against, model, call, threads)
        error = network_error(model, fast, call, runs)
        names = ["aerogel", *runs]
        times = dict(
            zip(names, interleaved([lambda: fast(*args, **kwargs), *runs.values()], rounds), strict=True)
        )
    if report is not None:
        told = aerogel.explain(fast), aerogel.explain(fast, layer=fast.plan.choices[0].layer)
        report.write_text("\n---\n".join(map(str, told)) + "\n")
    ours = np.array(times["aerogel"])
    ratios = {n: np.array(t) / ours for n, t in times.items() if n != "aerogel"}
    fastest = min(ratios, key=lambda n: float(np.median(times[n])))
    interval = {n: bootstrap(r) for n, r in ratios.items()}
    return {
        "ms": {n: {q: float(np.quantile(t, v)) / 1e3 for q, v in QUANTILES.items()} for n, t in
        times.items()}, "ratio": {n: float(np.median(r)) for n, r in ratios.items()} | {"fastest":
        float(np.median(ratios[fastest]))}, "interval": interval, "fastest": fastest, "absent": absent,
        "rounds": rounds, "threads": threads, "compile_s": spent, "error": error, "how": str(fast.how),
        "sparse_flops": sparse_share(fast), "notes": list(fast.notes),
        "plan": json.loads(fast.plan.to_json()), "target": str(fast.plan.target), "torch": torch.__version__,
    }  # fmt: skip


def network_error(
    model: torch.nn.Module, fast: torch.nn.Module, call: Call, others: Mapping[str, Callable[[], Any]]
) -> dict[str, float]:
    """Largest difference to float64 over the largest output: ours, eager's in whichever of its layouts is
    further off, others'."""
    leaves = torch.utils._pytree.tree_leaves
    (args, kwargs), double = call, torch.utils._pytree.tree_map(torch.Tensor.double, call)
    exact = leaves(copy.deepcopy(model).double()(*double[0], **double[1]))
    largest = max(float(e.abs().max()) for e in exact)

    def worst(got: Any) -> float:
        off = (
            float((g - e).abs().max()) if g.shape == e.shape else float("inf")
            for g, e in zip(leaves(got), exact, strict=True)
        )
        return max(off) / largest

    eager = max(worst(run()) for run in prepare(["torch"], model, call, 1)[0].values())
    found = {name: worst([torch.as_tensor(v) for v in outputs(run())]) for name, run in others.items()}
    return {"aerogel": worst(fast(*args, **kwargs)), "eager": eager} | found


def sparse_share(fast: aerogel.Compiled) -> float:
    """Share of the dense convolution FLOPs whose layers run on sparse kernels."""
    return 0.0 if fast.how.by == "torch" else count_sparse_flops(fast.plan.choices)


def bootstrap(ratios: np.ndarray[Any, np.dtype[Any]]) -> tuple[float, float]:
    """95 % interval of the median."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (500, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


def show(result: dict[str, Any]) -> None:
    table = Table(
        title=f"{result['model']} {result['pruning']}, batch {result['batch']}, {result['threads']} threads"
    )
    for heading in ("", "min ms", "p50 ms", "over aerogel", "95 % interval"):
        table.add_column(heading, justify="right")
    for name, ms in result["ms"].items():
        ratio = f"{result['ratio'][name]:.2f}x" if name in result["ratio"] else ""
        interval = "{:.2f} - {:.2f}".format(*result["interval"][name]) if name in result["interval"] else ""
        table.add_row(name, f"{ms['min']:.1f}", f"{ms['p50']:.1f}", ratio, interval)
    Console().print(table)
    for name, why in result["absent"].items():
        print(f"absent: {name} ({why})")
    e = result["error"]
    print(
        f"{result['ratio']['fastest']:.2f}x over the fastest ({result['fastest']}); "
        f"{result['sparse_flops']:.0%} of convolution FLOPs "
        f"on sparse kernels; compiled in {result['compile_s']:.0f} s"
    )
    print("error: " + ", ".join(f"{name} {value:.1e}" for name, value in e.items()))


if __name__ == "__main__":
    main()
