"""Other runtimes on the same dense model, each as a function of nothing. What is not installed is named as absent.

All take the model as it is, zeros included: none of them skips zeros. All are given the NCHW tensors that aerogel is given; who
wants another layout converts it within its own time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from aerogel.runtime.eager import channels_last, in_both_layouts
from benchmarks.models import Call

Run = Callable[[], Any]


def torch_contiguous(model: torch.nn.Module, call: Call, threads: int) -> Run:
    args, kwargs = call
    return lambda: model(*args, **kwargs)


def torch_channels_last(model: torch.nn.Module, call: Call, threads: int) -> Run:
    other, (args, kwargs) = in_both_layouts(model)["channels_last"], call
    return lambda: other(*(channels_last(a) for a in args), **{n: channels_last(a) for n, a in kwargs.items()})


def inductor(model: torch.nn.Module, call: Call, threads: int) -> Run:
    """torch.compile with freezing: constants folded, oneDNN weights reordered once."""
    import torch._inductor.config

    torch._inductor.config.freezing = True
    compiled: Any = torch.compile(in_both_layouts(model)["channels_last"])
    args, kwargs = call

    def run() -> Any:
        return compiled(*(channels_last(a) for a in args), **{n: channels_last(a) for n, a in kwargs.items()})

    run()
    return run


def _onnx(model: torch.nn.Module, call: Call) -> tuple[Path, list[Any]]:
    """The model in a file, and its inputs in the file's order."""
    path = Path(tempfile.mkdtemp()) / "model.onnx"
    torch.onnx.export(model, call[0], path, kwargs=call[1], dynamo=True, verbose=False)
    return path, [a.numpy() for a in (*call[0], *call[1].values())]


def onnxruntime(model: torch.nn.Module, call: Call, threads: int) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    path, arrays = _onnx(model, call)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {given.name: array for given, array in zip(session.get_inputs(), arrays, strict=True)}
    return lambda: session.run(None, feed)


def openvino(model: torch.nn.Module, call: Call, threads: int) -> Run:
    import openvino as ov

    core = ov.Core()
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    path, arrays = _onnx(model, call)
    request = core.compile_model(str(path), "CPU", settings).create_infer_request()
    return lambda: request.infer(arrays)


OPPONENTS: dict[str, dict[str, Callable[[torch.nn.Module, Call, int], Run]]] = {
    "torch": {"torch": torch_contiguous, "torch-channels-last": torch_channels_last},
    "inductor": {"inductor": inductor},
    "onnxruntime": {"onnxruntime": onnxruntime},
    "openvino": {"openvino": openvino},
}


def prepare(names: list[str], model: torch.nn.Module, call: Call, threads: int) -> tuple[dict[str, Run], dict[str, str]]:
    """The opponents that can run, and why the others cannot."""
    runs: dict[str, Run] = {}
    absent: dict[str, str] = {}
    for name in names:
        for form, make in OPPONENTS[name].items():
            try:
                runs[form] = make(model, call, threads)
            except Exception as why:  # an opponent's failure is its own, and is reported
                absent[form] = f"{type(why).__name__}: {str(why).splitlines()[0][:120] if str(why) else ''}"
    return runs, absent
