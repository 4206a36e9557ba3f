"""Sixty ONNX files made to do harm, read one after the other under a limit of memory and time: python -m
tests.hostile FOLDER

Prints a JSON object: the name of each file and what came of it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from aerogel.errors import AerogelError

F32, I64 = TensorProto.FLOAT, TensorProto.INT64
HUGE = 2**40


def model(
    nodes: list[Any],
    shape: Any = (1, 3, 8, 8),
    initializers: Any = (),
    opset: int = 17,
    outputs: Any = ("y",),
) -> Any:
    given = helper.make_tensor_value_info("x", F32, shape)
    made = [helper.make_tensor_value_info(o, F32, None) for o in outputs]
    graph = helper.make_graph(nodes, "g", [given], made, list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def array(name: str, values: Any, dtype: Any = np.float32) -> Any:
    return numpy_helper.from_array(np.asarray(values, dtype), name)


def node(op: str, *inputs: str, outputs: Any = ("y",), **attributes: Any) -> Any:
    return helper.make_node(op, list(inputs), list(outputs), **attributes)


def weight(*shape: int) -> Any:
    return array("w", np.ones(shape))


def conv(**attributes: Any) -> Any:
    return model([node("Conv", "x", "w", **attributes)], initializers=[weight(4, 3, 3, 3)])


def outside(location: str, **said: int) -> Any:
    held = TensorProto(name="w", data_type=F32, dims=[4, 3, 3, 3], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **said}.items():
        held.external_data.add(key=key, value=str(value))
    return model([node("Conv", "x", "w")], initializers=[held])


def raw(dims: list[int], content: bytes, kind: int = F32) -> Any:
    return model(
        [node("Conv", "x", "w")],
        initializers=[TensorProto(name="w", data_type=kind, dims=dims, raw_data=content)],
    )


def sized(op: str, *values: Any, data: bool = True, **attributes: Any) -> Any:
    """An operator whose sizes are whole numbers in constants."""
    names = [f"c{i}" for i in range(len(values))]
    held = [array(n, v, np.int64) for n, v in zip(names, values, strict=True)]
    return model([node(op, *(["x"] if data else []), *names, **attributes)], initializers=held)


def nested(deep: int) -> Any:
    inner = helper.make_graph([node("Relu", "x")], "g", [], [helper.make_tensor_value_info("y", F32, None)])
    for _ in range(deep):
        both = {"then_branch": inner, "else_branch": inner}
        inner = helper.make_graph(
            [node("If", "c", **both)], "g", [], [helper.make_tensor_value_info("y", F32, None)]
        )
    return model(list(inner.node), initializers=[array("c", True, bool)])


def looped() -> Any:
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [node("Identity", "go", outputs=["more"]), node("Identity", "v", outputs=["w"])], "b",
        [info("i", I64, []), info("go", TensorProto.BOOL, []), info("v", F32, None)],
        [info("more", TensorProto.BOOL, []), info("w", F32, None)],
    )  # fmt: skip
    return model(
        [node("Loop", "n", "t", "x", body=body)],
        initializers=[array("n", 2**62, np.int64), array("t", True, bool)],
    )


def files(folder: Path) -> Iterator[tuple[str, Any]]:
    """Names and models, or bytes."""
    (folder / "secret").write_bytes(b"\0" * 4096)
    inside = folder / "in"
    os.symlink(folder / "secret", inside / "link")
    (inside / "short").write_bytes(b"\0" * 16)
    (inside / "good").write_bytes(b"\0" * 432)
    for name in (
        "../secret",
        "a/../../secret",
        str(folder / "secret"),
        "link",
        "",
        ".",
        "none",
        "/dev/zero",
        "..",
        "//secret",
    ):
        yield f"external {name.replace(str(folder), 'FOLDER')}", outside(name)
    yield "external too short", outside("short")
    yield "external far away", outside("good", offset=HUGE)
    yield "external before the start", outside("good", offset=-4)
    yield "external of another length", outside("good", length=8)
    yield "external that is good", outside("good")
    yield "huge dims", raw([HUGE, HUGE, 3, 3], b"")
    yield "dims that overflow", raw([2**32, 2**32, 1, 1], b"\0" * 4)
    yield "negative dims", raw([-4, 3, 3, 3], b"\0" * 432)
    yield "too few bytes", raw([4, 3, 3, 3], b"\0" * 8)
    yield "too many bytes", raw([1, 1, 1, 1], b"\0" * 800)
    yield "no such type", raw([4, 3, 3, 3], b"\0" * 432, 99)
    yield (
        "texts",
        model([node("Identity", "w")], initializers=[numpy_helper.from_array(np.array([b"x"], object), "w")]),
    )
    yield "stride of zero", conv(strides=[0, 0])
    yield "negative stride", conv(strides=[-1, 1])
    yield "dilation of zero", conv(dilations=[0, 1])
    yield "too many strides", conv(strides=[1, 1, 1])
    yield "huge pads", conv(pads=[HUGE] * 4)
    yield "negative pads", conv(pads=[-9, -9, -9, -9])
    yield "huge stride", conv(strides=[2**62, 2**62])
    yield "groups that do not divide", conv(group=2)
    yield "no groups", conv(group=0)
    yield "negative groups", conv(group=-1)
    yield "kernel of another shape", conv(kernel_shape=[99, 99])
    yield "weight of another rank", model([node("Conv", "x", "w")], initializers=[weight(4, 3)])
    yield (
        "weight of nine dimensions",
        model([node("Conv", "x", "w")], initializers=[weight(1, 3, 1, 1, 1, 1, 1, 1, 1)]),
    )
    yield "channels that do not fit", model([node("Conv", "x", "w")], initializers=[weight(4, 7, 3, 3)])
    yield (
        "bias of another length",
        model([node("Conv", "x", "w", "b")], initializers=[weight(4, 3, 3, 3), array("b", np.ones(9))]),
    )
    yield "empty filters", model([node("Conv", "x", "w")], initializers=[weight(0, 3, 3, 3)])
    yield "reads what is not there", model([node("Relu", "z")])
    yield "reads what comes later", model([node("Relu", "z"), node("Relu", "x", outputs=["z"])])
    yield "reads itself", model([node("Relu", "y")])
    yield "gives a name twice", model([node("Relu", "x"), node("Abs", "x")])
    yield "no output", model([node("Relu", "x", outputs=["z"])])
    yield "no nodes", model([])
    yield "no shape", model([node("Relu", "x")], shape=None)
    yield "old", model([node("Relu", "x")], opset=5)
    yield "of another world", model([node("Frobnicate", "x", domain="org.evil")])
    yield "constant of a terabyte", sized("ConstantOfShape", [HUGE], data=False)
    yield "expanded to a terabyte", sized("Expand", [2**20, 2**20, 3, 8, 8])
    yield "tiled to a terabyte", sized("Tile", [2**20, 2**20, 1, 1])
    yield "padded to a terabyte", sized("Pad", [0, 0, HUGE, 0, 0, 0, 0, 0])
    yield "a range without end", sized("Range", 0, 2**62, 1, data=False)
    yield "a range of no steps", sized("Range", 0, 9, 0, data=False)
    yield "reshaped to nothing", sized("Reshape", [-1, -1, 7])
    yield "reshaped to a terabyte", sized("Reshape", [HUGE, HUGE])
    yield "gathered from outside", sized("Gather", [99], axis=1)
    yield "sliced in no direction", sized("Slice", [0], [4], [2], [0])
    yield "sliced with ends missing", sized("Slice", [0, 0], [4])
    yield "cut into too much", model([node("Split", "x", "s")], initializers=[array("s", [99, 99], np.int64)])
    yield "turned to nowhere", model([node("Transpose", "x", perm=[0, 0, 9, -7])])
    yield "joined nowhere", model([node("Concat", "x", "x", axis=77)])
    yield (
        "enlarged without end",
        model([node("Resize", "x", "", "s")], initializers=[array("s", [1, 1, 1e12, 1e12])]),
    )
    yield "shrunk to less", model([node("Resize", "x", "", "s")], initializers=[array("s", [1, 1, -2, 0])])
    yield "cast to nothing", model([node("Cast", "x")])
    yield "pooled by a huge window", model([node("MaxPool", "x", kernel_shape=[2**31, 2**31])])
    yield "pooled by nothing", model([node("MaxPool", "x", kernel_shape=[0, 0])])
    yield "a loop without end", looped()
    yield "graphs within graphs", nested(14)
    yield (
        "a long name",
        model([node("Conv", "x", "w", name="%s{}\n\0;define" * 2000)], initializers=[weight(4, 3, 3, 3)]),
    )
    whole = conv().SerializeToString()
    yield "half a file", whole[: len(whole) // 2]
    yield "no file", b""
    yield "noise", bytes(np.random.default_rng(0).integers(0, 256, 5000, np.uint8))
    yield "zeros", b"\0" * 5000
    yield "a page", b"<html>404</html>"


def judged(path: Path) -> str:
    import aerogel

    try:
        fast = aerogel.compile(path, tune="off", progress=False)
        assert fast.captured is not None
        args, kwargs = fast.captured.filled()
        fast(*args, **kwargs)
    except AerogelError as why:
        return type(why).__name__
    except BaseException as why:
        return f"{type(why).__name__}: {str(why)[:200]}"
    return "valid"


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "in").mkdir()
    found = list(files(folder))
    import torch  # before the limit: it maps much and uses little

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
    said = {}
    for i, (name, made) in enumerate(found):
        path = folder / "in" / f"{i}.onnx"
        path.write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
        said[name] = judged(path)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
