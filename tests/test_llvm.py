"""Machine code: the object cache, page protection, and what happens on a lesser CPU."""

from __future__ import annotations

import ctypes
import gc
import os
import stat
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest

from aerogel.codegen.cpu import llvm, rows, segment, sums
from aerogel.codegen.cpu.abi import Code
from aerogel.errors import PlanMismatch
from aerogel.ir import Dtypes, Target, features, here_levels, host
from tests import counts

CODE = rows.RowsCode("generic", Dtypes(), 1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AEROGEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(llvm, "_loaded", {})
    monkeypatch.setattr(llvm, "_jit", [])
    return tmp_path / "cache" / "objects"


def _function() -> Code:
    return llvm.function(str(CODE), rows.ENTRY, lambda: rows.emit(CODE), CODE.isa)


def _build() -> int:
    return _function().address


def _again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process would: nothing linked yet."""
    monkeypatch.setattr(llvm, "_loaded", {})
    monkeypatch.setattr(llvm, "_jit", [])


def test_objects_are_cached_for_the_user_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _build() > 0
    (entry,) = cache.glob("*.o")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
    monkeypatch.setattr(llvm, "object_code", lambda *_, **__: pytest.fail("compiled again"))
    _again(monkeypatch)
    assert _build() > 0
    assert entry.exists()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_a_damaged_entry_is_a_miss(cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    _build()
    (entry,) = cache.glob("*.o")
    good = entry.read_bytes()
    bad = {
        "truncated": good[:-9],
        "flipped": good[:99] + b"\x00\x01" + good[101:],
        "empty": b"",
        "foreign": b"x" * 5000,
    }
    entry.write_bytes(bad[damage])
    _again(monkeypatch)
    assert _build() > 0
    assert entry.read_bytes() == good


def test_a_folder_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("AEROGEL_CACHE", str(tmp_path / "file" / "cache"))
    _again(monkeypatch)
    assert _build() > 0


def test_a_folder_others_may_write_is_not_used(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert _build() > 0
    assert not list(cache.glob("*.o"))


def test_our_pages_are_never_writable_and_executable() -> None:
    """Looked up in the kernel's own list: the page of each address we call."""
    kept = [llvm.function("segment", segment.ENTRY, segment.emit, host().isa), _function()]
    addresses = [code.address for code in kept]
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode = line.split()[:2]
        low, high = (int(v, 16) for v in span.split("-"))
        if any(low <= a < high for a in addresses):
            found += 1
            assert mode.startswith("r-x"), line
    assert found >= 1


def test_objects_need_nothing_from_outside() -> None:
    """No undefined symbol: no libm, no compiler runtime, nothing to hijack."""
    import llvmlite.binding

    for code in (
        CODE,
        rows.RowsCode("generic", Dtypes(), 3, ("bias", "silu", "add")),
        rows.RowsCode("avx2", Dtypes.of("f16"), 2),
    ):
        llvm.object_code(rows.emit(code), code.isa)
        module = llvmlite.binding.parse_assembly(rows.emit(code))
        assert all(f.name.startswith("llvm.") for f in module.functions if f.is_declaration)


def test_avx512_uses_whole_registers() -> None:
    """LLVM's default on server cores is half-width vectors."""
    code = rows.RowsCode("avx512", Dtypes(), 8, ("bias", "relu"))
    text = _assembly(llvm.object_code(rows.emit(code), "avx512"))
    fused = [line for line in text.splitlines() if "vfmadd" in line]
    assert len(fused) >= 8 * (sums.UNROLL + 1)
    assert all("zmm" in line and "(" in line for line in fused), (
        "one FMA with a memory operand for each vector"
    )


def _assembly(code: bytes) -> str:
    path = Path(os.environ["AEROGEL_CACHE"]) / f"asm-{os.getpid()}.o"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(code)
    return subprocess.run(["objdump", "-d", path], capture_output=True, text=True, check=True).stdout


def test_code_for_a_better_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aerogel.ir.target.features", lambda: features() - {"avx512f", "avx512fp16"})
    for known in (host, here_levels):
        known.cache_clear()
    try:
        assert "avx512" not in here_levels()
        with pytest.raises(
            PlanMismatch, match=r"this code is for avx512; this machine runs avx2, generic\. Compile"
        ):
            llvm.function("other", rows.ENTRY, lambda: rows.emit(CODE), "avx512")
    finally:
        for known in (host, here_levels):
            known.cache_clear()


def test_fp16_arithmetic_is_asked_for_apart() -> None:
    assert Target("avx512", ("avx512fp16",)).runs_here() == ("avx512fp16" in host().extras)


def test_state_of_the_process_is_left_alone() -> None:
    """MXCSR and the environment are what they were: nobody's subnormals are turned off."""
    script = (
        "import os; before = dict(os.environ); import aerogel, numpy as np\n"
        "from aerogel.codegen.cpu import llvm, rows\nfrom aerogel.ir.dtypes import Dtypes\n"
        "c = rows.RowsCode('generic', Dtypes(), 1)\n"
        "llvm.function(str(c), rows.ENTRY, lambda: rows.emit(c), c.isa)\n"
        "assert dict(os.environ) == before\n"
        "assert np.float32(1e-45) * np.float32(1) > 0\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_addresses_are_callable_from_c() -> None:
    """An empty segment runs: the smallest proof that the linked page is code."""
    import numpy as np

    code = llvm.function("segment", segment.ENTRY, segment.emit, host().isa)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)(
        np.zeros(len(segment.CONTEXT), np.int64).ctypes.data
    )


def test_large_mappings_do_not_abort_the_linker(ran: Callable[[str, int], None]) -> None:
    if host().isa == "neon":
        pytest.skip("the layout of memory that is built here is x86-64's")
    ran("mapping", counts.count("mapping"))
    for seed in counts.seeds("mapping"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.mapped", str(seed)], capture_output=True, text=True, timeout=120
        )
        assert done.stdout.startswith("linked 12"), f"seed {seed}: {done.returncode} {done.stderr[-500:]}"


def _copy(code: Code) -> float:
    """What a small generated function makes of a number."""
    return float(ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(code.address)(2.0))


def _adds(i: int) -> Code:
    text = f"define double @adds(double %x) {{ %y = fadd double %x, {float(i)}\n ret double %y }}"
    return llvm.function(f"adds-{i}", "adds", lambda: text, "generic")


def _executable() -> int:
    """Pages of code that came from no file."""
    lines = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if " r-xp 00000000 00:00 0" in line
    ]
    return (
        sum(int(high, 16) - int(low, 16) for low, high in (line.split()[0].split("-") for line in lines))
        // 4096
    )


def test_code_that_nothing_uses_is_freed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as many as are kept: memory stays bounded, what is still held stays right, what was freed
    comes back right."""
    if host().isa == "neon":
        pytest.skip("x86-64 code")
    monkeypatch.setattr(llvm, "STRONG", 16)
    monkeypatch.setattr(llvm, "_loaded", weakref.WeakValueDictionary())
    monkeypatch.setattr(llvm, "_recent", OrderedDict())
    held, before, dropped = _adds(0), _executable(), weakref.ref(_adds(1))
    assert dropped() is not None, "used a moment ago"
    for i in range(2, 64):
        assert _copy(_adds(i)) == 2 + i
    gc.collect()
    assert dropped() is None
    assert len(llvm._loaded) <= 17
    assert len(llvm._recent) == 16
    assert before + 8 < _executable() <= before + 40
    assert _copy(held) == 2
    assert _adds(0) is held
    assert _copy(_adds(1)) == 3
