"""An ONNX file as a module: it answers as onnxruntime does, trains as torch does, and is written as the same
file."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn
from torch.nn import functional as F

import aerogel
from aerogel.capture import interpret
from aerogel.capture.onnx import write
from aerogel.errors import AerogelError, ShapeError, UnsupportedModel
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.private import private
from tests.onnx_files import answers, everything, numbers, structure, tensors, written

node = helper.make_node


def close(ours: Any, theirs: Any) -> bool:
    return np.allclose(ours.detach().numpy(), theirs, rtol=1e-4, atol=1e-4)


def opened(path: Path) -> aerogel.OnnxModel:
    return aerogel.OnnxModel(path, {"x": (2, 3, 12, 12)})


def changed(model: nn.Module) -> None:
    """Every weight a little different."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(i)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_every_kind_of_layer_and_the_same_file_again(tmp_path: Path) -> None:
    path = everything(tmp_path / "m.onnx")
    model, out = opened(path), tmp_path / "out.onnx"
    kinds = {name: type(m) for name, m in model.named_modules() if name}
    assert kinds == {
        "stem_Conv": nn.Conv2d,
        "grouped_conv": nn.Conv2d,
        "up": nn.ConvTranspose2d,
        "product": nn.Linear,
        "gemm": nn.Linear,
        "last": nn.Linear,
    }
    loose = {n for n, _ in model.named_parameters() if "." not in n}
    assert loose == {"scale", "shift", "b4", "b6"}
    assert (model.input_names, model.output_names, model.training) == (("x",), ("y",), False)
    (x,) = model.example
    assert x.shape == (2, 3, 12, 12)
    assert close(model(x), answers(path, x)[0])
    assert torch.equal(model(x=x), model(x))
    assert torch.equal(model.train()(x), model(x))
    changed(model)
    model.save(out)
    assert close(model(x), answers(out, x)[0])
    assert not close(model(x), answers(path, x)[0])
    assert structure(out) == structure(path)
    before, after = tensors(path), tensors(out)
    same = {n for n in before if np.array_equal(before[n], after[n])}
    assert same == {"mean", "var"}
    model.save(out)
    again = aerogel.OnnxModel(out, {"x": (2, 3, 12, 12)})
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("rank", [1, 3])
def test_other_dimensions(rank: int, tmp_path: Path) -> None:
    kernel, sizes = [3] * rank, [7] * rank
    nodes = [node("Conv", ["x", "w"], ["y"], name="conv", dilations=[2] * rank)]
    path = written(
        tmp_path / "m.onnx", nodes, {"x": [1, 2, *sizes]}, {"y": None}, {"w": numbers(4, 2, *kernel)}
    )
    model = aerogel.OnnxModel(path)
    assert isinstance(model.conv, (nn.Conv1d, nn.Conv3d))
    x = torch.randn(1, 2, *sizes)
    assert close(model(x), answers(path, x)[0])


def test_a_product_of_three_dimensions_and_turned_weights(tmp_path: Path) -> None:
    nodes = [
        node("Identity", ["w"], ["same"]),
        node("Transpose", ["same"], ["turned"], perm=[1, 0]),
        node("MatMul", ["x", "turned"], ["y"], name="layer"),
    ]
    path = written(tmp_path / "m.onnx", nodes, {"x": [2, 5, 6]}, {"y": [2, 5, 4]}, {"w": numbers(4, 6)})
    model, x = aerogel.OnnxModel(path), torch.randn(2, 5, 6)
    assert isinstance(model.layer, nn.Linear)
    changed(model)
    model.save(tmp_path / "out.onnx")
    assert close(model(x), answers(tmp_path / "out.onnx", x)[0])
    assert not np.array_equal(tensors(tmp_path / "out.onnx")["w"], numbers(4, 6))


def test_gradients_are_those_of_torch(tmp_path: Path) -> None:
    arrays = {"w": numbers(4, 3, 3, 3), "b": numbers(4), "m": numbers(4, 5)}
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv"),
        node("Relu", ["c"], ["r"]),
        node("GlobalAveragePool", ["r"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("MatMul", ["f", "m"], ["y"], name="product"),
    ]
    path = written(tmp_path / "m.onnx", nodes, {"x": [2, 3, 6, 6]}, {"y": [2, 5]}, arrays)
    model, x = aerogel.OnnxModel(path), torch.randn(2, 3, 6, 6)
    model(x).square().sum().backward()
    w, b, m = (torch.from_numpy(arrays[n]).requires_grad_() for n in ("w", "b", "m"))
    (F.relu(F.conv2d(x, w, b)).mean((2, 3)) @ m).square().sum().backward()  # type: ignore[no-untyped-call]
    ours = model.conv.weight.grad, model.conv.bias.grad, model.product.weight.grad.T  # type: ignore
    for got, wanted in zip(ours, (w.grad, b.grad, m.grad), strict=True):
        torch.testing.assert_close(got, wanted)
    with torch.no_grad():
        assert not model(x).requires_grad


def test_one_weight_of_two_nodes(tmp_path: Path) -> None:
    """Used alike, as in a head over several maps, it is one layer; used in different ways it is none."""
    arrays = {"w": numbers(3, 3, 3, 3), "b": numbers(3)}
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="first", pads=[1, 1, 1, 1]),
        node("Conv", ["c", "w", "b"], ["y"], name="second", pads=[1, 1, 1, 1]),
    ]
    path = written(tmp_path / "m.onnx", nodes, {"x": [1, 3, 6, 6]}, {"y": [1, 3, 6, 6]}, arrays)
    model, x = aerogel.OnnxModel(path), torch.randn(1, 3, 6, 6)
    assert [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)] == ["first"]
    aerogel.prune(model, 0.5)
    model.save(tmp_path / "out.onnx")
    assert close(model(x), answers(tmp_path / "out.onnx", x)[0])

    aerogel.prune(model, 0.75, score="obs", calibration=[x] * 2)
    aerogel.finalize(model).save(tmp_path / "out.onnx")  # type: ignore[operator]
    assert close(model(x), answers(tmp_path / "out.onnx", x)[0])

    nodes[1].attribute.extend([helper.make_attribute("strides", [2, 2])])
    path = written(tmp_path / "m.onnx", nodes, {"x": [1, 3, 6, 6]}, {"y": [1, 3, 3, 3]}, arrays)
    model = aerogel.OnnxModel(path)
    assert not [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert sorted(n for n, _ in model.named_parameters()) == ["b", "w"]
    changed(model)
    model.save(tmp_path / "out.onnx")
    assert close(model(x), answers(tmp_path / "out.onnx", x)[0])


def test_a_table_that_is_a_matrix_too(tmp_path: Path) -> None:
    """Looked up and, turned, multiplied with: one parameter, as the file has it."""
    nodes = [
        node("Relu", ["x"], ["r"]),
        node("MatMul", ["r", "w"], ["m"], name="there"),
        node("Transpose", ["w"], ["back"], perm=[1, 0]),
        node("MatMul", ["m", "back"], ["y"], name="back"),
    ]
    path = written(tmp_path / "m.onnx", nodes, {"x": [2, 6]}, {"y": [2, 6]}, {"w": numbers(6, 4)})
    model, x = aerogel.OnnxModel(path), torch.randn(2, 6)
    assert [(n, tuple(p.shape)) for n, p in model.named_parameters()] == [("w", (6, 4))]
    changed(model)
    model.save(tmp_path / "out.onnx")
    assert close(model(x), answers(tmp_path / "out.onnx", x)[0])
    assert close(aerogel.compile(model, (x,), tune="off")(x), model(x).detach())


def test_what_was_computed_from_a_weight_keeps_it_as_it_is(tmp_path: Path) -> None:
    """The reshaped copy would go on with the old numbers."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv"),
        node("Constant", [], ["flat"], value=numpy_helper.from_array(np.array([1, 3, 6, 6]), "s")),
        node("Reshape", ["w", "flat"], ["map"]),
        node("Add", ["x", "map"], ["a"]),
        node("Conv", ["a", "v"], ["d"], name="free"),
        node("Add", ["c", "d"], ["y"]),
    ]
    arrays = {"w": numbers(12, 3, 3, 1).reshape(4, 3, 3, 3)[:4], "v": numbers(4, 3, 3, 3, seed=1)}
    path = written(tmp_path / "m.onnx", nodes, {"x": [1, 3, 6, 6]}, {"y": [1, 4, 4, 4]}, arrays)
    model = aerogel.OnnxModel(path)
    assert [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)] == ["free"]
    changed(model)
    model.save(tmp_path / "out.onnx")
    x = torch.randn(1, 3, 6, 6)
    assert close(model(x), answers(tmp_path / "out.onnx", x)[0])
    assert np.array_equal(tensors(tmp_path / "out.onnx")["w"], arrays["w"])


def test_quantised_weights_are_left_alone(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).integers(-127, 127, (4, 3, 3, 3)).astype(np.int8)
    nodes = [
        node("DequantizeLinear", ["q", "s", "z"], ["w"]),
        node("Conv", ["x", "w", "b"], ["c"], name="quantised"),
        node("Conv", ["c", "v"], ["y"], name="plain"),
    ]
    arrays = {"q": whole, "s": np.float32(0.01) * np.ones((), np.float32), "z": np.zeros((), np.int8)}
    arrays |= {"b": numbers(4), "v": numbers(2, 4, 1, 1)}
    path = written(tmp_path / "m.onnx", nodes, {"x": [1, 3, 6, 6]}, {"y": [1, 2, 4, 4]}, arrays)
    model = aerogel.OnnxModel(path)
    assert [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)] == ["plain"]
    aerogel.prune(model, 0.5)
    model.save(tmp_path / "out.onnx")
    after = tensors(tmp_path / "out.onnx")
    assert {n for n in arrays if not np.array_equal(after[n], arrays[n])} == {"v"}


def test_pruned_and_finalized(tmp_path: Path) -> None:
    path, masked, final = everything(tmp_path / "m.onnx"), tmp_path / "masked.onnx", tmp_path / "final.onnx"
    model = aerogel.prune(opened(path), 0.75)
    model.save(masked)  # type: ignore[operator]
    aerogel.finalize(model).save(final)  # type: ignore[operator]
    assert masked.read_bytes() == final.read_bytes()
    assert structure(final) == structure(path)
    before, after = tensors(path), tensors(final)
    for name in before:
        kept = after[name] != 0
        assert np.array_equal(after[name][kept], before[name][kept])
    assert {n for n in before if not after[n].all()} == {"w1", "w2", "w3", "w4", "w5", "w6"}
    assert np.count_nonzero(after["w4"]) == before["w4"].size // 4
    x = torch.randn(2, 3, 12, 12)
    assert close(model(x), answers(final, x)[0])


def test_copies_and_states(tmp_path: Path) -> None:
    model = opened(everything(tmp_path / "m.onnx"))
    other, x = copy.deepcopy(model), torch.randn(2, 3, 12, 12)
    changed(other)
    assert not torch.equal(other(x), model(x))
    other.save(tmp_path / "other.onnx")
    assert close(other(x), answers(tmp_path / "other.onnx", x)[0])
    model.load_state_dict(other.state_dict())
    assert torch.equal(other(x), model(x))
    assert {p.data_ptr() for p in model.parameters()}.isdisjoint(p.data_ptr() for p in other.parameters())


def test_compiled_as_its_graph(tmp_path: Path) -> None:
    path, x = everything(tmp_path / "m.onnx"), torch.randn(2, 3, 12, 12)
    model = aerogel.prune(opened(path), 0.75)
    own = private(model, ((x,), {}))
    assert isinstance(own, GraphModel)
    fast = aerogel.compile(model, (x,), tune="off")
    assert close(fast(x), model(x).detach())
    assert fast(torch.randn(1, 3, 12, 12)).shape == (1, 5)
    assert {"stem_Conv", "grouped_conv", "product"} <= {c.layer for c in fast.plan.choices}
    model.save(tmp_path / "pruned.onnx")  # type: ignore[operator]
    same = aerogel.compile(tmp_path / "pruned.onnx", shapes={"x": (2, 3, 12, 12)}, tune="off")
    assert torch.equal(fast(x), same(x))
    assert [c.config for c in fast.plan.choices] == [c.config for c in same.plan.choices]


def test_values_are_let_go_after_their_last_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("Relu", [f"v{i}"], [f"v{i + 1}"]) for i in range(6)]
    path = written(tmp_path / "m.onnx", nodes, {"v0": [1, 4]}, {"v6": [1, 4]}, {})
    seen: list[Any] = []
    most = 0
    plain = interpret.answer

    def watched(one: Any, values: Any) -> Any:
        nonlocal most
        made = plain(one, values)
        seen.append(weakref.ref(made))
        most = max(most, sum(r() is not None for r in seen))
        return made

    monkeypatch.setattr(interpret, "answer", watched)
    with torch.no_grad():
        aerogel.OnnxModel(path)(torch.randn(1, 4))
    assert most == 2


def test_weights_beside_the_file(tmp_path: Path) -> None:
    path, x = everything(tmp_path / "m.onnx"), torch.randn(2, 3, 12, 12)
    wanted = answers(path, x)[0]
    (tmp_path / "far").mkdir()
    outside, out = tmp_path / "far" / "m.onnx", tmp_path / "out.onnx"
    onnx.save(
        onnx.load(str(path)), str(outside), save_as_external_data=True, location="w.bin", size_threshold=0
    )
    opened(outside).save(out)
    assert close(torch.from_numpy(answers(out, x)[0]), wanted)
    assert b"w.bin" not in out.read_bytes()


def test_several_inputs_and_names_that_clash(tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["a", "w"], ["c"], name="forward"),
        node("Conv", ["b", "v"], ["d"], name="/forward"),
        node("Add", ["c", "d"], ["y"], name="/"),
    ]
    arrays = {"w": numbers(4, 3, 1, 1), "v": numbers(4, 3, 1, 1, seed=1)}
    path = written(tmp_path / "m.onnx", nodes, {"a": [1, 3, 4, 4], "b": [1, 3, 4, 4]}, {"y": None}, arrays)
    model = aerogel.OnnxModel(path)
    assert [n for n, _ in model.named_children()] == ["forward_2", "forward_3"]
    a, b = model.example
    assert close(model(b=b, a=a), answers(path, a, b)[0])
    assert torch.equal(model(a, b=b), model(a, b))
    for args, kwargs in (((a,), {}), ((a, b, a), {}), ((a,), {"a": a}), ((a, b), {"c": a})):
        with pytest.raises(ShapeError, match="the file takes 'a', 'b', each once"):
            model(*args, **kwargs)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = everything(tmp_path / "m.onnx")
    with pytest.raises(ShapeError, match="open sizes"):
        aerogel.OnnxModel(path)
    model = opened(path)
    with pytest.raises(AerogelError, match="cannot be written"):
        model.save(tmp_path)
    monkeypatch.setattr(write, "MOST_BYTES", 1000)
    with pytest.raises(UnsupportedModel, match="keep the model's state_dict"):
        model.save(tmp_path / "large.onnx")


def test_a_real_file(tmp_path: Path) -> None:
    """A text detector, whose weights are what its exporter made of them."""
    rapidocr = pytest.importorskip("rapidocr")
    files = sorted((Path(rapidocr.__file__).parent / "models").glob("*det*.onnx"))
    if not files:
        pytest.skip("rapidocr came without its models")
    path, out = files[0], tmp_path / "out.onnx"
    name = onnx.load(str(path)).graph.input[0].name
    model = aerogel.prune(aerogel.OnnxModel(path, {name: (1, 3, 64, 64)}), 0.5)
    assert sum(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in model.modules()) > 20
    model.save(out)  # type: ignore[operator]
    x = torch.randn(1, 3, 64, 64)
    assert close(model(x), answers(out, x)[0])
    assert structure(out) == structure(path)
