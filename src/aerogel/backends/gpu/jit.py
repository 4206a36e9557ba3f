"""Launches of Triton kernels on torch's tensors. Needs Triton (`pip install "aerogel[triton]"`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from aerogel.backends.gpu.device import Queue
from aerogel.codegen.gpu.launch import TritonLaunch
from aerogel.ir import ELEMENTS
from aerogel.ir.tensors import TORCH

TYPES = {element.triton: TORCH[name] for name, element in ELEMENTS.items()} | {"i32": torch.int32}
LANES = 64 if torch.version.hip else 32
"""Threads of a warp."""


def prepared(launch: TritonLaunch, here: Callable[[torch.Tensor], torch.Tensor]) -> Queue:
    """A call on tensors by name; `here` brings the launch's own arrays to the device. Triton compiles at the
    first call."""
    from aerogel.codegen.gpu import gathered

    code = launch.code
    kernel, options = (
        getattr(gathered, code.entry),
        {"num_warps": 32 * code.warps // LANES, "num_stages": 1, "enable_fp_fusion": True},
    )
    own: list[Any] = [here(torch.from_numpy(a)) if isinstance(a, np.ndarray) else a for a in launch.arguments]

    def queue(buffers: Mapping[str, torch.Tensor]) -> None:
        pointers = (buffers.get(a) if isinstance(a, str) else a for a in own[: len(code.types)])
        given = [
            buffers["y"] if t is None else _typed(t, dtype)
            for t, dtype in zip(pointers, code.types, strict=True)
        ]
        numbers = (n.item() for n in own[len(code.types) :])
        kernel[launch.grid](*given, *numbers, **dict(code.constants), **options)

    return queue


def _typed(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Scratch comes as bytes, bf16 as its bits."""
    return tensor.view(TYPES[dtype]) if tensor.dtype in (torch.uint8, torch.uint16) else tensor
