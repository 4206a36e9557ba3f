"""Tuning records: what is measured once is not measured again, and no file on disk can do more harm than cost
time."""

from __future__ import annotations

import copy
import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aerogel
from aerogel import disk
from aerogel.backends import using
from aerogel.backends.cpu.backend import Cpu
from aerogel.ir import Choice, Config, Conv, Plan, Stats, Timing, Tried, Weight, host
from aerogel.methods import cpu_form
from aerogel.tune import search, whole
from aerogel.tune.store import Store, mask_digest
from tests.reference_backend import ClockedCpu, by_nonzeros
from tests.small_models import Skip, right, sparse

CONV = Conv.parse("n1c16h9w9k8r3s3u1p1")


def _weight(share: float = 0.9, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(CONV.weight_shape) * (rng.random(CONV.weight_shape) > share)).astype(
        np.float32
    )


def _choice(weight: Any, vectors: int = 2) -> Choice:
    module = cpu_form("direct")
    config = next(c for c in module.configs(CONV, host(), Stats.of(weight)) if c["vectors"] == vectors)
    tried = Tried(config, Timing.of([1.0] * 3, [2.0] * 3))
    return Choice("", "", CONV, config, sparsity=Stats.of(weight).sparsity, tried=(tried,))


def _no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was timed")

    monkeypatch.setattr(search, "interleaved", refuse)
    monkeypatch.setattr(whole, "interleaved", refuse)


def test_a_known_model_is_not_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = sparse(Skip(), 0.95), torch.randn(1, 3, 40, 40)
    first = aerogel.compile(model, x, store=tmp_path)
    tuned = copy.deepcopy(model)  # fine-tuned: other values under the same masks
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(1.5)
    _no_timing(monkeypatch)
    for again in (model, tuned):
        fast = aerogel.compile(again, x, store=str(tmp_path))
        assert fast.plan == first.plan
        assert fast.how == first.how
        assert "from the store" in str(aerogel.explain(fast))
        right(again, fast, x)
    with pytest.raises(AssertionError, match="was timed"):
        aerogel.compile(model, x, store=tmp_path, tune="full")
    with pytest.raises(AssertionError, match="was timed"):
        aerogel.compile(model, torch.randn(1, 3, 41, 40), store=tmp_path)


def test_an_answer_from_the_store_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = sparse(Skip(), 0.95), torch.randn(1, 3, 40, 40)
    with using(ClockedCpu(by_nonzeros)):
        known = aerogel.compile(model, x, store=tmp_path)
        assert str(known.how) == "graph"
        monkeypatch.setattr(whole, "alike", lambda *_: False)
        assert "answers differed" in str(aerogel.explain(aerogel.compile(model, x, store=tmp_path)))


def test_layers_are_found_by_their_zeros(tmp_path: Path) -> None:
    store, weight = Store(tmp_path, Cpu(host())), _weight()
    assert store.layer(CONV, weight, "fast") is None
    store.put_layer(weight, _choice(weight), "fast")
    assert store.layer(CONV, weight, "fast") == _choice(weight)
    assert store.layer(CONV, weight * 3, "fast") == _choice(weight), "the same zeros"
    assert store.layer(CONV, _weight(seed=1), "fast") is None
    assert store.layer(CONV, weight, "full") is None
    assert Store(tmp_path, Cpu(replace(host(), threads=2))).layer(CONV, weight, "fast") is None, (
        "another world"
    )
    assert Store(tmp_path, Cpu(host())).layer(CONV, weight, "fast") is not None


def test_a_record_under_another_name_is_a_miss(tmp_path: Path) -> None:
    store, weight, other = Store(tmp_path, Cpu(host())), _weight(), _weight(seed=1)
    store.put_layer(weight, _choice(weight), "fast")
    (path,) = tmp_path.rglob("*.json")
    path.parent.rename(path.parent.with_name(mask_digest(other)))
    assert store.layer(CONV, other, "fast") is None


def test_a_similar_layer_orders_the_candidates(tmp_path: Path) -> None:
    store, weight, other = Store(tmp_path, Cpu(host())), _weight(0.9), _weight(0.89, 1)
    unusual = _choice(weight, vectors=1).config
    store.put_layer(weight, _choice(weight, vectors=1), "fast")
    assert store.near(CONV, other, "fast") == (unusual,)
    assert store.near(CONV, _weight(0.5, 1), "fast") == (), "five times as dense"
    choice = search.time_layer(
        Cpu(host()),
        CONV,
        Weight(other),
        ("direct", "dense"),
        search.Effort(2, 1),
        store.near(CONV, other, "fast"),
    )
    assert [c for c in choice.configs() if c.method == "direct"] == [unusual], (
        "half as many are tried, the known one first"
    )


def test_a_budget_in_seconds(tmp_path: Path) -> None:
    weight = _weight()
    few = search.time_layer(Cpu(host()), CONV, Weight(weight), ("direct",), search.Effort(200, 2, 1e-9))
    many = search.time_layer(Cpu(host()), CONV, Weight(weight), ("direct",), search.Effort(12, 2, 1e6))
    assert sum(c.method == "direct" for c in few.configs()) == 1
    assert sum(c.method == "direct" for c in many.configs()) == 12
    for tune in ("quick", -1, True, float("nan"), None):
        with pytest.raises(aerogel.AerogelError, match="tune is"):
            search.effort(tune)


def test_damage_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every truncation and every byte changed: the record or nothing."""
    store, weight = Store(tmp_path, Cpu(host())), _weight()
    store.put_layer(weight, _choice(weight), "fast")
    (path,) = tmp_path.rglob("*.json")
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        assert store.layer(CONV, weight, "fast") is None
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ int(rng.integers(1, 256))]) + whole[at + 1 :])
        assert store.layer(CONV, weight, "fast") in (None, _choice(weight))
    assert "ignoring a tuning record" in caplog.text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("vectors=2", "vectors=1000000"),
        ("vectors=2", "vectors=0"),
        ('"direct/', '"dense/'),
        ("channels=", "channels=-"),
        (str(CONV), "n1c16h9w9k8r1s1u1p1"),
        ('"measured": "', '"measured": ["'),
    ],
)
def test_a_forged_record_is_a_miss(tmp_path: Path, old: str, new: str) -> None:
    """Its digest is right; what it asks for is not on offer."""
    import hashlib

    store, weight = Store(tmp_path, Cpu(host())), _weight()
    store.put_layer(weight, _choice(weight), "fast")
    (path,) = tmp_path.rglob("*.json")
    text = json.dumps(json.loads(path.read_text())["body"], sort_keys=True)
    assert old in text
    forged = text.replace(old, new)
    digest = hashlib.sha256(forged.encode()).hexdigest()
    path.write_text(f'{{"format": "aerogel-record-1", "digest": "{digest}", "body": {forged}}}')
    assert store.layer(CONV, weight, "fast") is None


def test_a_plan_asks_for_what_is_on_offer(small: Any) -> None:
    model, fast, x = small
    worst = replace(
        fast.plan.choices[0],
        config=Config.make("direct", vectors=10**9, channels=8, groups=1, ahead=4, aligned=0),
    )
    with pytest.raises(aerogel.PlanMismatch, match="is no configuration"):
        aerogel.compile(model, x, plan=replace(fast.plan, choices=(worst, *fast.plan.choices[1:])))
    old = replace(fast.plan.choices[0], config=Config.make("direct", vectors=2))
    with pytest.raises(aerogel.PlanMismatch, match="Compile again"):
        aerogel.compile(model, x, plan=replace(fast.plan, choices=(old,)))
    with pytest.raises(aerogel.PlanMismatch, match="has not"):
        aerogel.compile(model, x, plan=Plan(fast.plan.target, (replace(old, node="nothing"),)))


def test_a_store_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "_said", set())
    weight = _weight()
    blocked = tmp_path / "file"
    blocked.mkdir()
    store = Store(blocked, Cpu(host()))
    blocked.rmdir()
    blocked.write_text("")  # where the store was
    store.put_layer(weight, _choice(weight), "fast")
    assert "is not kept" in caplog.text
    store = Store(tmp_path / "full", Cpu(host()))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    store.put_layer(weight, _choice(weight), "fast")
    assert store.layer(CONV, weight, "fast") is None
    assert not [f for f in tmp_path.rglob("*") if f.is_file() and f != blocked], (
        "nothing half written is left behind"
    )
    with pytest.raises(aerogel.AerogelError, match="nowhere"):
        Store("nowhere://somewhere", Cpu(host()))
