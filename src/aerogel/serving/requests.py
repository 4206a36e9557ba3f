"""What an HTTP request may bring, and what is answered. Every body is hostile until it was looked at: sizes
come first, nothing is unpickled, and what is wrong with it is a status and a sentence."""

from __future__ import annotations

import io
import json
import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from aerogel.errors import AerogelError, printable
from aerogel.ir import Array
from aerogel.preprocess import NoImage, Recipe
from aerogel.serving.predictor import Predictor

NPY, JSON = "application/x-npy", "application/json"
MOST_BYTES = 16 << 20
"""Of a body, where nobody says another number."""
MOST_JSON = 8 << 20
"""Of JSON: as lists of Python it takes thirty times that."""
_HEADER = 10_000
_DIMENSIONS = 8


class Refused(AerogelError):
    """A request that gets no answer: its HTTP status, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def arrays(body: bytes, kind: str, predictor: Predictor, recipe: Recipe | None) -> dict[str, Array]:
    """The model's inputs from a body of this content type; Refused says what it should be."""
    kind = kind.partition(";")[0].strip().lower()
    if kind == NPY:
        found = {_only(predictor): npy(body)}
    elif kind == JSON:
        found = _lists(body, predictor)
    elif kind.startswith("image/"):
        found = {_only(predictor): _image(body, recipe)}
    else:
        raise Refused(415, f"content type '{kind[:80]}': send {NPY}, {JSON} or an image")
    if any(not value.ndim or not value.size for value in found.values()):
        raise Refused(400, "an input has no rows")
    if (why := predictor.misfit(found)) is not None:
        raise Refused(400, why)
    return found


def _only(predictor: Predictor) -> str:
    if len(predictor.inputs) != 1:
        raise Refused(400, f"the model takes {[*predictor.inputs]}: send them as JSON, by name")
    return next(iter(predictor.inputs))


def npy(body: bytes) -> Array:
    """An array in numpy's own format, whose header says as many bytes as there are."""
    raw = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(raw)
        reader = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            reader = np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reader(raw, max_header_size=_HEADER)
    except Exception as why:
        raise Refused(400, f"not a .npy array: {printable(why)[:120]}") from None
    if dtype.hasobject or dtype.kind not in "fiub" or any(n < 0 for n in shape) or len(shape) > _DIMENSIONS:
        raise Refused(400, f"a .npy array of {printable(dtype)[:40]}, {len(shape)} dimensions: no input")
    if math.prod(shape) * dtype.itemsize != len(body) - raw.tell():
        raise Refused(400, f"a .npy array of {shape} has {len(body) - raw.tell()} bytes")
    flat: Array = np.frombuffer(body, dtype, offset=raw.tell()).astype(dtype.newbyteorder("="))
    try:
        return flat.reshape(tuple(map(operator.index, shape)), order="F" if fortran else "C")
    except (TypeError, ValueError, OverflowError) as why:
        raise Refused(400, f"a .npy array of {printable(shape)[:80]}: {printable(why)[:80]}") from None


def _lists(body: bytes, predictor: Predictor) -> dict[str, Array]:
    if len(body) > MOST_JSON:
        raise Refused(413, f"{len(body)} bytes of JSON; at most {MOST_JSON}. Larger inputs: {NPY}")
    try:
        said = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as why:
        raise Refused(400, f"not JSON: {printable(why)[:120]}") from None
    if not isinstance(said, dict) or set(said) != {"inputs"}:
        raise Refused(400, 'JSON is {"inputs": nested lists}, or {"inputs": {name: nested lists}}')
    given = said["inputs"]
    names = len(given) if isinstance(given, dict) else 0
    if body.count(b'"') > 2 + 2 * names or b"null" in body:  # before numpy makes room for the longest text
        raise Refused(400, "an input is not made of numbers")
    if not isinstance(given, dict):
        given = {_only(predictor): given}
    if set(given) != set(predictor.inputs):
        raise Refused(400, f"the model takes {[*predictor.inputs]}, not {printable(sorted(given))[:200]}")
    return {name: _numbers(name, value, predictor.example[name].dtype) for name, value in given.items()}


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _numbers(name: str, value: Any, dtype: Any) -> Array:
    """Nested lists of numbers as an array of the input's own type."""
    try:
        found: Array = np.asarray(value)
    except (ValueError, TypeError, OverflowError, MemoryError, RecursionError) as why:
        raise Refused(400, f"input '{name}': {printable(why)[:120]}") from None
    if found.dtype.kind not in "fiub":
        raise Refused(400, f"input '{name}' is not made of numbers")
    with np.errstate(all="ignore"):
        return found.astype(dtype)


def _image(body: bytes, recipe: Recipe | None) -> Array:
    if recipe is None:
        raise Refused(415, f"the model was saved without a way to read images: send {NPY} or {JSON}")
    try:
        image: Array = recipe.decoded(body)[None]
    except NoImage as why:
        raise Refused(400, str(why)) from None
    return image


def answered(outputs: Mapping[str, Array], accept: str) -> tuple[bytes, str]:
    """An answer's body and content type. Numbers that JSON does not have are null."""
    if NPY in accept and len(outputs) == 1:
        raw = io.BytesIO()
        np.save(raw, next(iter(outputs.values())), allow_pickle=False)
        return raw.getvalue(), NPY
    held = {name: _finite(value) for name, value in outputs.items()}
    return json.dumps({"outputs": held}, allow_nan=False).encode(), JSON


def _finite(value: Array) -> Any:
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        held = value.astype(object)
        held[~np.isfinite(value)] = None
        return held.tolist()
    return value.tolist()
