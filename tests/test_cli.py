"""The command line, called as a user would."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from aerogel.cli.main import app
from aerogel.methods import METHODS
from aerogel.runtime import peers

run = CliRunner().invoke


def test_methods_lists_every_method_with_its_paper() -> None:
    out = run(app, ["methods"]).stdout
    assert "On GPUs" in out
    assert all(name in out for name in METHODS)
    assert "Escort" in out
    assert [m["name"] for m in json.loads(run(app, ["methods", "--json"]).stdout)] == list(METHODS)


def test_doctor_speaks_in_sentences() -> None:
    result = run(app, ["doctor", "--json"])
    findings = {f["what"]: f for f in json.loads(result.stdout)}
    assert {
        "versions",
        "CPU",
        "caches",
        "thread pool",
        "threads",
        "dense",
        "GPU",
        "triton",
        "cache folder",
        "environment",
    } == set(findings)
    assert result.exit_code == (0 if all(f["good"] for f in findings.values()) else 1)
    assert "cores" in findings["threads"]["says"]
    assert "thread pool" in run(app, ["doctor"]).stdout


def test_help_and_version() -> None:
    verbs = ("doctor", "methods", "compile", "bench", "explain", "advise", "prune", "slim")
    for verb in ([], *([name] for name in verbs)):
        result = run(app, [*verb, "--help"])
        assert result.exit_code == 0
        assert not verb or verb[0] in ("doctor", "methods") or "Example:" in result.stdout
    assert run(app, ["--version"]).stdout.startswith("aerogel 0.")
    assert run(app, ["dokter"]).exit_code == 2


BUILD = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
"""


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mymodel.py").write_text(BUILD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AEROGEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)
    return "mymodel:build"


def test_compile_explain_and_bench_a_module(built: str, tmp_path: Path) -> None:
    shape = ["--shape", "x=1x3x24x24", "--quiet"]
    done = run(app, ["compile", built, "-o", "m.aero", "--tune", "off", "--json", *shape])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["bytes"] == (tmp_path / "m.aero").stat().st_size
    said = run(app, ["explain", "m.aero", "--json"])
    assert [row["sparsity"] for row in json.loads(said.stdout)["layers"]] == [0.0, 0.0]
    assert "no layer is called 'z'" in run(app, ["explain", "m.aero", "--layer", "z"]).stderr
    timed = run(
        app,
        [
            "bench",
            built,
            "--sparsity",
            "0.9",
            "--rounds",
            "3",
            "--tune",
            "off",
            "--batch",
            "1,2",
            "--against",
            "torch",
            "--json",
            *shape,
        ],
    )
    assert timed.exit_code == 0, timed.output
    results = json.loads(timed.stdout)
    assert set(results) == {"1", "2"}
    assert set(results["1"]["ms"]) == {"aerogel", "torch contiguous", "torch channels_last"}
    short = ["bench", built, "--rounds", "3", "--tune", "off", "--against", "torch", *shape]
    missed = run(app, [*short, "--require", "1000"])
    assert missed.exit_code == 3
    assert "required" in missed.stderr


def test_bench_compares_a_module_with_every_runtime_that_is_installed(
    built: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = ["bench", built, "--rounds", "2", "--tune", "off", "--quiet", "--shape", "x=1x3x24x24"]
    monkeypatch.setattr(peers, "is_installed", lambda name: name == "onnxruntime")
    said = run(app, how)
    assert said.exit_code == 0, said.output
    assert re.search(r"^ *onnxruntime +[\d.]+ +[\d.]+ +[\d.]+x", said.stdout, re.MULTILINE)
    assert "not compared: openvino (not installed: pip install openvino)" in said.stdout
    monkeypatch.setattr("aerogel.cli.bench.find_spec", lambda _: None)
    said = run(app, how)
    assert "not compared: onnxruntime (AerogelError: it reads ONNX files, and torch needs onnx" in said.stdout


def test_report_writes_a_page(built: str, tmp_path: Path) -> None:
    how = [built, "--shape", "x=1x3x24x24", "--tune", "off", "--quiet"]
    done = run(app, ["report", *how, "-o", "r.html"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("r.html, ")
    assert "<title>" in (tmp_path / "r.html").read_text()
    assert json.loads(run(app, ["report", *how, "-o", "r.html", "--json"]).stdout)["file"] == "r.html"
    wrong = run(app, ["report", *how, "-o", "r.pdf"])
    assert wrong.exit_code == 2
    assert "must end in .html or .htm" in wrong.output


def test_verbose_says_why_not_the_others(built: str) -> None:
    how = ["explain", built, "--shape", "x=1x3x24x24", "--sparsity", "0.9", "--quiet"]
    short, long = (run(app, [*how, *more]).stdout for more in ([], ["--verbose"]))
    assert "not dense" not in short
    assert re.search(r"not (dense|direct|tilewise)", long)
    assert short.splitlines()[0].split("x")[0] == long.splitlines()[0].split("x")[0], (
        "the second by the store"
    )


def test_bench_of_the_zoo_draws_its_bars(built: str, tmp_path: Path) -> None:
    how = [
        "bench",
        "--zoo",
        "signal",
        "--sparsity",
        "0.9",
        "--threads",
        "1",
        "--tune",
        "off",
        "--rounds",
        "2",
        "--against",
        "torch",
    ]
    done = run(app, [*how, "--plot", "bars.svg", "--quiet"])
    assert done.exit_code == 0, done.output
    assert "1 thread\n" in done.stdout.replace(" \n", "\n") or "1 thread " in done.stdout
    assert "seeded" in done.stdout
    assert "signal" in (tmp_path / "bars.svg").read_text()
    unknown = run(app, ["bench", "--zoo", "resnet5000"])
    assert unknown.exit_code != 0
    assert "resnet50" in unknown.output, "the names there are"
    assert run(app, ["bench", built, "--zoo", "signal"]).exit_code == 2


def test_weights_from_a_file(built: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from aerogel.saved.file import load

    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3, padding=1)
    )
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    flags = ["--weights", "w.safetensors", "--shape", "x=1x3x24x24", "--tune", "off", "--quiet"]
    assert run(app, ["compile", built, "-o", "m.aero", *flags]).exit_code == 0
    x = torch.randn(1, 3, 24, 24)
    assert torch.allclose(load("m.aero")(x), model(x), atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.export's own
def test_a_pt2_is_read_when_it_is_trusted(built: str, tmp_path: Path) -> None:
    import torch

    program = torch.export.export(torch.nn.Conv2d(3, 4, 3).eval(), (torch.randn(1, 3, 9, 9),))
    torch.export.save(program, tmp_path / "m.pt2")
    done = run(app, ["explain", "m.pt2", "--trust-pickle", "--tune", "off", "--quiet"])
    assert done.exit_code == 0, done.output


@pytest.mark.filterwarnings("ignore")  # torch's own words on what it finds in there
def test_a_hostile_pt2(built: str, tmp_path: Path) -> None:
    """Never opened unasked; opened when trusted, where it is damaged a sentence and no traceback."""
    import os
    import zipfile

    import torch

    class Harm:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harmed"),)

    torch.save(Harm(), tmp_path / "harm.pt2")
    torch.export.save(
        torch.export.export(torch.nn.Conv2d(3, 4, 3).eval(), (torch.randn(1, 3, 9, 9),)),
        tmp_path / "good.pt2",
    )
    whole = (tmp_path / "good.pt2").read_bytes()
    rng = np.random.default_rng(0)
    damaged = {
        "empty": b"",
        "text": b"not an archive",
        "half": whole[: len(whole) // 2],
        "harm": (tmp_path / "harm.pt2").read_bytes(),
    }
    for i in range(8):
        at = int(rng.integers(len(whole)))
        damaged[f"flipped{i}"] = whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :]
    with zipfile.ZipFile(tmp_path / "bomb.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/models/model.json", b" " * (64 << 20))
    damaged["bomb"] = (tmp_path / "bomb.pt2").read_bytes()
    for name, content in damaged.items():
        (tmp_path / f"{name}.pt2").write_bytes(content)
        unasked = run(app, ["explain", f"{name}.pt2", "--tune", "off", "--quiet"])
        assert unasked.exit_code == 1
        assert "--trust-pickle" in unasked.stderr
        assert not (tmp_path / "harmed").exists(), "a file was unpickled unasked"
        if name == "harm":
            continue
        trusted = run(app, ["explain", f"{name}.pt2", "--tune", "off", "--quiet", "--trust-pickle"])
        assert trusted.exit_code in (0, 1)
        assert trusted.exception is None or isinstance(trusted.exception, SystemExit), (
            f"{name}: {trusted.exception!r}"
        )
        assert trusted.exit_code == 0 or "cannot be read" in trusted.stderr, trusted.stderr


def test_advise_measures_and_draws(built: str, tmp_path: Path) -> None:
    asked = [
        "advise",
        built,
        "--shape",
        "x=1x3x20x20",
        "--sparsities",
        "0.8,0.95",
        "--patterns",
        "unstructured",
        "--speedup",
        "1.01",
    ]
    result = run(app, [*asked, "--plot", str(tmp_path / "advice.png"), "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert set(said["model_us"]) == {"unstructured@0.8", "unstructured@0.95"}
    assert [layer["layer"] for layer in said["layers"]] == ["0", "2"]
    assert (tmp_path / "advice.png").read_bytes()[:4] == b"\x89PNG"
    assert run(app, ["advise", built, "--shape", "x=1x3x20x20", "--sparsities", "most"]).exit_code == 2


def test_prune_writes_weights_that_compile_reads(built: str, tmp_path: Path) -> None:
    out = tmp_path / "pruned.safetensors"
    result = run(
        app,
        [
            "prune",
            built,
            "-o",
            str(out),
            "--shape",
            "x=1x3x20x20",
            "--sparsity",
            "0.75",
            "--pattern",
            "4x1",
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["zeros"] == pytest.approx(0.75, abs=0.02)
    compiled = [
        "compile",
        built,
        "--weights",
        str(out),
        "--shape",
        "x=1x3x20x20",
        "--tune",
        "off",
        "-o",
        str(tmp_path / "m.aero"),
    ]
    assert run(app, compiled).exit_code == 0
    assert run(app, ["prune", built, "-o", "pruned.txt", "--shape", "x=1x3x20x20"]).exit_code == 2


def test_prune_writes_an_onnx_file(tmp_path: Path) -> None:
    onnx, helper = pytest.importorskip("onnx"), pytest.importorskip("onnx.helper")
    weight = np.random.default_rng(0).standard_normal((8, 4, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"])], "g", [helper.make_tensor_value_info("x", 1, [1, 4, 8,
        8])], [helper.make_tensor_value_info("y", 1, [1, 8, 6, 6])], [onnx.numpy_helper.from_array(weight,
        "w")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), str(tmp_path / "m.onnx"))
    result = run(
        app, ["prune", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "p.onnx"), "--sparsity", "0.5"]
    )
    assert result.exit_code == 0, result.output
    kept = onnx.numpy_helper.to_array(onnx.load(str(tmp_path / "p.onnx")).graph.initializer[0])
    assert np.count_nonzero(kept) == weight.size // 2
    assert np.array_equal(kept[kept != 0], weight[kept != 0])
