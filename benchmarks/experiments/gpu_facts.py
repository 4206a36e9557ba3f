"""What is known of the GPU kernels without a GPU: registers, spills, shared memory, occupancy, and what
packing costs exactly.

    python -m benchmarks.experiments.gpu_facts --json facts.json
        all kernels and targets, all real patterns
    python -m benchmarks.experiments.gpu_facts --kernels-only
        a minute; with --json the file's patterns stay as they are
    python -m benchmarks.experiments.gpu_facts --pattern resnet50-90
        one pattern (this one with the trade-off by channels of a stage)

Kernels are compiled by NVRTC for sm_75, sm_80, sm_90 and sm_100 (ptxas says what it used) and by clang for
gfx942. Occupancy is computed from those figures and the architectures' limits. For each pattern of
../shared/patterns: slots for each nonzero (padding) and shared-memory wavefronts for each slot, before and
after filter group reorder and bank-sensing reorganization, counted from the packed arrays. All of it is
compiled or counted; nothing is measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from aerogel.codegen.gpu import nvrtc
from aerogel.codegen.gpu.launch import HALVES, Code
from aerogel.codegen.gpu.nvrtc import Facts
from aerogel.ir import NUMPY, Array, Config, Conv, Dtypes, Idle, Stats
from aerogel.methods import gpu_form
from aerogel.methods.actsparse import gpu as actsparse
from aerogel.methods.stridepack import gpu as stridepack
from aerogel.methods.stridepack import spf
from benchmarks.experiments import gpu_triton
from benchmarks.experiments.sim.write import POOL, TARGET, launches_of
from benchmarks.zoo import patterns

PATTERNS = Path(__file__).parents[3] / "shared" / "patterns"
ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100")
LAYERS = (
    "n1c64h56w56k64r3s3u1p1+bias+relu",
    "n1c256h14w14k1024r1s1u1p0+bias+add+relu",
    "n1c512h7w7k512r3s3u1p1+bias+relu",
)
AMD = ("gfx942",) if shutil.which("clang-19") else ()
LIMITS = {
    "sm_75": (32, 16, 65536),
    "sm_80": (64, 32, 167936),
    "sm_90": (64, 32, 233472),
    "sm_100": (64, 32, 233472),
}
LIMITS["gfx942"] = (32, 16, 65536)
"""Warps, blocks and bytes of shared memory of a multiprocessor; NVIDIA's have 65,536 registers."""
FORMS = [(name, Dtypes()) for name in ("direct", "stridepack", "actsparse")]
FORMS += [(name, dtypes) for name in ("direct", "stridepack") for dtypes in HALVES]
"""Methods in the dialect and the types they take."""
CHANNELS, CURVE = (32, 64, 128, 256), "resnet50-90"
"""Channels of a stage, and the pattern for which all of them are tried; others get the largest that fits."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kernels-only", action="store_true")
    parser.add_argument("--pattern", action="append", help="only these patterns, and no kernels")
    given = parser.parse_args()
    result: dict[str, Any] = {"kernels": [], "patterns": {}}
    if given.json and given.json.exists() and (given.kernels_only or given.pattern):
        result |= json.loads(given.json.read_text())
    result["date"] = date.today().isoformat()
    if not given.pattern:
        work = [(code, arch) for arch in (*ARCHS, *AMD) for code in variants(arch)]
        result["kernels"] = [compiled(*one) for one in track(work, "kernels", console=Console(stderr=True))]
        show_kernels(result["kernels"])
        triton = [
            (launch.code, target) for target in gpu_triton.TARGETS for launch in gpu_triton.launches(target)
        ]
        result["triton"] = [
            gpu_triton.facts(*one) for one in track(triton, "Triton", console=Console(stderr=True))
        ]
    names = given.pattern or ([] if given.kernels_only else [p.stem for p in sorted(PATTERNS.glob("*.npz"))])
    for name in names:
        result["patterns"][name] = pattern(name)
        show_pattern(name, result["patterns"][name])
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


def variants(arch: str) -> list[Code]:
    """Each kernel in the configurations that are offered first for some layers of ResNet-50."""
    found: dict[Code, None] = {}
    target = replace(TARGET, arch=arch, shared_bytes=LIMITS[arch][2])
    for text in LAYERS:
        conv, rng = Conv.parse(text), np.random.default_rng(0)
        weight = np.where(
            rng.random(conv.weight_shape) < 0.1, rng.standard_normal(conv.weight_shape), 0
        ).astype(np.float32)
        for name, dtypes in FORMS:
            own, typed = gpu_form(name), replace(conv, dtypes=dtypes)
            offered = list(own.configs(typed, target, Stats.of(weight, Idle(80, 60, 50))))
            few = [c for c in offered if not dict(c.options).get("reorganized")]
            held = weight.astype(NUMPY[dtypes.weight])
            by_lists = [c for c in few if dict(c.options).get("lists")]
            some = (
                [*[c for c in few if c not in by_lists][:6], *by_lists[:3]] if dtypes == Dtypes() else few[:3]
            )
            for config in some:
                found |= {
                    launch.code: None for launch in own.build(own.pack(held, typed, config), typed, config)
                }
        config = next(actsparse.configs(conv, target, Stats.of(weight, Idle(80, 60, 50))))
        if "add" not in conv.steps and actsparse.takes_pool(conv, config, POOL):
            found[actsparse.build(actsparse.pack(weight, conv, config), conv, config, POOL)[0].code] = None
        found[launches_of(conv, weight, "dense", None, target)[0][0].code] = None
    return list(found)


def compiled(code: Code, arch: str) -> dict[str, Any]:
    named = re.sub(r" copy=\w+", "", str(code))
    if arch in AMD:
        return {"kernel": named, "target": arch, **amd(code)}
    facts = nvrtc.compile_for(code, arch)[1]
    return {"kernel": named, "target": arch, **asdict(facts), "occupancy": occupancy(code, facts, arch)}


def occupancy(code: Code, facts: Facts, arch: str) -> float:
    """The share of a multiprocessor's warps that registers and shared memory allow."""
    most, blocks, shared = LIMITS[arch]
    warps = code.block[0] * code.block[1] // 32
    by_registers = 65536 // (-(-facts.registers // 8) * 8 * 32 * warps)
    reserved = 0 if arch == "sm_75" else 1024
    by_shared = shared // (facts.shared + reserved) if facts.shared + reserved else blocks
    return min(most // warps, blocks, by_registers, by_shared) * warps / most


def amd(code: Code) -> dict[str, Any]:
    """By clang, which needs no GPU and no library: vector registers, spills, shared memory."""
    command = [
        "clang-19",
        "-x",
        "cl",
        "-cl-std=CL2.0",
        "-O3",
        "--target=amdgcn-amd-amdhsa",
        "-mcpu=gfx942",
        "-nogpulib",
        "-S",
    ]
    done = subprocess.run(
        [*command, "-o", "-", "-"], input=code.text(), capture_output=True, text=True, check=True
    )

    def said(name: str) -> int:
        return sum(map(int, re.findall(rf"\.{name}: +(\d+)", done.stdout)))

    # scalar registers spill into vector ones, not to memory
    spilled = said("vgpr_spill_count") + said("private_segment_fixed_size")
    return {
        "registers": said("vgpr_count"),
        "spilled": spilled,
        "shared": said("group_segment_fixed_size"),
        "occupancy": None,
    }


def pattern(name: str) -> dict[str, Any]:
    """Every layer of a pattern, and the sums over them: as it comes, reordered, reorganized, and by channels
    of a stage."""
    layers = patterns.load(PATTERNS / f"{name}.npz")
    with ProcessPoolExecutor(2) as pool:
        work = pool.map(layer, [(own.conv, own.mask, name == CURVE) for own in layers])
        rows = list(track(work, name, total=len(layers), console=Console(stderr=True)))
    rows = [row | {"layer": own.name} for row, own in zip(rows, layers, strict=True)]
    total = sum(r["nonzeros"] for r in rows)

    def summed(of: list[dict[str, float]]) -> dict[str, float]:
        return {key: sum(o[key] for o in of) / total for key in ("slots_before", "before", "slots", "after")}

    def nearest(row: dict[str, Any], channels: int) -> dict[str, float]:
        own: dict[int, dict[str, float]] = row["by_channels"]
        return own[min(own, key=lambda c: abs(c - channels))]

    curve = {c: summed([nearest(r, c) for r in rows]) for c in (CHANNELS if name == CURVE else ())}
    best = summed([min(r["by_channels"].values(), key=lambda one: one["after"]) for r in rows])
    return {"nonzeros": total, "best": best, "by_channels": curve, "layers": rows}


def layer(given: tuple[Conv, Array, bool]) -> dict[str, Any]:
    """Slots of 32 lanes, times 32, and wavefronts, times 32, by channels of a stage: all of them, or the
    largest."""
    conv, mask, every = given
    weight = mask.astype(np.float32).reshape(conv.weight_shape)
    offered = [Config.make("stridepack", **point, reorganized=1) for point in stridepack.points(conv, TARGET)]
    sizes = dict.fromkeys(c["channels"] for c in offered)
    few = [size for size in sizes if size in CHANNELS and every] or [max(sizes)]
    found = {size: cost(weight, conv, next(c for c in offered if c["channels"] == size)) for size in few}
    return {"conv": str(conv), "nonzeros": int(mask.sum()), "by_channels": found}


def cost(weight: Array, conv: Conv, config: Config) -> dict[str, float]:
    """In lanes, so that divided by nonzeros it is slots, or slots times wavefronts, for each of them."""
    options = dict(config.options)
    plain = Config.make("stridepack", **(options | {"reorganized": 0}))
    found = {}
    for chosen, slots_name, name in ((plain, "slots_before", "before"), (config, "slots", "after")):
        arrays = dict(stridepack.pack(weight, conv, chosen).arrays)
        places, counts, _ = stridepack.units(arrays, conv, chosen)
        slots = np.split(arrays["order"].astype(np.int64), arrays["first"][1:-1])
        found[slots_name] = 32.0 * int(counts.max(1).sum())
        found[name] = 32.0 * spf.wavefronts(places, slots)
    return found


def show_kernels(rows: list[dict[str, Any]]) -> None:
    table = Table(title="compiled, not run: registers / spilled bytes / shared bytes / occupancy")
    for heading in ("kernel", *ARCHS, "gfx942"):
        table.add_column(heading)
    for kernel in dict.fromkeys(r["kernel"] for r in rows):
        own = {r["target"]: r for r in rows if r["kernel"] == kernel}
        table.add_row(kernel, *(_facts(own[arch]) if arch in own else "" for arch in (*ARCHS, "gfx942")))
    Console(width=200).print(table)


def _facts(r: dict[str, Any]) -> str:
    allowed = "" if r["occupancy"] is None else f" / {r['occupancy']:.0%}"
    return f"{r['registers']} / {r['spilled']} / {r['shared']}{allowed}"


def show_pattern(name: str, result: dict[str, Any]) -> None:
    table = Table(title=f"{name}: for each of {result['nonzeros']} nonzeros, counted")
    for heading in (
        "channels of a stage",
        "slots before",
        "slots x wavefronts before",
        "slots reordered",
        "slots x wavefronts after",
    ):
        table.add_column(heading, justify="right")
    for channels, own in (*result["by_channels"].items(), ("best of each layer", result["best"])):
        table.add_row(
            str(channels), *(f"{own[key]:.2f}" for key in ("slots_before", "before", "slots", "after"))
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
