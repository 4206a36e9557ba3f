"""README and docs say what the code does: the example runs as it stands, and tables come from result
files."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aerogel
from benchmarks.harness import reliability
from benchmarks.harness.readme import written
from tests import counts

ROOT = Path(__file__).parent.parent


def test_readme_tables_are_generated() -> None:
    text = (ROOT / "README.md").read_text()
    assert written(text) == text, "run python -m benchmarks.harness.readme"
    modelled = (ROOT / "docs" / "gpu.md").read_text()
    assert written(modelled) == modelled, "run python -m benchmarks.harness.readme"


def test_the_page_on_reliability_is_generated() -> None:
    assert reliability.PAGE.read_text() == reliability.written(), "python -m benchmarks.harness.reliability"


BENCHMARKS = (
    "run",
    "harness.promises",
    "experiments.layers",
    "experiments.limits",
    "experiments.fashion",
    "experiments.fit",
    "experiments.tilewise",
    "experiments.blockgemm",
    "experiments.actsparse",
    "experiments.pooling",
    "experiments.activity",
    "experiments.in_network",
    "experiments.lanes",
    "experiments.gpu",
    "experiments.gpu_facts",
    "experiments.gpu_triton",
)


@pytest.mark.parametrize("name", BENCHMARKS if counts.mode() == "nightly" else counts.some(BENCHMARKS, 4))
def test_every_benchmark_says_how_it_is_called(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert said.returncode == 0, said.stderr
    assert f"python -m benchmarks.{name}" in said.stdout


def _contract() -> dict[str, ast.arguments]:
    """The functions of docs/api.md's first block of code, by name."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)
    assert block is not None
    code, found = re.sub(r"#.*", "", block[1]), {}
    for start in re.finditer(r"(?:^|;\s*)([a-z]\w*)\(", code, re.MULTILINE):
        depth, end = 1, start.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        (function,) = ast.parse(f"def f({code[start.end() : end - 1]}): pass").body
        assert isinstance(function, ast.FunctionDef)
        found[start[1]] = function.args
    return found


def test_signatures_are_those_of_the_contract() -> None:
    """What is built has the contract's parameters in its order with its defaults; what is not built yet may
    be missing."""
    contract = _contract()
    assert {"compile", "explain", "save"} <= set(contract)
    for name in aerogel.__all__:
        if name not in contract:
            continue
        wanted = contract[name]
        defaults = dict(
            zip(
                [a.arg for a in wanted.args][len(wanted.args) - len(wanted.defaults) :],
                wanted.defaults,
                strict=True,
            )
        )
        defaults |= {
            a.arg: d for a, d in zip(wanted.kwonlyargs, wanted.kw_defaults, strict=True) if d is not None
        }
        order = [a.arg for a in (*wanted.args, *wanted.kwonlyargs)]
        own = inspect.signature(getattr(aerogel, name)).parameters
        assert [n for n in order if n in own] == list(own), f"{name} takes {list(own)}, the contract {order}"
        for parameter in own.values():
            keyword = parameter.name in [a.arg for a in wanted.kwonlyargs]
            assert (parameter.kind == inspect.Parameter.KEYWORD_ONLY) == keyword, f"{name}({parameter.name})"
            has = (
                inspect.Parameter.empty
                if parameter.name not in defaults
                else ast.literal_eval(defaults[parameter.name])
            )
            assert parameter.default == has, (
                f"{name}({parameter.name}={parameter.default!r}); the contract says {has!r}"
            )


@pytest.mark.turns(2)
def test_readme_examples_run_as_they_stand() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "largest difference" in done.stdout
        assert "not dense" in done.stdout or "torch" in done.stdout


def test_the_benchmark_runs_on_one_layer(tmp_path: Path) -> None:
    pattern = ROOT.parent / "shared" / "patterns" / "resnet50-90.npz"
    if not pattern.exists():
        pattern = _made(tmp_path)
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "benchmarks.experiments.layers",
        "--pattern",
        pattern,
        "--only",
        "h7w7k512r1",
        "--rounds",
        "3",
        "--json",
        tmp_path / "out",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert '"ratio"' in (tmp_path / "out").read_text()


def test_the_benchmark_runs_on_a_whole_model(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.run",
        "squeezenet",
        "--size",
        "64",
        "--sparsity",
        "0.9",
        "--rounds",
        "1",
    ]
    command += ["--tune", "off", "--against", "torch", "--json", str(tmp_path / "out")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    result = json.loads((tmp_path / "out").read_text())
    assert set(result["error"]) >= {"aerogel", "eager", "torch", "torch-channels-last"}


def _made(folder: Path) -> Path:
    """Where the real patterns are not at hand: one seeded layer in the same format."""
    import numpy as np

    row = {
        "name": "l",
        "height": 7,
        "width": 7,
        "in_channels": 2048,
        "out_channels": 512,
        "kernel": 1,
        "padding": 0,
        "stride": 1,
        "groups": 1,
    }
    mask = np.random.default_rng(0).random((512, 2048, 1, 1)) < 0.1
    layers = np.frombuffer(json.dumps([row]).encode(), np.uint8)
    np.savez(folder / "made.npz", __layers__=layers, l=np.packbits(mask))
    return folder / "made.npz"


@pytest.mark.turns(2)
def test_the_example_runs(tmp_path: Path) -> None:
    """On made-up images: every way of pruning is there, with the zeros it asks for."""
    command = [
        sys.executable,
        str(ROOT / "examples" / "fashion_mnist.py"),
        "--quick",
        "--json",
        str(tmp_path / "f.json"),
    ]
    done = subprocess.run([*command, "--plot", str(tmp_path / "f.png")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "f.json").read_text())
    for name in ("dense", "magnitude", "tilewise", "tew", "blocks"):
        assert 0 <= result["accuracy"][name] <= 1
        assert result["speedup"][name] > 0
    assert result["parameters"] > 1_000_000
    assert result["zeros"]["dense"] == 0
    assert [result["zeros"][n] for n in ("magnitude", "tilewise", "tew")] == pytest.approx(
        [0.9, 0.75, 0.75], abs=0.02
    )
    assert result["zeros"]["blocks"] > 0.78
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"
