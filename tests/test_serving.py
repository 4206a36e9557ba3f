"""What engines call, without the engines: recipes, rows, requests, parts and their files."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import aerogel
from aerogel.addresses import filesystem
from aerogel.errors import AerogelError, InvalidArgument, InvalidFile, ShapeError
from aerogel.preprocess import NoImage, Recipe
from aerogel.saved import container
from aerogel.serving import inputs, requests, results
from aerogel.serving.predictor import Predictor
from tests.small_models import Small, sparse
from tests.test_engines import malformed
from tests.test_engines import model as model
from tests.test_onnx import exported

pq = pytest.importorskip("pyarrow.parquet")
IMAGENET = "resize=40 crop=32 mean=0.485,0.456,0.406 std=0.229,0.224,0.225"


def encoded(pixels: Any, kind: str = "PNG") -> bytes:
    raw = io.BytesIO()
    Image.fromarray(pixels).save(raw, kind)
    return raw.getvalue()


def test_a_recipe_is_its_text() -> None:
    for text in (IMAGENET, "resize=40x60", "crop=7 mean=0.5 std=0.25", "resize=8 bgr", ""):
        assert str(Recipe.parse(text)) == text
    wrong = ("resize=0", "resize=256,256", "crop=-1", "crop=1e3", "mean=a", "std=0", "std=0,0,0", "sharpen=1")
    for text in (*wrong, "resize=1 resize=2", "mean=1,2,3 std=1", "mean=0.5 bgr", "mean=nan", "mean=1,2"):
        with pytest.raises(InvalidArgument):
            Recipe.parse(text)


def test_without_pillow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(AerogelError, match=r"aerogel\[images\]"):
        Recipe.parse("").decoded(b"")
    with pytest.raises(AerogelError, match=r"aerogel\[images\]"):
        Recipe.parse("").applied(np.zeros((2, 2), np.uint8))


def test_a_recipe_does_what_torchvision_does() -> None:
    """By hand: the shorter side, the middle, 0 to 1, mean and std, channels first."""
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
    small = np.asarray(Image.fromarray(pixels).resize((56, 40), Image.Resampling.BILINEAR), np.float32)
    middle = small[4:36, 12:44] / 255
    mean, std = (np.array(v, np.float32) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    wanted = (middle - mean) / std
    found = Recipe.parse(IMAGENET).decoded(encoded(pixels))
    assert found.shape == (3, 32, 32)
    np.testing.assert_allclose(found, wanted.transpose(2, 0, 1), rtol=1e-6, atol=1e-6)
    assert np.array_equal(Recipe.parse(IMAGENET).applied(pixels), found)
    assert np.array_equal(Recipe.parse("bgr").applied(pixels), Recipe.parse("").applied(pixels)[::-1])
    assert Recipe.parse("mean=0.5").applied(pixels).shape == (1, 50, 70)
    assert Recipe.parse("").applied(pixels[..., 0]).shape == (3, 50, 70)


def test_images_that_are_none() -> None:
    recipe = Recipe.parse("resize=64")
    good = encoded(np.zeros((8, 8, 3), np.uint8))
    huge = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(huge, "PNG")  # 50 KB that say 400 million pixels
    thin = encoded(np.zeros((1, 60_000, 3), np.uint8))  # 64 x 3,840,000 when it is resized
    for raw in (b"", b"text", good[:40], good[: len(good) // 2], huge.getvalue(), thin, bytes(65 << 20)):
        with pytest.raises(NoImage):
            recipe.decoded(raw)
    with pytest.raises(NoImage, match="at most"):  # a recipe comes from a file
        Recipe.parse("crop=100000").applied(np.zeros((8, 8, 3), np.uint8))
    for pixels in (np.zeros((8, 8, 3)), np.zeros((0, 8, 3), np.uint8), np.zeros((8, 8, 7), np.uint8)):
        with pytest.raises(NoImage):
            recipe.applied(pixels)


def test_a_file_keeps_the_recipe(model: Path, tmp_path: Path) -> None:
    fast = aerogel.load(model)
    assert fast.preprocess == IMAGENET
    fast.preprocess = "crop=nonsense"
    with pytest.raises(InvalidArgument):
        aerogel.save(fast, tmp_path / "no.aero")
    texts, arrays = container.from_bytes(memoryview(model.read_bytes()))
    said = json.loads(texts["model"])
    for hostile in ("rm -rf", 7, ["crop=3"], "resize=" + "9" * 40):
        other = {**texts, "model": json.dumps({**said, "preprocess": hostile})}
        (tmp_path / "h.aero").write_bytes(container.to_bytes(other, {n: arrays[n] for n in arrays}))
        with pytest.raises(InvalidFile):
            aerogel.load(tmp_path / "h.aero")


def test_calls_together_are_calls_alone(model: Path) -> None:
    predictor = Predictor(model, 1)
    rng = np.random.default_rng(0)
    sizes = [(1, 32), (3, 32), (1, 24), (2, 32), (1, 24), (1, 1)]
    asked = [{"x": rng.standard_normal((n, 3, side, side), np.float32)} for n, side in sizes]
    found = predictor.together(asked)
    assert isinstance(found[-1], ShapeError)
    for rows, answer in zip(asked[:-1], found[:-1], strict=True):
        assert not isinstance(answer, AerogelError)
        assert np.array_equal(answer["mean"], predictor(rows)["mean"])
    assert predictor.misfit({"y": asked[0]["x"]}) == "the model takes ['x'], not ['y']"


class Two(nn.Module):
    """Two inputs; and images that meet, if asked for."""

    def __init__(self, meet: bool) -> None:
        super().__init__()
        self.layer, self.meet = nn.Conv2d(3, 8, 3), meet

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(a) + b[:, :1, :1, :1]
        return y - y.mean(0) if self.meet else y


@pytest.mark.parametrize("meet", [False, True])
def test_calls_do_not_see_each_other(tmp_path: Path, meet: bool) -> None:
    torch.manual_seed(0)
    example = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    aerogel.save(aerogel.compile(sparse(Two(meet).eval()), example, tune="off"), tmp_path / "m.aero")
    predictor = Predictor(tmp_path / "m.aero")
    rng = np.random.default_rng(0)

    def rows(a: int, b: int) -> dict[str, Any]:
        return {n: rng.standard_normal((k, 3, 8, 8), np.float32) for n, k in (("a", a), ("b", b))}

    asked = [rows(2, 2), rows(1, 2), rows(3, 3)]
    first, wrong, last = predictor.together(asked)
    assert isinstance(wrong, ShapeError)
    for given, found in ((asked[0], first), (asked[2], last)):
        assert not isinstance(found, AerogelError)
        (name,) = found
        np.testing.assert_array_equal(found[name], predictor(given)[name])


def test_inputs_of_a_call_have_as_many_rows(tmp_path: Path) -> None:
    """Of a model with one batch size, nothing else would notice."""
    example = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    static: dict[str, Any] = {"a": {}, "b": {}}
    fast = aerogel.compile(sparse(Two(False).eval()), example, dynamic_shapes=static, tune="off")
    aerogel.save(fast, tmp_path / "m.aero")
    predictor = Predictor(tmp_path / "m.aero")
    assert predictor.fixed == 2
    rows = {name: np.ones((count, 3, 8, 8), np.float32) for name, count in (("a", 1), ("b", 2))}
    assert predictor.misfit(rows) == "inputs of one call have as many rows"


def test_a_call_that_fails_fails_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit into memory is not its neighbour's fault."""
    predictor = Predictor(model, 1)
    run = predictor.fast.run

    def small(names: Any, feed: Any) -> Any:
        if feed["x"].shape[-1] > 40:
            raise InvalidFile("more memory than there is")
        return run(names, feed)

    monkeypatch.setattr(predictor.fast, "run", small)
    good, bad = predictor.together([{"x": np.zeros((1, 3, side, side), np.float32)} for side in (32, 48)])
    assert isinstance(bad, AerogelError)
    assert not isinstance(good, AerogelError)
    monkeypatch.setattr("aerogel.serving.predictor.TOGETHER", 3 * 32 * 32 * 4 * 2)
    many = [{"x": np.random.default_rng(i).standard_normal((1, 3, 32, 32), np.float32)} for i in range(5)]
    for given, found in zip(many, predictor.together(many), strict=True):
        assert not isinstance(found, AerogelError)
        assert np.array_equal(found["mean"], predictor(given)["mean"])


def test_a_model_of_one_batch_size(tmp_path: Path) -> None:
    path = exported(sparse(Small()), tmp_path / "m.onnx", 2, 3, 32, 32, open_sizes=False)
    aerogel.save(aerogel.compile(path, tune="off"), tmp_path / "m.aero")
    predictor = Predictor(tmp_path / "m.aero")
    assert predictor.fixed == 2
    rows = np.random.default_rng(0).standard_normal((5, 3, 32, 32), np.float32)
    (name,) = predictor.inputs
    (output,) = predictor.outputs
    found = predictor({name: rows})[output]
    pairs = [predictor.fast.run(None, {name: rows[[i, min(i + 1, 4)]]})[0] for i in (0, 2, 4)]
    assert np.array_equal(found, np.concatenate(pairs)[:5])
    (answer,) = predictor.together([{name: rows[:1]}])
    assert not isinstance(answer, AerogelError)
    assert len(answer[output]) == 1


def test_requests_are_looked_at(model: Path) -> None:
    predictor, recipe = Predictor(model, 1), Recipe.parse(IMAGENET)
    rng = np.random.default_rng(2)
    for _ in range(300):
        body, kind = malformed(rng)
        with pytest.raises(requests.Refused) as refused:
            requests.arrays(body, kind, predictor, recipe)
        assert 400 <= refused.value.status < 500
    array = rng.standard_normal((2, 3, 32, 32), np.float32)
    raw = io.BytesIO()
    np.save(raw, np.asfortranarray(array))
    assert np.array_equal(requests.arrays(raw.getvalue(), requests.NPY, predictor, None)["x"], array)
    text = json.dumps({"inputs": {"x": array.tolist()}}).encode()
    assert np.array_equal(
        requests.arrays(text, "application/json; charset=utf-8", predictor, None)["x"], array
    )
    photo = encoded(np.zeros((40, 40, 3), np.uint8), "JPEG")
    assert requests.arrays(photo, "image/jpeg", predictor, recipe)["x"].shape == (1, 3, 32, 32)
    text = b'{"inputs": ["' + b"x" * 1000 + b'"' + b",1" * 10_000 + b"]}"
    with pytest.raises(requests.Refused, match=r"^an input is not made"):  # before numpy makes 40 MB of it
        requests.arrays(text, "application/json", predictor, None)
    with pytest.raises(requests.Refused, match="without a way to read images"):
        requests.arrays(photo, "image/jpeg", predictor, None)
    content, kind = requests.answered({"a": np.array([[1, np.nan, np.inf]], np.float32)}, "")
    assert json.loads(content) == {"outputs": {"a": [[1.0, None, None]]}}
    assert kind == requests.JSON
    content, kind = requests.answered({"a": array}, requests.NPY)
    assert np.array_equal(np.load(io.BytesIO(content)), array)


def test_parquet_is_an_input(tmp_path: Path) -> None:
    import pyarrow

    photos = [encoded(np.full((8, 8, 3), i, np.uint8)) for i in range(10)]
    table = pyarrow.table(
        {"image": [{"bytes": p, "path": ""} for p in photos[:9]] + [None], "label": [0] * 10}
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    pq.write_table(pyarrow.table({"id": ["x", "y"], "bytes": photos[:2]}), tmp_path / "b.parquet")
    found = inputs.listed(str(tmp_path), 4)
    assert [(p.number, p.count, p.first) for p in found.parts] == [(0, 6, 0), (1, 4, 6), (2, 2, 0)]
    fs, _ = filesystem(str(tmp_path))
    read = [row for part in found.parts for batch in inputs.read(fs, part, 2) for row in batch]
    assert [name for name, _ in read] == [f"a.parquet:{i}" for i in range(10)] + ["x", "y"]
    assert [e for _, e in read[:9]] == photos[:9]
    assert isinstance(read[9][1], NoImage)
    pq.write_table(pyarrow.table({"a": [1]}), tmp_path / "c.parquet")
    with pytest.raises(AerogelError, match="no column of bytes"):
        list(inputs.read(fs, inputs.listed(str(tmp_path / "c.parquet"), 4).parts[0], 2))


def test_links_and_odd_names_are_inputs(tmp_path: Path) -> None:
    photo = encoded(np.zeros((8, 8, 3), np.uint8))
    (tmp_path / "in").mkdir()
    (tmp_path / "there.png").write_bytes(photo)
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "there.png")
    (tmp_path / "in" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "in" / os.fsdecode(b"\xff.png")).write_bytes(photo)
    found = inputs.listed(str(tmp_path / "in"), 4)
    assert (found.count, found.skipped) == (2, 1)
    fs, _ = filesystem(str(tmp_path))
    ((first, content), (second, _)) = next(inputs.read(fs, found.parts[0], 4))
    assert (first, content, second) == ("link.png", photo, "\\udcff.png")


def test_what_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for url in (str(tmp_path), str(tmp_path / "none"), str(tmp_path / "*.jpg")):
        with pytest.raises(AerogelError, match="no images in"):
            inputs.listed(url, 4)
    with pytest.raises(AerogelError, match="cannot be opened"):
        inputs.listed("nowhere://x", 4)
    (tmp_path / "b.parquet").write_bytes(b"x")
    with pytest.raises(AerogelError, match="cannot be read"):
        inputs.listed(str(tmp_path / "b.parquet"), 4)
    (tmp_path / "a.jpg").write_bytes(b"x")
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(AerogelError, match="a pattern of one kind"):
        inputs.listed(str(tmp_path), 4)


def test_results_are_whole_or_not_there(tmp_path: Path) -> None:
    folder = results.Folder(str(tmp_path / "out"))
    said = {"model": "a", "batch": 1}
    folder.begin(said)
    folder.begin(said)
    with pytest.raises(AerogelError, match="has results of another batch size"):
        folder.begin({**said, "batch": 2})
    with pytest.raises(AerogelError, match="another model: say another --output"):
        folder.begin({**said, "model": "b"})
    row = ("i", {"y": np.arange(6, dtype=np.float32).reshape(2, 3)})

    def breaks() -> Any:
        yield [row]
        assert not list((tmp_path / "out").glob("*.parquet"))  # nobody sees a file that is half written
        raise KeyError

    with pytest.raises(KeyError):
        folder.write(0, breaks(), {"y": np.float32})
    assert [p.name for p in (tmp_path / "out").glob("*.parquet")] == []
    assert not list((tmp_path / "out").glob(".part-*"))
    for name, age in (("new", 0.0), ("old", 7200.0)):
        left = tmp_path / "out" / f".part-{name}"
        left.write_bytes(b"half")
        os.utime(left, (time.time() - age,) * 2)
    assert folder.done() == set()
    assert [p.name for p in (tmp_path / "out").glob(".part-*")] == [".part-new"]
    count = folder.write(1, iter([[row, ("j", NoImage("gone"))]]), {"y": np.float32})
    assert count == (2, 1)
    assert folder.done() == {"part-00001.parquet"}
    first, second = pq.read_table(tmp_path / "out").to_pylist()  # as the docs say it
    assert first == {
        "id": "i",
        "outputs": {"y": {"shape": [2, 3], "values": [0, 1, 2, 3, 4, 5]}},
        "error": None,
    }
    assert second == {"id": "j", "outputs": None, "error": "gone"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.parquet").write_bytes(b"x")
    with pytest.raises(AerogelError, match="did not write"):
        results.Folder(str(tmp_path / "other")).begin(said)


def test_predict_takes_columns(model: Path) -> None:
    from aerogel.ray import Predict

    predict = Predict(str(model), threads=torch.get_num_threads())
    pixels = np.random.default_rng(0).integers(0, 256, (2, 44, 56, 3), np.uint8)
    found = predict({"image": pixels, "path": np.array(["a", "b"])})
    assert sorted(found) == ["mean", "path"]
    held = np.stack([Recipe.parse(IMAGENET).applied(p) for p in pixels])
    assert np.array_equal(predict({"x": held})["mean"], found["mean"])
    held.flags.writeable = False  # as Ray gives it
    assert np.array_equal(predict({"x": held})["mean"], found["mean"])
    with pytest.raises(InvalidArgument, match="no column 'x'"):
        predict({"y": held})
