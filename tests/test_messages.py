"""The mistakes of a first hour: each is one sentence that says what is wrong and what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aerogel
from aerogel import AerogelError
from aerogel.arguments import FEW_IMAGES, dtype_of
from aerogel.cli.words import in_shell

X = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)).eval()


def error_of(call: Callable[[], Any]) -> str:
    """Return the sentence of an AerogelError."""
    with pytest.raises(AerogelError) as raised:
        call()
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 600
    return text


@pytest.mark.parametrize("function", [aerogel.compile, aerogel.advise, aerogel.reprune])
def test_missing_example_is_asked_for(function: Any) -> None:
    says = f"{function.__name__}() needs an example input"
    for call in (lambda: function(net()), lambda: function(net(), ())):
        text = error_of(call)
        assert text.startswith(says)
        assert f"Call aerogel.{function.__name__}(model, (x,)), where x is a tensor" in text


def test_missing_example_of_an_onnx_model_is_its_own(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from onnx import helper

    from tests.onnx_files import numbers, written

    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], name="conv")]
    file = written(tmp_path / "m.onnx", nodes, {"x": [1, 3, 8, 8]}, {"y": None}, {"w": numbers(4, 3, 3, 3)})
    model = aerogel.OnnxModel(file)
    assert "Call aerogel.compile(model, model.example)." in error_of(lambda: aerogel.compile(model))
    said = error_of(lambda: aerogel.compile(file, torch.zeros(1, 3, 8, 8, dtype=torch.float64)))
    assert "input 'x' of the file is torch.float32, and the example is torch.float64" in said
    assert "Call .float() on the example." in said


def test_a_model_without_inputs_needs_no_example() -> None:
    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.grid = net(), nn.Buffer(X)

        def forward(self, scale: float = 2.0) -> Any:
            return self.body(self.grid) * scale

    fast = aerogel.compile(Grid().eval(), tune="off")
    assert torch.allclose(fast(), Grid().eval()(), atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's own
def test_forms_whose_layers_cannot_be_read() -> None:
    for made in (torch.jit.trace(net(), X), torch.jit.script(net())):  # type: ignore[no-untyped-call]
        text = error_of(lambda made=made: aerogel.compile(made, X, tune="off"))  # type: ignore[misc]
        assert "torch.jit module, whose layers cannot be read" in text
        assert "Pass the nn.Module that it was made from, or export that to ONNX" in text
    program = torch.export.export(net(), (X,))
    assert "Pass its .module()." in error_of(lambda: aerogel.compile(program, X, tune="off"))


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("fp16", 'Did you mean "float16"?'),
        ("half", 'Did you mean "float16"?'),
        ("f16", 'Did you mean "float16"?'),
        ("FLOAT16", 'Did you mean "float16"?'),
        ("torch.float16", 'Did you mean "float16"?'),
        (np.float16, 'Did you mean "float16"?'),
        ("bf16", 'Did you mean "bfloat16"?'),
        ("torch.bfloat16", 'Did you mean "bfloat16"?'),
        ("i8", 'Did you mean "int8"?'),
        (torch.qint8, 'Did you mean "int8"?'),
        ("uint8", 'Did you mean "int8"?'),
        ("fp32", "Leave dtype out to keep the model's own precision."),
        (torch.float32, "Leave dtype out to keep the model's own precision."),
        (float, "Leave dtype out to keep the model's own precision."),
    ],
)
def test_spelling_of_a_precision(given: Any, hint: str) -> None:
    text = error_of(lambda: dtype_of(given))
    assert text == f'dtype must be None, torch.float16, torch.bfloat16 or "int8"; got {given!r}. {hint}'
    assert "--dtype must be float16, bfloat16 or int8; got" in in_shell(text)
    assert error_of(lambda: dtype_of("float8")).endswith("got 'float8'.")


def test_element_types_that_differ() -> None:
    def remedy(model: nn.Module, x: torch.Tensor) -> str:
        return error_of(lambda: aerogel.compile(model, x, tune="off")).partition(". ")[2]

    double = "The model is torch.float32 and the example torch.float64: call .float() on the example."
    assert remedy(net(), X.double()) == double
    assert remedy(net(), X.byte()).endswith("the example torch.uint8: call .float() on the example.")
    assert remedy(net().half(), X).endswith("call .to(torch.float16) on the example.")
    with pytest.warns(UserWarning, match=r"The model is float64.*Call \.float\(\) on the model"):
        assert remedy(net().double(), X).endswith("call .float() on the model.")
    calls = [X.double()]
    said = error_of(lambda: aerogel.prune(net(), 0.5, score="wanda", calibration=calls))
    assert "call .float() on the input." in said


def test_a_float64_model_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"torch alone can run. Call \.float\(\) on the model and on its"):
        fast = aerogel.compile(net().double(), X.double(), tune="off")
    assert torch.equal(fast(X.double()), net().double()(X.double()))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("w.pt", "state", "a PyTorch checkpoint, not a model saved by aerogel. Load its weights into"),
        ("w.pth", "state", "a PyTorch checkpoint, not a model saved by aerogel. Load its weights into"),
        ("noname", "state", "a PyTorch checkpoint, not a model saved by aerogel. Load its weights into"),
        ("old.pth", "old", "a PyTorch checkpoint, not a model saved by aerogel. Load its weights into"),
        ("m.onnx", b"\x08\x07", "an ONNX model, not a model saved by aerogel. Compile it first: "),
        ("w.safetensors", "safe", "a safetensors file, not a model saved by aerogel. Load its weights into"),
        ("m.engine", b"engine", "a TensorRT engine, not a model saved by aerogel. Export the model to ONNX"),
        ("m.aero", b"text", "not a model saved by aerogel, or one that was cut off"),
        ("noname", b"text", "not a model saved by aerogel, or one that was cut off"),
    ],
)
def test_load_says_what_a_file_is(name: str, content: Any, says: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "safe":
        save_file(net().state_dict(), path)
    else:
        torch.save(net().state_dict(), path, _use_new_zipfile_serialization=content == "state")
    text = error_of(lambda: aerogel.load(path))
    assert text.startswith(f"'{path}'")
    assert says in text
    if name == "m.onnx":
        assert f"aerogel.compile('{path}')" in text
        assert f"Compile it first: aerogel compile {path} -o FILE.aero" in in_shell(text)
    if content == "state":
        assert "Say package.module:build and --weights FILE.safetensors" in in_shell(text)
        said = error_of(lambda: aerogel.compile(path))
        assert "is no ONNX file: it is a PyTorch checkpoint. Load its weights into a torch.nn.Module" in said


def test_load_of_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = error_of(lambda: aerogel.load("none.aero"))
    assert text.startswith("'none.aero' cannot be read: No such file or directory. Check the path")
    assert str(tmp_path) in text
    assert "it is a folder. Name the .aero file in it." in error_of(lambda: aerogel.load(tmp_path))


@pytest.mark.filterwarnings("error::UserWarning")
def test_int8_of_a_few_images_is_warned_of() -> None:
    def calibrated(*sizes: int) -> Any:
        calls = [torch.rand(n, 3, 12, 12, generator=torch.Generator().manual_seed(n)) for n in sizes]
        return aerogel.compile(net(), X, dtype="int8", calibration=calls, tune="off")

    for sizes, words in (((1,), "1 image:"), ((2, 5), "7 images:")):
        with pytest.warns(UserWarning, match=f"int8 was calibrated with {words}.*some dozens of real images"):
            calibrated(*sizes)
    calibrated(FEW_IMAGES)
    aerogel.compile(net(), X, dtype="bfloat16", calibration=[X], tune="off")  # no ranges of feature maps


def test_a_bare_tensor_is_no_list_of_calls() -> None:
    """Where it is no error it is split into batches: a row is never a call."""
    from aerogel.pruning.repair import calls_of

    images = torch.zeros(40, 3, 12, 12)
    for call in (
        lambda: aerogel.compile(net(), X, calibration=images, tune="off"),
        lambda: aerogel.heal(net(), images, teacher=net()),
        lambda: aerogel.boost(net(), images),
    ):
        text = error_of(call)
        assert re.search(r"must be a list.*got a Tensor", text)
        assert "[tensor]" in text
    assert [call[0][0].shape[0] for call in calls_of(images, "slim()")] == [32, 8]
    for rows in (list(images), images[0], [images[0]]):
        slims = error_of(lambda rows=rows: aerogel.slim(net(), rows, sparsity=0.5))  # type: ignore[misc]
        prunes = error_of(
            lambda rows=rows: aerogel.prune(net(), 0.5, score="wanda", calibration=rows)  # type: ignore[misc]
        )
        for text in (slims, prunes):
            assert "one image without a batch, of shape (3, 12, 12). Give batches" in text
            assert "[images] with images of shape (N, 3, 12, 12)" in text


WITHOUT = """
import json, sys, warnings
from importlib.machinery import PathFinder

MISSING = {"onnx", "matplotlib", "PIL", "ray", "s3fs", "pyopencl", "lightning", "transformers", "cuda"}

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
import aerogel
from aerogel.addresses import filesystem
from aerogel.backends.gpu.cuda import Cuda
from aerogel.backends.gpu.opencl import OpenCL
from aerogel.preprocess import Recipe
from aerogel.pruning.advice import Advice
from aerogel.pruning.slimmed import Slimmed
from aerogel.ray import Predict, app
from aerogel.report.report import Report
from aerogel.tune.fleet import Fleet
from typer.testing import CliRunner
from aerogel.cli.main import app as verbs

def verb(*words):
    done = CliRunner().invoke(verbs, list(words))
    assert done.exit_code == 1, done.output
    raise aerogel.AerogelError(done.stderr)

def module(name):
    __import__(name)

calls = {
    "plot: Advice": lambda: Advice("", 1.0, {}, (), None, {}, None).plot(),
    "plot: Slimmed": lambda: Slimmed(None, None, (), None, 0.0, 1.0, 0.0, "").plot(),
    "plot: bench": lambda: verb("bench", "m.onnx", "--plot", "p.png"),
    "plot: advise": lambda: verb("advise", "m.onnx", "--plot", "p.png"),
    "onnx: compile": lambda: aerogel.compile("m.onnx"),
    "onnx: OnnxModel": lambda: aerogel.OnnxModel("m.onnx"),
    "onnx: explain": lambda: verb("explain", "m.onnx"),
    "images: decoded": lambda: Recipe.parse("resize=8").decoded(b""),
    "s3: store": lambda: Fleet.of("s3://bucket/path"),
    "s3: address": lambda: filesystem("s3://bucket/path"),
    "ray: Predict": lambda: Predict("m.aero"),
    "ray: app": lambda: app({"model": "m.aero"}),
    "ray: batch": lambda: verb("batch", "m.aero", "--input", "photos", "--output", "out"),
    "ray: serve": lambda: verb("serve", "m.aero"),
    "ray: config": lambda: verb("serve", "m.aero", "-o", "serve.yaml"),
    "opencl: device": OpenCL,
    "cuda: device": Cuda,
    "lightning: import": lambda: module("aerogel.lightning"),
    "huggingface: import": lambda: module("aerogel.huggingface"),
}
found = {}
for name, call in calls.items():
    try:
        found[name] = ["nothing was raised", str(call())]
    except Exception as error:
        found[name] = [type(error).__name__, str(error)]
print(json.dumps(found))
"""


def test_packages_that_are_missing_are_named_with_their_extra(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 19
    for name, (kind, text) in found.items():
        extra = name.partition(":")[0]
        wanted = "ImportError" if name.endswith("import") else "AerogelError"
        assert kind in (wanted, "InvalidArgument"), (name, kind, text)
        assert f'pip install "aerogel[{extra}]"' in text, (name, text)
        assert "fault of aerogel" not in text


INTERRUPTED = """
import signal, sys
module = sys.argv.pop()

class AtImport:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == module:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, AtImport)
from aerogel.cli.entry import main
main()
"""


@pytest.mark.parametrize("module", ["aerogel.cli.main", "typer", "aerogel.preprocess", "aerogel.saved.file"])
def test_ctrl_c_is_one_line(module: str, tmp_path: Path) -> None:
    """While the command line is imported, and while a verb works."""
    command = [sys.executable, "-c", INTERRUPTED, "compile", "m.onnx", "-o", "m.aero", module]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (130, "Interrupted.\n", "")


def test_the_command_is_the_entry_that_handles_ctrl_c() -> None:
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert 'aerogel = "aerogel.cli.entry:main"' in pyproject
