"""Tuning records on disk, the only persistence: what was measured once on this machine is not measured again.

    tuning/WORLD/layers/CONV/MASK.json      the candidates of one layer, timed
    tuning/WORLD/models/KEY.json            the choices of a whole model, with its timing

A record is immutable and names its world: machine, threads, torch, aerogel's own code. Another world has another folder, and a
record whose key is not the one asked for is a miss. A record is never code: its configurations must be among those a method
offers. A torn, poisoned or foreign file costs at most time.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from aerogel.candidate import Config, Stats
from aerogel.disk import cache_folder, not_kept, write_whole
from aerogel.errors import AerogelError
from aerogel.layout import Array
from aerogel.methods import METHODS, method
from aerogel.plan import Choice, Plan
from aerogel.problem import Conv
from aerogel.target import Target

log = logging.getLogger("aerogel")
FORMAT = "aerogel-record-1"
LARGEST = 16 << 20
"""Bytes of a record worth reading."""
NEAR = 0.25
"""Densities that differ by less than this share are alike enough to order candidates."""


@cache
def package_digest() -> str:
    """A digest of aerogel's own source: any change to it makes every record a stranger."""
    state = hashlib.sha256()
    root = Path(__file__).parent.parent
    for source in sorted(root.rglob("*.py")):
        state.update(str(source.relative_to(root)).encode() + source.read_bytes())
    return state.hexdigest()


def mask_digest(weight: Array) -> str:
    """A digest of where the zeros are: a fine-tuned layer with the same mask is the same layer."""
    return hashlib.sha256(str(weight.shape).encode() + np.packbits(weight.reshape(-1) != 0).tobytes()).hexdigest()


def offered(choice: Choice, stats: Stats, target: Target) -> bool:
    """Whether every configuration of a choice is one its method offers for this layer."""
    named = {choice.config, *(c for c, _ in choice.tried)}
    for name in {c.method for c in named}:
        if name not in METHODS or method(name).refuse(choice.conv, target, stats) is not None:
            return False
        missing, others = {c for c in named if c.method == name}, iter(method(name).configs(choice.conv, target, stats))
        while missing and (config := next(others, None)) is not None:
            missing.discard(config)
        if missing:
            return False
    return True


def not_offered(choices: Sequence[Choice], weights: Sequence[Array], target: Target) -> Choice | None:
    """The first choice with a configuration that its method does not offer for its layer; layers alike are looked at once."""
    alike = set[str]()
    for choice, weight in zip(choices, weights, strict=True):
        stats = Stats.of(weight, choice.idle)
        named = f"{choice.conv} {choice.config} {[str(c) for c, _ in choice.tried]} {stats}"
        if named not in alike and not offered(choice, stats, target):
            return choice
        alike.add(named)
    return None


@dataclass(frozen=True)
class Known:
    """A whole model's record: its plan, who runs it ("graph" or a torch layout), what was said, and when."""

    plan: Plan
    how: str
    notes: tuple[str, ...]
    measured: str


class Store:
    """Records of one world in a folder."""

    def __init__(self, folder: str | Path | None, target: Target) -> None:
        if isinstance(folder, str) and "://" in folder:
            raise AerogelError(f"a store is a folder on this machine; '{folder}' is an address, and those are not read yet")
        self.target = target
        self._world = {"target": str(target), "torch": version("torch"), "aerogel": package_digest()}
        name = hashlib.sha256(json.dumps(self._world, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = (cache_folder() / "tuning" if folder is None else Path(folder)) / name

    def layer(self, conv: Conv, weight: Array, effort: str) -> Choice | None:
        """The layer's timed candidates, if this very mask was measured here."""
        path, key = self._layer(conv, mask_digest(weight), effort)
        found = self._read(path, key)
        if found is None or len(found.plan.choices) != 1:
            return None
        (choice,) = found.plan.choices
        return choice if choice.conv == conv and offered(choice, Stats.of(weight, choice.idle), self.target) else None

    def near(self, conv: Conv, weight: Array, effort: str) -> tuple[Config, ...]:
        """Configurations of the same problem at the nearest density, fastest first: an order for candidates, no more."""
        stats = Stats.of(weight)
        density, best = 1 - stats.sparsity, (NEAR, ())
        path, key = self._layer(conv, "", effort)
        for other in sorted(path.parent.glob("*.json"))[:64]:
            found = self._read(other, {**key, "mask": other.stem})
            if found is not None and len(found.plan.choices) == 1:
                (choice,) = found.plan.choices
                apart = abs(1 - choice.sparsity - density) / max(density, 1e-9)
                if choice.conv == conv and apart < best[0] and offered(choice, replace(stats, idle=choice.idle), self.target):
                    best = (apart, tuple(c for c, _ in choice.tried))  # type: ignore[assignment]
        return best[1]

    def put_layer(self, weight: Array, choice: Choice, effort: str) -> None:
        path, key = self._layer(choice.conv, mask_digest(weight), effort)
        self._write(path, key, Plan(self.target, (choice,)), "graph", ())

    def model(self, key: str, weights: Sequence[Array]) -> Known | None:
        """The whole model's choices; `weights` are those of the layers, in the order of the choices."""
        found = self._read(self.folder / "models" / f"{key}.json", {**self._world, "model": key})
        forms = ("graph", "contiguous", "channels_last")
        if found is None or len(found.plan.choices) != len(weights) or found.how.partition(" ")[0] not in forms:
            return None
        return found if not_offered(found.plan.choices, weights, self.target) is None else None

    def put_model(self, key: str, plan: Plan, how: str, notes: tuple[str, ...]) -> None:
        self._write(self.folder / "models" / f"{key}.json", {**self._world, "model": key}, plan, how, notes)

    def _layer(self, conv: Conv, mask: str, effort: str) -> tuple[Path, dict[str, str]]:
        problem = hashlib.sha256(f"{conv} {effort}".encode()).hexdigest()[:32]
        key = {**self._world, "conv": str(conv), "effort": effort, "mask": mask}
        return self.folder / "layers" / problem / f"{mask}.json", key

    def _read(self, path: Path, key: dict[str, str]) -> Known | None:
        try:
            if path.stat().st_size > LARGEST:
                raise ValueError("too large")
            raw: dict[str, Any] = json.loads(path.read_bytes())
            body = json.dumps(raw["body"], sort_keys=True)
            if raw["format"] != FORMAT or raw["digest"] != hashlib.sha256(body.encode()).hexdigest():
                raise ValueError("damaged")
            if raw["body"]["key"] != key:
                raise ValueError("made for something else")
            own = raw["body"]
            plan = Plan.from_json(json.dumps(own["plan"]))
            if plan.target != self.target:
                raise ValueError("made for another machine")
            return Known(plan, str(own["how"]), tuple(str(n) for n in own["notes"]), str(own["measured"]))
        except OSError:  # not there, or not to be read: what is written afterwards says why
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, AerogelError) as why:
            log.warning("ignoring a tuning record: %s: %s", path.name, why)
            return None

    def _write(self, path: Path, key: dict[str, str], plan: Plan, how: str, notes: tuple[str, ...]) -> None:
        body = {
            "key": key, "how": how, "notes": list(notes), "measured": date.today().isoformat(), "plan": json.loads(plan.to_json()),
        }  # fmt: skip
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        try:
            write_whole(path, json.dumps({"format": FORMAT, "digest": digest, "body": body}).encode())
        except OSError as why:
            not_kept("a tuning record", why)


def model_key(graph: str, weights: Sequence[Array], shapes: object, asked: object) -> str:
    """What a model's choices depend on: its graph, its zeros, the sizes it was given and what was asked for."""
    masks = [mask_digest(w) for w in weights]
    return hashlib.sha256(json.dumps([graph, masks, str(shapes), str(asked)]).encode()).hexdigest()
