"""Nodes that only onnxruntime can run: each a small ONNX model, kept as bytes among the graph's constants."""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from aerogel.capture import pieces
from aerogel.errors import InvalidFile, UnsupportedModel
from aerogel.locks import Lock

_SESSIONS: dict[tuple[int, bytes], Any] = {}
_LOCK = Lock()
MOST_SESSIONS = 256


def available() -> bool:
    """Whether onnxruntime is installed."""
    return find_spec("onnxruntime") is not None


def session_options(ort: Any) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 4
    return options


def exact(model: Any, options: Any) -> Any:
    """A session whose sums of bytes do not saturate on a CPU without VNNI, where onnxruntime can make one: it
    has no kernel for some layers then."""
    import onnxruntime as ort

    cpu = ["CPUExecutionProvider"]
    options.add_session_config_entry("session.x64quantprecision", "1")
    try:
        return ort.InferenceSession(model, options, providers=cpu)
    except ort.capi.onnxruntime_pybind11_state.NotImplemented:
        options.add_session_config_entry("session.x64quantprecision", "0")
        return ort.InferenceSession(model, options, providers=cpu)


def run(content: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The node's outputs for its inputs."""
    session = _session(content)
    names = [given.name for given in session.get_inputs()]
    if len(names) != len(inputs):
        raise InvalidFile(
            f"a part for onnxruntime takes {len(names)} inputs, the graph gives it {len(inputs)}"
        )
    try:
        arrays = [value.detach().contiguous().numpy() for value in inputs]
        answers = session.run(None, dict(zip(names, arrays, strict=True)))
    except Exception as why:  # onnxruntime's own types
        raise InvalidFile(
            f"onnxruntime cannot run a part of the model: {str(why).splitlines()[0][:200]}"
        ) from None
    if not all(isinstance(made, np.ndarray) and made.dtype.kind in "fiub" for made in answers):
        raise InvalidFile("a part of the model for onnxruntime gives no numbers")
    return [torch.from_numpy(made.copy()) for made in answers]


def _session(content: torch.Tensor) -> Any:
    pieces.check(content)
    raw = content.numpy().tobytes()
    # a session's threads do not come along into a forked child
    key = (
        os.getpid(),
        hashlib.sha256(raw).digest(),
    )
    with _LOCK:
        if key not in _SESSIONS:
            if not available():
                raise UnsupportedModel("a part of this model runs in onnxruntime: pip install onnxruntime")
            import onnxruntime as ort

            try:
                made = exact(raw, session_options(ort))
            except Exception as why:  # onnxruntime's own types
                raise InvalidFile(
                    f"a part of the model is nothing onnxruntime takes: {str(why).splitlines()[0][:160]}"
                ) from None
            while len(_SESSIONS) >= MOST_SESSIONS:
                _SESSIONS.pop(next(iter(_SESSIONS)))
            _SESSIONS[key] = made
        return _SESSIONS[key]
