"""The command line, called as a user would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aerogel.cli.doctor import cpu_quota
from aerogel.cli.main import app
from aerogel.methods import METHODS

run = CliRunner().invoke


def test_methods_lists_every_method_with_its_paper() -> None:
    out = run(app, ["methods"]).stdout
    assert all(name in out for name in METHODS)
    assert "Escort" in out
    assert [m["name"] for m in json.loads(run(app, ["methods", "--json"]).stdout)] == list(METHODS)


def test_doctor_speaks_in_sentences() -> None:
    result = run(app, ["doctor", "--json"])
    findings = {f["what"]: f for f in json.loads(result.stdout)}
    assert {"versions", "CPU", "caches", "thread pool", "threads", "dense", "cache folder", "environment"} == set(findings)
    assert result.exit_code == (0 if all(f["good"] for f in findings.values()) else 1)
    assert "cores" in findings["threads"]["says"]
    assert "thread pool" in run(app, ["doctor"]).stdout


def test_help_and_version() -> None:
    for verb in ([], ["doctor"], ["methods"]):
        result = run(app, [*verb, "--help"])
        assert result.exit_code == 0
    assert run(app, ["--version"]).stdout.startswith("aerogel 0.")
    assert run(app, ["dokter"]).exit_code == 2


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
        ({"cpu.max": "rubbish"}, None),
    ],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], wanted: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == wanted
