"""`aerogel doctor`: what was found, in sentences, and what to do where something is wrong."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from aerogel import __version__
from aerogel.disk import cache_folder
from aerogel.methods.dense import private_ops
from aerogel.runtime import pool
from aerogel.target import here_levels, host


@dataclass(frozen=True)
class Finding:
    """One line of the report; `good` is False where speed or work is lost."""

    what: str
    says: str
    good: bool = True


def examine() -> list[Finding]:
    """Look at everything aerogel depends on."""
    return [_versions(), _cpu(), _caches(), _pool(), _threads(), _dense(), _gpu(), _folder(), _variables()]


def _versions() -> Finding:
    says = f"aerogel {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return Finding("versions", says)


def _cpu() -> Finding:
    names = {"avx512": "AVX-512", "avx2": "AVX2", "generic": "plain x86-64 (128-bit)", "neon": "ARM NEON"}
    here = host()
    half = "fp16 arithmetic" if {"avx512fp16", "fp16"} & set(here.extras) else "no fp16 arithmetic"
    matrix = ", AMX matrix unit" if "amx_bf16" in here.extras else ""
    if here.isa == "generic":
        return Finding("CPU", "no AVX2: kernels run, but a modern CPU would be several times faster", good=False)
    levels = ", ".join(names[i] for i in here_levels()[1:])
    return Finding("CPU", f"{names[here.isa]}, {half}{matrix}; also runs {levels}" if levels else names[here.isa])


def _caches() -> Finding:
    here = host()
    shared = f", L3 {here.l3_bytes >> 20} MB shared" if here.l3_bytes else ""
    return Finding("caches", f"L1 {here.l1_bytes >> 10} KB, L2 {here.l2_bytes >> 10} KB a core{shared}")


def _pool() -> Finding:
    if pool.entries():
        return Finding("thread pool", "torch's own OpenMP pool (libgomp), shared with torch: no second pool fights for the cores")
    says = "torch here has no GNU OpenMP (libgomp), so kernels of ours use one thread. A torch wheel from PyPI for Linux has it."
    return Finding("thread pool", says, good=False)


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", "torch sees no CUDA device; models run on the CPU")
    name = torch.cuda.get_device_name()
    if find_spec("cuda") is None or find_spec("cuda.core") is None:
        says = f"{name}, but cuda-core is missing: pip install aerogel[cuda] for models on the GPU"
        return Finding("GPU", says, good=False)
    return Finding("GPU", f"{name}: compile(model.cuda(), (x.cuda(),)) takes it; our kernels are new there (docs/gpu.md)")


def _threads() -> Finding:
    wanted, allowed = torch.get_num_threads(), len(os.sched_getaffinity(0))
    quota = cpu_quota()
    facts = f"torch uses {wanted} threads, this process may run on {allowed} cores"
    facts += ", no cgroup CPU quota" if quota is None else f", the cgroup's CPU quota is {quota:g} cores"
    usable = allowed if quota is None else min(allowed, max(1, int(quota)))
    if wanted > usable:
        return Finding(
            "threads", f"{facts}: too many threads wait for each other; call torch.set_num_threads({usable})", good=False
        )
    return Finding("threads", facts)


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores the cgroup allows, or None: from cgroup v2's cpu.max or v1's cfs files."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        return None if quota_us <= 0 else quota_us / int((root / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


def _dense() -> Finding:
    if private_ops():
        return Finding("dense", "oneDNN with reordered weights and fused epilogues is there to compare with")
    says = "this torch lacks oneDNN's fused convolution; torch.conv2d is compared with instead. Nothing to do."
    return Finding("dense", says)


def _folder() -> Finding:
    folder = cache_folder()
    probe = folder
    while not probe.exists():
        probe = probe.parent
    if os.access(probe, os.W_OK):
        count = len(list((folder / "objects").glob("*.o"))) if folder.exists() else 0
        records = len(list((folder / "tuning").rglob("*.json"))) if folder.exists() else 0
        return Finding("cache folder", f"{folder}: {count} compiled kernels, {records} tuning records")
    says = f"{folder} cannot be written, so kernels are compiled again in every process. Set AEROGEL_CACHE to a folder of yours."
    return Finding("cache folder", says, good=False)


def _variables() -> Finding:
    chosen = os.environ.get("AEROGEL_CACHE")
    return Finding("environment", f"AEROGEL_CACHE (cache folder): {chosen or 'not set'}")
