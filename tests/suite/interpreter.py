"""Triton's interpreter, mended where it is not what a GPU does: bf16 (Triton 3.9 multiplies its bits and cuts
instead of rounding).

Import this before a kernel: Triton asks for its interpreter when kernels are made.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np
import torch

from aerogel.backends.gpu import jit
from aerogel.codegen.gpu.launch import TritonLaunch
from aerogel.ir import Array, from_float64

os.environ["TRITON_INTERPRET"] = "1"


def run(launches: list[TritonLaunch], placed: dict[str, Array]) -> Array:
    """y, computed where it lies."""
    mend()
    tensors = {name: torch.from_numpy(array) for name, array in placed.items()}
    scratch = max((launch.scratch_bytes for launch in launches), default=0)
    tensors["scratch"] = torch.full((max(4, scratch),), 0xFF, dtype=torch.uint8)
    for launch in launches:
        with np.errstate(all="ignore"):
            jit.prepared(launch, lambda own: own)(tensors)
    return placed["y"].copy()


@cache
def mend() -> None:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def numbers(tensor: Any) -> Any:
        return (
            (tensor.data.astype(np.uint32) << 16).view(np.float32)
            if str(tensor.dtype) == "bf16"
            else tensor.data
        )

    def dot(self: Any, a: Any, b: Any, d: Any, precision: object, imprecise: object) -> Any:
        return TensorHandle(np.matmul(numbers(a), numbers(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def cast(self: Any, given: Any, to: Any) -> Any:
        kind = str(to.scalar)
        wanted = from_float64(given.data.astype(np.float64), "bf16") if kind == "bf16" else None
        if wanted is None and str(given.dtype.scalar) == "bf16" and kind == "fp32":
            wanted = numbers(given)
        return self.cast_impl(given, to) if wanted is None else TensorHandle(wanted, to.scalar)

    InterpreterBuilder.create_dot = dot
    InterpreterBuilder.create_fp_trunc = InterpreterBuilder.create_fp_ext = cast
