"""Other runtimes for the same ONNX file, as calls that can be timed: onnxruntime and OpenVINO, where they are
installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from aerogel.capture import foreign

Session = Callable[[], Any]
"""One run of a file on its inputs."""
TITLES = {"onnxruntime": "onnxruntime", "openvino": "OpenVINO"}
"""What each package is called, by its import name."""


def is_installed(name: str) -> bool:
    """Return whether a runtime can be imported here."""
    return find_spec(name) is not None


def open_installed(
    path: str | Path, names: Sequence[str], inputs: Sequence[torch.Tensor]
) -> dict[str, Session]:
    """Open a file in every runtime that is installed and runs it, by import name."""
    sessions = {}
    for name in TITLES:
        if is_installed(name):
            try:
                sessions[name] = open_session(name, path, names, inputs)
            except Exception:  # noqa: S112  a runtime that refuses the file is no peer of it
                continue
    return sessions


def open_session(
    name: str, path: str | Path, names: Sequence[str], inputs: Sequence[torch.Tensor]
) -> Session:
    """Open a file in one runtime with torch's number of threads, and run it once.

    Raises what the runtime raises where it is not installed or refuses the file.
    """
    feed = {given: value.detach().contiguous().numpy() for given, value in zip(names, inputs, strict=True)}
    session = _OPEN[name](str(path), feed)
    session()
    return session


def _open_onnxruntime(path: str, feed: dict[str, Any]) -> Session:
    import onnxruntime as ort

    session = ort.InferenceSession(path, foreign.session_options(ort), providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feed)


def _open_openvino(path: str, feed: dict[str, Any]) -> Session:
    import openvino as ov

    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = ov.Core().compile_model(path, "CPU", settings).create_infer_request()
    return lambda: request.infer(feed)


_OPEN: dict[str, Callable[[str, dict[str, Any]], Session]] = {
    "onnxruntime": _open_onnxruntime,
    "openvino": _open_openvino,
}
