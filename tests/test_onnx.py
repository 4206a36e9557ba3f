"""ONNX in: the operators by onnx's own tests, models beside onnxruntime, what is refused in words."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import aerogel
from aerogel.capture import foreign
from aerogel.capture.onnx.operators import build
from aerogel.capture.onnx.read import read
from aerogel.errors import AerogelError, InvalidFile, ShapeError, UnsupportedModel
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.points import Several
from tests.small_models import Small, sparse

PIECES = 4


@cache
def backend_tests() -> list[Any]:
    """onnx's own tests of operators that we claim: (name, model, inputs, outputs). Only the first input is
    data; the others are constants, as exporters write them."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases: list[Any] = load_model_tests(kind="node")
    found = []
    for one in cases:
        ops = {node.op_type for node in one.model.graph.node}
        both = [*one.model.graph.input, *one.model.graph.output]
        if not all(build(op) or op == "Constant" for op in ops) or not all(
            i.type.HasField("tensor_type") for i in both
        ):
            continue
        inputs, outputs = (list(map(_array, values)) for values in one.data_sets[0])
        if any(a.dtype.name not in _PLAIN for a in (*inputs, *outputs)):
            continue
        model = onnx.ModelProto.FromString(one.model.SerializeToString())
        names = [i.name for i in model.graph.input]
        model.graph.initializer.extend(
            numpy_helper.from_array(v, n) for n, v in list(zip(names, inputs, strict=True))[1:]
        )
        del model.graph.input[1:]
        found.append((one.name, model, inputs[:1], outputs))
    return found


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


_PLAIN = {"float32", "float16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"}


@pytest.mark.parametrize("piece", range(PIECES))
def test_operators_by_onnx_own_tests(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "available", lambda: False)
    right = refused = 0
    for name, model, inputs, outputs in backend_tests()[piece::PIECES]:
        onnx.save(model, tmp_path / "model.onnx")
        try:
            captured = read(tmp_path / "model.onnx", {}, [v.shape for v in inputs])
        except AerogelError:
            refused += 1
            continue
        given = [torch.from_numpy(v.copy()) for v in inputs][: len(captured.graph.inputs)]
        got = pytree.tree_leaves(GraphModel(captured, captured.constants)(*given))
        assert len(got) == len(outputs), name
        # where onnx's reference and onnxruntime differ, the answer is onnxruntime's
        if not _alike(got, outputs):
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            feed = {i.name: v for i, v in zip(model.graph.input, inputs, strict=True)}
            assert _alike(got, session.run(None, feed)), name
        right += 1
    assert right > 100
    assert refused < right / 2


def _alike(ours: list[Any], theirs: list[Any]) -> bool:
    return all(
        tuple(g.shape) == w.shape
        and np.allclose(g.numpy().astype(float), w.astype(float), rtol=1e-3, atol=1e-5, equal_nan=True)
        for g, w in zip(ours, theirs, strict=True)
    )


def exported(model: nn.Module, path: Path, *shape: int, open_sizes: bool = True) -> Path:
    """A file with open batch, height and width."""
    dims = (
        {0: torch.export.Dim("n"), 2: torch.export.Dim("h"), 3: torch.export.Dim("w")} if open_sizes else None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (torch.randn(2, *shape[1:]),), path, dynamo=True, verbose=False,
                          dynamic_shapes=None if dims is None else (dims,))  # fmt: skip
    return path


def close(path: Path, fast: Any, *feeds: dict[str, Any]) -> None:
    """Error against float64 at most twice onnxruntime's own."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    exact = copy.deepcopy(fast.original).double()
    for feed in feeds:
        with torch.no_grad():
            wanted = pytree.tree_leaves(exact(*(torch.from_numpy(v).double() for v in feed.values())))
        for w, theirs, ours in zip(wanted, session.run(None, feed), fast.run(None, feed), strict=True):
            scale = np.abs(w.numpy()).max()
            lost = np.abs(theirs - w.numpy()).max()
            assert np.abs(ours - w.numpy()).max() <= 2 * lost + 1e-6 * scale


def test_a_model_with_open_sizes(tmp_path: Path) -> None:
    path = exported(sparse(Small()), tmp_path / "m.onnx", 1, 3, 64, 64)
    with pytest.raises(ShapeError, match=r"open sizes .*aerogel.compile\(path, shapes=\{\""):
        aerogel.compile(path)
    fast = aerogel.compile(path, shapes={"x": (1, 3, 64, 64)}, tune="off")
    assert fast.input_names == ("x",)
    assert sum(c.config.method != "dense" for c in fast.plan.choices) > 5
    rng = np.random.default_rng(0)
    close(
        path,
        fast,
        *(
            {"x": rng.standard_normal(s, np.float32)}
            for s in ((1, 3, 64, 64), (3, 3, 64, 64), (2, 3, 96, 40))
        ),
    )
    with pytest.raises(ShapeError, match="takes"):
        fast.run(None, {"y": np.zeros((1, 3, 64, 64), np.float32)})
    with pytest.raises(InvalidFile, match="no input 'y'"):
        aerogel.compile(path, shapes={"y": (1, 3, 64, 64)})


def test_several_tuned_points(tmp_path: Path) -> None:
    """Each has choices of its own and the same weights; other sizes go to the nearest; the file keeps them
    all."""
    path = exported(sparse(Small()), tmp_path / "m.onnx", 1, 3, 64, 64)
    points = [{"x": (1, 3, 64, 64)}, {"x": (4, 3, 96, 96)}]
    fast = aerogel.compile(path, shapes=points, tune="off")
    assert isinstance(fast, Several)
    assert [p.plan.choices[0].conv.n for p in fast.points] == [1, 4]
    assert fast.points[0].network is fast.points[1].network
    asked = ((1, 3, 64, 64), (4, 3, 96, 96), (1, 3, 70, 64), (5, 3, 96, 80))
    assert [fast.nearest((a,)) for a in asked] == [0, 1, 0, 1]
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal(a, np.float32)} for a in asked]
    close(path, fast, *feeds)
    said = aerogel.explain(fast)
    assert "At 1x3x64x64: " in said.headline
    assert "At 4x3x96x96: " in said.headline
    assert len(said.layers) == 2 * len(fast.plan.choices)
    aerogel.save(fast, tmp_path / "m.aero")
    again = aerogel.load(tmp_path / "m.aero")
    assert isinstance(again, Several)
    assert [p.plan for p in again.points] == [p.plan for p in fast.points]
    copied = copy.deepcopy(again)
    carried = pickle.loads(pickle.dumps(fast))
    assert carried.points[0].network is carried.points[1].network
    assert carried.points[0].original is carried.points[1].original
    for feed in feeds:
        (wanted,) = fast.run(None, feed)
        assert all(np.array_equal(m.run(None, feed)[0], wanted) for m in (again, copied, carried))
    fast.load_state_dict({name: 2 * value for name, value in fast.state_dict().items()})
    assert all(not np.array_equal(fast.run(None, feed)[0], again.run(None, feed)[0]) for feed in feeds)
    assert fast.points[0].network is fast.points[1].network
    with pytest.raises(AerogelError, match="empty list"):
        aerogel.compile(path, shapes=[])
    with pytest.raises(AerogelError, match="sizes that differ"):
        aerogel.compile(path, shapes=points[:1] * 2, tune="off")


def test_a_gate_of_another_value_is_no_silu(tmp_path: Path) -> None:
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Relu", ["x"], ["z"]),
        helper.make_node("Sigmoid", ["z"], ["g"]),
        helper.make_node("Mul", ["x", "g"], ["y"]),
    ]
    inputs, outputs = [info("x", TensorProto.FLOAT, [2, 3])], [info("y", TensorProto.FLOAT, None)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.save(model, tmp_path / "m.onnx")
    x = np.array([[-1, 0, 2], [3, -4, 5]], np.float32)
    (got,) = aerogel.compile(tmp_path / "m.onnx", tune="off").run(None, {"x": x})
    assert np.allclose(got, x / (1 + np.exp(-np.maximum(x, 0))), atol=1e-6)


def test_sizes_that_only_seem_open(tmp_path: Path) -> None:
    """The file says any height, a Reshape inside knows only one."""
    info = helper.make_tensor_value_info
    nodes = [helper.make_node("Relu", ["x"], ["z"]), helper.make_node("Reshape", ["z", "s"], ["y"])]
    held = [numpy_helper.from_array(np.array([1, 3, 64]), "s")]
    graph = helper.make_graph(
        nodes, "g", [info("x", TensorProto.FLOAT, [1, 3, "h", 8])], [info("y", TensorProto.FLOAT, None)], held
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        tmp_path / "m.onnx",
    )
    fast = aerogel.compile(tmp_path / "m.onnx", shapes={"x": (1, 3, 8, 8)}, tune="off")
    assert fast.run(None, {"x": np.ones((1, 3, 8, 8), np.float32)})[0].shape == (1, 3, 64)
    with pytest.raises(ShapeError, match="16 in dimension 2"):
        fast.run(None, {"x": np.ones((1, 3, 16, 8), np.float32)})


class Detecting(nn.Module):
    """SiLU, a resize, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1)
        self.box, self.score = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.silu(self.b(F.silu(self.a(x))))
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.box(x).flatten(2).transpose(1, 2).sigmoid(), self.score(x).flatten(2)


def with_nms(path: Path) -> None:
    """Put a NonMaxSuppression behind the two outputs of a file."""
    model = onnx.load(path)
    boxes, scores = (o.name for o in model.graph.output)
    for name, value in (("most", np.int64(10)), ("overlap", np.float32(0.5)), ("least", np.float32(0.1))):
        model.graph.initializer.append(numpy_helper.from_array(np.array([value]), name))
    given = [boxes, scores, "most", "overlap", "least"]
    model.graph.node.append(helper.make_node("NonMaxSuppression", given, ["chosen"], name="nms"))
    model.graph.output.append(helper.make_tensor_value_info("chosen", TensorProto.INT64, [None, 3]))
    onnx.save(model, path)


def test_what_torch_has_not_runs_in_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = exported(sparse(Detecting()), tmp_path / "m.onnx", 1, 3, 32, 32, open_sizes=False)
    with_nms(path)
    fast = aerogel.compile(path, tune="off")
    assert "nms runs in onnxruntime" in str(aerogel.explain(fast))
    assert fast.network is not None
    # x * sigmoid(x), taken along
    assert [n.conv.activation for n in fast.network.convs() if n.conv][:2] == [
        "silu",
        "silu",
    ]
    feed = {fast.input_names[0]: np.random.default_rng(0).standard_normal((2, 3, 32, 32), np.float32)}
    wanted = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feed)
    for w, g in zip(wanted, fast.run(None, feed), strict=True):
        assert w.shape == g.shape
        assert np.allclose(w, g, atol=1e-5)
    aerogel.save(fast, tmp_path / "m.aero")
    again = aerogel.load(tmp_path / "m.aero")
    assert all(np.array_equal(a, b) for a, b in zip(again.run(None, feed), fast.run(None, feed), strict=True))
    monkeypatch.setattr(foreign, "available", lambda: False)
    with pytest.raises(
        UnsupportedModel, match=r"'nms': operator NonMaxSuppression .* pip install onnxruntime"
    ):
        aerogel.compile(path, tune="off")


def test_onnxruntime_is_timed_and_said_first(tmp_path: Path) -> None:
    path = exported(sparse(Small()), tmp_path / "m.onnx", 1, 3, 64, 64, open_sizes=False)
    fast = aerogel.compile(path, tune=0.5, store=tmp_path / "store")
    assert str(aerogel.explain(fast)).startswith("onnxruntime ")


def test_quantised_weights_keep_their_zeros(tmp_path: Path) -> None:
    """A pruned model made QDQ by onnxruntime: our answer is nearer to the float model than its own."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    path = exported(sparse(Detecting()), tmp_path / "m.onnx", 1, 3, 32, 32, open_sizes=False)
    name = onnx.load(path).graph.input[0].name
    rng = np.random.default_rng(0)
    images = [rng.standard_normal((2, 3, 32, 32), np.float32) for _ in range(4)]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(images)

        def get_next(self) -> Any:
            image = next(self.left, None)
            return None if image is None else {name: image}

    quantize_static(
        path, tmp_path / "q.onnx", Reader(), quant_format=QuantFormat.QDQ, weight_type=QuantType.QInt8
    )
    fast = aerogel.compile(tmp_path / "q.onnx", tune="off")
    assert all(c.sparsity > 0.85 for c in fast.plan.choices)
    feed = {name: images[0]}
    plain, theirs = (
        onnxruntime.InferenceSession(str(tmp_path / p)).run(None, feed) for p in ("m.onnx", "q.onnx")
    )
    for p, t, ours in zip(plain, theirs, fast.run(None, feed), strict=True):
        assert np.abs(ours - p).max() <= 1.5 * np.abs(t - p).max()


def test_numbers_and_names_of_bad_calls(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match="cannot be read"):
        aerogel.compile(tmp_path / "none.onnx")
    with pytest.raises(AerogelError, match="order"):
        aerogel.compile(tmp_path / "none.onnx", kwargs={"x": torch.zeros(1)})
