"""ONNX: networks through both of torch's exporters, and small files made by hand of what exporters seldom
write.

The truth is onnxruntime's answer where it differs from eager's (an exporter bakes branches in), else eager's
and float64's.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from tests.fuzz.judge import Answer
    from tests.fuzz.spec import Call, Spec


class NotExported(Exception):
    """torch's exporter or onnxruntime does not take the network."""


class Exported:
    """The file of a network, written into a folder, and what onnxruntime says."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        import onnxruntime

        self.spec, path = spec, str(folder / "net.onnx")
        try:
            if spec.onnx == "by hand":
                Path(path).write_bytes(spec.file)
            else:
                exported(spec, path)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads, options.log_severity_level = 1, 4
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as why:
            raise NotExported(f"{type(why).__name__}: {str(why)[:150]}") from why

    def answers(self, order: list[Call]) -> list[Answer]:
        from tests.fuzz.judge import Answer, differs, eager_answers

        torch_says = [None] * len(order) if self.spec.onnx == "by hand" else eager_answers(self.spec, order)
        found = []
        for call, eager in zip(order, torch_says, strict=True):
            args, _ = call()
            feed = {node.name: a.numpy() for node, a in zip(self.session.get_inputs(), args, strict=False)}
            try:
                values = [torch.as_tensor(v) for v in self.session.run(None, feed)]
            except Exception as why:
                found.append(Answer(raised=why))
                continue
            if eager is None or eager.raised is not None:
                found.append(Answer(_single(values)))
                continue
            leaves = pytree.tree_leaves(eager.value)
            loosely = Answer(_single(leaves))
            close = len(leaves) == len(values) and not differs(self.spec, _single(values), loosely)
            exact = None if eager.exact is None else _single(pytree.tree_leaves(eager.exact))
            found.append(Answer(_single(leaves), exact) if close else Answer(_single(values)))
        return found


def _single(values: list[Any]) -> Any:
    """As a compiled file answers: one output bare, several as a tuple."""
    return values[0] if len(values) == 1 else tuple(values)


def exported(spec: Spec, path: str) -> None:
    """By torch, with batch, height and width left open."""
    model, (args, _) = spec.build(), spec.example()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        if spec.onnx == "dynamo":
            sizes = tuple(dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO) for _ in args)
            torch.onnx.export(model, args, path, dynamo=True, verbose=False, dynamic_shapes=sizes)
        else:
            axes = {"image": {0: "n", 2: "h", 3: "w"}}
            torch.onnx.export(
                model, args, path, dynamo=False, input_names=["image"], dynamic_axes=axes, opset_version=17
            )


def by_hand(rng: Random, turn: int) -> tuple[bytes, str]:
    """One operator with attributes torch never exports, between a convolution and an activation. Bytes and a
    title."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    c = rng.choice([2, 3, 5])
    floats = {"c.w": np.random.default_rng(turn).standard_normal((c, 3, 3, 3)).astype(np.float32) / 3}
    kind = ["AveragePool", "MaxPool", "Resize", "Conv", "Pad", "Resize", "AveragePool", "ConvTranspose"][
        turn % 8
    ]
    attributes: dict[str, Any] = {}
    inputs = ["a"]
    extra: dict[str, Any] = {}
    if kind in ("AveragePool", "MaxPool"):
        kernel = [rng.choice([2, 3]), rng.choice([2, 3])]
        attributes = {
            "kernel_shape": kernel,
            "strides": [rng.choice([1, 2, 3]) for _ in "hw"],
            "ceil_mode": rng.choice([0, 1]),
        }
        attributes["dilations"] = [rng.choice([1, 1, 2]) for _ in "hw"]
        if rng.random() < 0.25:
            attributes["auto_pad"] = rng.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
            attributes["ceil_mode"] = 0
        else:
            attributes["pads"] = [rng.choice([0, 1]) for _ in range(4)]
        if kind == "AveragePool":
            attributes["count_include_pad"] = rng.choice([0, 1])
    elif kind == "Resize":
        mode = rng.choice(["linear", "linear", "nearest", "cubic"])
        attributes = {
            "mode": mode,
            "coordinate_transformation_mode": rng.choice(
                ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
            ),
        }
        if mode == "nearest":
            attributes["nearest_mode"] = rng.choice(
                ["floor", "round_prefer_floor", "round_prefer_ceil", "ceil"]
            )
        if mode == "cubic":
            attributes["cubic_coeff_a"] = rng.choice([-0.75, -0.5])
        if rng.random() < 0.8:
            extra["s"] = np.array(
                [1, 1, rng.choice([1.5, 2, 0.7, 1.25]), rng.choice([1.5, 2, 3])], np.float32
            )
            inputs = ["a", "", "s"]
        else:
            extra["z"] = np.array([1, c, 17, 9], np.int64)
            inputs = ["a", "", "", "z"]
    elif kind == "Conv":
        extra["w"] = np.random.default_rng(turn + 1).standard_normal((4, c, 3, 2)).astype(np.float32)
        attributes = {"strides": [rng.choice([1, 2]) for _ in "hw"]}
        attributes |= (
            {"auto_pad": rng.choice(["SAME_UPPER", "SAME_LOWER"])}
            if rng.random() < 0.4
            else {"pads": [rng.choice([0, 1, 2]) for _ in range(4)]}
        )
        inputs = ["a", "w"]
    elif kind == "ConvTranspose":
        extra["w"] = np.random.default_rng(turn + 1).standard_normal((c, 4, 3, 3)).astype(np.float32)
        attributes = {
            "strides": [rng.choice([1, 2]) for _ in "hw"],
            "pads": [rng.choice([0, 1]) for _ in range(4)],
        }
        inputs = ["a", "w"]
    else:
        extra["p"] = np.array(
            [0, 0, *(rng.choice([0, 1, 2]) for _ in "hw"), 0, 0, *(rng.choice([-1, 0, 1, 2]) for _ in "hw")],
            np.int64,
        )
        attributes = {"mode": rng.choice(["constant", "reflect", "edge"])}
        inputs = ["a", "p"]
    nodes = [
        helper.make_node("Conv", ["image", "c.w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node(kind, inputs, ["b"], **attributes),
    ]
    nodes.append(helper.make_node(rng.choice(["Relu", "Tanh", "Identity"]), ["b"], ["out"]))
    weights = [numpy_helper.from_array(v, k) for k, v in (floats | extra).items()]
    value = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, "h", "w"])
    graph = helper.make_graph(
        nodes, "net", [value], [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)], weights
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)])
    made.ir_version = 9
    return (
        made.SerializeToString(),
        f"{kind} {attributes} {list(extra.values())[:1] if kind in ('Resize', 'Pad') else ''}",
    )
