"""Other runtimes on the same dense model, each as a function of nothing. What is not installed is named as absent.

All take the model as it is, zeros included: none of them skips zeros. All are given the same NCHW tensor that aerogel is given; who
wants another layout converts it within its own time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Run = Callable[[], Any]


def torch_contiguous(model: torch.nn.Module, x: torch.Tensor, threads: int) -> Run:
    return lambda: model(x)


def torch_channels_last(model: torch.nn.Module, x: torch.Tensor, threads: int) -> Run:
    import copy

    other = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return lambda: other(x.contiguous(memory_format=torch.channels_last))


def inductor(model: torch.nn.Module, x: torch.Tensor, threads: int) -> Run:
    """torch.compile with freezing: constants folded, oneDNN weights reordered once."""
    import copy

    import torch._inductor.config

    torch._inductor.config.freezing = True
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    compiled: Any = torch.compile(other)

    def run() -> Any:
        return compiled(x.contiguous(memory_format=torch.channels_last))

    run()
    return run


def _onnx(model: torch.nn.Module, x: torch.Tensor) -> Path:
    path = Path(tempfile.mkdtemp()) / "model.onnx"
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False)
    return path


def onnxruntime(model: torch.nn.Module, x: torch.Tensor, threads: int) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(_onnx(model, x)), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def openvino(model: torch.nn.Module, x: torch.Tensor, threads: int) -> Run:
    import openvino as ov

    core = ov.Core()
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    compiled = core.compile_model(str(_onnx(model, x)), "CPU", settings)
    request, feed = compiled.create_infer_request(), x.numpy()
    return lambda: request.infer([feed])


OPPONENTS: dict[str, dict[str, Callable[[torch.nn.Module, torch.Tensor, int], Run]]] = {
    "torch": {"torch": torch_contiguous, "torch-channels-last": torch_channels_last},
    "inductor": {"inductor": inductor},
    "onnxruntime": {"onnxruntime": onnxruntime},
    "openvino": {"openvino": openvino},
}


def prepare(names: list[str], model: torch.nn.Module, x: torch.Tensor, threads: int) -> tuple[dict[str, Run], dict[str, str]]:
    """The opponents that can run, and why the others cannot."""
    runs: dict[str, Run] = {}
    absent: dict[str, str] = {}
    for name in names:
        for form, make in OPPONENTS[name].items():
            try:
                runs[form] = make(model, x, threads)
            except Exception as why:  # an opponent's failure is its own, and is reported
                absent[form] = f"{type(why).__name__}: {str(why).splitlines()[0][:120] if str(why) else ''}"
    return runs, absent
