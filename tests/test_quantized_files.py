"""Files and programs that are quantised already: run in integers by their own scales, beside onnxruntime and
torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from torch import Tensor, nn

import aerogel
from aerogel.capture.onnx.read import read
from aerogel.errors import AerogelError, InvalidFile
from aerogel.ir import INT8
from aerogel.runtime.reading import fused
from benchmarks.harness.layerwise import compared
from tests.onnx_files import answers, numbers, written

SHAPE = [2, 3, 20, 18]


def floats(path: Path) -> Path:
    """A file with a residual, maps laid beside each other, the largest of windows, uneven pads and a head."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "wa", "ba"], ["a"], name="a", pads=[0, 0, 1, 1], strides=[2, 2]),
        node("Relu", ["a"], ["ar"], name="ar"),
        node("Conv", ["ar", "wb", "bb"], ["b"], name="b", pads=[1, 1, 1, 1], group=2),
        node("Add", ["b", "ar"], ["c"], name="c"),
        node("Relu", ["c"], ["cr"], name="cr"),
        node("MaxPool", ["cr"], ["p"], name="p", kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["p", "wd"], ["d"], name="d"),
        node("Clip", ["d", "low", "high"], ["dc"], name="dc"),
        node("Concat", ["p", "dc"], ["e"], name="e", axis=1),
        node("Conv", ["e", "wf", "bf"], ["f"], name="f", pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", ["f"], ["g"], name="g"),
        node("Flatten", ["g"], ["h"], name="h"),
        node("Gemm", ["h", "wy", "by"], ["y"], name="y", transB=1),
    ]
    arrays: dict[str, Any] = {
        "wa": numbers(8, 3, 3, 3), "ba": numbers(8), "wb": numbers(8, 4, 3, 3), "bb": numbers(8, seed=1),
        "wd": numbers(12, 8, 1, 1), "wf": numbers(16, 20, 3, 3), "bf": numbers(16), "wy": numbers(5, 16),
        "by": numbers(5), "low": np.float32(-1.5), "high": np.float32(2.5),
    }  # fmt: skip
    return written(path, nodes, {"x": ["n", *SHAPE[1:]]}, {"y": None}, arrays)


class Images(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self) -> None:
        self.left = iter(numbers(*SHAPE, seed=seed) for seed in range(4))

    def get_next(self) -> Any:
        image = next(self.left, None)
        return None if image is None else {"x": image}


def made(folder: Path, form: str, kind: str) -> Path:
    out = folder / f"{form}-{kind}.onnx"
    quantize_static(
        floats(folder / "floats.onnx"), out, Images(), quant_format=QuantFormat[form], per_channel=True,
        activation_type=QuantType[kind], weight_type=QuantType.QInt8,
    )  # fmt: skip
    return out


def integers(fast: Any) -> list[str]:
    """Layers that run in integers; what changes a scale or adds two maps is none."""
    nodes = [n for n in fast.network.convs() if n.conv.dtypes == INT8]
    return [n.layer for n in nodes if "#one" not in n.args[1].name]


@pytest.mark.parametrize("kind", ["QUInt8", "QInt8"])
@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_a_file_of_onnxruntimes_runs_in_integers(form: str, kind: str, tmp_path: Path) -> None:
    path = made(tmp_path, form, kind)
    fast = aerogel.compile(path, shapes={"x": tuple(SHAPE)}, tune="off")
    assert len(integers(fast)) >= 5, fast.notes
    assert "layers run in integers, by the scales that the model brings" in fast.notes[0]
    for seed in range(5):
        x = numbers(1 + seed % 3, *SHAPE[1:], seed=10 + seed)
        (wanted,) = answers(path, x)
        (got,) = fast.run(None, {"x": x})
        step = np.diff(np.unique(wanted)).min()
        assert np.abs(got - wanted).max() <= 1.01 * step
    aerogel.save(fast, tmp_path / "m.aero")
    assert np.array_equal(aerogel.load(tmp_path / "m.aero").run(None, {"x": x})[0], got)


@pytest.mark.parametrize(("form", "kind"), [("QDQ", "QInt8"), ("QOperator", "QUInt8")])
def test_layer_by_layer_they_are_onnxruntimes_integers(form: str, kind: str, tmp_path: Path) -> None:
    """Each fed with onnxruntime's own: equal, or the next one in a thousandth of the outputs."""
    ends = ("QuantizeLinear", "QLinear", "QGemm")
    found = compared(made(tmp_path, form, kind), numbers(*SHAPE, seed=77), ends)
    assert found["integers"] >= 5
    assert found["most"] <= 1
    assert found["most_floats"] <= 1
    assert found["apart"] <= 1e-3
    assert found["apart_floats"] <= 1e-3


def one_layer(path: Path, **changed: Any) -> Path:
    """DequantizeLinear, Conv, QuantizeLinear, DequantizeLinear; some arrays changed."""
    arrays: dict[str, Any] = {
        "xs": np.float32(0.05), "xz": np.uint8(100),
        "w": np.arange(-50, 58, dtype=np.int8).reshape(3, 4, 3, 3),
        "ws": np.array([0.01, 0.02, 0.03], np.float32), "wz": np.zeros(3, np.int8), "ys": np.float32(0.9),
        "yz": np.uint8(120), **changed,
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
        helper.make_node("Conv", ["xd", "wd"], ["c"], name="layer"),
        helper.make_node("QuantizeLinear", ["c", "ys", "yz"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "ys", "yz"], ["y"]),
    ]
    return written(path, nodes, {"x": [1, 4, 9, 9]}, {"y": None}, arrays)


def test_weights_that_are_signed_bytes_run_and_others_are_named(tmp_path: Path) -> None:
    x = numbers(1, 4, 9, 9) * 3
    unsigned = (np.arange(108) * 2 % 200 + 28).astype(np.uint8).reshape(3, 4, 3, 3)
    whole = {"ws": np.float32(0.02), "wz": np.int8(0)}
    for changed, fits in (
        ({}, True),
        (whole, True),
        ({"w": unsigned, "wz": np.full(3, 128, np.uint8)}, True),
        ({"w": unsigned, "wz": np.full(3, 20, np.uint8)}, False),
        ({"ws": np.array([0.01, 0, 0.03], np.float32)}, False),
    ):
        path = one_layer(tmp_path / "m.onnx", **changed)
        fast = aerogel.compile(path, tune="off")
        assert bool(integers(fast)) == fits, changed
        if not fits:
            assert any(note.startswith("layer: stays in floats, ") for note in fast.notes)
        (wanted,), (got,) = answers(path, x), fast.run(None, {"x": x})
        apart = np.abs(got - wanted) / np.float32(0.9)
        assert apart.max() <= 1.001
        assert (apart > 0.5).mean() <= 0.01


def test_a_clamp_before_the_bytes_limits_them(tmp_path: Path) -> None:
    """A Clip between a convolution and its bytes, which could hold more."""
    path, x = one_layer(tmp_path / "m.onnx"), numbers(1, 4, 9, 9) * 3
    model = onnx.load(path)
    (place,) = (i for i, node in enumerate(model.graph.node) if node.op_type == "Conv")
    model.graph.node[place].output[0] = "before"
    model.graph.node.insert(place + 1, helper.make_node("Clip", ["before", "low", "high"], ["c"]))
    for name, bound in (("low", -7.0), ("high", 11.0)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(bound, np.float32), name))
    onnx.save(model, path)
    fast = aerogel.compile(path, tune="off")
    assert integers(fast) == ["layer"]
    (wanted,), (got,) = answers(path, x), fast.run(None, {"x": x})
    assert wanted.min() < -6
    assert wanted.max() > 10
    assert np.abs(got - wanted).max() <= 0.91
    assert (got != wanted).mean() <= 0.01


@pytest.mark.parametrize("scale", [0.0, -0.1, np.nan, np.inf])
def test_scales_that_are_none_are_refused(scale: float, tmp_path: Path) -> None:
    for name in ("xs", "ys"):
        with pytest.raises(InvalidFile, match="which is no scale of bytes"):
            read(one_layer(tmp_path / "m.onnx", **{name: np.float32(scale)}), {})


def test_hostile_scales_and_shapes_are_errors_or_floats(tmp_path: Path) -> None:
    """Whatever a file says: an error of ours, or numbers between the same bytes."""
    huge = np.float32(3e38)
    many = np.ones(3, np.float32)
    hostile: list[dict[str, Any]] = [
        {"ws": np.array([1, 2], np.float32)}, {"ws": np.ones((3, 1), np.float32)},
        {"wz": np.zeros(2, np.int8)}, {"ws": many * np.nan}, {"ws": -many}, {"ws": many * huge},
        {"xs": huge}, {"ys": huge}, {"xs": np.float32(1e-37), "ys": huge},
        {"ws": many * np.float32(1e-38), "xs": np.float32(1e-37)}, {"xz": np.int8(-128)},
        {"xs": np.ones(4, np.float32), "xz": np.zeros(4, np.uint8)}, {"yz": np.int16(3)},
        {"xs": np.zeros(0, np.float32)}, {"w": np.zeros((3, 4, 3, 3), np.int8)},
    ]  # fmt: skip
    for changed in hostile:
        try:
            captured = read(one_layer(tmp_path / "m.onnx", **changed), {})
            network, _ = fused(captured)
        except AerogelError:
            continue
        values = network.values([torch.from_numpy(numbers(1, 4, 9, 9))])
        assert network.outputs(values)[0].shape == (1, 3, 7, 7), changed


@pytest.mark.parametrize("zero", [np.int8(0), np.int8(7)])
def test_signed_bytes_may_leave_their_zero_point_out(zero: Any, tmp_path: Path) -> None:
    """The type of the integers says what they are, not that of a zero point that may not be there."""
    made = ["x", "s", "z"]
    nodes = [
        helper.make_node("QuantizeLinear", made, ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s"], ["y"]),
    ]
    arrays: dict[str, Any] = {"s": np.float32(0.1), "z": zero}
    path = written(tmp_path / "m.onnx", nodes, {"x": [1, 4, 6, 6]}, {"y": None}, arrays)
    x = numbers(1, 4, 6, 6)
    (wanted,) = answers(path, x)
    assert wanted.min() < -1
    np.testing.assert_array_equal(aerogel.compile(path, tune="off").run(None, {"x": x})[0], wanted)


def test_a_zero_point_of_another_type_is_refused(tmp_path: Path) -> None:
    path = one_layer(tmp_path / "m.onnx")
    model = onnx.load(path)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(100, np.int8), "other"))
    model.graph.node[1].input[2] = "other"
    onnx.save(model, path)
    with pytest.raises(InvalidFile, match="a zero point of another type than its integers"):
        read(path, {})


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_gemm_has_its_bias_in_units_of_the_whole_product(alpha: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "sx": np.float32(0.02), "zx": np.uint8(120), "w": rng.integers(-60, 61, (8, 16)).astype(np.int8),
        "sw": np.float32(0.01), "zw": np.int8(0), "b": rng.integers(-20000, 20000, 16).astype(np.int32),
        "sy": np.float32(0.05), "zy": np.uint8(128),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "zx"], ["q"]),
        helper.make_node("QGemm", ["q", *arrays], ["p"], domain="com.microsoft", alpha=alpha),
        helper.make_node("DequantizeLinear", ["p", "sy", "zy"], ["y"]),
    ]
    path, x = written(tmp_path / "m.onnx", nodes, {"x": [3, 8]}, {"y": None}, arrays), numbers(3, 8)
    (wanted,) = answers(path, x)
    np.testing.assert_array_equal(aerogel.compile(path, tune="off").run(None, {"x": x})[0], wanted)


def test_parts_of_a_map_of_bytes(tmp_path: Path) -> None:
    """Split of what a QLinearConv gives, at batch 1 and 2."""
    arrays: dict[str, Any] = {
        "s": np.float32(0.02), "z": np.uint8(128), "w": np.ones((16, 4, 1, 1), np.int8),
        "ws": np.float32(0.01), "wz": np.int8(0), "ys": np.float32(0.05),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("QLinearConv", ["q", "s", "z", "w", "ws", "wz", "ys", "z"], ["c"]),
        helper.make_node("Split", ["c"], ["a", "b"], axis=1),
        helper.make_node("DequantizeLinear", ["a", "ys", "z"], ["y"]),
        helper.make_node(
            "QLinearAdd", ["a", "ys", "z", "b", "ys", "z", "ys", "z"], ["d"], domain="com.microsoft"
        ),
        helper.make_node("DequantizeLinear", ["d", "ys", "z"], ["y2"]),
    ]
    outputs: dict[str, Any] = {"y": None, "y2": None}
    path = written(tmp_path / "m.onnx", nodes, {"x": ["n", 4, 6, 6]}, outputs, arrays, opset=13)
    for batch in (1, 2):
        fast = aerogel.compile(path, shapes={"x": (batch, 4, 6, 6)}, tune="off")
        x = numbers(batch, 4, 6, 6)
        for got, wanted in zip(fast.run(None, {"x": x}), answers(path, x), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_a_file_that_trains_is_not_rounded(tmp_path: Path) -> None:
    """Gradients pass what is quantised and read back; integers that someone reads are integers."""
    path = one_layer(tmp_path / "m.onnx")
    model = aerogel.OnnxModel(path)
    x = torch.from_numpy(numbers(1, 4, 9, 9)).requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    whole = onnx.load(path)
    whole.graph.output.append(helper.make_tensor_value_info("yq", 2, None))
    onnx.save(whole, path)
    (_, wanted) = answers(path, x.detach().numpy())
    for own in (aerogel.OnnxModel(path)(x)[1], aerogel.compile(path, tune="off")(x.detach())[1]):
        assert own.dtype == torch.uint8
        assert np.abs(own.numpy().astype(int) - wanted.astype(int)).max() <= 1


class Quantised(nn.Module):
    """As PT2E leaves it: weights in signed bytes, maps between quantize and dequantize."""

    def __init__(self, kind: torch.dtype = torch.uint8, least: int = 0, most: int = 255) -> None:
        super().__init__()
        from torch.ao.quantization.fx import _decomposed  # noqa: F401  they enter their operators

        torch.manual_seed(0)
        self.register_buffer("w", torch.randint(-128, 128, (8, 3, 3, 3), dtype=torch.int8))
        self.register_buffer("s", torch.rand(8) * 0.01 + 0.001)
        self.register_buffer("z", torch.zeros(8, dtype=torch.int64))
        self.kind, self.least, self.most = kind, least, most
        self.middle = 100 - (128 if kind == torch.int8 else 0)

    def around(self, x: Tensor, scale: float) -> Tensor:
        own = torch.ops.quantized_decomposed
        given = scale, self.middle, self.least, self.most, self.kind
        found: Tensor = own.dequantize_per_tensor(own.quantize_per_tensor(x, *given), *given)
        return found

    def forward(self, x: Tensor) -> Tensor:
        w = torch.ops.quantized_decomposed.dequantize_per_channel(
            self.w, self.s, self.z, 0, -128, 127, torch.int8
        )
        x = self.around(x, 0.03)
        y = self.around(nn.functional.conv2d(x, w, None, 1, 1).relu(), 0.2)
        return self.around(nn.functional.max_pool2d(y, 2) + 1.0, 0.3)


@pytest.mark.parametrize(
    ("kind", "least", "most"), [(torch.uint8, 0, 255), (torch.uint8, 0, 127), (torch.int8, -127, 127)]
)
def test_programs_of_torch_run_in_integers(kind: torch.dtype, least: int, most: int) -> None:
    """Modules written by hand with the operators that PT2E writes."""
    model, x = Quantised(kind, least, most).eval(), torch.randn(2, 3, 12, 12)
    fast = aerogel.compile(model, x, tune="off")
    assert len(integers(fast)) == 1, fast.notes
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(2, 3, 12, 12) * 3
        apart = (fast(x) - model(x)).abs() / 0.3
        assert apart.max() <= 1.01
        assert (apart > 0.5).float().mean() <= 5e-3


def test_programs_whose_scales_are_none_are_torchs() -> None:
    for scale in (0.0, float("nan"), float("inf"), -1.0):
        model, x = Quantised().eval(), torch.randn(1, 3, 12, 12)
        around = model.around
        model.around = lambda x, s, around=around, bad=scale: around(x, bad)  # type: ignore[method-assign,misc]
        try:
            fast = aerogel.compile(model, x, tune="off")
        except AerogelError:
            continue
        assert fast.network is None
        assert torch.equal(fast(x).isnan(), model(x).isnan())
