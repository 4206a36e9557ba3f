"""Tiles on AMX: the code is compiled for it and looked at; it runs with the tile instructions emulated, and
on the engine where the CPU has one."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from aerogel.codegen.cpu import amx, blocks, llvm
from aerogel.codegen.cpu.abi import Code
from aerogel.errors import PlanMismatch
from aerogel.ir import Conv, Dtypes, Stats, Target, here_levels, host
from aerogel.methods import CpuForm
from aerogel.methods.blockgemm import cpu as blockgemm
from aerogel.methods.tilewise import cpu as tilewise
from tests.suite import run
from tests.suite.cases import case

CODE = blocks.BlocksCode(
    "avx512", Dtypes.of("bf16"), 4, ("bias", "relu"), width=amx.WIDTH, filters=amx.FILTERS
)
WITH = Target("avx512", ("amx_bf16", "f16c"))
CONV = Conv.parse("n1c64h14w14k64r3s3u1p1:bf16.bf16.f32.bf16")


@pytest.fixture(params=["emulated", "on the engine"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels for AMX that were made, in a list: with plain loops in the place of its instructions, or with
    them where the machine has them."""
    found: list[str] = []
    engine = amx.function

    def emulated(code: blocks.BlocksCode) -> Code:
        return llvm.function(
            f"emulated-{code}", blocks.ENTRY, lambda: amx.emit(code, emulated=True), code.isa
        )

    how = emulated if request.param == "emulated" else engine

    def function(code: blocks.BlocksCode) -> Code:
        found.append(str(code))
        return how(code)

    if "avx512" not in here_levels():
        pytest.skip("emulated tiles use AVX-512")
    if how is engine and "amx_bf16" not in host().extras:
        pytest.skip("this machine has no AMX")
    monkeypatch.setattr(amx, "function", function)
    return found


def test_the_engine_does_the_work() -> None:
    """A product for each load of a tile, as many of each as the loop is unrolled; the engine is configured
    and given back."""
    found = llvm.object_code(amx.emit(CODE), "avx512", "amx_bf16")
    loads, products = (
        len(re.findall(code, found, re.DOTALL)) for code in (rb"\xc4.\x7b\x4b", rb"\xc4\xe2[\x42\x4a]\x5c")
    )
    assert loads == products >= 4
    assert b"\xc4\xe2\x78\x49\xc0" in found, "tilerelease"


def test_configurations_for_amx_come_first_where_it_is() -> None:
    weight = np.ones(CONV.weight_shape, np.float32) * (np.arange(CONV.c) % 4 == 0)[None, :, None, None]
    stats = Stats.of(weight)
    for module in (tilewise, blockgemm):
        assert next(module.configs(CONV, WITH, stats))["filters"] == amx.FILTERS
        for conv, target in (
            (CONV, replace(WITH, extras=("f16c",))),
            (Conv.parse("n1c64h14w14k64r3s3u1p1"), WITH),
        ):
            assert all(config["filters"] != amx.FILTERS for config in module.configs(conv, target, stats))


@pytest.mark.parametrize("module", [tilewise, blockgemm], ids=["tilewise", "blockgemm"])
@pytest.mark.parametrize("kind", ["half", "half-edges", "half-special"])
def test_tiles_are_right(module: CpuForm, kind: str, made: list[str]) -> None:
    """The suite's cases in bf16: guard pages, exact integers, the bound, NaN and Inf, every configuration for
    AMX."""
    target, ran = replace(host(), extras=tuple(sorted({"amx_bf16", *host().extras}))), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            run, "_in_suite", lambda offered, case: [c for c in offered if c["filters"] == amx.FILTERS]
        )
        for seed in range(150):
            one = case(kind, seed, 12)
            if (one.conv.dtypes.input, one.conv.dtypes.weight) == ("bf16", "bf16"):
                assert run.faults(module, target, one, run.Expected(one)) is None, run.describe(
                    module.NAME, "avx512", one
                )
                ran += 1
    assert ran >= 20
    assert made


def test_code_for_amx_is_refused_without_it() -> None:
    if "amx_bf16" in host().extras:
        pytest.skip("this machine has AMX")
    with pytest.raises(PlanMismatch, match="with amx_bf16"):
        amx.function(CODE)
    config = next(tilewise.configs(CONV, WITH, Stats.of(np.ones(CONV.weight_shape, np.float32))))
    weight = np.zeros(CONV.weight_shape, np.uint16)
    reads, writes = tilewise.layouts(CONV, config, WITH)
    with pytest.raises(PlanMismatch, match="for AMX in bf16"):
        tilewise.build(
            tilewise.pack(weight, CONV, config), CONV, config, host().lower("avx512"), reads, writes
        )
