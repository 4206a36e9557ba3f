"""Products of bytes: which instruction each form is, and sums at the edge of what 16 bits hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from aerogel.backends.cpu import threads
from aerogel.codegen.cpu import bytewise, llvm, weaving
from aerogel.codegen.cpu.abi import native
from aerogel.codegen.cpu.products import extra_of, form_of
from aerogel.ir import INT8, Array, Conv, Requantize, Target
from aerogel.methods import cpu_form
from aerogel.reference import in_bytes
from tests.suite.run import worth_it
from tests.suite.sweep import levels, target_of

_SDOT, _USDOT = 0x4E809400, 0x4E809C00
"""AArch64's two instructions, their registers left out."""


def kernels(isa: str, form: str) -> tuple[bytes, bytes]:
    """Of `quads` and of `depthwise`, four vectors of sums each."""
    codes = (
        (bytewise.BytesCode(isa, form, 4, ("bias",)), bytewise.emit),
        (weaving.WeavingCode(isa, form, 1, False, ("bias",)), weaving.emit),
    )
    return tuple(llvm.object_code(emit(code), isa, code.extra) for code, emit in codes)  # type: ignore[arg-type, return-value]


def words(made: bytes, pattern: int) -> int:
    """How many instructions of AArch64 are this one, whatever its registers."""
    text = np.frombuffer(made[: len(made) // 4 * 4], np.uint32)
    return int(((text & 0xFFE0FC00) == pattern).sum())


def opcodes(made: bytes, first: int) -> int:
    """How many instructions of x86 may be vpdpbusd: map 0F38, prefix 66, W0, opcode 50."""
    evex, count = first == 0x62, 0
    for at in range(len(made) - 6):
        if made[at] != first:
            continue
        ops, rest, code = (made[at + 1] & 0x07, made[at + 2] & 0x83, made[at + (4 if evex else 3)])
        ops = ops if evex else made[at + 1] & 0x1F
        count += ops == 2 and rest & 0x03 == 1 and not rest & 0x80 and code == 0x50
    return count


@pytest.mark.parametrize(
    ("isa", "form", "many"),
    [
        ("avx512", "vnni", lambda made: opcodes(made, 0x62)),
        ("avx2", "vnni", lambda made: opcodes(made, 0xC4)),
        ("avx2", "evex", lambda made: opcodes(made, 0x62)),
        ("neon", "sdot", lambda made: words(made, _SDOT)),
        ("neon", "usdot", lambda made: words(made, _USDOT)),
    ],
)
def test_one_instruction_for_four_products(isa: str, form: str, many: Callable[[bytes], int]) -> None:
    """The same kernels in each encoding. avx2's own, VEX, is compiled and looked at: no machine here has run
    it."""
    for made in kernels(isa, form):
        assert many(made) >= 4
    other = {"avx512": "pairs", "avx2": "pairs", "neon": "lanes"}[isa]
    assert all(many(made) == 0 for made in kernels(isa, other))


def test_the_form_follows_the_target() -> None:
    wanted = {
        ("avx512", "avx512vnni"): "vnni", ("avx512",): "pairs", ("avx2", "avxvnni"): "vnni",
        ("avx2", "avx512vnni"): "evex", ("avx2", "avx512vnni", "avxvnni"): "vnni", ("avx2",): "pairs",
        ("generic",): "halves", ("neon",): "lanes", ("neon", "dotprod"): "sdot",
        ("neon", "dotprod", "i8mm"): "usdot",
    }  # fmt: skip
    for (isa, *extras), form in wanted.items():
        assert form_of(Target(isa, tuple(extras))) == form
        assert extra_of(isa, form) in ("", *extras)


_PAIRS = (
    (127, 1), (127, 2), (64, 64), (65, 64), (-128, 0), (-128, -1), (-127, -1), (-64, -64), (-65, -64),
    (127, -128), (-128, 127), (127, 127), (-128, -128), (1, -1),
)  # fmt: skip


@pytest.mark.parametrize("level", levels("quads"))
@pytest.mark.parametrize("name", ["quads", "depthwise"])
def test_sums_at_the_edge_of_16_bits(name: str, level: str) -> None:
    """Pairs of weights whose products with 255 just fit 16 bits and just do not, alone, twice in a block, and
    in sums of many; all ones of x at their largest, and every other one."""
    for first, second in product(_PAIRS, repeat=2):
        block = np.array([*first, *second], np.int8)
        if name == "quads":
            conv = Conv(16, 4, 1, 1, dtypes=INT8, epilogue=("bias",), n=1, h=3, w=25)
            weight = np.tile(block, (4, 4))[:, :, None, None]
            weight[1, 4:] = 0
            weight[2, ::2] = 0
        else:
            conv = Conv(4, 4, 2, 4, groups=4, dtypes=INT8, epilogue=("bias",), n=1, h=4, w=28)
            weight = np.tile(block, (4, 2)).reshape(4, 1, 2, 4)
            weight[1, :, 1:] = 0
        x = np.full(conv.x_shape, 255, np.uint8)
        x[:, 1::2] = 254
        how = Requantize(np.zeros(conv.k, np.int32), np.full(conv.k, 2.0**-11, np.float32), 0, 100)
        got = answered(name, conv, weight, x, how, target_of(level))
        np.testing.assert_array_equal(got, in_bytes(x, weight, conv, how))


def answered(name: str, conv: Conv, weight: Array, x: Array, how: Requantize, target: Target) -> Array:
    form = cpu_form(name)
    config = next(iter(form.configs(conv, target, worth_it(weight))))
    reads, writes = form.layouts(conv, config, target)
    made = native(form.build(form.pack(weight, conv, config), conv, config, target, reads, writes))
    x_buffer, y_buffer = reads.allocate(conv.x_shape), writes.allocate(conv.y_shape)
    reads.write(x_buffer, x, how.x_zero)
    threads.run(made, x_buffer, y_buffer, how.words)
    return writes.read(y_buffer, conv.y_shape)


def test_the_instruction_is_not_asked_of_machines_without_it() -> None:
    """A target says what it has; one that lacks it runs the same kernel otherwise, and gives the same
    bytes."""
    here = levels("quads")
    assert len(set(here)) == len(here) >= 1
    for level in here:
        assert target_of(level).runs_here()
        assert set(level.split("+")[1:]) <= set(target_of(level).extras)
    assert replace(target_of(here[-1]), extras=()).runs_here()
