"""Files made to do harm: every one is a typed error or a valid result, in bounded time and memory, and never
a crash."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save as safetensors
from torch import nn

import aerogel
from aerogel.errors import AerogelError, InvalidFile
from aerogel.saved import container
from tests import counts
from tests.small_models import sparse

PIECES = 4
SHARES = {"mutants": 0.8, "righted": 0.196, "loaded": 0.004}
"""Of the count: changed anywhere, changed with the digest made right, and of these whole models that are
called."""


@cache
def sample() -> bytes:
    """A small file with one array of each form."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((4, 3, 3, 3)).astype(np.float32) * (rng.random((4, 3, 3, 3)) < 0.2)
    arrays = {
        "weight": ("float32", weight),
        "bias": ("float32", rng.random(4).astype(np.float32)),
        "flag": ("bool", np.array([True, False])),
        "half": ("bfloat16", np.arange(5, dtype=np.uint16)),
    }
    return container.to_bytes({"model": json.dumps({"format": "x"}), "plan0": "{}"}, arrays)


Ran = Callable[[str, int], None]


def many(what: str, ran: Ran) -> range:
    """One piece's share of the mutants."""
    own = counts.count("file mutants", SHARES[what] / PIECES)
    ran("file mutants", own)
    return range(own)


def drawn(what: str, piece: int) -> np.random.Generator:
    return np.random.default_rng([counts.seed(), list(SHARES).index(what), piece])


def judge(content: bytes) -> bool:
    """Whether it was let in; anything but an InvalidFile comes through."""
    try:
        texts, arrays = container.from_bytes(content)
    except InvalidFile:
        return False
    assert all(isinstance(t, str) for t in texts.values())
    assert all(isinstance(a, np.ndarray) for _, a in arrays.values())
    return True


def test_every_flip_and_every_cut() -> None:
    content = sample()
    assert judge(content)
    let_in = 0
    for i in range(len(content) * 8):
        changed = bytearray(content)
        changed[i // 8] ^= 1 << i % 8
        let_in += judge(bytes(changed))
    assert let_in < len(content) / 4, "only the header's spaces and the order of its names may change"
    assert not any(judge(content[:i]) for i in range(len(content)))
    assert not judge(content + b"\0")


@pytest.mark.parametrize("piece", range(PIECES))
def test_random_mutants(piece: int, ran: Ran) -> None:
    rng, content = drawn("mutants", piece), np.frombuffer(sample(), np.uint8)
    for _ in many("mutants", ran):
        changed, bytes_ = content.copy(), int(rng.integers(1, 9))
        at = rng.integers(0, len(changed), bytes_)
        changed[at] = rng.integers(0, 256, bytes_)
        if rng.random() < 0.3:
            low, high = sorted(rng.integers(0, len(changed), 2))
            less, more = (
                np.concatenate([changed[:low], changed[high:]]),
                np.insert(changed, low, changed[low:high]),
            )
            changed = less if rng.random() < 0.5 else more
        judge(changed.tobytes())


def _righted(metadata: dict[str, str], tensors: dict[str, Any]) -> bytes:
    """A file whose digest is that of its content."""
    digest = container._digest(metadata, {n: t.tobytes() for n, t in tensors.items()})
    return safetensors(tensors, {**metadata, "digest": digest})


def _mutated(rng: np.random.Generator, text: str) -> str:
    """Another number, a name twice or not at all, a bracket less."""
    match int(rng.integers(6)):
        case 0:
            numbers = list(re.finditer(r"-?\d+", text))
            if numbers:
                m = numbers[int(rng.integers(len(numbers)))]
                wild = [0, 1, -1, 2, 3, 7, 255, 2**15, 2**31, 2**63, -(2**31), 10**30, 1e308]
                return text[: m.start()] + str(wild[int(rng.integers(len(wild)))]) + text[m.end() :]
        case 1:
            names = list(re.finditer(r'"[^"]*"', text))
            if len(names) > 1:
                a, b = (names[int(i)] for i in rng.integers(0, len(names), 2))
                return text[: a.start()] + b[0] + text[a.end() :]
        case 2:
            i = int(rng.integers(len(text)))
            return text[:i] + text[i + 1 + int(rng.integers(8)) :]
        case 3:
            i = int(rng.integers(len(text)))
            return text[:i] + str(rng.choice(["null", "[]", "{}", '""', "true", "[[[[", "NaN"])) + text[i:]
        case 4:
            i, j = sorted(int(v) for v in rng.integers(0, len(text), 2))
            return text[:j] + text[i:j] + text[j:]
    return text.replace('"float32"', str(rng.choice(['"float16"', '"int64"', '"bool"', '"x"'])), 1)


def test_bits_past_the_last_element_are_refused() -> None:
    """As many bits as nonzeros, but one of them for an element that is not there."""
    array = np.zeros(13, np.float32)
    array[3] = 1
    metadata, parts = container._parts(memoryview(container.to_bytes({}, {"a": ("float32", array)})))
    tensors = {name: np.frombuffer(part, np.uint8).copy() for name, part in parts.items()}
    bits = next(part for name, part in tensors.items() if name.endswith(".bits"))
    assert bits.tolist() == [16, 0]
    bits[:] = [0, 1]
    del metadata["digest"]
    with pytest.raises(InvalidFile, match="past its last element"):
        container.from_bytes(_righted(metadata, tensors))


@pytest.mark.parametrize("piece", range(PIECES))
def test_mutants_with_their_digest_made_right(piece: int, ran: Ran) -> None:
    rng = drawn("righted", piece)
    header = json.loads(sample()[8 : 8 + int.from_bytes(sample()[:8], "little")])
    metadata = {k: v for k, v in header.pop("__metadata__").items() if k != "digest"}
    base = 8 + int.from_bytes(sample()[:8], "little")
    places = {name: slice(*(base + i for i in held["data_offsets"])) for name, held in header.items()}
    tensors = {name: np.frombuffer(sample()[place], np.uint8) for name, place in places.items()}
    assert judge(_righted(metadata, tensors))
    let_in = 0
    for _ in many("righted", ran):
        texts, parts = dict(metadata), dict(tensors)
        name = str(rng.choice(list(texts if rng.random() < 0.7 else parts)))
        if name in texts:
            texts[name] = _mutated(rng, texts[name])
        else:
            part = parts[name].copy()
            part[int(rng.integers(len(part)))] = rng.integers(256)
            parts[name] = part if rng.random() < 0.5 else part[: int(rng.integers(len(part)))]
        let_in += judge(_righted(texts, parts))
    assert let_in > 0, "some changes are another valid file"


@pytest.mark.filterwarnings(
    "ignore:tuned for"
)  # another thread count is another valid file, and calling it warns
@pytest.mark.parametrize("piece", range(PIECES))
def test_whole_models_with_their_digest_made_right(piece: int, tmp_path: Path, ran: Ran) -> None:
    """Loaded, and where that goes, called."""
    model = sparse(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)))
    x = torch.randn(1, 3, 12, 12)
    path = tmp_path / "m.aero"
    aerogel.save(aerogel.compile(model, x, tune="off"), path)
    texts, arrays = container.from_bytes(path.read_bytes())
    rng, loaded, tried = drawn("loaded", piece), 0, many("loaded", ran)
    for _ in tried:
        changed = dict(texts)
        name = str(rng.choice(list(texts)))
        changed[name] = _mutated(rng, changed[name])
        path.write_bytes(container.to_bytes(changed, arrays))
        try:
            fast = aerogel.load(path)
        except AerogelError:
            continue
        loaded += 1
        # torch's own words on another graph
        with suppress(AerogelError, RuntimeError, TypeError, ValueError, IndexError):
            fast(x)
    assert loaded > 0 or len(tried) < 20, "some changes are another valid model"


def test_hostile_onnx_under_limits(tmp_path: Path, ran: Ran) -> None:
    """Sixty files, in a process that may take 8 GB and two minutes."""
    ran("hostile ONNX", 60)
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said) >= 60
    strange = {
        name: kind
        for name, kind in said.items()
        if kind not in ("InvalidFile", "UnsupportedModel", "ShapeError", "valid")
    }
    assert not strange
    assert {name for name, kind in said.items() if kind == "valid"} == {
        "external that is good",
        "a long name",
    }
