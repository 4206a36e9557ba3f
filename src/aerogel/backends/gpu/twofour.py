"""A layer as torch's own product with two of four weights.

The product has never run: it needs a GPU of compute capability 8.x. What stands around it is run by the
tests, with torch's conversion back in its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from aerogel.backends.gpu.device import Queue
from aerogel.codegen.gpu.launch import TorchLaunch
from aerogel.ir.tensors import epilogue, to_torch


def prepared(launch: TorchLaunch, here: Callable[[torch.Tensor], torch.Tensor]) -> Queue:
    """A call on tensors by name; `here` brings values and indices to the device."""
    conv = launch.conv
    value = here(to_torch(launch.value, conv.dtypes.weight))
    metadata = here(torch.from_numpy(launch.metadata))

    def queue(buffers: Mapping[str, Any]) -> None:
        x: torch.Tensor = buffers["x"]
        bias = buffers["bias"].to(x.dtype) if "bias" in conv.steps else None
        if bias is not None:
            bias = F.pad(bias, (0, len(value) - conv.k))
        pixels = x.permute(0, 2, 3, 1).reshape(-1, conv.c)
        rows = product(pixels, value, metadata, bias)[:, : conv.k]
        y = rows.reshape(conv.batch, *conv.out, conv.k).permute(0, 3, 1, 2)
        buffers["y"].copy_(epilogue(y, conv, conv.epilogue, buffers.get("residual")))

    return queue


def product(
    pixels: torch.Tensor, value: torch.Tensor, metadata: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[pixels, channels] x [filters, channels], the filters as kept values and where they stood."""
    shape = torch.Size((len(value), pixels.shape[1]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of SparseSemiStructuredTensor is in prototype")
        weight = torch.sparse.SparseSemiStructuredTensorCUTLASS(shape, value, metadata, None, None, None)
    return F.linear(pixels, weight, bias)
