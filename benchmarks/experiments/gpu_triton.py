"""Triton's kernels compiled for GPUs that are not here: registers, spills, shared memory, matrix
instructions. See gpu_facts.py.

    python -m benchmarks.experiments.gpu_triton sm_80 sm_100 --json rows.json
        some targets; a second or two for each kernel
    python -m benchmarks.experiments.gpu_triton sm_80 --few 0
        one kernel of nine, from the first on

NVIDIA's figures are cuobjdump's of the very code object, AMD's those in the assembly.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from aerogel.codegen.gpu.launch import TritonCode, TritonLaunch
from aerogel.formats import panels
from aerogel.ir import Conv, Gpu, from_float64
from aerogel.methods import gpu_form
from benchmarks.experiments import sass

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
LAYERS = ("n1c64h56w56k128r3s3u1p1{}+bias+relu", "n1c256h14w14k256r1s1u1p0{}+bias+add+relu")
TYPES = ("f16", "bf16", "f32")
MATRIX = r"\b(HMMA|HGMMA|UTCHMMA|UTCQMMA|v_mfma_\w+)"
SHARED = {"sm_80": 167936, "sm_90": 233472, "sm_100": 233472}
A100 = Gpu("cuda", "sm_80", 108, 166912, tf32=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", default=TARGETS)
    parser.add_argument("--few", type=int, metavar="K", help="one kernel of nine, from the K-th on")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    work = [
        (launch.code, target) for target in given.targets for launch in few(list(launches(target)), given.few)
    ]
    rows = [facts(code, target) for code, target in track(work, "Triton", console=Console(stderr=True))]
    if given.json:
        given.json.write_text(json.dumps(rows))
    else:
        print(*rows, sep="\n")


def few(every: list[TritonLaunch], first: int | None) -> list[TritonLaunch]:
    return every if first is None else every[first::9]


def launches(target: str) -> Iterator[TritonLaunch]:
    """Every program of panels.configs in every type, with a border and without, and the leftovers."""
    on = replace(A100, arch=target)
    for kind in TYPES:
        for text in LAYERS:
            conv, rng = Conv.parse(text.format("" if kind == "f32" else f":{kind}")), np.random.default_rng(0)
            kept = np.repeat(rng.random((conv.k // 32, *conv.weight_shape[1:])) < 0.3, 32, axis=0)
            weight = from_float64(kept.astype(np.float64), kind)
            own = gpu_form("tilewise")
            for config in panels.configs("tilewise", conv, on, int((kept > 0).sum()), 0):
                yield from own.build(own.pack(weight, conv, config), conv, config)
            weight.reshape(-1)[::97] = weight.max()
            yield own.build(own.pack(weight, conv, config), conv, config)[-1]


def facts(code: TritonCode, target: str) -> dict[str, Any]:
    """One row of gpu_facts.json."""
    made = compiled(code, target)
    row: dict[str, Any] = {"kernel": str(code), "target": target, "warps": code.warps}
    if target.startswith("gfx"):
        text = made.asm["amdgcn"]

        def said(name: str) -> int:
            return sum(map(int, re.findall(rf"\.{name}: +(\d+)", text)))

        spilled = said("vgpr_spill_count") + said("private_segment_fixed_size")
        row |= {"registers": said("vgpr_count"), "spilled": spilled, "shared": int(made.metadata.shared)}
    else:
        text = disassembled(made.asm["cubin"])
        used = re.search(
            r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", tool("cuobjdump", made.asm["cubin"], "-res-usage")
        )
        assert used is not None
        row |= {
            "registers": int(used[1]),
            "spilled": int(used[2]),
            "shared": int(made.metadata.shared) + int(used[3]),
        }
        row |= {"loop": sum(sass.hot_loop(text).values()), "occupancy": occupancy(row, target)}
    return row | {"matrix": dict(sorted(_counted(text).items()))}


def occupancy(row: dict[str, int], target: str) -> float:
    """The share of a multiprocessor's 64 warps that registers and shared memory allow."""
    by_registers = 65536 // (-(-row["registers"] // 8) * 8 * 32 * row["warps"])
    by_shared = SHARED[target] // (row["shared"] + 1024)
    return min(64 // row["warps"], 32, by_registers, by_shared) * row["warps"] / 64


def _counted(text: str) -> dict[str, int]:
    found = re.findall(MATRIX, text)
    return {re.sub(r"^v_mfma.*", "MFMA", name): sum(1 for f in found if f == name) for name in found}


def compiled(code: TritonCode, target: str) -> Any:
    """Without a device. Pointers are as torch's allocator gives them, on 16 bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from aerogel.codegen.gpu import gathered

    kernel, constants = getattr(gathered, code.entry), dict(code.constants)
    names = [n for n in kernel.arg_names if n not in constants]
    types = [*(f"*{t}" for t in code.types), "fp32", *["i32"] * (len(names) - len(code.types) - 1)]
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(code.types))}
    lanes = 64 if target.startswith("gfx") else 32
    backend = GPUTarget("hip", target, lanes) if lanes == 64 else GPUTarget("cuda", int(target[3:]), lanes)
    options = {"num_warps": 32 * code.warps // lanes, "num_stages": 1, "enable_fp_fusion": True}
    return triton.compile(ASTSource(kernel, signature, fixed, aligned), target=backend, options=options)


def disassembled(cubin: bytes) -> str:
    return tool("nvdisasm", cubin, "-c")


def tool(name: str, cubin: bytes, *options: str) -> str:
    """A tool of NVIDIA's that comes with Triton."""
    import triton

    binary = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [binary, *options, file.name], capture_output=True, text=True, check=True
        ).stdout


if __name__ == "__main__":
    main()
