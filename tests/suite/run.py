"""Run one case through one method on one ISA and say what is wrong with the answer, if anything."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from aerogel.codegen.cpu import amx
from aerogel.codegen.cpu.abi import Kernel, LibraryCall
from aerogel.ir import (
    Array,
    Config,
    Idle,
    Layout,
    Place,
    Requantize,
    Stats,
    Target,
    from_float64,
    to_float64,
)
from aerogel.methods import CpuForm
from aerogel.reference import F64, activate, bound, convolve, in_bytes, reference
from tests.suite.cases import Case
from tests.suite.guard import Guarded

CONFIGS = 60
TILED = ("tilewise", "blockgemm", "actsparse")
"""Methods whose dense parts may hold zeros."""
_BLOCKS = {(3, 2): ((3, 2, 6), (8, 2, 6)), (7, 1): ((2, 4, 4), (6, 4, 4)), (1, 1): ((1, 1, 1),)}
_LISTS = {(3, 2): ((8, 1, 3), (4, 2, 4)), (7, 1): ((12, 1, 2), (4, 1, 7)), (1, 1): ((4, 1, 1), (8, 1, 1))}
"""Filters, width and vectors of the panels that the suite compiles."""
NORMAL = 2.0**-126
"""The smallest f32 that is not subnormal."""
LARGEST = {"f32": 3.4028234663852886e38, "bf16": 3.3895313892515355e38, "f16": 65504.0}


@cache
def _regions() -> dict[str, Guarded]:
    return {
        name: Guarded() for name in ("x", "y", "residual", "bias", "scratch", *(f"own{i}" for i in range(16)))
    }


class Expected:
    """The reference's answer to a case, computed once for all methods and ISAs, and how far off it may be."""

    def __init__(self, case: Case) -> None:
        self.case = case
        if case.how is not None:
            self._in_bytes(case.how)
            return
        x, weight, bias, residual = case.numbers()
        finite = np.where(np.isfinite(x), x, 0.0)
        self.y = reference(finite, weight, case.conv, bias, residual)
        if case.exact:
            self.y = to_float64(from_float64(self.y, case.conv.dtypes.output), case.conv.dtypes.output)
        self.doubtful = np.zeros(self.y.shape, bool)
        self.judged, self.decided = np.ones(self.y.shape, bool), np.zeros(self.y.shape, bool)
        self._numbers, self._slack = (finite, weight, bias, residual), dict[int | None, F64]()
        if case.kind.endswith("special"):
            self._special(x, finite, weight, bias, residual)

    def _in_bytes(self, how: Requantize) -> None:
        """Nothing is left to a tolerance."""
        case = self.case
        y = in_bytes(case.x, case.weight, case.conv, how, case.residual)
        self.y, self._slack = y.astype(np.float64), {None: np.zeros(1)}
        self.doubtful, self.judged = np.zeros(y.shape, bool), np.ones(y.shape, bool)

    def slack(self, channels: int | None) -> F64:
        """The bound where blocks of so many channels are summed in the accumulator's type."""
        if channels not in self._slack:
            x, weight, bias, residual = self._numbers
            allowed = (
                np.zeros(1) if self.case.exact else bound(x, weight, self.case.conv, bias, residual, channels)
            )
            self._slack[channels] = np.where(self.decided, 0.0, allowed)
        return self._slack[channels]

    def _special(self, x: F64, finite: F64, weight: F64, bias: F64 | None, residual: F64 | None) -> None:
        """A NaN or Inf that meets a kept weight decides its output; sums that overflow are not judged."""
        conv = self.case.conv
        plain = replace(conv, epilogue=())

        def meets(where: NDArray[np.bool_], by: NDArray[np.bool_]) -> NDArray[np.bool_]:
            return convolve(where.astype(np.float64), by.astype(np.float64), plain) > 0

        plus, minus, positive, negative = x == np.inf, x == -np.inf, weight > 0, weight < 0
        nan = meets(np.isnan(x), weight != 0)
        up, down = (
            meets(plus, positive) | meets(minus, negative),
            meets(plus, negative) | meets(minus, positive),
        )
        value = np.where(nan | (up & down), np.nan, np.where(up, np.inf, -np.inf))
        met = nan | up | down
        size = convolve(np.abs(finite), np.abs(weight), plain)
        most = min(LARGEST[conv.dtypes.accumulator], LARGEST[conv.dtypes.output]) / 4
        self.judged, self.decided = (size < most) & (np.abs(self.y) < most), met
        self.doubtful = meets(~np.isfinite(x), weight == 0)
        answer = activate(value, conv) if conv.activation else value
        if "add" in conv.epilogue and residual is not None:
            before = conv.epilogue.index("add") < len(conv.epilogue) - 1
            answer = answer if before else answer + residual
        self.y = np.where(met, answer, self.y)

    def flushed(self) -> F64:
        """What is lost where subnormal inputs and products count as zeros, as on AMX."""
        x, weight, _, _ = self._numbers
        plain, small = (
            replace(self.case.conv, epilogue=()),
            np.where(np.abs(x) < NORMAL, np.abs(x), NORMAL * (x != 0)),
        )
        return (
            np.zeros(1)
            if self.case.exact
            else 2 * (convolve(small, np.abs(weight), plain) + NORMAL * weight[0].size)
        )

    def fault(
        self, y: Array, channels: int | None = None, skips: bool = True, flushes: bool = False
    ) -> str | None:
        """None, or what is wrong with `y`. A kernel that does not skip every zero may find a NaN where one
        meets it."""
        got, slack = (
            to_float64(y, self.case.conv.dtypes.output),
            self.slack(channels) + (self.flushed() if flushes else 0),
        )
        with np.errstate(invalid="ignore"):
            good = (got == self.y) | (np.isnan(got) & np.isnan(self.y)) | (np.abs(got - self.y) <= slack)
        bad = ~good & self.judged & ~(self.doubtful & np.isnan(got) & (not skips))
        if not bad.any():
            return None
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        return (
            f"{int(bad.sum())} of {bad.size} outputs wrong; first at (n, k, p, q) = {at}: {got[at]!r}, "
            f"expected {self.y[at]!r}"
        )


def worth_it(weight: Array) -> Stats:
    """Statistics with which no method refuses a weight because it does not pay: the suite wants every weight
    right."""
    stats = Stats.of(weight)
    return replace(stats, weights=10 * stats.weights, shared=stats.nonzeros, alike=100, idle=Idle(90, 90, 90))


def faults(
    method: CpuForm, target: Target, case: Case, expected: Expected, threads: tuple[int, ...] = (1,)
) -> str | None:
    """None, or the first thing wrong. A refusal is right by definition; the tests count those."""
    stats = worth_it(case.weight)
    if method.refuse(case.conv, target, stats) is not None:
        return None
    points = _in_suite(list(method.configs(case.conv, target, stats)), case)
    config = points[int(case.pick * len(points))]
    packed = method.pack(case.weight, case.conv, config)
    stored = case.conv.dtypes.weight
    if not np.array_equal(
        to_float64(method.unpack(packed, case.conv), stored), to_float64(case.weight, stored)
    ):
        return f"{config}: unpack(pack(weight)) is not the weight"
    reads, writes = method.layouts(case.conv, config, target, Place(case.border))
    kernels = method.build(packed, case.conv, config, target, reads, writes)
    if isinstance(kernels, LibraryCall):
        return _library(kernels, case, expected)
    answers, summed = [], config["channels"] if case.conv.dtypes.accumulator == "f16" else None
    for back in (False, True):
        for count in threads:
            wrong, y = _native(kernels, case, reads, writes, back, count)
            wrong = wrong or expected.fault(
                y, summed, method.NAME not in TILED, dict(config.options).get("filters") == amx.FILTERS
            )
            if wrong:
                return f"{config}, {count} threads, {'back' if back else 'front'} guard: {wrong}"
            answers.append(y)
    if any(a.tobytes() != answers[0].tobytes() for a in answers):
        return f"{config}: threads {threads} give different bits"
    return None


def _in_suite(offered: list[Config], case: Case) -> list[Config]:
    """Kernels whose code depends on the problem's shape are compiled for one register block a shape: LLVM
    takes its time.

    test_stridepack.py goes through every block of both methods on one problem.
    """
    conv = case.conv
    shape = conv.r + conv.s + conv.stride[0] + conv.stride[1] + conv.dilation[0] + conv.dilation[1]

    def fits(config: Config, rows: int, columns: int) -> bool:
        options = dict(config.options)
        if "width" in options:
            menu = _LISTS if "chunk" in options else _BLOCKS
            return (
                options["filters"] == amx.FILTERS
                or (options["filters"], options["width"], options["vectors"]) in menu[rows, columns]
            )
        if "rows" in options:
            return (options["rows"], options["columns"]) == (rows, columns)
        return not options.get("aligned") or (options["vectors"] == (1, 5)[shape % 2] and case.seed % 9 == 0)

    wanted = [c for c in offered if fits(c, *((3, 2), (7, 1), (1, 1))[shape % 3])] or [
        c for c in offered if fits(c, 1, 1)
    ]
    return wanted[:CONFIGS]


def _native(
    kernels: list[Kernel], case: Case, reads: Layout, writes: Layout, back: bool, threads: int
) -> tuple[str | None, Array]:
    from aerogel.backends.cpu.threads import Segment

    regions, conv = _regions(), case.conv
    x_zero, zero, beside = (
        (0, 0, 0) if case.how is None else (case.how.x_zero, case.how.zero, case.how.beside_zero)
    )
    x = regions["x"].place(reads.elements(conv.x_shape), reads.item, back)
    reads.write(x, case.x, x_zero)
    y = regions["y"].place(writes.elements(conv.y_shape), writes.item, back)
    addresses = {"x": x.ctypes.data, "y": y.ctypes.data}
    if case.bias is not None:
        addresses["bias"] = regions["bias"].copy(case.bias, back).ctypes.data
    if case.residual is not None:
        residual = y if back else regions["residual"].place(writes.elements(conv.y_shape), writes.item, back)
        writes.write(residual, case.residual, beside)  # against the back guard y takes the residual's place
        addresses["residual"] = residual.ctypes.data
    bytes_ = max(k.scratch_bytes for k in kernels) * threads
    addresses["scratch"] = regions["scratch"].place(bytes_, np.dtype(np.uint8), back).ctypes.data
    steps = []
    for kernel in kernels:
        guarded = kernel.bind(**addresses)
        for i, own in enumerate(kernel.owned):
            guarded[kernel.arguments == own.ctypes.data] = regions[f"own{i}"].copy(own, back).ctypes.data
        steps.append((kernel, guarded))
    Segment(steps, threads)()
    used = writes.elements(conv.y_shape) - writes.slack
    if (y[used:].view(np.uint8) != 0xFF).any():
        return "wrote into the slack after y", y
    if dirty := writes.dirty_border(y, conv.y_shape, zero):
        return f"{dirty} border elements of y are not zero", y
    return None, writes.read(y, conv.y_shape)


def _library(kernel: LibraryCall, case: Case, expected: Expected) -> str | None:
    from aerogel.ir.tensors import from_torch, to_torch

    d = case.conv.dtypes

    def laid(array: Array, layout: Layout, dtype: str) -> object:
        buffer = np.zeros(layout.elements(array.shape), array.dtype)
        layout.write(buffer, array)
        return to_torch(layout.view(buffer, array.shape), dtype)

    bias = None if case.bias is None else to_torch(case.bias, "f32")
    residual = None if case.residual is None else laid(case.residual, kernel.writes, d.output)
    return expected.fault(from_torch(kernel.call(laid(case.x, kernel.reads, d.input), bias, residual)))


def describe(method: str, isa: str, case: Case, few: bool = False) -> str:
    """The command that repeats a case."""
    return (
        f"python -m tests.suite --method {method} --isa {isa} --kind {case.kind} --seed {case.seed}"
        f"{' --few' if few else ''}   # {case.conv}"
    )
