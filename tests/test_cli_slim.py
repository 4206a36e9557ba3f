"""`aerogel slim`: an ONNX file or a module in, a pruned file, a compiled one or weights out; mistakes are one
sentence, before any work."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper
from typer.testing import CliRunner

import aerogel
from aerogel.cli.main import app
from tests.onnx_files import answers, numbers, structure, tensors, written
from tests.test_cli_mistakes import refused

BUILD = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
"""
SHAPE = ["--shape", "x=4x3x12x12"]
LONG = [*SHAPE, "--calibration", "inputs.npz", "--max-drop", "0.9", "--minutes", "0.05", "--quiet"]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few points are timed, and nothing is tuned."""
    from aerogel.pruning import slim, steps

    monkeypatch.setattr(slim, "AUTO", ("unstructured",))
    monkeypatch.setattr(steps, "SHARES", (0.8,))
    monkeypatch.setattr(steps, "compiled", partial(aerogel.compile, tune="off"))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two convolutions and a classifier, and inputs for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AEROGEL_CACHE", str(tmp_path / "cache"))
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w1"], ["c1"], name="/a/Conv", pads=[1, 1, 1, 1]),
        node("Relu", ["c1"], ["r1"]),
        node("Conv", ["r1", "w2"], ["c2"], name="/b/Conv", pads=[1, 1, 1, 1]),
        node("Relu", ["c2"], ["r2"]),
        node("GlobalAveragePool", ["r2"], ["pool"]),
        node("Flatten", ["pool"], ["flat"]),
        node("Gemm", ["flat", "w3"], ["y"], name="last", transB=1),
    ]
    arrays = {"w1": numbers(8, 3, 3, 3), "w2": numbers(8, 8, 3, 3), "w3": numbers(4, 8)}
    written(tmp_path / "m.onnx", nodes, {"x": ["n", 3, 12, 12]}, {"y": ["n", 4]}, arrays)
    np.savez("inputs.npz", x=numbers(16, 3, 12, 12))
    return "m.onnx"


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "small.py").write_text(BUILD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AEROGEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "small", raising=False)
    return "small:build"


def slim(*words: str) -> Any:
    done = CliRunner().invoke(app, ["slim", *words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_an_onnx_file_to_another(file: str) -> None:
    """For a speedup, with all that can be written; the recipe is one that `prune` takes."""
    words = ["--speedup", "1.2", "--recipe-out", "recipe.json", "--plot", "slim.png"]
    said = slim(file, "-o", "out.onnx", *words, *LONG)
    assert said["file"] == "out.onnx"
    assert structure(Path(file)) == structure(Path("out.onnx"))
    assert json.loads(Path("recipe.json").read_text()) == said["recipe"]
    assert set(said["recipe"]) <= {"a_Conv", "b_Conv", "last"}
    for layer, (_, share) in said["recipe"].items():
        weight = tensors(Path("out.onnx"))[{"a_Conv": "w1", "b_Conv": "w2", "last": "w3"}[layer]]
        assert np.count_nonzero(weight) <= (1 - share) * weight.size + weight.shape[0]
    assert Path("slim.png").read_bytes()[:4] == b"\x89PNG"


def test_shares_replayed_resumed_and_compiled(file: str) -> None:
    """For a share of zeros: the second call takes what the first one kept."""
    words = ["--sparsity", "0.5", "--state", "state", *LONG]
    first = slim(file, "-o", "out.onnx", "--recipe-out", "recipe.json", *words)
    assert first["chosen"] == 0
    assert first["tries"][0]["zeros"] == pytest.approx(0.5, abs=0.02)
    again = slim(file, "-o", "out.aero", *words)
    assert again["tries"] == first["tries"]
    x = torch.from_numpy(numbers(1, 3, 12, 12))
    fast = aerogel.load("out.aero")
    assert np.allclose(fast(x), answers(Path("out.onnx"), x)[0], atol=1e-3)
    done = CliRunner().invoke(
        app, ["prune", file, "-o", "p.onnx", *SHAPE, "--recipe", "recipe.json", "--json"]
    )
    assert done.exit_code == 0, done.output
    kept = [np.count_nonzero(tensors(Path(name))["w2"]) for name in ("out.onnx", "p.onnx")]
    assert kept[0] == pytest.approx(kept[1], abs=1)
    said = refused(["slim", file, "-o", "o.onnx", "--sparsity", "0.6", *words[2:]], 1)
    assert "another goal: say --state with another folder" in said


def test_a_module_as_weights_and_a_table(built: str) -> None:
    np.save("inputs.npy", numbers(4, 3, 12, 12))
    words = ["--shape", "x=2x3x12x12", "--sparsity", "0.6", "--exclude", "0", "--calibration", "inputs.npy"]
    done = CliRunner().invoke(
        app, ["slim", built, "-o", "w.safetensors", *words, "--minutes", "0.05", "--max-drop", "0.99"]
    )
    assert done.exit_code == 0, done.output
    assert "predicted" in done.stdout
    assert "w.safetensors: written" in done.stdout
    from safetensors.torch import load_file

    assert all(value.isfinite().all() for value in load_file("w.safetensors").values())


def test_mistakes_before_any_work(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from aerogel.pruning import slim

    monkeypatch.setattr(slim, "slim", lambda *_, **__: pytest.fail("work"))
    head, real = ["slim", file, "-o", "out.onnx", *SHAPE], ["--calibration", "inputs.npz"]
    both = ["--speedup", "2", "--sparsity", "0.9"]
    assert "say --speedup or --sparsity, not both" in refused([*head, *both, *real], 2)
    assert "slim looks at real inputs: say --calibration" in refused(head, 2)
    for flag, value in (
        ("--speedup", "1"),
        ("--speedup", "nan"),
        ("--sparsity", "90"),
        ("--max-drop", "1"),
        ("--minutes", "0"),
        ("--pattern", "some"),
        ("--dtype", "int4"),
        ("--plot", "p.txt"),
    ):
        assert flag in refused([*head, flag, value, *real], 2)
    Path("folder").mkdir()
    Path("text").write_text("no folder")
    assert "--recipe-out 'folder' cannot be written: it is a folder" in refused(
        [*head, "--recipe-out", "folder", *real], 1
    )
    assert "--plot 'text/p.png' cannot be written: 'text' is not a folder" in refused(
        [*head, "--plot", "text/p.png", *real], 1
    )
    said = refused(["slim", "none.onnx", "-o", "text/out.onnx", *real], 1)
    assert "cannot be written: " in said
    for out in ("out.pt", "out"):
        assert "must end in .onnx, .safetensors or .aero" in refused(["slim", file, "-o", out, *real], 2)
    said = refused(["slim", "m:build", "-o", "out.onnx", *real], 2)
    assert "must end in .safetensors or .aero: .onnx names an ONNX model." in said
    assert "Only an .onnx file is written as .onnx again." in said
    assert "no such file or folder" in refused([*head, "--calibration", "none"], 1)
    assert "a call takes 32" in refused(["slim", file, "-o", "out.onnx", "--shape", "x=32x3x12x12", *real], 1)
    assert not Path("out.onnx").exists()


def test_files_without_layers_are_refused(built: str) -> None:
    np.save("inputs.npy", numbers(4, 3, 12, 12))
    done = CliRunner().invoke(
        app, ["compile", built, "--shape", "x=1x3x12x12", "--tune", "off", "-o", "m.aero", "--quiet"]
    )
    assert done.exit_code == 0, done.output
    said = refused(["slim", "m.aero", "-o", "out.aero", "--calibration", "inputs.npy"], 1)
    assert "has no layers to prune: slim takes model.onnx or package.module:build" in said


def test_where_no_step_keeps_the_score_nothing_is_written(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from aerogel.pruning import slim as search

    scores = iter([1.0])
    monkeypatch.setattr(search, "agreement", lambda wanted, got: next(scores, 0.0))
    words = ["--sparsity", "0.5", *SHAPE, "--calibration", "inputs.npz", "--minutes", "0.05", "--quiet"]
    done = CliRunner().invoke(app, ["slim", file, "-o", "out.onnx", "--recipe-out", "recipe.json", *words])
    assert done.exit_code == 1, done.output
    assert "Nothing was written. Allow more with --max-drop" in done.stdout
    assert not Path("out.onnx").exists()
    assert not Path("recipe.json").exists()
