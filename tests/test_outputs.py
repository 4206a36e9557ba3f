"""No result replaces its input, takes the suffix of another format or creates folders that were mistyped, and
every refusal comes before any work."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import aerogel
from aerogel import AerogelError
from aerogel.cli.main import app
from aerogel.outputs import check_folder, check_output, make_folder
from aerogel.tune.fleet import Fleet

X = torch.zeros(1, 3, 12, 12)
REAL, PHOTOS = ["--calibration", "inputs.npz"], ["--calibration", "photos"]
READ_ONLY = {"doctor", "methods", "explain", "warm"}
EXISTING = {
    "m.onnx": "an ONNX model", "m.aero": "a compiled model", "inputs.npz": "arrays", "recipe.json": "{}",
    "w.safetensors": "weights", "photos/one.png": "a picture", "build.py": "def build(): ...",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inputs that must not change. None of them is a model, so a verb that reads one before it checks its
    output fails with another sentence."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for name, text in EXISTING.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.safetensors").symlink_to("w.safetensors")
    os.link(tmp_path / "m.onnx", tmp_path / "hard.onnx")
    return tmp_path


def message_of(command: list[str], code: int) -> str:
    """Return what a verb prints on stderr, as one line."""
    done = CliRunner().invoke(app, command, env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})
    assert done.exit_code == code, (command, done.output, done.exception)
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.stderr).split())


def unchanged(folder: Path) -> bool:
    """Whether every input is as it was and nothing was created beside them."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    same = all((folder / name).read_text() == text for name, text in EXISTING.items())
    return same and names == {*EXISTING, "link.safetensors", "hard.onnx"}


WRONG_SUFFIX = [
    (["compile", "m.onnx", "-o", "m.onnx"], r"-o 'm.onnx' must end in .aero: .onnx names an ONNX model"),
    (["compile", "m.onnx", "-o", "other.onnx"], r"must end in .aero.* For example 'other.aero'"),
    (["compile", "m.onnx", "-o", "m.engine"], r".engine names a TensorRT engine"),
    (["compile", "m.onnx", "-o", "m.pt"], r".pt names a PyTorch checkpoint"),
    (["compile", "m.onnx", "-o", "resnet-1.3"], r"must end in .aero. For example 'resnet-1.3.aero'"),
    (["report", "m.onnx", "-o", "m.onnx"], r"must end in .html or .htm: .onnx names an ONNX model"),
    (["bench", "m.onnx", "--plot", "m.onnx"], r"--plot 'm.onnx' must end in .png, .svg or .pdf"),
    (["advise", "m.onnx", "--plot", "m.onnx"], r"--plot 'm.onnx' must end in .png, .svg or .pdf"),
    (["prune", "m.onnx", "-o", "m.aero"], r"must end in .onnx or .safetensors: .aero names a compiled"),
    (["prune", "a:build", "-o", "m.onnx"], r"Only an .onnx file is written as .onnx again"),
    (["slim", "m.onnx", *REAL, "-o", "m.pt"], r"must end in .onnx, .safetensors or .aero"),
    (["slim", "m.onnx", *REAL, "-o", "o.onnx", "--recipe-out", "build.py"], r".py names Python code"),
    (["slim", "m.onnx", *REAL, "-o", "o.onnx", "--plot", "o.onnx"], r"--plot 'o.onnx' must end in"),
    (["serve", "m.aero", "-o", "m.aero"], r"-o 'm.aero' must end in .yaml or .yml: .aero names"),
]
INPUT = [
    (["prune", "m.onnx", "-o", "m.onnx"], "-o 'm.onnx' is the input, which would be lost"),
    (["prune", "m.onnx", "-o", "./photos/../m.onnx"], "is the input ('m.onnx'), which would be lost"),
    (["prune", "m.onnx", "-o", "hard.onnx"], "-o 'hard.onnx' is the input ('m.onnx')"),
    (["prune", "a:b", "--weights", "w.safetensors", "-o", "w.safetensors"], "is the input"),
    (["prune", "a:b", "--weights", "w.safetensors", "-o", "link.safetensors"], "is the input"),
    (["prune", "a:b", "--weights", "link.safetensors", "-o", "w.safetensors"], "is the input"),
    (["slim", "m.onnx", *REAL, "-o", "hard.onnx"], "is the input"),
    (["slim", "m.onnx", *PHOTOS, "-o", "o.onnx", "--plot", "photos/one.png"], "is the input ('photos')"),
    (["compile", "m.aero", "-o", "m.aero"], "-o 'm.aero' is the input, which would be lost"),
]  # fmt: skip
NO_FOLDER = [
    (["compile", "m.onnx", "-o", "no/such/o.aero"], "-o 'no/such/o.aero' cannot be written"),
    (["report", "m.onnx", "-o", "no/such/o.html"], "-o 'no/such/o.html' cannot be written"),
    (["bench", "m.onnx", "--plot", "no/such/o.png"], "--plot 'no/such/o.png' cannot be written"),
    (["advise", "m.onnx", "--plot", "no/such/o.png"], "--plot 'no/such/o.png' cannot be written"),
    (["prune", "m.onnx", "-o", "no/such/o.onnx"], "-o 'no/such/o.onnx' cannot be written"),
    (["slim", "m.onnx", *REAL, "-o", "no/such/o.onnx"], "-o 'no/such/o.onnx' cannot be written"),
    (["slim", "m.onnx", *REAL, "-o", "o.onnx", "--recipe-out", "no/such/r.json"], "--recipe-out '"),
    (["slim", "m.onnx", *REAL, "-o", "o.onnx", "--plot", "no/such/o.svg"], "--plot '"),
    (["slim", "m.onnx", *REAL, "-o", "o.onnx", "--state", "no/such/state"], "--state 'no/such/state' cannot"),
    (["serve", "m.aero", "-o", "no/such/o.yaml"], "-o 'no/such/o.yaml' cannot be written"),
    (["export", "m.aero", "-o", "no/such/repository"], "-o 'no/such/repository' cannot be created"),
    (["batch", "m.aero", "--input", "photos", "--output", "no/such/out"], "/no/such/out' cannot be created"),
    (["store", "pull", "memory://a", "--folder", "no/such/records"], "--folder 'no/such/records' cannot"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "says"), WRONG_SUFFIX)
def test_suffix_that_denies_the_format_is_usage(command: list[str], says: str, folder: Path) -> None:
    assert re.search(says, message_of(command, 2))
    assert unchanged(folder)


@pytest.mark.parametrize(("command", "says"), INPUT)
def test_input_is_never_replaced(command: list[str], says: str, folder: Path) -> None:
    assert says in message_of(command, 2)
    assert unchanged(folder)


@pytest.mark.parametrize(("command", "says"), NO_FOLDER)
def test_mistyped_folders_are_not_created(command: list[str], says: str, folder: Path) -> None:
    message = message_of(command, 1)
    assert says in message
    assert "no/such' does not exist. Create it first, or correct the path." in message
    assert unchanged(folder)
    assert not (folder / "no").exists()


def test_folders_that_are_files(folder: Path) -> None:
    for command in (
        ["export", "m.aero", "-o", "m.aero"],
        ["batch", "m.aero", "--input", "photos", "--output", "m.aero"],
        ["slim", "m.onnx", *REAL, "-o", "o.onnx", "--state", "recipe.json"],
    ):
        assert "cannot be used as a folder: it is a file" in message_of(command, 1)
    assert unchanged(folder)


def test_every_verb_that_takes_a_path_to_write_is_in_the_tables() -> None:
    """A new option that writes has its rows above."""
    tried = {(c[0], word) for c, _ in [*WRONG_SUFFIX, *NO_FOLDER] for word in c if word.startswith("-")}
    flags = ("-o", "--plot", "--recipe-out", "--state", "--output")
    verbs = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    writes = 0
    for name in verbs - READ_ONLY:
        help_text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).stdout
        for flag in flags:
            if re.search(rf"(?<!-){flag}\b(?!-)", help_text):
                assert (name, flag) in tried
                writes += 1
    assert writes >= 11, "the help names its options"


@pytest.fixture(scope="module")
def fast() -> Any:
    torch.manual_seed(0)
    return aerogel.compile(nn.Conv2d(3, 8, 3).eval(), X, tune="off")


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(AerogelError) as raised:
        call()
    return str(raised.value)


def test_save_writes_its_own_format_only(fast: Any, folder: Path) -> None:
    for name in ("m.onnx", "M.ONNX", "w.pt", "w.pth", "m.engine", "m.pb", "m.html"):
        assert "must end in .aero: ." in error_of(lambda name=name: aerogel.save(fast, name))  # type: ignore[misc]
    said = error_of(lambda: aerogel.save(fast, "no/such/m.aero"))
    assert "'no/such/m.aero' cannot be written: the folder 'no/such' does not exist" in said
    assert unchanged(folder)
    for name in ("new.aero", "new", "new-1.3", "NEW.AERO"):
        aerogel.save(fast, name)
        assert aerogel.load(name).captured is not None


def test_report_is_a_page_in_a_folder_that_exists(fast: Any, folder: Path) -> None:
    report = aerogel.explain(fast)
    assert "must end in .html or .htm: .onnx names" in error_of(lambda: report.save("m.onnx"))
    assert "the folder 'no' does not exist" in error_of(lambda: report.save("no/r.html"))
    assert unchanged(folder)


def test_an_onnx_model_is_saved_beside_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx")
    from onnx import helper

    from tests.onnx_files import numbers, written

    monkeypatch.chdir(tmp_path)
    conv = helper.make_node("Conv", ["x", "w"], ["y"], name="conv")
    file = written(tmp_path / "m.onnx", [conv], {"x": [1, 3, 8, 8]}, {"y": None}, {"w": numbers(4, 3, 3, 3)})
    before, model = file.read_bytes(), aerogel.OnnxModel("m.onnx")
    os.link(file, tmp_path / "hard.onnx")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")  # the model knows its file from any folder
    for out in (file, tmp_path / "hard.onnx"):
        assert "is the input" in error_of(lambda out=out: model.save(out))  # type: ignore[misc]
    assert "must end in .onnx: .aero names" in error_of(lambda: model.save("m.aero"))
    assert "the folder 'no' does not exist" in error_of(lambda: model.save("no/m.onnx"))
    assert file.read_bytes() == before
    model.save("m.onnx")


def test_stores_are_created_in_folders_that_exist(folder: Path) -> None:
    model = nn.Conv2d(3, 8, 3).eval()
    for store in ("no/such/store", folder / "no" / "such" / "store"):
        said = error_of(lambda store=store: aerogel.compile(model, X, tune="off", store=store))  # type: ignore[misc]
        assert "does not exist. Create it first" in said
    assert "does not exist" in error_of(lambda: Fleet.of(f"file://{folder}/no/such/store"))
    assert "state 'no/such/state' cannot be created" in error_of(
        lambda: aerogel.slim(model, [X], sparsity=0.5, state="no/such/state")
    )
    assert unchanged(folder)
    assert not (folder / "no").exists()


def test_folders_of_results_are_made_one_level_deep(tmp_path: Path) -> None:
    assert make_folder(tmp_path / "new") == make_folder(tmp_path / "new") == check_folder(tmp_path / "new")
    assert (tmp_path / "new").is_dir()
    assert "does not exist" in error_of(lambda: make_folder(tmp_path / "a" / "b"))
    assert not (tmp_path / "a").exists()


def test_inputs_that_do_not_exist_are_no_obstacle(tmp_path: Path) -> None:
    out = tmp_path / "m.aero"
    assert check_output(out, (".aero",), inputs=[None, "package.module:build", out]) == out
    out.write_text("")
    assert check_output(out, (".aero",), inputs=[tmp_path]) == out, "a folder of images is no picture of it"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folders_without_permission(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    said = error_of(lambda: check_output(tmp_path / "closed" / "m.aero", (".aero",)))
    assert "you have no permission to write to the folder" in said
    assert "you have no permission" in error_of(lambda: check_folder(tmp_path / "closed"))
