"""Tuning records on disk, the only persistence: what was measured once on this machine is not measured again.

    tuning/WORLD/layers/CONV/MASK/NAME.json   the candidates of one layer, timed
    tuning/WORLD/models/KEY/NAME.json         the choices of a whole model, with its timing

Each measurement has a name of its own, a digest of what it says. Where there are several of one thing, as
in a fleet's store (fleet.py), what most of them say is taken (agreed.py).

A record is immutable and names its world: machine, threads, torch, the code that times depend on. Another
world has another folder, and a record whose key is not the one asked for is a miss. A record is never code:
its configurations must be among those a method offers. A torn, poisoned or foreign file costs at most time.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from aerogel.backends import Backend
from aerogel.backends.watch import without
from aerogel.disk import cache_folder, not_kept, private_folder, read_small, write_whole
from aerogel.errors import AerogelError, printable
from aerogel.ir import GRAPH, Array, Choice, Config, Conv, Dtypes, Plan, Stats, Way
from aerogel.methods import METHODS
from aerogel.outputs import check_folder
from aerogel.tune import agreed
from aerogel.tune.agreed import Known
from aerogel.tune.fleet import Fleet

log = logging.getLogger("aerogel")
FORMAT = "aerogel-record-1"
LARGEST = 16 << 20
"""Bytes of a record worth reading."""
MOST = 64
"""Measurements of one thing that are looked at."""
NEAR = 0.25
"""Densities that differ by less than this share are alike enough to order candidates."""


TIMED = ("codegen", "formats", "methods", "backends")
"""The rooms whose code times depend on."""


@cache
def timed_digest() -> str:
    """A digest of the code that times depend on: a change to it makes every record a stranger."""
    state = hashlib.sha256()
    root = Path(__file__).parent.parent
    for source in sorted(path for room in TIMED for path in (root / room).rglob("*") if path.is_file()):
        if source.suffix != ".pyc":
            state.update(str(source.relative_to(root)).encode() + source.read_bytes())
    return state.hexdigest()


def mask_digest(weight: Array) -> str:
    """A digest of where the zeros are: a fine-tuned layer with the same mask is the same layer."""
    return hashlib.sha256(
        str(weight.shape).encode() + np.packbits(weight.reshape(-1) != 0).tobytes()
    ).hexdigest()


def offered(choice: Choice, stats: Stats, backend: Backend, target: object) -> bool:
    """Whether every configuration of a choice is one its method offers for this layer on `target`."""
    return _offered({choice.config, *choice.configs()}, choice.conv, stats, backend, target)


def _offered(named: set[Config], conv: Conv, stats: Stats, backend: Backend, target: object) -> bool:
    for name in {c.method for c in named}:
        if name not in METHODS or backend.form(name).refuse(conv, target, stats) is not None:
            return False
        missing = {c for c in named if c.method == name}
        others = iter(backend.form(name).configs(conv, target, stats))
        while missing and (config := next(others, None)) is not None:
            missing.discard(config)
        if missing:
            return False
    return True


def not_offered(
    choices: Sequence[Choice], known: Sequence[Stats], backend: Backend, target: object
) -> Choice | None:
    """The first choice that would run a configuration which its method does not offer for its layer; layers
    alike are looked at once."""
    alike = set[str]()
    for choice, own in zip(choices, known, strict=True):
        stats = replace(own, idle=choice.idle)
        runs = {choice.config, *without({choice.node: choice}).values()}
        named = f"{choice.conv} {sorted(map(str, runs))} {stats}"
        if named not in alike and not _offered(runs, choice.conv, stats, backend, target):
            return choice
        alike.add(named)
    return None


class Store:
    """Records of one world in a folder."""

    def __init__(self, folder: str | Path | None, backend: Backend) -> None:
        """An address (`s3://bucket/path`) is a fleet's store: its records are copied to the user's own folder
        once, and new ones sent there (`shared`)."""
        self.fleet = Fleet.of(folder) if isinstance(folder, str) and "://" in folder else None
        self.backend = backend
        self._world = {"target": str(backend.target), "torch": version("torch"), "aerogel": timed_digest()}
        name = hashlib.sha256(json.dumps(self._world, sort_keys=True).encode()).hexdigest()[:16]
        own = folder is None or self.fleet is not None
        if not own:
            check_folder(str(folder), "store", writable=False)
        self.folder = (cache_folder() / "tuning" if own else Path(str(folder))) / name
        self._new: list[Path] = []

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within it: first what others of the fleet have measured is copied here, at the end what was
        measured here is sent there."""
        if self.fleet is not None:
            self.fleet.fetch(self.folder)
        try:
            yield
        finally:
            if self.fleet is not None and self._new:
                self.fleet.send(self.folder, self._new)
                self._new = []

    def layer(self, conv: Conv, weight: Array, effort: str) -> Choice | None:
        """The layer's timed candidates, if this very mask was measured here."""
        folder, key = self._layer(conv, mask_digest(weight), effort)
        stats, good = Stats.of(weight), list[Choice]()
        for found in self._all(folder, key):
            choice = found.plan.choices[0] if len(found.plan.choices) == 1 else None
            if choice is not None and choice.conv == conv:
                own = replace(stats, idle=choice.idle)
                good += [choice] if offered(choice, own, self.backend, self.backend.target) else []
        return agreed.layer(good)

    def near(self, conv: Conv, weight: Array, effort: str) -> tuple[Config, ...]:
        """Configurations of the same problem at the nearest density, fastest first: an order for candidates,
        no more."""
        stats = Stats.of(weight)
        density = 1 - stats.sparsity
        best: tuple[float, tuple[Config, ...]] = (NEAR, ())
        folder, key = self._layer(conv, "", effort)
        try:
            others = sorted(folder.iterdir())[:MOST]
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except OSError as why:
            not_kept("a tuning record", why)
            return ()
        for other in others:
            for found in self._all(other, {**key, "mask": other.name})[:1]:
                choice = found.plan.choices[0]
                apart = abs(1 - choice.sparsity - density) / max(density, 1e-9)
                if (
                    choice.conv == conv
                    and apart < best[0]
                    and offered(choice, replace(stats, idle=choice.idle), self.backend, self.backend.target)
                ):
                    best = (apart, choice.configs())
        return best[1]

    def put_layer(self, weight: Array, choice: Choice, effort: str) -> None:
        path, key = self._layer(choice.conv, mask_digest(weight), effort)
        self._write(path, key, Plan(self.backend.target, (choice,)), GRAPH, ())

    def model(
        self, key: str, layers: Sequence[tuple[str, Conv, Array]], ways: Collection[Way]
    ) -> Known | None:
        """The whole model's choices. `layers` are the graph's convolutions in order, by name and with their
        weights; `ways` the ways in which torch could run the model."""
        records = self._all(self.folder / "models" / key, {**self._world, "model": key})
        records = [found for found in records if found.how in (GRAPH, *ways)]
        stats = [Stats.of(weight) for *_, weight in layers] if records else []
        named = [(name, conv) for name, conv, _ in layers]
        good = []
        for found in records:
            choices = found.plan.choices
            if named == [(c.node, replace(c.conv.layer(), dtypes=Dtypes())) for c in choices]:
                wrong = not_offered(choices, stats, self.backend, self.backend.target)
                good += [found] if wrong is None else []
        return agreed.model(good)

    def put_model(self, key: str, plan: Plan, how: Way, notes: tuple[str, ...]) -> None:
        self._write(self.folder / "models" / key, {**self._world, "model": key}, plan, how, notes)

    def _layer(self, conv: Conv, mask: str, effort: str) -> tuple[Path, dict[str, str]]:
        problem = hashlib.sha256(f"{conv} {effort}".encode()).hexdigest()[:32]
        key = {**self._world, "conv": str(conv), "effort": effort, "mask": mask}
        return self.folder / "layers" / problem / mask, key

    def _all(self, folder: Path, key: dict[str, str]) -> list[Known]:
        """Every measurement of one thing, in the order of their names."""
        try:
            names = sorted(p for p in folder.iterdir() if p.suffix == ".json")[:MOST]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as why:
            not_kept("a tuning record", why)
            return []
        found = (self._read(path, key) for path in names)
        return [known for known in found if known is not None and known.plan.choices]

    def _read(self, path: Path, key: dict[str, str]) -> Known | None:
        try:
            raw: dict[str, Any] = json.loads(read_small(path, LARGEST))
            body = json.dumps(raw["body"], sort_keys=True)
            if raw["format"] != FORMAT or raw["digest"] != hashlib.sha256(body.encode()).hexdigest():
                raise ValueError("damaged")
            if raw["body"]["key"] != key:
                raise ValueError("made for something else")
            own = raw["body"]
            plan = Plan.from_json(json.dumps(own["plan"]))
            if str(plan.target) != str(self.backend.target):
                raise ValueError("made for another machine")
            if not (isinstance(own["how"], str) and isinstance(own["notes"], list)):
                raise ValueError("its texts are none")
            measured = date.fromisoformat(own["measured"]).isoformat()
            return Known(plan, Way.parse(own["how"]), tuple(map(printable, own["notes"])), measured)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as why:
            not_kept("a tuning record", why)
            return None
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            OverflowError,
            AerogelError,
        ) as why:
            log.warning("ignoring a tuning record: %s: %s", printable(path.name), printable(why)[:200])
            return None

    def _write(self, folder: Path, key: dict[str, str], plan: Plan, how: Way, notes: tuple[str, ...]) -> None:
        body = {
            "key": key,
            "how": str(how),
            "notes": list(notes),
            "measured": date.today().isoformat(),
            "plan": json.loads(plan.to_json()),
        }
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        path = folder / f"{digest[:32]}.json"
        try:
            private_folder(folder)
            write_whole(path, json.dumps({"format": FORMAT, "digest": digest, "body": body}).encode())
            if self.fleet is not None:
                self._new.append(path)
        except OSError as why:
            not_kept("a tuning record", why)


def model_key(graph: str, weights: Sequence[Array], shapes: object, asked: object) -> str:
    """What a model's choices depend on: its graph, its zeros, the sizes it was given and what was asked
    for."""
    masks = [mask_digest(w) for w in weights]
    return hashlib.sha256(json.dumps([graph, masks, str(shapes), str(asked)]).encode()).hexdigest()
