"""`aerogel doctor`: what was found, in sentences, and what to do where something is wrong."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import torch

from aerogel import __version__
from aerogel.backends.cpu import cores, threads
from aerogel.cli.surroundings import false_triton, unsafe, written
from aerogel.disk import cache_folder, private_folder
from aerogel.errors import AerogelError
from aerogel.ir import here_levels, host
from aerogel.ir.tensors import private_ops
from aerogel.methods import BASELINE
from aerogel.optional import install
from aerogel.torch_versions import NEWEST_TESTED_TORCH, OLDEST_TORCH, dotted, is_untested


@dataclass(frozen=True)
class Finding:
    """One line of the report; `good` is False where speed or work is lost."""

    what: str
    says: str
    good: bool = True


def examine() -> list[Finding]:
    """Look at everything aerogel depends on."""
    return [
        _versions(),
        _cpu(),
        _caches(),
        _pool(),
        _threads(),
        _dense(),
        _gpu(),
        _triton(),
        _folder(),
        _variables(),
    ]


def _versions() -> Finding:
    says = f"aerogel {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    tested = f"{dotted(OLDEST_TORCH)} to {dotted(NEWEST_TESTED_TORCH)}"
    newer = f"; aerogel is tested with torch {tested}, and newer ones usually work"
    return Finding("versions", says + newer if is_untested(torch.__version__) else says)


def _cpu() -> Finding:
    names = {"avx512": "AVX-512", "avx2": "AVX2", "generic": "plain x86-64 (128-bit)", "neon": "ARM NEON"}
    here = host()
    half = "fp16 arithmetic" if {"avx512fp16", "fp16"} & set(here.extras) else "no fp16 arithmetic"
    matrix = ", AMX matrix unit" if "amx_bf16" in here.extras else ""
    if here.isa == "generic":
        return Finding(
            "CPU", "no AVX2: kernels run, but a modern CPU would be several times faster", good=False
        )
    levels = ", ".join(names[i] for i in here_levels()[1:])
    return Finding(
        "CPU", f"{names[here.isa]}, {half}{matrix}; also runs {levels}" if levels else names[here.isa]
    )


def _caches() -> Finding:
    here = host()
    shared = f", L3 {here.l3_bytes >> 20} MB shared" if here.l3_bytes else ""
    return Finding("caches", f"L1 {here.l1_bytes >> 10} KB, L2 {here.l2_bytes >> 10} KB a core{shared}")


def _pool() -> Finding:
    if threads.entries():
        return Finding(
            "thread pool",
            "torch's own OpenMP pool (libgomp), shared with torch: no second pool fights for the cores",
        )
    says = (
        "torch here has no GNU OpenMP (libgomp), so kernels of ours use one thread. A torch wheel from "
        "PyPI for Linux has it."
    )
    return Finding("thread pool", says, good=False)


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", "torch sees no CUDA device; models run on the CPU")
    name = torch.cuda.get_device_name()
    if find_spec("cuda") is None or find_spec("cuda.core") is None:
        says = f"{name}, but cuda-core is missing: {install('cuda')} for models on the GPU"
        return Finding("GPU", says, good=False)
    return Finding(
        "GPU",
        f"{name}: compile(model.cuda(), (x.cuda(),)) takes it; kernels are new there (docs/gpu.md)",
    )


def _threads() -> Finding:
    wanted, quota, usable = torch.get_num_threads(), cores.cpu_quota(), cores.usable()
    facts = f"torch uses {wanted} threads, this process may run on {cores.cores()} cores"
    facts += ", no cgroup CPU quota" if quota is None else f", the cgroup's CPU quota is {quota:g} cores"
    said = os.environ.get("OMP_NUM_THREADS")
    facts += "" if said is None else f", OMP_NUM_THREADS is {said}"
    remedy = (
        f"say --threads {usable}, set OMP_NUM_THREADS={usable}, or in Python torch.set_num_threads({usable})"
    )
    if wanted > usable and cores.by_default(wanted):
        return Finding("threads", f"{facts}: nobody has set a number, so aerogel takes {usable}")
    if wanted > usable:
        return Finding("threads", f"{facts}: too many threads wait for each other; {remedy}", good=False)
    if said is not None and not (said.isascii() and said.isdigit() and int(said) > 0):
        return Finding("threads", f"{facts}, which is no number: {remedy}", good=False)
    if said is not None and wanted < usable:
        return Finding(
            "threads", f"{facts}: {usable - wanted} cores are left alone because OMP_NUM_THREADS asks for it"
        )
    return Finding("threads", facts)


def _dense() -> Finding:
    if private_ops():
        return Finding(BASELINE, "oneDNN with reordered weights and fused epilogues is there to compare with")
    says = (
        "this torch lacks oneDNN's fused convolution; torch.conv2d is compared with instead. Nothing to do."
    )
    return Finding(BASELINE, says)


def _folder() -> Finding:
    """The cache folder, made as the library makes it, written to, and looked at as for machine code."""
    again = "so kernels are compiled again in every process. Set AEROGEL_CACHE to a folder of yours."
    try:
        folder = cache_folder()
    except (OSError, RuntimeError, KeyError, AerogelError) as why:  # no HOME, and a user without a name
        return Finding("cache folder", f"the user's home folder is not known ({why}), {again}", good=False)
    try:
        private_folder(folder / "objects")
        failed = written(folder / "objects")
        danger = None if failed is not None else unsafe(folder / "objects")
        kernels, records = (
            len(list(folder.glob(pattern))) for pattern in ("objects/*.o", "tuning/**/*.json")
        )
    except OSError as why:
        failed, danger = why, None
    if failed is not None:
        return Finding(
            "cache folder", f"{folder} cannot be written ({failed.strerror or failed}), {again}", good=False
        )
    if danger is not None:
        says = (
            f"{danger}. Until then compiled kernels are not kept there: whoever can write there could "
            "have yours run theirs."
        )
        return Finding("cache folder", says, good=False)
    return Finding("cache folder", f"{folder}: {kernels} compiled kernels, {records} tuning records")


def _triton() -> Finding:
    """Only GPU kernels use it; but torch asks for it too, and a folder of that name answers."""
    here, path = os.getcwd(), [entry for entry in sys.path if entry]
    for entries, who in ((path, "Python"), ([here, *path], "Python started in this folder")):
        if (found := false_triton(entries)) is not None:
            says = (
                f"{who} takes '{found}' for the triton package, and torch with it: rename it, or take "
                f"'{found.parent}' off the path"
            )
            return Finding("triton", says, good=False)
    there = PathFinder.find_spec("triton", path)
    return Finding(
        "triton",
        "not installed; only kernels for GPUs use it"
        if there is None
        else f"{Path(there.origin or '').parent}",
    )


def _variables() -> Finding:
    chosen = os.environ.get("AEROGEL_CACHE")
    return Finding("environment", f"AEROGEL_CACHE (cache folder): {chosen or 'not set'}")
