"""A fleet's tuning store on a real S3 API (moto's server): shared, patient for 3 seconds, hard to fool.

No verdict depends on how fast this machine is: the server that answers is waited for as long as it takes, and
patience is measured by a clock of the test's own.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import aerogel
from aerogel.backends.cpu.backend import Cpu
from aerogel.cli.main import app
from aerogel.ir import Choice, Config, Timing, Tried, host
from aerogel.tune import agreed, fleet
from aerogel.tune import store as store_
from aerogel.tune.agreed import Known
from aerogel.tune.store import Store, mask_digest
from tests.small_models import sparse
from tests.test_store import CONV, _choice, _no_timing, _weight

pytest.importorskip("moto")
pytest.importorskip("s3fs")
pytestmark = pytest.mark.loopback


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


SERVER = """
import signal
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.kill()


def reach(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """As a user's environment says it."""
    for name, value in {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(fleet, "_known", {})
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a server that does answer, however busy the machine is."""
    monkeypatch.setattr(fleet, "PATIENCE", 600.0)
    monkeypatch.setattr(fleet, "_S3", {**fleet._S3, "connect_timeout": 300, "read_timeout": 300})


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    reach(monkeypatch, endpoint)
    be_patient(monkeypatch)
    url = f"s3://bucket{random.randrange(10**9)}/tuning"
    fs, path = fleet.filesystem(url)
    fs.mkdir(path.partition("/")[0])
    return url


def machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of its own stands for another machine, in another process."""
    monkeypatch.setenv("AEROGEL_CACHE", str(folder))
    monkeypatch.setattr(store_, "cache_folder", lambda: folder)
    monkeypatch.setattr(fleet, "_known", {})


def test_a_second_machine_tunes_nothing(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 16, 1)]
    model = sparse(torch.nn.Sequential(*layers).eval())
    x = torch.randn(1, 16, 24, 24)
    machine(tmp_path / "one", monkeypatch)
    first = aerogel.compile(model, x, store=bucket)
    machine(tmp_path / "two", monkeypatch)
    _no_timing(monkeypatch)
    second = aerogel.compile(model, x, store=bucket)
    assert "from the store" in str(aerogel.explain(second))
    assert second.plan == first.plan
    assert torch.equal(first(x), second(x))


def test_twelve_writers_of_one_layer(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stores = _weight(), []
    for i in range(12):
        machine(tmp_path / str(i), monkeypatch)
        stores.append(Store(bucket, Cpu(host())))

    def write(i: int) -> None:
        with stores[i].shared():
            stores[i].put_layer(weight, _timed(_choice(weight), 100.0 + i), "fast")

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(write, range(12)))
    names = fleet.listed(bucket, stores[0].folder.name)
    assert len(names) == 12
    machine(tmp_path / "reader", monkeypatch)
    store = Store(bucket, Cpu(host()))
    with store.shared():
        found = store.layer(CONV, weight, "fast")
    assert found is not None
    assert len(list(store.folder.rglob("*.json"))) == 12, "none torn"
    assert found.tried[0].timing.p25_us in (105.0, 106.0), "the median"


def _timed(choice: Choice, us: float, config: Config | None = None) -> Choice:
    own = choice.config if config is None else config
    return replace(choice, config=own, tried=(Tried(own, Timing(us, us, us, 9)),))


def test_one_record_of_three_decides_nothing() -> None:
    """Whether noisy, or forged; and whatever order they are listed in."""
    base, rng = _choice(_weight()), random.Random(0)
    fast, slow = (Config.make("direct", vectors=v) for v in (3, 1))

    def record(fast_us: float, slow_us: float) -> Choice:
        times = sorted([(fast_us, fast), (slow_us, slow)], key=lambda t: t[0])
        tried = tuple(Tried(c, Timing(us, us, us, 9)) for us, c in times)
        return replace(base, config=tried[0].config, tried=tried)

    honest = [record(50, 80), record(52, 85)]
    forged = [record(9000, 0.001), _timed(base, 0.001, Config.make("direct", vectors=2)), record(500, 400)]
    for third in (record(51, 82), *forged):
        for _ in range(6):
            records = [*honest, third]
            rng.shuffle(records)
            found = agreed.layer(records)
            assert found is not None
            assert found.config == fast
            assert found.tried[0].timing.p25_us in (50, 51, 52)
    plan = aerogel.compile(torch.nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8), tune="off").plan
    how = aerogel.compile(torch.nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8), tune="off").how

    def whole(config: Config, us: float) -> Known:
        own = replace(plan, choices=(replace(plan.choices[0], config=config),))
        return Known(replace(own, model=Timing(us, us, us, 9)), how, (), "2026-11-17")

    for other in (whole(slow, 0.001), whole(slow, 51.0), whole(slow, 9000.0)):
        for _ in range(6):
            known = [whole(fast, 50.0), whole(fast, 52.0), other]
            rng.shuffle(known)
            chosen = agreed.model(known)
            assert chosen is not None
            assert chosen.plan.choices[0].config == fast
    assert agreed.layer([]) is None
    assert agreed.model([]) is None


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port at which nobody answers: connections are refused, or hang once it listens."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        yield own


class PatientClock:
    """Stands for the modules `time` and `threading`: a thread either ends, or its whole time passes."""

    def __init__(self, hangs: bool) -> None:
        clock, self.now, self.threads = self, 0.0, list[threading.Thread]()

        class Thread(threading.Thread):
            def join(self, timeout: float | None = None) -> None:
                clock.threads.append(self)
                if hangs:
                    clock.now += timeout or 0.0
                else:
                    super().join()

        self.time = SimpleNamespace(monotonic=lambda: self.now)
        self.threading = SimpleNamespace(Thread=Thread)

    def finish(self, server: socket.socket) -> None:
        """Hang up, and wait for those that were left: what they leave open is no other test's fault."""
        server.close()
        for thread in self.threads:
            threading.Thread.join(thread)


@pytest.mark.parametrize("kind", ["dead", "hung", "garbage"])
def test_a_store_that_fails_costs_three_seconds(
    kind: str,
    endpoint: str,
    taken: socket.socket,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At most, by the clock that a compile waits by: nothing if it refuses, all of them if it hangs."""
    reach(monkeypatch, endpoint if kind == "garbage" else f"http://127.0.0.1:{taken.getsockname()[1]}")
    if kind == "hung":
        taken.listen(64)
    else:
        monkeypatch.setattr(fleet, "_S3", {**fleet._S3, "connect_timeout": 300, "read_timeout": 300})
    clock = PatientClock(kind == "hung")
    request.addfinalizer(lambda: clock.finish(taken))
    monkeypatch.setattr(fleet, "time", clock.time)
    monkeypatch.setattr(fleet, "threading", clock.threading)
    url = f"s3://garbage{random.randrange(10**9)}/tuning"
    machine(tmp_path, monkeypatch)
    weight = _weight()
    if kind == "garbage":
        fs, path = fleet.filesystem(url)
        fs.mkdir(path.partition("/")[0])
        own = Store(url, Cpu(host()))
        place, _ = own._layer(CONV, mask_digest(weight), "fast")
        near = f"{path}/{own.folder.name}/{place.relative_to(own.folder).as_posix()}"
        for i, content in enumerate(
            (b"", b"{", b"\0" * 100, json.dumps({"format": "x"}).encode(), b"[" * 9000)
        ):
            fs.pipe_file(f"{near}/{i:032x}.json", content)
        fs.pipe_file(f"{path}/{own.folder.name}/../../outside.json", b"{}")
        fs.pipe_file(f"{near}/evil.py", b"raise SystemExit")
    for _ in range(2):
        store = Store(url, Cpu(host()))
        with store.shared():
            assert store.layer(CONV, weight, "fast") is None
            store.put_layer(weight, _choice(weight), "fast")
            assert store.layer(CONV, weight, "fast") == _choice(weight)
        for record in store.folder.rglob("*.json"):
            record.unlink()
    assert clock.now == (fleet.PATIENCE if kind == "hung" else 0.0)
    said = [r for r in caplog.records if "left alone from now on" in r.message]
    assert len(said) == (kind != "garbage"), "one sentence"
    assert not list(tmp_path.rglob("*.py"))
    assert not (tmp_path.parent / "outside.json").exists()


def test_many_records_are_listed_once(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path / "a", monkeypatch)
    store, weight = Store(bucket, Cpu(host())), _weight()
    fs, path = fleet.filesystem(bucket)
    store.put_layer(weight, _choice(weight), "fast")
    (own,) = store.folder.rglob("*.json")
    content, place = own.read_bytes(), own.relative_to(store.folder.parent).parent.as_posix()
    for first in range(0, 400, 200):
        fs.pipe({f"{path}/{place}/{i:032x}.json": content for i in range(first, first + 200)})
    machine(tmp_path / "b", monkeypatch)
    calls: list[str] = []
    find = type(fs).find
    monkeypatch.setattr(type(fs), "find", lambda self, *a, **k: calls.append(a[0]) or find(self, *a, **k))  # type: ignore[func-returns-value]
    monkeypatch.setattr(fleet, "_known", {})
    for _ in range(3):
        other = Store(bucket, Cpu(host()))
        with other.shared():
            assert other.layer(CONV, weight, "fast") is not None
    assert len(calls) == 1
    assert len(list(other.folder.rglob("*.json"))) == 400
    chunks = list(fleet._chunks(dict.fromkeys(map(str, range(1000)), fleet.LARGEST)))
    assert all(len(chunk) * fleet.LARGEST <= fleet.CHUNK for chunk in chunks), "bounded memory"
    assert sum(map(len, chunks)) * fleet.LARGEST <= fleet.ALL, "and disk"


def test_the_verbs(
    bucket: str, taken: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CliRunner().invoke
    machine(tmp_path / "a", monkeypatch)
    assert "no records" in run(app, ["store", "ls"]).stdout
    Store(None, Cpu(host())).put_layer(_weight(), _choice(_weight()), "fast")
    assert "1 layers, 0 models" in run(app, ["store", "ls"]).stdout
    assert run(app, ["store", "push", bucket]).stdout == "1 records sent\n"
    assert run(app, ["store", "push", bucket]).stdout == "0 records sent\n"
    machine(tmp_path / "b", monkeypatch)
    assert json.loads(run(app, ["store", "pull", bucket, "--json"]).stdout) == {"records": 1}
    (row,) = json.loads(run(app, ["store", "ls", "--json"]).stdout)
    assert row["current"]
    assert row["target"] == str(host())
    assert run(app, ["store", "prune"]).stdout == "0 records removed\n"
    (world,) = (tmp_path / "b" / "tuning").iterdir()
    (record,) = world.rglob("*.json")
    raw = json.loads(record.read_text())
    raw["body"]["key"]["torch"] = "1.0"
    record.write_text(json.dumps(raw))
    assert "of another version" in run(app, ["store", "ls"]).stdout
    foreign = [tmp_path / "b" / "tuning" / "photos" / "a.json", record.parent / "notes.json", world / "b.txt"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    assert run(app, ["store", "prune"]).stdout == "1 records removed\n"
    assert not record.exists()
    assert all(path.read_text() == "mine" for path in foreign), "what is no record stays"
    assert run(app, ["store", "push", bucket]).stdout == "0 records sent\n"
    reach(monkeypatch, f"http://127.0.0.1:{taken.getsockname()[1]}")
    dead = run(app, ["store", "pull", bucket])
    assert dead.exit_code == 1
    assert "the store" in dead.output
