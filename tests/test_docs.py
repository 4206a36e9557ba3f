"""README and docs say what the code does: the example runs as it stands, and tables come from result
files."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aerogel
from aerogel.cli.main import app
from benchmarks.harness import chart, reliability, tables
from tests import counts

ROOT = Path(__file__).parent.parent


def test_tables_are_generated() -> None:
    for page in tables.PAGES:
        text = page.read_text()
        assert tables.written(text) == text, f"{page.name}: run python -m benchmarks.harness.tables"


def test_the_chart_shows_the_result_files() -> None:
    results = {
        name: [json.loads(line) for line in (tables.RESULTS / f"{name}.jsonl").read_text().splitlines()]
        for name, _ in chart.SOURCES.values()
    }
    numbers = chart.shown(results)
    for theme in chart.INKS:
        for form in chart.SHAPES:
            assert numbers in (chart.FOLDER / f"speed-{theme}{form}.svg").read_text(), (
                "run python -m benchmarks.harness.tables"
            )


def test_the_page_on_reliability_is_generated() -> None:
    assert reliability.PAGE.read_text() == reliability.written(), "python -m benchmarks.harness.reliability"


BENCHMARKS = (
    "run",
    "harness.promises",
    "harness.stand_ins",
    "harness.torch_environment",
    "harness.torch_versions",
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
    "experiments.slim",
    "experiments.int8",
    "experiments.slim_ocr",
    "experiments.slim_upscale",
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


def test_every_public_name_is_in_the_reference_with_an_example() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for name in aerogel.__all__:
        if name == "__version__":
            continue
        assert re.search(rf"auto\w+:: aerogel\.{name}$", page, re.MULTILINE), name
        assert "Example:\n" in (inspect.getdoc(getattr(aerogel, name)) or ""), f"{name} shows no example"


def test_every_parameter_is_explained() -> None:
    for name in aerogel.__all__:
        own = getattr(aerogel, name)
        if inspect.isfunction(own):
            text = inspect.getdoc(own) or ""
            missing = [n for n in inspect.signature(own).parameters if f"\n    {n}: " not in text]
            assert not missing, f"{name}: {missing}"


def test_every_verb_has_its_place_in_the_docs() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    verbs = [
        command.name or str(command.callback.__name__)
        for command in app.registered_commands
        if command.callback
    ]
    assert len(verbs) >= 8
    for verb in verbs:
        assert f"## {verb}\n" in page


def test_the_readme_is_short_and_works_from_a_wheel() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert "../" not in text
    assert "-m benchmarks" not in text, "what is run from a checkout is in docs/benchmarks.md"
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in link or (ROOT / link).exists(), link


def test_torch_for_cpus_is_installed_first() -> None:
    for name in ("README.md", "docs/get-started.md"):
        first = re.findall(r"^```\w*\n(.*?)^```", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)[0]
        lines = first.splitlines()
        assert "torch --torch-backend=cpu" in lines[0], f"{name}: pip alone picks 3 GB of CUDA"
        assert lines[1].startswith("pip install"), name
        assert "aerogel[" in lines[1], name
    assert "ARG TORCH_OPTIONS=--torch-backend=cpu\n" in (ROOT / "deploy" / "Dockerfile").read_text()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_pages_say_of_torchao_exists() -> None:
    sparsity = pytest.importorskip("torchao.sparsity")
    page = (ROOT / "docs" / "about" / "coming-from.md").read_text()
    names = {*re.findall(r"torchao's `(\w+)", page), "semi_sparse_weight"}
    assert names >= {"sparsify_", "WandaSparsifier"}
    assert not [name for name in names if not hasattr(sparsity, name)]
    assert "removed" not in page, "a package that removed something may bring it back: say the version"


RIDDLES = r"\b(ours|is said|are said|world|apart|twin|house)\b"
"""Words that newcomers stumbled over: each has a plain one."""


def test_no_riddles() -> None:
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs" / "guides").glob("*.md"),
        *(ROOT / "docs" / "about").glob("*.md"),
    ]
    pages += [ROOT / "docs" / name for name in ("index.md", "get-started.md", "how-it-works.md", "cli.md")]
    for page in pages:
        found = re.findall(RIDDLES, page.read_text())
        assert not found, f"{page.name}: {found}"


PAGES = ("get-started", *(f"guides/{name}" for name in (
    "deploy", "debug", "report", "half", "onnx", "sparsity", "int8", "feature-maps", "prune", "slim",
)))  # fmt: skip
"""Pages whose Python blocks run one after the other, from the preamble at the top of each."""


def blocks_of(page: str) -> list[str]:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return re.findall(r"^```(?:python|\{testcode\})\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.turns(5)
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_as_they_stand(page: str, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", "\n".join(blocks_of(page))]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]


def test_every_guide_with_code_is_run_from_its_preamble() -> None:
    guides = {f"guides/{path.stem}" for path in (ROOT / "docs" / "guides").glob("*.md")}
    assert {page for page in guides if blocks_of(page)} <= {*PAGES, "guides/gpu"}, "GPUs are not here"
    for page in PAGES:
        first = blocks_of(page)[0]
        assert "import aerogel" in first, f"{page} begins with what its blocks need"
        assert "model = nn.Sequential(" in first, page


@pytest.mark.skipif(counts.by_day(), reason=".ci/wheel.py runs them")
def test_readme_examples_run_as_they_stand(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "largest difference" in done.stdout
        assert "torch" in done.stdout
        assert (tmp_path / "report.html").stat().st_size > 10_000


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
