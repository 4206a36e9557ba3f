"""Whatever is wrong on the command line is one sentence with a flag as its remedy, never a traceback; exit
codes as documented."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from aerogel.cli.main import app
from tests.test_cli import built as built
from tests.test_explain import HOSTILE

SOURCE = Path(__file__).parent.parent / "src" / "aerogel"
SHAPE = ["--shape", "x=1x3x12x12"]
VERBS = {
    "compile": ["-o", "out.aero", "--tune", "off", "--quiet"],
    "bench": ["--rounds", "1", "--tune", "off", "--quiet", "--against", "torch"],
    "explain": ["--tune", "off", "--quiet"],
    "advise": ["--sparsities", "0.9", "--patterns", "unstructured"],
    "prune": ["-o", "out.safetensors"],
}


def refused(command: list[str], code: int) -> str:
    """What is said on stderr, as one line; the exit code is this, and there is no traceback."""
    done = CliRunner().invoke(app, command)
    assert done.exit_code == code, (command, done.output, done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.output
    assert code == 2 or len(done.stderr.splitlines()) == 1, done.stderr
    assert all(line.isprintable() for line in done.stderr.splitlines()), done.stderr
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.stderr).split())


@pytest.fixture
def folder(built: str, tmp_path: Path) -> Path:
    """Files that are none of ours, or not what they seem."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "folder.aero").mkdir()
    (tmp_path / "notes.txt").write_text("notes")
    for kind in ("onnx", "aero", "pt2"):
        (tmp_path / f"empty.{kind}").write_bytes(b"")
        (tmp_path / f"text.{kind}").write_text("not a model")
    torch.save({}, tmp_path / "state.pth")
    (tmp_path / "wrong.py").write_text(
        "import torch\n"
        "NUMBER = 3\n"
        "def fails():\n    raise KeyError('weights.bin')\n"
        "def leaves():\n    raise SystemExit(7)\n"
        "def nothing(): pass\n"
        "def argument(size): pass\n"
        "READY = torch.nn.Conv2d(3, 4, 3)\n"
    )
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    sys.modules.pop("wrong", None)
    return tmp_path


MODELS = [
    ("none.onnx", "cannot be read"),
    ("none.aero", "cannot be read"),
    ("none.pt2", "cannot be read: there is no such file"),
    ("none", "is none of model.onnx, model.aero, .* or package.module:build: there is no such file either"),
    ("folder", "is a folder. Name the file in it"),
    ("folder.onnx", "is a folder"),
    ("folder.aero", "is a folder"),
    ("notes.txt", "is none of model.onnx"),
    ("state.pth", "A pickle is not read: .* --weights FILE"),
    ("empty.onnx", "."),
    ("empty.aero", "not a model saved by aerogel"),
    ("text.onnx", "no ONNX file"),
    ("text.aero", "not a model saved by aerogel"),
    ("text.pt2", "--trust-pickle"),
    ("nomodule:build", "names no function: No module named 'nomodule'"),
    ("wrong:build", "names no function: .*Say package.module:build"),
    (":build", "names no function"),
    ("wrong:", "names no function"),
    ("..wrong:build", "names no function"),
    ("wrong:NUMBER", "is a int; name a function"),
    ("wrong:fails", r"fails in wrong.py, line 4: KeyError 'weights.bin'"),
    ("wrong:leaves", "fails in wrong.py, line 6: SystemExit 7"),
    ("wrong:nothing", "gave a NoneType; it must return a torch.nn.Module"),
    ("wrong:argument", "called without arguments"),
    ("broken:build", "importing 'broken' fails in .*SyntaxError"),
    ("raises:build", "importing 'raises' fails in raises.py, line 1: ZeroDivisionError"),
    ("exits:build", "importing 'exits' fails in exits.py, line 2: SystemExit"),
    ("mymodel:build\x1b[31m", r"names no function"),
]


@pytest.mark.parametrize("verb", VERBS)
def test_models_that_are_none(verb: str, folder: Path) -> None:
    for model, says in MODELS:
        said = refused([verb, model, *VERBS[verb], *SHAPE], 1)
        assert re.search(says, said), (model, said)
    assert re.search("cannot be read", refused([verb, "text.pt2", *VERBS[verb], "--trust-pickle"], 1))
    assert "Say --shape x=1x3x224x224" in refused([verb, "mymodel:build", *VERBS[verb]], 1)
    assert "holds no weights for" in refused(
        [verb, "mymodel:build", *VERBS[verb], *SHAPE, "--weights", "none.safetensors"], 1
    )
    said = refused([verb, "mymodel:build", *VERBS[verb], "--shape", "x=1x4x12x12"], 1)
    assert "does not run on inputs of 1x4x12x12: RuntimeError" in said
    assert "Say --shape NAME=1x3x224x224" in said
    assert not (folder / "out.aero").exists()
    assert not (folder / "out.safetensors").exists()


OPTIONS = [
    (["--shape", "x=1xmany"], "'x=1xmany' is no shape; one looks like --shape images=1x3x640x640"),
    (["--shape", "1x3x12x12"], "is no shape"),
    (["--shape", "x=1x0x12x12"], "is no shape"),
    (["--shape", "x=-1x3"], "is no shape"),
    (["--shape", "x=\u0664"], "is no shape"),
    (["--shape", "x=99999999999x3"], "is no shape"),
    ([*SHAPE, *SHAPE], "--shape says 'x' twice"),
    (["--threads", "0"], "--threads"),
    (["--threads", "-1"], "--threads"),
    (["--threads", "all"], "--threads"),
    (["--threads", "1000000"], "--threads"),
    (["--batch", "0"], "--batch"),
    (["--batch", "one"], "--batch"),
    (["--tune", "fastest"], "--tune is off, fast, full or seconds such as 30, not 'fastest'"),
    (["--tune", "-1"], "--tune is off"),
    (["--tune", "nan"], "--tune is off"),
    (["--tune", "inf"], "--tune is off"),
    (["--tune", "0"], "--tune is off"),
    (["--dtype", "float8"], "--dtype must be float16, bfloat16 or int8; got 'float8'."),
    (["--dtype", "__doc__"], "--dtype must be float16, bfloat16 or int8"),
    (["--sparsity", "2"], "--sparsity is between 0 and 1, not 2: for 2 % say 0.02"),
    (["--sparsity", "nan"], "--sparsity is between 0 and 1"),
    (["--sparsity", "-0.5"], "--sparsity is between 0 and 1"),
    (["--sparsity", "most"], "--sparsity"),
    (["--pattern", "stripes"], "--pattern is unstructured, NxM"),
    (["--patterns", "unstructured,stripes"], "--pattern is unstructured, NxM"),
    (["--sparsities", "0.5,90"], "each of --sparsities is between 0 and 1, not 90: for 90 % say 0.9"),
    (["--sparsities", "most"], "each of --sparsities is between 0 and 1"),
    (["--speedup", "0"], "--speedup is a number above 0"),
    (["--speedup", "nan"], "--speedup is a number above 0"),
    (["--plot", "advice.txt"], "--plot 'advice.txt' must end in .png, .svg or .pdf"),
    (["--require", "nan"], "--require is a number above 0"),
    (["--require", "-1"], "--require is a number above 0"),
    (["--require", "1.5", "--against", ""], "--against names none"),
    (
        ["--against", "gpu"],
        "--against takes opponents: torch, inductor, onnxruntime, openvino; 'gpu' is none of them",
    ),
    (["--rounds", "0"], "--rounds"),
    (["--batch", "1,,8"], "--batch"),
    (["-o", "out.txt"], "-o 'out.txt' must end in .onnx or .safetensors"),
]


@pytest.mark.parametrize("verb", VERBS)
def test_options_that_are_wrong_are_usage(verb: str, folder: Path) -> None:
    """Looked at before the model is opened: this one does not exist."""
    tried = 0
    for options, says in OPTIONS:
        known = {flag for flag in options if flag.startswith("--")} or {"-o"}
        only = {"-o": ("prune",), "1,,8": ("bench",)}.get(
            options[-1] if options[-1] == "1,,8" else options[0], (verb,)
        )
        if verb not in only or not all(re.search(rf"{f}\b(?!-)", _help(verb)) for f in known):
            continue
        tried += 1
        said = refused([verb, "none.onnx", *VERBS[verb], *options], 2)
        assert says in said, (options, said)
    assert tried >= 9, tried
    assert "--weights goes with package.module:build" in refused(
        [verb, "none.onnx", *VERBS[verb], "--weights", "w.safetensors"], 2
    )


def _help(verb: str) -> str:
    return (
        CliRunner()
        .invoke(app, [verb, "--help"], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
        .stdout
    )


def test_open_sizes_are_given_by_a_flag(folder: Path) -> None:
    onnx, helper = pytest.importorskip("onnx"), pytest.importorskip("onnx.helper")
    weight = onnx.numpy_helper.from_array(np.ones((8, 3, 3, 3), np.float32), "w")
    sizes = {"images": ["n", 3, "h", "w"]}
    graph = helper.make_graph(
        [helper.make_node("Conv", ["images", "w"], ["y"])], "g", [helper.make_tensor_value_info(n, 1, s) for
        n, s in sizes.items()], [helper.make_tensor_value_info("y", 1, None)], [weight],
    )  # fmt: skip
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), str(folder / "open.onnx")
    )
    for verb, options in VERBS.items():
        said = refused([verb, "open.onnx", *options], 1)
        assert "input 'images' has open sizes (n, h, w). Say --shape images=1x3x640x640." in said
        assert "aerogel.compile" not in said
        assert "has no input 'image'; it has images" in refused(
            [verb, "open.onnx", *options, "--shape", "image=1x3x9x9"], 1
        )
        assert "input 'images' takes" in refused([verb, "open.onnx", *options, "--shape", "images=1x3x9"], 1)
        assert "input 'images' takes" in refused(
            [verb, "open.onnx", *options, "--shape", "images=1x4x9x9"], 1
        )
    done = CliRunner().invoke(
        app, ["compile", "open.onnx", *VERBS["compile"], "--shape", "images=1x3x9x9", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["speedup"] is None, "nothing was timed"
    assert "(--tune off)" in json.loads(done.stdout)["says"]
    said = refused(["explain", "out.aero", "--shape", "image=1x3x9x9"], 1)
    assert "has no input 'image'; say --shape with one of images" in said
    assert "--batch" in refused(["explain", "out.aero", "--batch", "0"], 2)
    other = CliRunner().invoke(app, ["bench", "out.aero", "--shape", "images=2x3x20x20", "--rounds", "1"])
    assert other.exit_code == 0, other.output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(folder: Path) -> None:
    (folder / "folder").chmod(0o500)
    said = refused(["compile", "none.onnx", "-o", "folder/m.aero"], 1)
    assert "you have no permission to write to the folder 'folder'" in said


def test_where_nothing_can_be_written(folder: Path) -> None:
    """Said before the model is opened, for this one does not exist."""
    folder_given = "-o '{}' cannot be written: it is a folder"
    assert folder_given.format("folder") in refused(["compile", "none.onnx", "-o", "folder"], 1)
    assert "'notes.txt' is not a folder" in refused(["compile", "none.onnx", "-o", "notes.txt/m.aero"], 1)
    assert folder_given.format("folder.onnx") in refused(["prune", "none.onnx", "-o", "folder.onnx"], 1)
    assert "is a folder" in refused(["advise", "none.onnx", "--plot", "folder"], 1)


def test_a_ready_module_is_a_model(folder: Path) -> None:
    done = CliRunner().invoke(app, ["explain", "wrong:READY", *VERBS["explain"], *SHAPE])
    assert done.exit_code == 0, done.output


def test_require_with_nothing_to_compare_is_usage(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aerogel.runtime.peers.is_installed", lambda _: False)
    command = ["bench", built, *VERBS["bench"], *SHAPE, "--against", "onnxruntime", "--require", "1.1"]
    assert "none of --against ran" in refused(command, 2)


def test_what_nobody_expected(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import aerogel.compiler

    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError(f"in {HOSTILE}")

    monkeypatch.setattr(aerogel.compiler, "compile", fails)
    said = refused(["explain", built, *VERBS["explain"], *SHAPE], 1)
    assert said.startswith("ZeroDivisionError: in ")
    assert "please report it with what 'aerogel --traceback ...' prints" in said
    shown = CliRunner().invoke(app, ["--traceback", "explain", built, *VERBS["explain"], *SHAPE])
    assert isinstance(shown.exception, ZeroDivisionError)
    assert "ZeroDivisionError" in refused(["explain", built, *VERBS["explain"], *SHAPE], 1), (
        "asked for once, not for ever"
    )


def test_warnings_have_the_flag_too(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    import aerogel.compiler

    def warns(*_: Any, **__: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(
                "tuned for 8 threads, running on 2. Call torch.set_num_threads(8), or compile again.",
                stacklevel=1,
            )
        raise aerogel.AerogelError("enough")

    monkeypatch.setattr(aerogel.compiler, "compile", warns)
    done = CliRunner().invoke(app, ["explain", built, *VERBS["explain"], *SHAPE])
    assert done.stderr.splitlines()[0].endswith("running on 2. say --threads 8, or compile again.")


NAMED = """
import torch
from collections import OrderedDict
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict({%r: nn.Conv2d(3, 8, 3), "[/]": nn.Conv2d(8, 8, 3)}))
"""


@pytest.mark.parametrize("verb", VERBS)
def test_names_of_a_file_are_shown_and_not_obeyed(verb: str, folder: Path) -> None:
    """Neither colours nor rich's markup: `[/]` alone would be an error of rich's."""
    (folder / "named[red].py").write_text(NAMED % HOSTILE)
    done = CliRunner().invoke(
        app, [verb, "named[red]:build", *VERBS[verb], *SHAPE], env={"TERM": "dumb", "NO_COLOR": "1"}
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert all(line.isprintable() for line in done.output.splitlines()), done.output
    if verb == "explain":
        assert "[31mred[/]<script>" in done.stdout
        assert "\n[/] " in done.stdout
    if verb == "bench":
        assert "named[red]:build" in done.stdout


def test_an_encoding_that_lacks_a_letter(folder: Path) -> None:
    (folder / "named.py").write_text(NAMED % "漢字")
    command = [
        sys.executable,
        "-c",
        "from aerogel.cli.main import app; app()",
        "explain",
        "named:build",
        *VERBS["explain"],
        *SHAPE,
    ]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    assert r"\u6f22\u5b57" in done.stdout


def test_a_model_with_no_layer(folder: Path) -> None:
    (folder / "none.py").write_text("import torch\ndef build():\n    return torch.nn.ReLU()\n")
    sys.modules.pop("none", None)
    done = CliRunner().invoke(app, ["explain", "none:build", *VERBS["explain"], *SHAPE])
    assert "There is no convolution or Linear to speed up." in done.stdout
    assert "pruning it gains nothing" in refused(["advise", "none:build", *VERBS["advise"], *SHAPE], 1)
