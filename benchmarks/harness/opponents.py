"""Other runtimes on the same dense model, each as a function of nothing. What is not installed is named as
absent.

All take the model as it is, zeros included: none of them skips zeros. All are given the f32 NCHW tensors that
aerogel is given; who wants another layout or precision converts within its own time. A name without a
precision means f32; bf16 and int8 use AMX where the machine has it. `aerogel-f32` is ourselves, for what half
precision gains.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import aerogel
from aerogel.ir import Way
from aerogel.runtime.eager import InType, body, channels_last, runner
from aerogel.zoo.models import Call

Run = Callable[[], Any]
CALIBRATION = 32
"""Images that a quantization sees."""
CHANNELS_LAST = Way("torch", "channels_last")


def torch_contiguous(model: torch.nn.Module, call: Call, threads: int) -> Run:
    args, kwargs = call
    return lambda: model(*args, **kwargs)


def torch_channels_last(model: torch.nn.Module, call: Call, threads: int) -> Run:
    other, (args, kwargs) = body(model, CHANNELS_LAST), call
    return lambda: other(
        *(channels_last(a) for a in args), **{n: channels_last(a) for n, a in kwargs.items()}
    )


def inductor(model: torch.nn.Module, call: Call, threads: int) -> Run:
    """torch.compile with freezing: constants folded, oneDNN weights reordered once."""
    import torch._inductor.config

    torch._inductor.config.freezing = True
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        torch._inductor.config.cpp.simdlen = 256
    compiled: Any = torch.compile(body(model, CHANNELS_LAST))
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
    path, arrays = _onnx(model, call)
    return _openvino(path, arrays, threads, "f32")


def openvino_bf16(model: torch.nn.Module, call: Call, threads: int) -> Run:
    path, arrays = _onnx(model, call)
    return _openvino(path, arrays, threads, "bf16")


def openvino_int8(model: torch.nn.Module, call: Call, threads: int) -> Run:
    """OpenVINO's own post-training quantization, calibrated on seeded images like the example; what is left
    over in bf16."""
    import nncf
    import openvino as ov

    path, arrays = _onnx(model, call)
    images = [[a.numpy() for a in args] for args in calibration(call)]
    quantized = nncf.quantize(ov.Core().read_model(str(path)), nncf.Dataset(images), subset_size=CALIBRATION)
    return _openvino(quantized, arrays, threads, "bf16")


def calibration(call: Call) -> list[tuple[torch.Tensor, ...]]:
    """Seeded images like the example, for whoever quantizes."""
    rng = torch.Generator().manual_seed(0)
    given = (*call[0], *call[1].values())
    return [tuple(torch.randn(a.shape, generator=rng) for a in given) for _ in range(CALIBRATION)]


def _openvino(model: Any, arrays: list[Any], threads: int, precision: str) -> Run:
    import openvino as ov

    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()
    return lambda: request.infer(arrays)


def torch_bf16(model: torch.nn.Module, call: Call, threads: int) -> Run:
    return runner(body(model, way := Way("torch", dtype="bfloat16")), call, way)


def torch_bf16_channels_last(model: torch.nn.Module, call: Call, threads: int) -> Run:
    return runner(body(model, way := replace(CHANNELS_LAST, dtype="bfloat16")), call, way)


def inductor_bf16(model: torch.nn.Module, call: Call, threads: int) -> Run:
    return inductor(InType(model, torch.bfloat16), call, threads)


def aerogel_f32(model: torch.nn.Module, call: Call, threads: int) -> Run:
    fast = aerogel.compile(model, *call, store=tempfile.mkdtemp())
    return lambda: fast(*call[0], **call[1])


def outputs(given: Any) -> list[Any]:
    """What a run gave, as a flat list; OpenVINO's answer is a mapping of its own."""
    plain = isinstance(given, torch.Tensor | dict | list | tuple)
    return torch.utils._pytree.tree_leaves(given) if plain else list(given.values())


OPPONENTS: dict[str, dict[str, Callable[[torch.nn.Module, Call, int], Run]]] = {
    "torch": {"torch": torch_contiguous, "torch-channels-last": torch_channels_last},
    "inductor": {"inductor": inductor},
    "onnxruntime": {"onnxruntime": onnxruntime},
    "openvino": {"openvino": openvino},
    "torch-bf16": {"torch-bf16": torch_bf16, "torch-bf16-channels-last": torch_bf16_channels_last},
    "inductor-bf16": {"inductor-bf16": inductor_bf16},
    "openvino-bf16": {"openvino-bf16": openvino_bf16},
    "openvino-int8": {"openvino-int8": openvino_int8},
    "aerogel-f32": {"aerogel-f32": aerogel_f32},
}


def prepare(
    names: list[str], model: torch.nn.Module, call: Call, threads: int
) -> tuple[dict[str, Run], dict[str, str]]:
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
