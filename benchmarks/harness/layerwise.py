"""A quantised ONNX file layer by layer: what stands between two maps of integers is a file of its own, is
given what onnxruntime has there, and is compared with what onnxruntime makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import onnx
from onnx import helper

import aerogel
from aerogel.capture.foreign import exact
from aerogel.ir import INT8


def compared(path: Path, image: Any, ends: tuple[str, ...]) -> dict[str, Any]:
    """Every layer of a file, fed with onnxruntime's own integers, beside what onnxruntime makes of them."""
    model, folder = onnx.load(path), Path(mkdtemp())
    cuts = [n.output[0] for n in model.graph.node if n.op_type.startswith(ends)]
    if ends == ("ConvInteger",):
        cuts += [o for n in model.graph.node if n.op_type == "DynamicQuantizeLinear" for o in n.output]
    values = seen(model, image, cuts)
    rows = []
    for name, piece in pieces(model, values, ends):
        onnx.save(piece, folder / "piece.onnx")
        fast = aerogel.compile(folder / "piece.onnx", tune="off")
        (got,) = fast.run(None, {i.name: values[i.name] for i in piece.graph.input})
        apart = np.abs(got.astype(np.int64) - values[name].astype(np.int64))
        network: Any = fast.network
        convs = list(network.convs()) if network is not None else []
        rows.append({"name": name, "outputs": apart.size, "apart": int((apart > 0).sum()),
                     "most": int(apart.max(initial=0)),
                     "integers": bool(convs) and all(n.conv.dtypes == INT8 for n in convs)})  # fmt: skip
    whole = [row for row in rows if row["integers"]]
    floats = [row for row in rows if not row["integers"]]
    return {
        "input": model.graph.input[0].name,
        "layers": len(rows),
        "integers": len(whole),
        **{f"{key}{after}": value
           for after, own in (("", whole), ("_floats", floats)) for key, value in summed(own).items()},
    }  # fmt: skip


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    worst = max(rows, key=lambda row: row["apart"] / row["outputs"], default=None)
    return {
        "outputs": sum(row["outputs"] for row in rows),
        "apart": sum(row["apart"] for row in rows) / max(1, sum(row["outputs"] for row in rows)),
        "worst": worst["apart"] / worst["outputs"] if worst else 0.0,
        "worst_layer": worst["name"] if worst else "",
        "most": max((row["most"] for row in rows), default=0),
    }


def seen(model: Any, image: Any, names: list[str]) -> dict[str, Any]:
    """These values of a model for an image, by onnxruntime."""
    import onnxruntime

    shown = onnx.ModelProto.FromString(model.SerializeToString())
    own = {o.name for o in shown.graph.output}
    more = [name for name in dict.fromkeys(names) if name not in own]
    shown.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in more)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = exact(shown.SerializeToString(), options)
    found = session.run(more, {model.graph.input[0].name: image})
    return {**dict(zip(more, found, strict=True)), model.graph.input[0].name: image}


def pieces(model: Any, values: dict[str, Any], ends: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """What stands between maps of integers, each as a model of its own, by the name of what it gives."""
    makers = {out: node for node in model.graph.node for out in node.output}
    arrays = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        if not node.op_type.startswith(ends):
            continue
        inside, given, open_ = set[int](), set[str](), [node]
        while open_:
            one = open_.pop()
            inside.add(id(one))
            for name in one.input:
                if name in values:
                    given.add(name)
                elif name and name not in arrays and id(makers[name]) not in inside:
                    open_.append(makers[name])
        if not any(values[name].ndim for name in given):
            continue
        nodes = [n for n in model.graph.node if id(n) in inside]
        used = {name for n in nodes for name in n.input}
        infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(values[n].dtype),
                                               values[n].shape) for n in sorted(given)]  # fmt: skip
        infos.sort(key=lambda info: values[info.name].ndim == 0)
        name = node.output[0]
        kind = helper.np_dtype_to_tensor_dtype(values[name].dtype)
        graph = helper.make_graph(
            nodes, "piece", infos, [helper.make_tensor_value_info(name, kind, None)],
            [t for n, t in arrays.items() if n in used],
        )  # fmt: skip
        yield name, helper.make_model(graph, opset_imports=model.opset_import, ir_version=8)
