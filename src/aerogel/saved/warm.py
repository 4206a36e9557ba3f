"""`warm`: every kernel that a file's model needs, compiled before it runs: while an image is built, say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aerogel import disk
from aerogel.backends import using
from aerogel.backends.cpu.backend import Cpu
from aerogel.backends.cpu.runner import CpuRunner, batches
from aerogel.codegen.cpu import llvm
from aerogel.errors import AerogelError, InvalidArgument
from aerogel.ir import GRAPH, ISAS, Target, host
from aerogel.runtime.module import Compiled
from aerogel.runtime.points import Several
from aerogel.saved.file import load


@dataclass(frozen=True)
class Warmed:
    """Kernels of one ISA: how many there are, and how many of them were compiled now."""

    isa: str
    kernels: int
    compiled: int


def warm(
    path: str | Path, images: Sequence[int], threads: Sequence[int], isas: Sequence[str]
) -> tuple[Path, list[Warmed]]:
    """Put the machine code of a model into the cache: the folder, and what was done for each ISA.

    Nothing is linked or run, so the ISA may be one that this machine has not. Without `images` the batches
    that it was tuned for, without `threads` its own number, without `isas` its own.
    """
    found = []
    for isa in isas or [""]:
        target, seen = _target(path, isa), llvm.Warm()
        for count in threads or [target.threads]:
            _model(path, replace(target, threads=count), images, seen)
        if not seen.names:
            raise AerogelError("torch runs this model: it has no kernels to compile")
        found.append(Warmed(target.isa, len(seen.names), len(seen.compiled)))
        try:
            folder = disk.kept(seen.names)
        except OSError as why:
            raise AerogelError(
                f"compiled code cannot be kept: {why}. Set AEROGEL_CACHE to a folder of your own."
            ) from why
    return folder, found


def _target(path: str | Path, isa: str) -> Target:
    """What the model was tuned for, or a machine with these caches and another ISA."""
    if isa and isa not in ISAS:
        raise InvalidArgument(f"'{isa[:40]}' is no ISA: {', '.join(ISAS)} are")
    own = _points(load(path))[0].plan.target
    assert isinstance(own, Target)
    return own if isa in ("", own.isa) else replace(host().lower(isa), threads=own.threads)


def _model(path: str | Path, target: Target, images: Sequence[int], seen: llvm.Warm) -> None:
    """The model as it will be chosen for a target."""
    with using(Cpu(target)):
        points = [p for p in _points(load(path)) if p.how == GRAPH]
    for point in points:
        assert point.network is not None
        sizes = images or batches(point.network, point.plan) or _tuned(point)
        with llvm.warming(seen):
            CpuRunner(point.network, point.plan, target).warm(sizes, target.threads)


def _points(fast: Compiled) -> tuple[Compiled, ...]:
    return fast.points if isinstance(fast, Several) else (fast,)


def _tuned(point: Compiled) -> list[int]:
    return [choice.conv.batch for choice in point.plan.choices[:1]]
