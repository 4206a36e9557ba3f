r"""A folder of layers as single .cu files, those of the sheet in docs/gpu.md, and the table of what
they take where they are run: on a GPU, or by a simulator.

    python -m benchmarks.experiments.sim.sheet write sim/
        dense, stridepack (as simulated and as offered now), direct, baked and actsparse (both forms) for A,
        D, G, H and C, whole and cropped to 8 x 24 outputs; needs ../shared/patterns
    python -m benchmarks.experiments.sim.sheet run sim/ --nvcc nvcc --arch sm_75
        builds and runs each; a file that finds its own answer wrong says so
    python -m benchmarks.experiments.sim.sheet run sim/ --arch compute_70 --before "gpgpu-sim-run"
        with a command before the program

Whole layers have all filters and channels; crops 64 filters and the channels of the sheet. Times are those
that the program prints, or what a simulator says. Nothing here was run on a GPU.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from aerogel.ir import Array, Config, Conv, Idle, Stats
from aerogel.methods.stridepack import gpu as stridepack
from benchmarks.experiments.gpu_facts import PATTERNS
from benchmarks.experiments.sim import write
from benchmarks.zoo import patterns

SHEET = {
    "A": ("resnet50-90", "module12_0_module0_1_conv2d_2", 32),
    "D": ("resnet50-90", "module8_0_module3_1_conv2d_0", 64),
    "G": ("resnet50-90", "module12_0_module0_1_conv2d_2", 128),
    "H": ("vgg19-92", "module8_1_module2_0_conv2d_5", 128),
    "C": ("resnet50-90", "module8_1_conv2d_0", 128),
}
"""Pattern, layer, channels of the crop."""
OLD = (
    "stridepack/baked=0,buffers=1,channels={},deep=1,reorganized=1,tile_p=4,tile_q=4,warps_p=2,warps_q=2,"
    "wide=4"
)
"""As it was simulated first, with 32, 64 or 128 channels a stage."""
MIDDLE = 7, 9
"""Groups of filters of C's crop, as stridepack orders them."""
FORMS = ("dense", "stridepack-old", "stridepack", "direct", "baked", "actsparse", "lists")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("write", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--arch", default="sm_75")
    parser.add_argument("--before", default="", help="a command that is given the program")
    given = parser.parse_args()
    if given.what == "run":
        show(run(given.folder, given.nvcc, given.arch, shlex.split(given.before)))
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, conv, weight in layers():
        for form in FORMS:
            text = source(conv, weight, form)
            if text is not None:
                (given.folder / f"{name}-{form}.cu").write_text(text)


def layers() -> Iterator[tuple[str, Conv, Array]]:
    """`A-crop`, `A-whole` and so on."""
    for name, (network, layer, channels) in SHEET.items():
        found = next(one for one in patterns.load(PATTERNS / f"{network}.npz") if one.name == layer)
        weight = found.weight(np.random.default_rng(0))
        yield f"{name}-whole", found.conv, weight
        few = weight[:64, :channels]
        if name == "C":
            config = Config.parse(OLD.format(128))
            order = stridepack.pack(weight, found.conv, config).arrays["filter"]
            few = weight[order[slice(*(32 * group for group in MIDDLE))]]
        crop = replace(found.conv, c=channels, k=64).at(1, 8, 24)
        yield f"{name}-crop", crop, np.ascontiguousarray(few)


def source(conv: Conv, weight: Array, form: str) -> str | None:
    """The file, or None where the method does not offer this form."""
    kind, _, old = form.partition("-")
    config = Config.parse(OLD.format(128 if conv.r == 1 else min(64, conv.c))) if old else None
    if kind == "baked":
        offered = stridepack.configs(conv, write.TARGET, Stats.of(weight, Idle(50, 30, 20)))
        if not any(c["baked"] for c in offered):
            return None
    return write.source(conv, weight, kind, config)


def run(folder: Path, nvcc: str, arch: str, before: list[str]) -> dict[str, str]:
    """What each program says of itself."""
    said = {}
    for path in sorted(folder.glob("*.cu")):
        program = path.with_suffix(".out")
        built = subprocess.run(
            [nvcc, "-std=c++11", "-O2", f"-arch={arch}", "-o", str(program), str(path)],
            capture_output=True,
            text=True,
        )
        if built.returncode:
            said[path.stem] = "does not compile"
            continue
        done = subprocess.run([*before, str(program.resolve())], capture_output=True, text=True, cwd=folder)
        cycles = re.findall(r"gpu_tot_sim_cycle = (\d+)", done.stdout)
        us = re.search(r"([\d.e+-]+) us", done.stdout)
        found = f"{int(cycles[-1]):,} cycles" if cycles else f"{float(us[1]):.0f} us" if us else "no answer"
        said[path.stem] = f"{found}, WRONG" if done.returncode and (cycles or us) else found
    return said


def show(said: dict[str, str]) -> None:
    table = Table(title="what each program says; dense is the opponent")
    names = list(dict.fromkeys("-".join(stem.split("-")[:2]) for stem in said))
    for heading in ("layer", *FORMS):
        table.add_column(heading, justify="right")
    for name in names:
        table.add_row(name, *(said.get(f"{name}-{form}", "") for form in FORMS))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
