"""Where slim() keeps what it has done, so that it can be killed at any time and goes on from there.

Each stage is a file that appears whole or not at all. Timings are part of it: a run that is resumed decides
by the same numbers, and ends with the same masks.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aerogel.disk import read_small, write_whole
from aerogel.errors import AerogelError, InvalidFile
from aerogel.pruning.gram import inference
from aerogel.pruning.judge import answers
from aerogel.runtime.eager import Call

MOST = 64 << 20
"""Bytes of a stage that is no weights."""
ANSWERS, ROUNDING = 32, 1e-3
"""Numbers of each answer by which a model is known again, and how far they may be apart."""


class Stages:
    """A folder, or memory where there is none."""

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder)

    def begin(self, question: Mapping[str, Any]) -> None:
        """Raises where the folder holds the answer to another question."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            known = self.read("question")
            if known is None:
                self.write("question", question)
                return
        except OSError as why:
            raise AerogelError(f"'{self.folder}' cannot be used for state: {why.strerror or why}") from why
        other = [name for name in question if not _same(name, known.get(name), question[name])]
        if other:
            raise AerogelError(
                f"'{self.folder}' holds the state of a slim() with another {' and '.join(other)}: say state= "
                "with another folder, or remove this one"
            )

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What was made before, or is made now: plain values."""
        found = self.read(name)
        if found is None:
            found = make()
            self.write(name, found)
            found = json.loads(json.dumps(found))
        return found

    def weights(self, name: str, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The state of a model that was made before, or is made now."""
        path = None if self.folder is None else self.folder / f"{name}.safetensors"
        if path is not None and path.exists():
            try:
                return load_file(path)
            except (SafetensorError, OSError) as why:
                raise InvalidFile(f"'{path}' is damaged; remove it, and slim() makes it again") from why
        made = {key: value.detach().cpu().clone().contiguous() for key, value in make().items()}
        if path is not None:
            write_whole(path, save(made))
        return made

    def read(self, name: str) -> Any:
        """A stage that is done, or None."""
        path = None if self.folder is None else self.folder / f"{name}.json"
        if path is None or not path.exists():
            return None
        try:
            return json.loads(read_small(path, MOST))
        except ValueError as why:
            raise InvalidFile(f"'{path}' is damaged; remove it, and slim() makes it again") from why

    def write(self, name: str, found: Any) -> None:
        """A stage's plain values, in the place of those it had."""
        if self.folder is not None:
            write_whole(self.folder / f"{name}.json", json.dumps(found, indent=1).encode())


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
        torch.manual_seed(0)
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
