"""Where slim() keeps what it has done, so that it can be killed at any time and goes on from there.

Each stage is a file that appears whole or not at all. Timings are part of it: a run that is resumed decides
by the same numbers, and ends with the same masks.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aerogel.disk import read_small, write_whole
from aerogel.errors import AerogelError, InvalidFile
from aerogel.outputs import check_folder, make_folder
from aerogel.pruning.advice import Point
from aerogel.pruning.gram import inference
from aerogel.pruning.judge import answers
from aerogel.runtime.eager import Call, seed

Found = TypeVar("Found")
MOST = 64 << 20
"""Bytes of a stage that is no weights."""
ANSWERS, ROUNDING = 32, 1e-3
"""Numbers of each answer by which a model is known again, and how far they may be apart."""


class Stages:
    """A folder of stages; without one nothing is kept, and every stage is made. What is read was written by
    nobody knows whom: it is parsed where it is read, and whatever goes wrong there is one sentence."""

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else check_folder(folder, "state")

    def begin(self, question: Mapping[str, Any]) -> None:
        """Raises where the folder holds the answer to another question."""
        if self.folder is None:
            return
        try:
            make_folder(self.folder, "state")
        except OSError as why:
            raise self._unusable(why) from why
        known = self.read("question", dict)
        if known is None:
            self.write("question", question)
            return
        other = [name for name in question if not _same(name, known.get(name), question[name])]
        if other:
            raise AerogelError(
                f"'{self.folder}' holds the state of a slim() with another {' and '.join(other)}: say state= "
                "with another folder, or remove this one"
            )

    def once(self, name: str, make: Callable[[], Any], parse: Callable[[Any], Found]) -> Found:
        """What was made before, or is made now: plain values, parsed."""
        found = self.read(name, parse)
        if found is not None:
            return found
        made = make()
        self.write(name, made)
        return parse(json.loads(json.dumps(made)))

    def weights(
        self, name: str, make: Callable[[], Mapping[str, Any]], like: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """The tensors of a model's state that was made before, or is made now. `like` is the state of the
        model that they are for."""
        path = None if self.folder is None else self.folder / f"{name}.safetensors"
        if path is not None:
            with _parsed(path):
                if path.exists():
                    return _weights(path, like)
        made = {k: v.detach().cpu().clone().contiguous() for k, v in make().items() if isinstance(v, Tensor)}
        if path is not None:
            self._write(path, save(made))
        return made

    def read(self, name: str, parse: Callable[[Any], Found]) -> Found | None:
        """A stage that is done, or None."""
        path = None if self.folder is None else self.folder / f"{name}.json"
        if path is None:
            return None
        with _parsed(path):
            if not path.exists():
                return None
            return parse(json.loads(read_small(path, MOST), parse_constant=_no_number))

    def write(self, name: str, found: Any) -> None:
        """A stage's plain values, in the place of those it had."""
        if self.folder is not None:
            self._write(self.folder / f"{name}.json", json.dumps(found, indent=1).encode())

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_whole(path, content)
        except OSError as why:
            raise self._unusable(why) from why

    def _unusable(self, why: OSError) -> AerogelError:
        return AerogelError(f"'{self.folder}' cannot be used for state: {why.strerror or why}")


@contextmanager
def _parsed(path: Path) -> Iterator[None]:
    """Around all that is made of a file's content."""
    try:
        yield
    except Exception as why:
        gone = "its folder" if path.stem == "question" else "it"
        raise InvalidFile(f"'{path}' is damaged; remove {gone}, and slim() makes it again") from why


def _no_number(said: str) -> float:
    raise ValueError(said)


def finite(said: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite number between two others."""
    if isinstance(said, bool) or not isinstance(said, int | float) or not math.isfinite(said):
        raise ValueError(f"{said!r:.60} is no number")
    if not low <= said <= high:
        raise ValueError(f"{said} is not between {low} and {high}")
    return float(said)


def points(said: Mapping[str, Any], layers: Collection[str], patterns: Collection[str]) -> dict[str, Point]:
    """A recipe for some of these layers."""
    found = {layer: (pattern, finite(share, 0, 1)) for layer, (pattern, share) in said.items()}
    if not {pattern for pattern, _ in found.values()} <= {*patterns} or not {*found} <= {*layers}:
        raise ValueError("a recipe for other layers")
    return found


def _weights(path: Path, like: Mapping[str, Any]) -> dict[str, Tensor]:
    found = load_file(path)
    if _sizes(found) != _sizes(like):
        raise ValueError("the weights of another model")
    return found


def _sizes(state: Mapping[str, Any]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in state.items() if isinstance(value, Tensor)}


def digest(model: nn.Module, calls: Sequence[Call]) -> dict[str, Any]:
    """Model and inputs by what they hold, and some of what the model answers to its first call: two networks
    may have the same weights."""
    weights, inputs = hashlib.sha256(_words(model)), hashlib.sha256()
    for name, value in model.state_dict().items():
        weights.update(f" {name} ".encode() + _held(value))
    for call in calls:
        leaves, form = pytree.tree_flatten(call)
        inputs.update(_words(form) + b"".join(map(_held, leaves)))
    with inference(model), torch.random.fork_rng([]):
        seed(calls[0])
        answer = [value for one in answers(model, calls[:1]) for value in one]
    return {
        "model": weights.hexdigest(),
        "inputs": inputs.hexdigest(),
        "network": [number for value in answer for number in _some(value)],
    }


def _words(value: Any) -> bytes:
    """How Python shows it, without the places in memory that it shows."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value)).encode()


def _held(value: Any) -> bytes:
    """A tensor's sizes, type and bytes; what is none as it is shown."""
    if not isinstance(value, Tensor):
        return _words(value)
    plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tuple(value.shape)} {value.dtype} ".encode() + bytes(plain.numpy().data)


def _some(value: Tensor) -> list[float]:
    """A few numbers of a tensor, evenly spread, as shares of the largest."""
    flat = torch.nan_to_num(value.detach().cpu().double().flatten())
    if not len(flat):
        return []
    picked = flat[torch.linspace(0, len(flat) - 1, ANSWERS).long()]
    return [float(number) for number in picked / flat.abs().max().clamp_min(1e-30)]


def _same(name: str, known: Any, now: Any) -> bool:
    """Answers may differ as they do with another number of threads; whatever else is equal."""
    if name != "network":
        return bool(known == json.loads(json.dumps(now)))
    near = partial(math.isclose, rel_tol=0, abs_tol=ROUNDING)
    return isinstance(known, list) and len(known) == len(now) and all(map(near, known, now))
