"""What each layer of two real patterns costs in machine code: instructions for each FMA, counted in SASS.

    python -m benchmarks.experiments.gpu_sass --before TREE --json benchmarks/results/gpu_sass.jsonl
        ten minutes, and it goes on where it was ended; TREE is an older checkout (git worktree add TREE
        23cd23c); needs the patterns

Of each shape the layer with the middle number of nonzeros, in the configuration that its method offers first.
NVRTC compiles it for sm_80 and sm_90; instructions of each part of the kernel, as nvdisasm shows them, are
multiplied by how often a warp passes there, which the packed arrays and the grid say: its hot loop, staging
(with the loop's own share of a copy), the epilogue (all behind the last hot loop), and the rest. An FMA is
one that is executed, padding included. All of it is counted: nothing was run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from aerogel.codegen.gpu import nvrtc
from aerogel.codegen.gpu.launch import Launch
from aerogel.ir import Array, Config, Conv, Gpu, Stats
from aerogel.methods import gpu_form
from benchmarks.experiments.gpu_triton import disassembled
from benchmarks.experiments.sass import Part, parts
from benchmarks.zoo import patterns

ROOT = Path(__file__).parents[2]
PATTERNS = ROOT.parent / "shared" / "patterns"
NETWORKS = ("resnet50-90", "vgg19-92")
KINDS = ("stridepack", "baked")
"""Not `direct`: compilers unroll its loop over filters, so its parts cannot be told by where they stand."""
TARGET = Gpu("cuda", "sm_80", 108, 166912)
ARCHS = ("sm_80", "sm_90")
SHARED = {"sm_80": 167936, "sm_90": 233472}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="an older checkout, whose kernels are counted too")
    parser.add_argument(
        "--tree", choices=("before", "after"), default="after", help="what the rows are called"
    )
    parser.add_argument("--json", type=Path, required=True, help="rows are added; those that it has are kept")
    given = parser.parse_args()
    count(given.tree, given.json)
    if given.before:
        path = os.pathsep.join((str(given.before / "src"), str(ROOT)))
        command = [sys.executable, "-m", "benchmarks.experiments.gpu_sass", "--tree", "before"]
        subprocess.run(
            [*command, "--json", str(given.json)], env={**os.environ, "PYTHONPATH": path}, check=True
        )


def count(tree: str, out: Path) -> None:
    """A row for each layer, method and architecture, as it is found."""
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(row["network"], row["conv"], row["method"]) for row in known if row["tree"] == tree}
    work = [
        (network, layer, times, kind)
        for network in NETWORKS
        for layer, times in patterns.distinct(patterns.load(PATTERNS / f"{network}.npz"))
        for kind in KINDS
        if (network, str(layer.conv), kind) not in done
    ]
    for network, layer, times, kind in track(work, f"SASS {tree}", console=Console(stderr=True)):
        weight = layer.weight(np.random.default_rng(0))
        if (config := chosen(kind, layer.conv, weight)) is None:
            continue
        own = gpu_form(config.method)
        launch = own.build(own.pack(weight, layer.conv, config), layer.conv, config)[-1]
        with out.open("a") as file:
            for arch in ARCHS:
                row = {"tree": tree, "network": network, "conv": str(layer.conv), "count": times}
                row |= {"method": kind, "arch": arch, "config": str(config)}
                file.write(json.dumps(row | layer_cost(launch, layer.conv, arch)) + "\n")


def chosen(kind: str, conv: Conv, weight: Array) -> Config | None:
    """What the tuner would try first, its nonzeros in the order they come: that changes no code."""
    own = gpu_form("stridepack")
    for config in own.configs(conv, TARGET, Stats.of(weight)):
        options = dict(config.options)
        if bool(options.get("baked")) == (kind == "baked"):
            plain = {"reorganized": 0} if "reorganized" in options else {}
            return Config.make(config.method, **(options | plain))
    return None


def layer_cost(launch: Launch, conv: Conv, arch: str) -> dict[str, float]:
    """Of an average warp: instructions for each FMA and their shares."""
    code, facts = nvrtc.compile_for(launch.code, arch)
    found, macros = parts(disassembled(code)), dict(launch.code.macros)
    arrays = [a for a in launch.arguments if isinstance(a, np.ndarray)]
    kind, warps = launch.code.entry, launch.code.block[0] * launch.code.block[1] / 32
    counts = {"stridepack": _slots, "baked": _baked}[kind]
    macs, hot, words = counts(found, macros, arrays, launch)
    per_stage, stages = _staging(macros, launch)
    each = found.copies
    staging = per_stage * stages * (each.instructions / max(1, each.copies))
    deep = int(macros.get("DEEP", 1))
    epilogue, rest = found.after * deep, found.before + found.between * max(stages, deep)
    total = hot + staging + epilogue + rest
    limit = SHARED[arch] // (facts.shared + 1024)
    blocks = min(64 // warps, 32, limit, 65536 // (-(-facts.registers // 8) * 8 * 32 * warps))
    return {
        "instructions": total / macs,
        "words": words / macs,
        "staging": staging / total,
        "epilogue": epilogue / total,
        "hot": hot / macs,
        "warps": blocks * warps,
        "registers": facts.registers,
    }


def _staging(macros: dict[str, Any], launch: Launch) -> tuple[float, int]:
    """Copies of a thread for a stage, and stages."""
    at_once = launch.code.block[0] * launch.code.block[1] * int(macros["WIDE"]) // int(macros["TILE_C"])
    pixels = int(macros["TILE_H"]) * int(macros["TILE_W"])
    numbers = [int(a) for a in launch.arguments if isinstance(a, np.int32)]
    return -(-pixels // max(1, at_once)), numbers[9]


def _slots(
    found: Part, macros: dict[str, Any], arrays: list[Array], launch: Launch
) -> tuple[float, float, float]:
    """stridepack: four slots a turn. FMAs, instructions and words of an average warp."""
    outputs = int(macros["TILE_P"]) * int(macros["TILE_Q"])
    turns = int(arrays[1][-1]) / launch.grid[1]
    macs = 4.0 * outputs * turns
    per = found.hot.macs / outputs / 4  # turns that were unrolled
    return macs, found.hot.instructions / per * turns, found.hot.words / per * turns


def _baked(
    found: Part, macros: dict[str, Any], arrays: list[Array], launch: Launch
) -> tuple[float, float, float]:
    """baked: every instruction between staging and epilogue belongs to one group of filters."""
    groups = launch.grid[1]
    return found.straight.macs / groups, found.straight.instructions / groups, found.straight.words / groups


if __name__ == "__main__":
    main()
