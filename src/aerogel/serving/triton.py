"""A saved model in a repository of Triton's inference server, for its Python backend.

Batching, instances, health and metrics are the server's. The repository holds settings, the model's file and
two lines of Python that name the class below; arrays go both ways by DLPack.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import dlpack

from aerogel.disk import write_whole
from aerogel.errors import AerogelError, InvalidArgument, UnsupportedModel, printable
from aerogel.ir import Array
from aerogel.outputs import check_folder, make_folder
from aerogel.serving.predictor import Predictor, Rows

_TYPES = {
    "float16": "FP16", "float32": "FP32", "float64": "FP64", "bool": "BOOL", "uint8": "UINT8", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64",
}  # fmt: skip
_MODEL = '''"""Written by `aerogel export`: the code is aerogel's own."""

from aerogel.serving.triton import TritonPythonModel as TritonPythonModel
'''


class TritonPythonModel:
    """What the server's Python backend calls: the names are its own."""

    def initialize(self, args: dict[str, str]) -> None:
        said = json.loads(args["model_config"])
        threads = int(said["parameters"]["threads"]["string_value"])
        path = os.path.join(args["model_repository"], args["model_version"], "model.aero")
        self._predictor = Predictor(path, threads)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        import triton_python_backend_utils as server

        asked = [{name: self._array(server, r, name) for name in self._predictor.inputs} for r in requests]
        return [_response(server, found) for found in self._predictor.together(asked)]

    @staticmethod
    def _array(server: Any, request: Any, name: str) -> Array:
        held = server.get_input_tensor_by_name(request, name)
        array: Array = dlpack.from_dlpack(held.to_dlpack()).numpy()
        return array


def _response(server: Any, found: Rows | AerogelError) -> Any:
    if isinstance(found, AerogelError):
        invalid = server.TritonError(str(found), server.TritonError.INVALID_ARG)
        return server.InferenceResponse(output_tensors=[], error=invalid)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in found.items()}
    outputs = [server.Tensor.from_dlpack(name, held) for name, held in tensors.items()]
    return server.InferenceResponse(output_tensors=outputs)


def export(
    path: Path, out: Path, name: str | None, instances: int, threads: int, batch: int | None, wait_us: int
) -> Path:
    """Write a repository with this model; its folder there. What is there under its name is left alone."""
    name = path.stem if name is None else name
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
        raise InvalidArgument(f"'{printable(name)}' is no name for a model: letters, digits, _, . and -")
    if "triton" in (name, out.name):
        raise InvalidArgument(
            "a folder called 'triton' hides the package of that name from torch: choose another"
        )
    check_folder(out, "-o")
    predictor = Predictor(path, threads)
    folder = out / name
    if folder.exists():
        raise AerogelError(f"'{printable(folder)}' exists: remove it, or choose another --name")
    said = settings(predictor, name, instances, threads, batch, wait_us)
    try:
        make_folder(out, "-o")
        folder.mkdir()
        (folder / "1").mkdir()
        shutil.copyfile(path, folder / "1" / "model.aero")
        write_whole(folder / "1" / "model.py", _MODEL.encode())
        write_whole(folder / "config.pbtxt", said.encode())
    except OSError as why:
        raise AerogelError(f"'{printable(folder)}' cannot be written: {why.strerror or why}") from why
    return folder


def settings(
    predictor: Predictor, name: str, instances: int, threads: int, batch: int | None, wait_us: int
) -> str:
    """The model's config.pbtxt."""
    largest = predictor.fixed or batch or max(32, predictor.largest)
    open_sizes = any(not isinstance(n, int) for sizes in predictor.inputs.values() for n in sizes[1:])
    inputs = {
        n: [s if isinstance(s, int) else -1 for s in sizes[1:]] for n, sizes in predictor.inputs.items()
    }
    outputs = {
        n: [-1] * (v.ndim - 1) if open_sizes else list(v.shape[1:]) for n, v in predictor.answer.items()
    }
    flat = [n for n, dims in (*inputs.items(), *outputs.items()) if not dims]
    if flat:
        raise UnsupportedModel(
            f"'{printable(flat[0])}' is one number an image, which Triton's server does not take"
        )
    preferred = sorted({min(n, largest) for n in (predictor.largest, largest) if n > 1})
    batching = f"preferred_batch_size: {preferred} " if preferred else ""
    return "\n".join(
        [
            f'name: "{name}"',
            'backend: "python"',
            f"max_batch_size: {largest}",
            _tensors("input", inputs, predictor.example),
            _tensors("output", outputs, predictor.answer),
            f"instance_group [ {{ kind: KIND_CPU count: {instances} }} ]",
            f"dynamic_batching {{ {batching}max_queue_delay_microseconds: {wait_us} }}",
            f'parameters {{ key: "threads" value: {{ string_value: "{threads}" }} }}',
            *(_warm_up(predictor, n) for n in sorted({1, min(predictor.largest, largest)})),
            "",
        ]
    )


def _tensors(kind: str, dims: dict[str, list[int]], arrays: Rows) -> str:
    each = [f"{{ name: {_text(n)} data_type: {_type(n, arrays)} dims: {dims[n]} }}" for n in dims]
    return f"{kind} [\n  " + ",\n  ".join(each) + "\n]"


def _warm_up(predictor: Predictor, batch: int) -> str:
    """A request of zeros, before the model is said to be ready."""
    inputs = [
        f"inputs {{ key: {_text(n)} value: {{ data_type: {_type(n, predictor.example)} "
        f"dims: {list(v.shape[1:])} zero_data: true }} }}"
        for n, v in predictor.example.items()
    ]
    return f'model_warmup [ {{ name: "{batch}" batch_size: {batch} {" ".join(inputs)} }} ]'


def _type(name: str, arrays: Rows) -> str:
    dtype = str(arrays[name].dtype)
    if dtype not in _TYPES:
        raise AerogelError(f"'{printable(name)}' is {dtype}, which Triton's server does not have")
    return f"TYPE_{_TYPES[dtype]}"


def _text(name: str) -> str:
    """A string of protobuf's text format: every other byte is written as octal."""
    kept = re.compile(rb"[A-Za-z0-9_./:-]")
    raw = (bytes([b]) for b in name.encode())
    return '"' + "".join(b.decode() if kept.match(b) else f"\\{b[0]:03o}" for b in raw) + '"'
