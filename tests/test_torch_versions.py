"""The range of torch versions: one constant, which files, pages and results agree with, and a warning beyond
it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import aerogel
from aerogel.capture import export
from aerogel.cli import doctor
from aerogel.errors import UnsupportedTorch
from aerogel.torch_versions import (
    NEWEST_TESTED_TORCH,
    OLDEST_TORCH,
    dotted,
    is_untested,
    minor_version,
    require_supported_torch,
)
from benchmarks.harness.tables import RESULTS
from benchmarks.harness.torch_networks import (
    FLOAT_LIMIT,
    NETWORKS,
    check_other_sizes,
    compiled_graph,
    run_check,
    small_input,
    small_model,
)
from benchmarks.harness.torch_versions import latest_rows, table

ROOT = Path(__file__).parent.parent


def test_package_requires_oldest_torch_without_upper_bound() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [line for line in required if line.startswith("torch")] == [f"torch>={dotted(OLDEST_TORCH)}"]


@pytest.mark.parametrize(
    "page", ["docs/get-started.md", "docs/about/stability.md", "docs/about/platforms.md"]
)
def test_pages_name_oldest_torch(page: str) -> None:
    named = re.findall(r"torch (\d+\.\d+) or (?:later|newer)", (ROOT / page).read_text())
    assert set(named) == {dotted(OLDEST_TORCH)}


def test_results_cover_the_range_and_every_network_passes() -> None:
    lines = (RESULTS / "torch_versions.jsonl").read_text().splitlines()
    latest = latest_rows([json.loads(line) for line in lines])
    assert min(latest) == OLDEST_TORCH
    assert max(latest) == NEWEST_TESTED_TORCH
    for minor, by_network in latest.items():
        assert set(by_network) == set(NETWORKS), dotted(minor)
        assert all(row["passed"] for row in by_network.values()), dotted(minor)


def test_table_counts_networks_that_fail() -> None:
    rows = [
        {"torch": "2.10.0", "network": "unet", "passed": False, "reason": "x", "date": "2026-01-02"},
        {"torch": "2.9.1", "network": "unet", "passed": False, "reason": "x", "date": "2026-01-02"},
        {"torch": "2.9.1", "network": "unet", "passed": True, "error": 2e-6, "date": "2026-01-03"},
    ]
    assert table(rows).splitlines()[2:4] == [
        "| 2.9 | 2.9.1 | 1 of 1 | 2e-06 | 2026-01-03 |",
        "| 2.10 | 2.10.0 | 0 of 1 (not unet) | 0e+00 | 2026-01-02 |",
    ]


@pytest.mark.parametrize("name", ["bfloat16", "saved file", "ONNX file", "export of a Compiled"])
def test_smoke_passes_with_the_installed_torch(name: str, tmp_path: Path) -> None:
    row = run_check(name, tmp_path)
    assert row["passed"], row


@pytest.mark.filterwarnings("error:torch runs")
def test_larger_batch_gets_its_program_where_torch_fixes_a_batch_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export, "CAN_OPEN_ONES", False)  # as with torch 2.6
    model = small_model()
    fast = compiled_graph(model, (small_input(),))
    assert fast.misfit([small_input(2)]) is not None
    assert check_other_sizes(model, fast, (small_input(1, 48, 40),), {}) < FLOAT_LIMIT
    for batch in (2, 3):
        assert check_other_sizes(model, fast, (small_input(batch),), {}, is_open=False) < FLOAT_LIMIT


@pytest.mark.parametrize(
    ("version", "minor"),
    [("2.6.0", (2, 6)), ("2.15.0a0+git1234", (2, 15)), ("10.11", (10, 11)), ("nightly", None)],
)
def test_minor_version(version: str, minor: tuple[int, int] | None) -> None:
    assert minor_version(version) == minor


def test_versions_beyond_the_range() -> None:
    newest = f"{dotted(NEWEST_TESTED_TORCH)}.9+cu130"
    newer = f"{NEWEST_TESTED_TORCH[0]}.{NEWEST_TESTED_TORCH[1] + 1}.0.dev1"
    assert [is_untested(v) for v in (newest, newer, "3.0", "unknown")] == [False, True, True, True]
    for version in (f"{dotted(OLDEST_TORCH)}.0+cpu", newer, "unknown"):
        require_supported_torch(version)
    with pytest.raises(
        UnsupportedTorch, match=r"needs torch 2\.6 or newer, and this is torch 2\.5\.1\+cpu"
    ) as e:
        require_supported_torch("2.5.1+cpu")
    assert isinstance(e.value, ImportError)
    assert isinstance(e.value, aerogel.AerogelError)


UNKNOWN_TORCH = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("99.1.0")
import pathlib, sys, warnings
warnings.simplefilter("error", UserWarning)
import aerogel, aerogel.compiler, aerogel.dynamo, aerogel.saved.file
warnings.simplefilter("always", UserWarning)
model, x = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)).eval(), torch.ones(1, 3, 8, 8)
with warnings.catch_warnings(record=True) as caught:
    fast = aerogel.compile(model, (x,), tune="off", progress=False)
    aerogel.compile(model, (x,), tune="off", progress=False)
    aerogel.save(fast, sys.argv[1])
    aerogel.load(sys.argv[1])
[warning] = [w for w in caught if issubclass(w.category, aerogel.errors.UntestedTorchWarning)]
assert warning.filename == "<string>", warning.filename
print(warning.message)
"""


def test_newer_torch_warns_once_at_first_compile_and_not_at_import(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNKNOWN_TORCH, str(tmp_path / "model.aero")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tested = f"tested with torch {dotted(OLDEST_TORCH)} to {dotted(NEWEST_TESTED_TORCH)}"
    assert f"{tested}, and this is torch 99.1.0" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        "from aerogel import compile",
        "import aerogel.dynamo",
        "from aerogel.cli.main import app; app(['bench', 'model.onnx'])",
    ],
)
def test_older_torch_is_refused_in_one_sentence(command: str) -> None:
    script = f"import torch, aerogel; torch.__version__ = '2.4.1'; {command}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.partition("UnsupportedTorch: ")[2] == (
        'aerogel needs torch 2.6 or newer, and this is torch 2.4.1. Run: pip install --upgrade "torch>=2.6"'
    )


def test_doctor_names_the_tested_range_beside_a_newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is tested with" not in doctor._versions().says
    monkeypatch.setattr(torch, "__version__", "99.1.0")
    assert f"tested with torch 2.6 to {dotted(NEWEST_TESTED_TORCH)}" in doctor._versions().says
    assert doctor._versions().good
