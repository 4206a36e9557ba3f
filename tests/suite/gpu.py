"""The same cases on an OpenCL device (PoCL) or in Triton's interpreter, between guard pages: both work on the
host's memory where it lies.

python -m tests.suite.gpu --method direct --kind exact --count 200        many cases
python -m tests.suite.gpu --method direct --kind exact --seed 7           one of them
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from aerogel.backends.gpu.opencl import OpenCL
from aerogel.ir import NUMPY, Array, Config, Gpu, Stats, to_float64
from aerogel.methods import METHODS, GpuForm, gpu_form
from tests.suite import interpreter
from tests.suite.cases import Case, case
from tests.suite.guard import Guarded
from tests.suite.run import TILED, Expected, worth_it
from tests.suite.sweep import Sweep

TRITON = ("tilewise", "blockgemm")
WIDE = 512
"""Pixels of a program in the interpreter, at most, seven times of eight: an operation costs it about the same
for many."""

FAMILIES = {"opencl": 4, "cuda": 12}
"""Shapes of kernels, each met many times: what code depends on is compiled once, which takes PoCL seconds."""
FEW = 2
"""Configurations of a shape that are used."""


@cache
def device() -> OpenCL:
    return OpenCL()


@cache
def _regions() -> dict[str, Guarded]:
    return {name: Guarded() for name in ("x", "y", "residual", "bias")}


def target(name: str) -> Gpu:
    """What a method is asked to work for: Triton's interpreter stands for an A100."""
    return Gpu("cuda", "sm_80", 108, 166912, tf32=True) if name in TRITON else device().target


def stats(own: GpuForm, one: Case) -> Stats:
    """Of methods that look for tiles or zeros of x every case is wanted, whether it pays or not."""
    return worth_it(one.weight) if own.NAME in TILED else Stats.of(one.weight)


def config(own: GpuForm, one: Case) -> Config:
    """One of FEW configurations of the case's shape: the first, and others by the shape; where zeros are
    skipped, one of each form. Every eighth case has its weights in the code where that is offered, for which
    it is compiled."""
    every = list(own.configs(one.conv, target(own.NAME), stats(own, one)))
    baked = [c for c in every if dict(c.options).get("baked")]
    if baked and one.seed % 8 == 0:
        return baked[0]
    offered = [c for c in every if c not in baked]
    shape = zlib.crc32(
        str((one.conv.r, one.conv.s, one.conv.stride, one.conv.dilation, one.conv.epilogue)).encode()
    )
    few = [offered[0], *(offered[shape // (i + 1) % len(offered)] for i in range(1, FEW))]
    if forms := [c for c in offered if dict(c.options).get("lists")]:  # half of the cases by lists
        few = [next(c for c in offered if c not in forms), forms[shape % len(forms)]]
    chosen = few[int(one.pick * FEW)]
    if own.NAME in TRITON and one.seed % 8:
        pixels = one.conv.batch * one.conv.out[0] * one.conv.out[1]
        return Config.make(
            own.NAME,
            **(dict(chosen.options) | {"pixels": min(WIDE, max(16, 1 << (pixels - 1).bit_length()))}),
        )
    return chosen


def faults(own: GpuForm, one: Case, expected: Expected) -> str | None:
    """None, or the first thing wrong."""
    chosen = config(own, one)
    packed, stored = own.pack(one.weight, one.conv, chosen), one.conv.dtypes.weight
    if not np.array_equal(to_float64(own.unpack(packed, one.conv), stored), to_float64(one.weight, stored)):
        return f"{chosen}: unpack(pack(weight)) is not the weight"
    launches = own.build(packed, one.conv, chosen)
    # the interpreter takes its time
    for back in (one.seed % 2 == 1,) if own.NAME in TRITON else (False, True):
        y = _run(own, one, chosen, launches, back)
        stage = dict(chosen.options).get("channels") if one.conv.dtypes.accumulator != "f32" else None
        if (wrong := expected.fault(y, stage, own.NAME not in TILED)) is not None:
            return f"{chosen}, {'back' if back else 'front'} guard: {wrong}"
    return None


def _run(own: GpuForm, one: Case, chosen: Config, launches: list[Any], back: bool) -> Array:
    last = own.layout(chosen) == "channels_last"
    y = np.zeros(one.conv.y_shape, NUMPY[one.conv.dtypes.output])
    given = {"x": one.x, "y": y, "bias": one.bias, "residual": one.residual}
    placed = {
        name: _placed(name, array, last and array.ndim == 4, back)
        for name, array in given.items()
        if array is not None
    }
    placed["y"].reshape(-1).view(np.uint8)[:] = 0xFF
    found = (interpreter.run if own.NAME in TRITON else _on_opencl)(launches, placed)
    return np.ascontiguousarray(found.transpose(0, 3, 1, 2)) if last else found


def _on_opencl(launches: list[Any], placed: dict[str, Array]) -> Array:
    gpu = device()
    flags = gpu.cl.mem_flags.READ_WRITE | gpu.cl.mem_flags.USE_HOST_PTR
    buffers = {
        name: gpu.cl.Buffer(gpu.context, flags, hostbuf=array) for name, array in placed.items() if array.size
    }
    y = np.empty_like(placed["y"])
    if launches:
        buffers["counts"] = gpu.buffer(np.zeros(np.prod(launches[0].grid), np.int32))
        gpu.prepared(launches)(buffers)
        gpu.cl.enqueue_copy(gpu.queue, y, buffers["y"])
    return y


def _placed(name: str, array: Array, last: bool, back: bool) -> Array:
    """Against a guard; at the back within 16 bytes of it, for kernels copy as many at once."""
    laid = np.ascontiguousarray(array.transpose(0, 2, 3, 1) if last else array)
    room = _regions()[name].place(-(-laid.size // 4) * 4, laid.dtype, back)
    room[: laid.size] = laid.reshape(-1)
    return room[: laid.size].reshape(laid.shape)


def sweep(name: str, kind: str, seeds: Iterable[int], stop: int = 5) -> Sweep:
    """Run the seeds; gives up after `stop` failures."""
    done, own = Sweep(), gpu_form(name)
    for seed in seeds:
        one = case(kind, seed, FAMILIES[target(name).kind])
        if own.refuse(one.conv, target(name), stats(own, one)) is not None:
            done.refused += 1
            continue
        done.ran += 1
        if (wrong := faults(own, one, Expected(one))) is not None:
            done.failures.append(
                f"python -m tests.suite.gpu --method {name} --kind {kind} --seed {seed}   # "
                f"{one.conv}\n    {wrong}"
            )
            if len(done.failures) >= stop:
                break
    return done


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.suite.gpu", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", type=int, default=5)
    given = parser.parse_args()
    seeds = range(given.count) if given.seed is None else [given.seed]
    done = sweep(given.method, given.kind, seeds, given.stop)
    print(*done.failures, sep="\n")
    counts = f"{done.ran} ran, {done.refused} refused, {len(done.failures)} failed"
    print(f"{given.method} {given.kind} for {target(given.method)}: {counts}")
    return 1 if done.failures else 0


if __name__ == "__main__":
    sys.exit(main())
