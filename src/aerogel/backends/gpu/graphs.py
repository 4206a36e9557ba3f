"""Calls replayed as CUDA graphs: one graph for each set of input sizes.

No physical GPU has run this file; see cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aerogel.locks import Lock

Run = Callable[[list[Any]], list[Any]]

_CAPTURING = Lock()
"""Held during a capture: a capture waits for the device, which it may not do while another one records."""


class GraphCalls:
    """A function of tensors that runs as one CUDA graph for each set of input sizes, element types and
    layouts. Inputs that are not tensors are part of the key.

    The graphs, their inputs and outputs and the scratch memory of the layers exist once, so calls must not
    overlap: not on the host, which the runner's lock prevents, and not on the device, where a call on another
    stream than the last one waits for it.
    """

    def __init__(self, run: Run, number: int) -> None:
        self._run = run
        self._number = number
        self._graphs: dict[Any, tuple[Any, list[Any], list[Any]] | None] = {}
        self._stream: Any = None
        self._finished: Any = None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if torch.cuda.is_current_stream_capturing():  # a graph of the user's: our launches become part of it
            return self._run(inputs)
        stream = torch.cuda.current_stream(self._number)
        if self._stream is not None and self._stream != stream:
            stream.wait_event(self._finished)
        outputs = self._replay(inputs)
        if self._finished is None:
            self._finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._finished.record(stream)
        self._stream = stream
        return outputs

    def _replay(self, inputs: list[Any]) -> list[Any]:
        key = tuple(
            (tuple(v.shape), v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v for v in inputs
        )
        if key not in self._graphs:
            self._graphs[key] = self._capture(inputs)
        if (captured := self._graphs[key]) is None:
            return self._run(inputs)
        graph, buffers, outputs = captured
        for buffer, value in zip(buffers, inputs, strict=True):
            if isinstance(value, torch.Tensor):
                buffer.copy_(value)
        graph.replay()
        return [v.clone() if isinstance(v, torch.Tensor) else v for v in outputs]

    def _capture(self, inputs: list[Any]) -> tuple[Any, list[Any], list[Any]] | None:
        """Record the graph for inputs like these, with buffers for its inputs and outputs. None where CUDA
        cannot record it, as when sizes depend on data: then every call launches kernel by kernel."""
        # buffers made in inference mode could not be written outside of it
        with _CAPTURING, torch.inference_mode(False), torch.no_grad():
            buffers = [v.clone() if isinstance(v, torch.Tensor) else v for v in inputs]
            side = torch.cuda.Stream(self._number)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self._number))
            with torch.cuda.stream(side):
                self._run(buffers)  # uploads and allocations happen here, not in the graph
            torch.cuda.synchronize(self._number)
            graph = torch.cuda.CUDAGraph()
            try:  # thread_local: what other threads do on the device does not end the capture
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    outputs = self._run(buffers)
            except Exception:  # the call itself has just run; cuda.core's CUDAError is no RuntimeError
                return None
            return graph, buffers, outputs
