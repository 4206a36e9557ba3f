"""AArch64: NEON code for every kernel, and a sample executed by qemu. (Emulated: right or wrong, never a
speed.)"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from aerogel.codegen.cpu import blocks, lists, llvm, rows, tiles
from aerogel.codegen.cpu.abi import POINTERS, Kernel, native
from aerogel.ir import Array, Conv, Dtypes, Place, Target
from aerogel.methods import cpu_form
from tests import counts
from tests.suite import sweep
from tests.suite.cases import _EXACT, _HALF, _REAL, BYTES, DEPTHWISE, Case, case
from tests.suite.run import Expected, worth_it

NEON = Target("neon", ("fp16",), threads=2)
DOTTED = (
    NEON,
    Target("neon", ("dotprod", "fp16"), threads=2),
    Target("neon", ("dotprod", "fp16", "i8mm"), threads=2),
)
"""ARM's products of bytes: a byte at a time, of two signed ones, of an unsigned and a signed one."""
SAMPLED = ("exact", "real", "half")
TOOLS = ("qemu-aarch64", "aarch64-linux-gnu-gcc")


@pytest.mark.parametrize("dtypes", [Dtypes(), *_HALF], ids=str)
def test_every_kernel_has_a_neon_form(dtypes: Dtypes) -> None:
    for vectors, epilogue in counts.some(list(product((1, 7, 14), dict.fromkeys((*_EXACT, *_REAL))))):
        steps = Conv(1, 1, epilogue=epilogue).steps
        texts = [rows.emit(rows.RowsCode("neon", dtypes, vectors, steps))]
        if vectors == 7:
            texts.append(rows.emit(rows.RowsCode("neon", dtypes, vectors, steps, (0, 1, 3))))
            texts.append(tiles.emit(tiles.TilesCode("neon", dtypes, vectors, 1, 3, 2, 1, 2, steps)))
            if dtypes.accumulator == "f32":
                texts.append(blocks.emit(blocks.BlocksCode("neon", dtypes, 4, steps, width=2, filters=8)))
                texts.append(lists.emit(lists.ListsCode("neon", dtypes, 4, steps, width=2, filters=8)))
        for text in texts:
            made = llvm.object_code(text, "neon", "fp16" if dtypes.accumulator == "f16" else "")
            assert made[:4] == b"\x7fELF"
            assert int.from_bytes(made[18:20], "little") == 183, "the machine in the ELF header is AArch64"


@pytest.mark.skipif(
    not all(map(shutil.which, TOOLS)), reason=f"needs Debian's qemu-user and gcc-aarch64-linux-gnu: {TOOLS}"
)
@pytest.mark.parametrize(
    ("name", "kind", "number", "target"),
    [
        (name, kind, number, target)
        for name in sweep.native()
        for target in (DOTTED if name in sweep.BYTES else (NEON,))
        for kind in {"quads": BYTES, "depthwise": DEPTHWISE}.get(name, SAMPLED)
        for number in range(counts.count("neon", 1 / len(SAMPLED)))
    ],
    ids=str,
)
def test_a_sample_runs_right_under_qemu(
    name: str,
    kind: str,
    number: int,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ran: Callable[[str, int], None],
) -> None:
    one = case(kind, counts.first() + number)
    ran(f"neon: {name}", 1)
    if cpu_form(name).refuse(one.conv, target, worth_it(one.weight)):
        pytest.skip("refused")
    emitted: list[tuple[str, Callable[[], str], str]] = []

    def capture(name: str, entry: str, emit: Callable[[], str], isa: str, extra: str = "") -> int:
        emitted.append((entry, emit, extra))
        return 1

    monkeypatch.setattr(llvm, "function", capture)
    kernel = _kernel(name, one, target)
    ((entry, emit, extra),) = emitted
    code = llvm.object_code(emit(), "neon", extra)
    (tmp_path / "rows.o").write_bytes(code)
    harness = Path(__file__).parent / "neon_harness.c"
    command: list[str | Path] = [
        "aarch64-linux-gnu-gcc",
        "-static",
        f"-Drows={entry}",
        "-o",
        tmp_path / "run",
        harness,
        tmp_path / "rows.o",
    ]
    subprocess.run(command, check=True)
    (tmp_path / "in").write_bytes(_slots(kernel, one))
    subprocess.run(
        ["qemu-aarch64", "-cpu", "max", tmp_path / "run", tmp_path / "in", tmp_path / "out"], check=True
    )
    y = np.fromfile(tmp_path / "out", kernel.writes.item)
    assert Expected(one).fault(kernel.writes.read(y, one.conv.y_shape)) is None, (
        f"seed {one.seed} of {kind}: {one.conv}"
    )
    assert kernel.writes.dirty_border(y, one.conv.y_shape, 0 if one.how is None else one.how.zero) == 0


def _kernel(name: str, one: Case, target: Target) -> Kernel:
    module = cpu_form(name)
    points = list(module.configs(one.conv, target, worth_it(one.weight)))
    config = points[int(one.pick * len(points))]
    reads, writes = module.layouts(one.conv, config, target, Place(one.border))
    packed = module.pack(one.weight, one.conv, config)
    (kernel,) = native(module.build(packed, one.conv, config, target, reads, writes))
    return replace(kernel)


def _slots(kernel: Kernel, one: Case) -> bytes:
    """The argument slots as the harness reads them."""
    reads, writes = kernel.reads, kernel.writes
    x = np.full(reads.elements(one.conv.x_shape), 0, reads.item)
    reads.write(x, one.x, 0 if one.how is None else one.how.x_zero)
    y = np.frombuffer(b"\xff" * writes.elements(one.conv.y_shape) * writes.item_bytes, writes.item)
    residual = y.copy()
    if one.residual is not None:
        writes.write(residual, one.residual)
    bias = np.zeros(0, np.float32) if one.bias is None else one.bias
    given: dict[str, tuple[Array, int]] = {
        "x": (x, reads.front * reads.item_bytes), "y": (y, writes.front * writes.item_bytes),
        "residual": (residual, writes.front * writes.item_bytes), "bias": (bias, 0),
        "scratch": (np.zeros(kernel.scratch_bytes * 2, np.uint8), 0),
    }  # fmt: skip
    own = {o.ctypes.data: o for o in kernel.owned}
    out = np.int64(len(kernel.arguments)).tobytes()
    for i, value in enumerate(kernel.arguments.tolist()):
        array, start = given[POINTERS[i]] if i < len(POINTERS) else (own.get(value), 0)
        if array is None:
            out += np.array([0, value], np.int64).tobytes()
        else:
            out += np.array([1, array.nbytes, start], np.int64).tobytes() + array.tobytes()
    return out
