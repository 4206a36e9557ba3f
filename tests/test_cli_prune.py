"""`aerogel prune`: every kind of source, scores and shares, real inputs from folders and files; mistakes are
one sentence."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import aerogel
from aerogel.cli import pruning
from aerogel.cli.calibration import read_calls
from aerogel.cli.main import app
from aerogel.errors import AerogelError
from tests.onnx_files import answers, everything, structure, tensors
from tests.test_cli import built as built
from tests.test_cli_mistakes import refused

SHAPE = ["--shape", "x=2x3x12x12"]
RECIPE = "resize=12x12 mean=0.5,0.5,0.5 std=0.2,0.2,0.2"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return everything(tmp_path / "m.onnx")


def prune(*words: str | Path, out: str = "out.onnx") -> Any:
    done = CliRunner().invoke(app, ["prune", *map(str, words), "-o", out, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def photos(folder: Path, count: int) -> Path:
    folder.mkdir()
    for i in range(count):
        (folder / f"c{i % 2}").mkdir(exist_ok=True)
        pixels = np.full((20, 24, 3), i, np.uint8)
        Image.fromarray(pixels).save(folder / f"c{i % 2}" / f"{i:03d}.png")
    return folder


def test_an_onnx_file_as_before(file: Path) -> None:
    """By magnitude, each layer alike; turned matrices and Constant nodes are written too."""
    said = prune(file, *SHAPE, "--sparsity", "0.75")
    before, after = tensors(file), tensors(Path("out.onnx"))
    for name in ("w1", "w2", "w3", "w4", "w5", "w6"):
        size = np.abs(before[name])
        kept = after[name] != 0
        assert kept.sum() == before[name].size // 4
        assert size[kept].min() >= size[~kept].max()
        assert np.array_equal(after[name][kept], before[name][kept])
    assert said["arrays"] == sum(not np.array_equal(before[n], after[n]) for n in before) == 6
    assert 0.6 < said["zeros"] < 0.76
    assert structure(file) == structure(Path("out.onnx"))
    x = torch.randn(2, 3, 12, 12)
    model = aerogel.OnnxModel("out.onnx", {"x": (2, 3, 12, 12)})
    assert np.allclose(model(x).detach(), answers(Path("out.onnx"), x)[0], atol=1e-4)


def test_weights_of_an_onnx_file_by_their_own_names(file: Path) -> None:
    from safetensors.torch import load_file

    said = prune(file, *SHAPE, out="out.safetensors")
    state = load_file("out.safetensors")
    assert {"w1", "b1", "scale", "w5"} <= set(state)
    assert said["arrays"] == len(state)


def test_spread_over_layers(file: Path) -> None:
    prune(file, *SHAPE, "--sparsity", "0.75", "--scope", "global")
    after = tensors(Path("out.onnx"))
    assert np.count_nonzero(after["w4"]) != after["w4"].size // 4
    prune(file, *SHAPE, "--sparsity", "0.5", "--pattern", "4x1", "--scope", "erk")


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_recipe(file: Path, wrapped: bool) -> None:
    """Layers by the names of the file's nodes or of the model's layers."""
    shares = {"/stem/Conv": ["unstructured", 0.5], "gemm": ["4x1", 0.75]}
    Path("recipe.json").write_text(json.dumps({"recipe": shares, "more": 1} if wrapped else shares))
    assert prune(file, *SHAPE, "--recipe", "recipe.json")["arrays"] == 2
    before, after = tensors(file), tensors(Path("out.onnx"))
    assert {n for n in before if not np.array_equal(before[n], after[n])} == {"w1", "w5"}
    assert np.count_nonzero(after["w1"]) == before["w1"].size // 2
    blocks = (after["w5"] != 0).reshape(5, 4, 12).sum(1)
    assert set(np.unique(blocks)) == {0, 4}


def test_what_advise_says_is_a_recipe(file: Path) -> None:
    done = CliRunner().invoke(
        app, ["advise", str(file), *SHAPE, "--sparsities", "0.9", "--patterns", "unstructured", "--json"]
    )
    said = json.loads(done.stdout)
    said["recipe"] = {layer["layer"]: ["unstructured", 0.5] for layer in said["layers"][:2]}
    Path("advice.json").write_text(json.dumps(said))
    assert prune(file, *SHAPE, "--recipe", "advice.json")["arrays"] == 2


def test_calibration_reaches_prune(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As calls of the model, for a score that looks at them."""
    from aerogel.pruning import prune as module

    given: dict[str, Any] = {}
    plain = module.prune

    def watched(model: nn.Module, sparsity: Any, **options: Any) -> nn.Module:
        given.update(options)
        return plain(model, sparsity, pattern=options["pattern"])

    monkeypatch.setattr(module, "prune", watched)
    folder = photos(Path("photos"), 7)
    prune(file, *SHAPE, "--score", "obs", "--calibration", folder, "--preprocess", RECIPE, "--images", "6")
    assert given["score"] == "obs"
    assert [call[0].shape for call in given["calibration"]] == [(2, 3, 12, 12)] * 3
    assert "scope" not in given, "prune knows which goes with the score"


@pytest.mark.parametrize("score", ["wanda", "obs"])
def test_scores_that_look_at_inputs(file: Path, score: str) -> None:
    np.savez("inputs.npz", x=np.random.default_rng(0).standard_normal((16, 3, 12, 12)))
    said = prune(file, *SHAPE, "--sparsity", "0.5", "--score", score, "--calibration", "inputs.npz")
    assert said["arrays"] >= 5
    assert structure(file) == structure(Path("out.onnx"))
    assert np.count_nonzero(tensors(Path("out.onnx"))["w1"]) < tensors(file)["w1"].size
    Path("recipe.json").write_text('{"gemm": ["4x1", 0.5], "/stem/Conv": ["unstructured", 0.75]}')
    prune(file, *SHAPE, "--recipe", "recipe.json", "--score", score, "--calibration", "inputs.npz")
    after = tensors(Path("out.onnx"))
    assert np.count_nonzero(after["w5"]) == after["w5"].size // 2
    assert np.count_nonzero(after["w1"]) == after["w1"].size // 4


def test_a_module_and_a_compiled_file(built: str, tmp_path: Path) -> None:
    words = [built, "--shape", "x=1x3x20x20"]
    assert prune(*words, "--sparsity", "0.5", out="w.safetensors")["zeros"] == pytest.approx(0.5, abs=0.01)
    fast = CliRunner().invoke(app, ["compile", *words, "--tune", "off", "-o", "m.aero"])
    assert fast.exit_code == 0
    assert prune("m.aero", out="v.safetensors")["zeros"] == pytest.approx(0.9, abs=0.01)
    said = refused(["prune", "m.aero", "-o", "v.safetensors", "--scope", "erk"], 1)
    assert "take model.onnx or package.module:build" in said


def test_images_are_taken_at_even_steps(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", 8)
    calls = read_calls(folder, ["x"], (torch.zeros(1, 3, 12, 12),), 4, "resize=12x12")
    assert [round(float(call[0][0, 0, 0, 0]) * 255) for call in calls] == [0, 4, 1, 5]
    calls = read_calls(folder, ["x"], (torch.zeros(3, 3, 12, 12),), 128, "resize=12x12")
    assert [tuple(call[0].shape) for call in calls] == [(3, 3, 12, 12)] * 2


def test_arrays_by_the_names_of_the_inputs(tmp_path: Path) -> None:
    a, b = np.arange(12.0).reshape(4, 3), np.arange(8).reshape(4, 2)
    np.savez(tmp_path / "two.npz", b=b, a=a)
    example = torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.int64)
    calls = read_calls(tmp_path / "two.npz", ["a", "b"], example, 128)
    assert torch.equal(torch.cat([call[0] for call in calls]), torch.from_numpy(a).float())
    assert torch.equal(torch.cat([call[1] for call in calls]), torch.from_numpy(b))
    np.save(tmp_path / "one.npy", a)
    (call,) = read_calls(tmp_path / "one.npy", ["whatever"], example[:1], 2)
    assert torch.equal(call[0], torch.from_numpy(a[[0, 2]]).float())


class Trap:
    """Says so where it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def test_calibration_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example, names = (torch.zeros(2, 3, 12, 12),), ["x"]

    def said(name: str, like: Any = example, recipe: str | None = "resize=12x12") -> str:
        with pytest.raises(AerogelError) as why:
            read_calls(tmp_path / name, names, like, 128, recipe)
        return str(why.value)

    np.save(tmp_path / "pickled.npy", np.array([Trap()], object), allow_pickle=True)
    np.savez(tmp_path / "pickled.npz", x=np.array([Trap()], object))
    np.savez(tmp_path / "names.npz", y=np.zeros((4, 3, 12, 12), np.float32), z=np.zeros(4))
    np.save(tmp_path / "bytes.npy", np.zeros((4, 3, 12, 12), np.uint8))
    np.save(tmp_path / "small.npy", np.zeros((4, 3, 8, 8), np.float32))
    np.save(tmp_path / "few.npy", np.zeros((1, 3, 12, 12), np.float32))
    (tmp_path / "text.npz").write_text("no arrays")
    np.save(tmp_path / "nan.npy", np.full((4, 3, 12, 12), np.nan, np.float32))
    np.savez(tmp_path / "large.npz", x=np.full((4, 3, 12, 12), 1e300))
    with zipfile.ZipFile(tmp_path / "note.npz", "w") as file:
        file.writestr("note.txt", "no array")
    whole = (tmp_path / "small.npy").read_bytes()
    (tmp_path / "damaged.npy").write_bytes(whole.replace(b"(4, 3", b"((((("))
    (tmp_path / "empty").mkdir()
    folder = photos(tmp_path / "photos", 3)
    for name in ("pickled.npy", "pickled.npz", "text.npz", "note.npz", "damaged.npy"):
        assert "Write plain numbers with numpy.save" in said(name)
    assert "unpickled" not in capsys.readouterr().out
    assert "'note.txt' in it is no array" in said("note.npz")
    for name in ("nan.npy", "large.npz"):
        assert f"{name}' has NaN or infinity in 'x'" in said(name)
    assert "holds 'y', 'z' and the model takes 'x'" in said("names.npz")
    assert "is uint8 of 4x3x12x12; the model takes float32 of Nx3x12x12" in said("bytes.npy")
    assert "is float32 of 4x3x8x8" in said("small.npy")
    assert "has 1 samples and a call takes 2" in said("few.npy")
    assert "there is no such file" in said("none.npz")
    assert "no images in" in said("empty")
    assert "say --preprocess with resize=12x12" in said("photos", recipe="resize=8x8")
    assert "is not known: say it, as in --preprocess" in said("photos", recipe=None)
    assert "takes 2 inputs and images are one" in said("photos", (*example, *example))
    (folder / "c0" / "bad.png").write_text("no image")
    assert "bad.png' cannot be used: not an image" in said("photos")


def test_flags_that_do_not_go_together(file: Path) -> None:
    head = ["prune", str(file), *SHAPE, "-o", "out.onnx"]
    for score in ("wanda", "obs"):
        assert f"--score {score} looks at real inputs: say --calibration" in refused(
            [*head, "--score", score], 2
        )
    assert "--score is one of magnitude, wanda, obs" in refused([*head, "--score", "taylor"], 2)
    assert "--scope is one of uniform, global, erk" in refused([*head, "--scope", "wide"], 2)
    assert "goes with --calibration" in refused([*head, "--preprocess", RECIPE], 2)
    Path("recipe.json").write_text('{"gemm": ["4x1", 0.5]}')
    assert "leave --sparsity" in refused([*head, "--recipe", "recipe.json", "--sparsity", "0.5"], 2)
    for text in ("no json", "[]", "{}", '{"gemm": 0.5}', '{"gemm": ["4x1", 1.5]}', '{"gemm": ["4x1", true]}'):
        Path("recipe.json").write_text(text)
        assert "a recipe looks like" in refused([*head, "--recipe", "recipe.json"], 1)
    Path("recipe.json").write_text('{"other": ["4x1", 0.5]}')
    assert "other" in refused([*head, "--recipe", "recipe.json"], 1)
    assert not Path("out.onnx").exists()
    assert pruning.SCORES == {"magnitude": False, "wanda": True, "obs": True}
