"""Small ONNX files made by hand, and what onnxruntime answers to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from aerogel.capture.foreign import exact
from aerogel.ir import Array

Sizes = list[Any] | None


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def written(
    path: Path,
    nodes: list[Any],
    inputs: dict[str, Sizes],
    outputs: dict[str, Sizes],
    arrays: dict[str, Array],
    opset: int = 18,
) -> Path:
    """A file of these nodes; arrays are its initializers."""
    graph = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info(n, 1, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, 1, s) for n, s in outputs.items()],
        [numpy_helper.from_array(a, n) for n, a in arrays.items()],
    )
    domains = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=9), str(path))
    return path


def answers(path: Path, *inputs: Any) -> list[Array]:
    """onnxruntime's own, its sums of bytes exact."""
    session = exact(str(path), onnxruntime.SessionOptions())
    feed = {i.name: np.asarray(v) for i, v in zip(session.get_inputs(), inputs, strict=True)}
    found: list[Array] = session.run(None, feed)
    return found


def tensors(path: Path) -> dict[str, Array]:
    """Its initializers, and what its Constant nodes give."""
    graph = onnx.load(str(path)).graph
    found = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            found[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return found


def structure(path: Path) -> bytes:
    """The file without any numbers: its nodes, names, opset and shapes."""
    model = onnx.load(str(path))
    held = [a.t for n in model.graph.node if n.op_type == "Constant" for a in n.attribute]
    for tensor in (*model.graph.initializer, *held):
        for field in ("raw_data", "float_data", "int64_data", "external_data", "data_location"):
            tensor.ClearField(field)
    return bytes(model.SerializeToString())


def everything(path: Path) -> Path:
    """Every kind of layer: a grouped and a strided convolution, batch norm, a transposed one, a Constant
    node's weight, MatMul with a vector added, Gemm both ways round."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], name="/stem/Conv", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", ["c1", "scale", "shift", "mean", "var"], ["n1"], name="norm"),
        node("Relu", ["n1"], ["r1"]),
        node("Constant", [], ["w2"], value=numpy_helper.from_array(numbers(8, 2, 3, 3), "inner")),
        node("Conv", ["r1", "w2"], ["c2"], name="grouped.conv", group=4, pads=[1, 1, 1, 1]),
        node("ConvTranspose", ["c2", "w3", "b3"], ["c3"], name="up", strides=[2, 2], output_padding=[1, 1]),
        node("GlobalAveragePool", ["c3"], ["pool"]),
        node("Flatten", ["pool"], ["flat"]),
        node("MatMul", ["flat", "w4"], ["m"], name="product"),
        node("Add", ["m", "b4"], ["a"]),
        node("Gemm", ["a", "w5", "b5"], ["g"], name="gemm", transB=1),
        node("Tanh", ["g"], ["t"]),
        node("Gemm", ["t", "w6", "b6"], ["y"], name="last", transB=0),
    ]
    arrays = {
        "w1": numbers(8, 3, 3, 3),
        "b1": numbers(8),
        "scale": numbers(8, seed=1),
        "shift": numbers(8, seed=2),
        "mean": numbers(8, seed=3),
        "var": np.abs(numbers(8, seed=4)) + 0.5,
        "w3": numbers(8, 6, 3, 3),
        "b3": numbers(6),
        "w4": numbers(6, 12),
        "b4": numbers(12),
        "w5": numbers(20, 12),
        "b5": numbers(20),
        "w6": numbers(20, 5),
        "b6": numbers(1, 5),
    }
    return written(path, nodes, {"x": ["n", 3, 12, 12]}, {"y": ["n", 5]}, arrays)
