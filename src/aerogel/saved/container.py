"""The bytes of a model file: texts and named arrays in one safetensors file, a digest over all of it.

    metadata   the texts, "index" (name, element type, shape of each array, and how it is kept) and "digest"
               (SHA-256)
    tensors    "3"       array 3, flat; a packed one is filled up to a multiple of 64 bytes
               "3.bits"  or, where most of it is zeros, one bit an element
                         (numpy.packbits, most significant first)
               "3.kept"  and its nonzeros in order

Arrays whose name begins with PACKED come first and as they are: kernels read them from a mapping of the file.
A file is never code. Whatever it says about sizes is compared with the bytes that are there before anything
is allocated, so that it cannot ask for more than 32 bytes of memory a byte.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from aerogel.errors import InvalidFile
from aerogel.ir import LINE_BYTES, Array, ceil_div
from aerogel.ir.zeros import left_out, put_back

DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float64": np.float64,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "uint16": np.uint16,
    "int32": np.int32,
    "int64": np.int64,
    "bool": np.bool_,
}
PACKED = "packed:"
"""The names of arrays that kernels read where they lie."""
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)


def to_bytes(texts: Mapping[str, str], arrays: Mapping[str, tuple[str, Array]]) -> bytes:
    """One file. `arrays` are pairs of an element type's name and the elements (bf16 as its bits)."""
    tensors: dict[str, bytes] = {}
    index = []
    ordered = sorted(arrays.items(), key=lambda item: not item[0].startswith(PACKED))
    for i, (name, (dtype, array)) in enumerate(ordered):
        flat: Array = np.ascontiguousarray(array, DTYPES[dtype]).reshape(-1)
        said = {"name": name, "dtype": dtype, "shape": list(array.shape), "sparse": False}
        if name.startswith(PACKED):
            tensors[str(i)] = _padded(flat.tobytes())
        else:
            found = left_out(flat, "bf16" if dtype == "bfloat16" else dtype)
            said["sparse"] = found is not None
            if found is not None:
                tensors |= {f"{i}.bits": found[0].tobytes(), f"{i}.kept": found[1].tobytes()}
            else:
                tensors[str(i)] = flat.tobytes()
        index.append(said)
    metadata = {**texts, "index": json.dumps(index)}
    return _file({**metadata, "digest": _digest(metadata, tensors)}, tensors)


def _padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % LINE_BYTES)


def _file(metadata: Mapping[str, str], tensors: Mapping[str, bytes]) -> bytes:
    """safetensors' own layout, its header filled up with blanks so that tensors begin with a line."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, raw in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [end, end + len(raw)]}
        end += len(raw)
    said = json.dumps(header).encode()
    said += b" " * (-(8 + len(said)) % LINE_BYTES)
    return b"".join([len(said).to_bytes(8, "little"), said, *tensors.values()])


class Arrays(Mapping[str, tuple[str, Array]]):
    """The arrays of a file, each made when it is asked for. All of them were looked at before."""

    def __init__(self, index: list[Any], tensors: Mapping[str, Array], first: int) -> None:
        """`first` is the address of the file's first byte."""
        self._tensors = tensors
        self._said = {str(held["name"]): (i, held) for i, held in enumerate(index)}
        for i, held in self._said.values():
            _look(i, held, tensors, first)

    def __getitem__(self, name: str) -> tuple[str, Array]:
        i, held = self._said[name]
        dtype, count = np.dtype(DTYPES[held["dtype"]]), math.prod(held["shape"])
        if not held["sparse"]:
            raw = self._tensors[str(i)][: count * dtype.itemsize]
            found = raw.view(dtype) if name.startswith(PACKED) else np.frombuffer(bytearray(raw), dtype)
            return held["dtype"], found.reshape(held["shape"])
        kept = np.frombuffer(self._tensors[f"{i}.kept"].tobytes(), dtype)
        return held["dtype"], put_back(self._tensors[f"{i}.bits"], kept, count).reshape(held["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._said)

    def __len__(self) -> int:
        return len(self._said)

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        """An array's element type and shape."""
        _, held = self._said[name]
        return held["dtype"], tuple(held["shape"])


def from_bytes(content: Any) -> tuple[dict[str, str], Arrays]:
    """The inverse, of bytes or a mapping of them. Any damage is an InvalidFile."""
    try:
        metadata, tensors = _parts(memoryview(content))
        first = np.frombuffer(content, np.uint8).ctypes.data
        digest, index = metadata.pop("digest"), json.loads(metadata["index"])
        if digest != _digest(metadata, tensors):
            raise InvalidFile(
                "the file is damaged: its digest is not that of its content. Save it again, or "
                "fetch it again."
            )
        views = {name: np.frombuffer(raw, np.uint8) for name, raw in tensors.items()}
        arrays = Arrays(index, views, first)
    except _DAMAGE as why:
        raise InvalidFile(f"not a model saved by aerogel: {type(why).__name__} {str(why)[:200]}") from None
    return {name: text for name, text in metadata.items() if name != "index"}, arrays


def _parts(content: memoryview) -> tuple[dict[str, str], dict[str, memoryview]]:
    """Texts and tensors by name, none of them outside of the file."""
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > len(content) - 8:
        raise InvalidFile("not a model saved by aerogel, or one that was cut off")
    header, data = json.loads(bytes(content[8 : 8 + size])), content[8 + size :]
    metadata = header.pop("__metadata__")
    if not all(isinstance(text, str) for text in metadata.values()):
        raise InvalidFile("not a model saved by aerogel: a text is none")
    tensors, done = {}, 0
    for name, said in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (count,), (first, end) = said["shape"], said["data_offsets"]
        whole = all(type(n) is int for n in (count, first, end))
        if said["dtype"] != "U8" or not whole or first != done or not first <= end or end - first != count:
            raise InvalidFile("not a model saved by aerogel: a tensor does not begin where another ends")
        tensors[name], done = data[first:end], end
    if done != len(data):
        raise InvalidFile("not a model saved by aerogel, or one that was cut off")
    return metadata, tensors


def _look(i: int, held: Mapping[str, Any], tensors: Mapping[str, Array], first: int) -> None:
    """Raise unless an array's shape, element type and bytes fit each other."""
    dtype, shape, name = np.dtype(DTYPES[held["dtype"]]), tuple(held["shape"]), str(held["name"])[:80]
    packed = name.startswith(PACKED)
    if len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise InvalidFile(f"array '{name}' has the shape {str(shape)[:80]}")
    count = math.prod(shape)
    if held["sparse"]:
        bits, raw = tensors[f"{i}.bits"], tensors[f"{i}.kept"]
        if len(bits) != ceil_div(count, 8):
            raise InvalidFile(f"array '{name}' has {len(bits)} bytes of bits for {count} elements")
        if count % 8 and bits[-1] & 0xFF >> count % 8:
            raise InvalidFile(f"array '{name}' has bits past its last element")
        count = int(np.bitwise_count(bits).sum())
    else:
        raw = tensors[str(i)]
    wanted = count * dtype.itemsize
    if packed and (held["sparse"] or (raw.ctypes.data - first) % LINE_BYTES):
        raise InvalidFile(f"array '{name}' does not lie at a multiple of {LINE_BYTES} bytes")
    if raw.size != wanted + (-wanted % LINE_BYTES if packed else 0):
        raise InvalidFile(f"{raw.size} bytes for {count} elements of {dtype}")
    if dtype == np.bool_ and raw.size and raw.max() > 1:
        raise InvalidFile("a truth value is neither 0 nor 1")


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Any]) -> str:
    made = hashlib.sha256()
    for name in sorted(metadata):
        made.update(f"{name}\0{len(metadata[name])}\0{metadata[name]}\0".encode())
    for name in sorted(tensors):
        made.update(f"{name}\0{len(tensors[name])}\0".encode())
        made.update(tensors[name])
    return made.hexdigest()
