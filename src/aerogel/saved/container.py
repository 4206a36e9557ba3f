"""The bytes of a model file: texts and named arrays in one safetensors file, zeros left out, a digest over
all of it.

    metadata   the texts, "index" (name, element type, shape and number of nonzeros of each array) and
               "digest" (SHA-256)
    tensors    "3"       array 3, flat
               "3.bits"  or, where most of it is zeros, one bit an element
                         (numpy.packbits, most significant first)
               "3.kept"  and its nonzeros in order

A file is never code. Whatever it says about sizes is compared with the bytes that are there before anything
is allocated, so that it cannot ask for more than 32 bytes of memory a byte.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from aerogel.errors import InvalidFile
from aerogel.ir import Array, ceil_div

DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float64": np.float64,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "bool": np.bool_,
}
SPARSE = 0.25
"""Share of zeros from which an array is kept as bits and nonzeros."""


def to_bytes(texts: Mapping[str, str], arrays: Mapping[str, tuple[str, Array]]) -> bytes:
    """One file. `arrays` are pairs of an element type's name and the elements (bf16 as its bits)."""
    tensors: dict[str, Array] = {}
    index = []
    for i, (name, (dtype, array)) in enumerate(arrays.items()):
        flat: Array = np.ascontiguousarray(array, DTYPES[dtype]).reshape(-1)
        # a minus zero, which pruning leaves, comes back as zero
        kept = (flat & 0x7FFF if dtype == "bfloat16" else flat) != 0
        sparse = np.count_nonzero(kept) < (1 - SPARSE) * flat.size
        if sparse:
            tensors |= {f"{i}.bits": np.packbits(kept), f"{i}.kept": flat[kept].view(np.uint8)}
        else:
            tensors[str(i)] = flat.view(np.uint8)
        index.append({"name": name, "dtype": dtype, "shape": list(array.shape), "sparse": bool(sparse)})
    metadata = {**texts, "index": json.dumps(index)}
    return save(
        tensors, {**metadata, "digest": _digest(metadata, {n: t.tobytes() for n, t in tensors.items()})}
    )


def from_bytes(content: bytes) -> tuple[dict[str, str], dict[str, tuple[str, Array]]]:
    """The inverse. Any damage is an InvalidFile."""
    try:
        tensors = {name: bytes(held["data"]) for name, held in deserialize(content)}  # type: ignore[no-untyped-call]
        size = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + size])["__metadata__"]
        digest, index = metadata.pop("digest"), json.loads(metadata["index"])
        if digest != _digest(metadata, tensors):
            raise InvalidFile(
                "the file is damaged: its digest is not that of its content. Save it again, or "
                "fetch it again."
            )
        arrays = {
            str(held["name"]): (str(held["dtype"]), _array(i, held, tensors)) for i, held in enumerate(index)
        }
    except (
        SafetensorError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as why:
        raise InvalidFile(f"not a model saved by aerogel: {type(why).__name__} {str(why)[:200]}") from None
    return {name: text for name, text in metadata.items() if name != "index"}, arrays


def _array(i: int, held: Mapping[str, Any], tensors: Mapping[str, bytes]) -> Array:
    dtype, shape = np.dtype(DTYPES[held["dtype"]]), tuple(held["shape"])
    if len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise InvalidFile(f"array '{held['name']}' has the shape {str(shape)[:80]}")
    count = math.prod(shape)
    if not held["sparse"]:
        return _checked(np.frombuffer(tensors[str(i)], np.uint8), count, dtype, shape)
    bits = np.frombuffer(tensors[f"{i}.bits"], np.uint8)
    if len(bits) != ceil_div(count, 8):
        raise InvalidFile(f"array '{held['name']}' has {len(bits)} bytes of bits for {count} elements")
    kept = np.unpackbits(bits, count=count).view(np.bool_)
    values = np.frombuffer(tensors[f"{i}.kept"], np.uint8)
    flat = np.zeros(count, dtype)
    flat[kept] = _checked(values, int(np.count_nonzero(kept)), dtype, (-1,))
    return flat.reshape(shape)


def _checked(raw: Array, count: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if raw.size != count * dtype.itemsize:
        raise InvalidFile(f"{raw.size} bytes for {count} elements of {dtype}")
    if dtype == np.bool_ and raw.size and raw.max() > 1:
        raise InvalidFile("a truth value is neither 0 nor 1")
    return raw.view(dtype).reshape(shape).copy()


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, bytes]) -> str:
    made = hashlib.sha256()
    for name in sorted(metadata):
        made.update(f"{name}\0{len(metadata[name])}\0{metadata[name]}\0".encode())
    for name in sorted(tensors):
        made.update(f"{name}\0{len(tensors[name])}\0".encode())
        made.update(tensors[name])
    return made.hexdigest()
