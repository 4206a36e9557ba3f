"""aerogel on the engines people run: Ray Data, `aerogel batch`, Ray Serve and Triton's server, the real ones,
with processes killed under them. Sizes in CI are small; `--nightly` has those of the promises."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import aerogel
from tests.counts import BY_NIGHT, by_day, count
from tests.processes import descendants
from tests.rayed import images
from tests.small_models import sparse
from tests.test_fleet_store import bucket as bucket
from tests.test_fleet_store import endpoint as endpoint
from tests.test_fleet_store import free_port

pytest.importorskip("ray")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.loopback
RECIPE = "resize=40 crop=32 mean=0.485,0.456,0.406 std=0.229,0.224,0.225"
REPLICA = "ray::ServeReplica"
BROKEN = {7: "no format", 101: "truncated", 202: "no format"}


class Net(nn.Module):
    """Every layer is one of ours, so that answers are the same bits in any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(x)).mean((2, 3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    fast = aerogel.compile(sparse(Net().eval()), torch.randn(8, 3, 32, 32), tune="off")
    assert all(choice.config.method != "dense" for choice in fast.plan.choices)
    fast.preprocess = RECIPE
    path = tmp_path_factory.mktemp("model") / "net.aero"
    aerogel.save(fast, path)
    yield path
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Cluster:
    """Ray's head on this machine: its process, and where its metrics are."""

    pid: int
    metrics: str


@pytest.fixture(scope="module")
def cluster(endpoint: str) -> Iterator[Cluster]:
    """Ray on this machine, begun once; as Ray counts, it has CPUs for actors and what feeds them."""
    port, metrics, folder = free_port(), free_port(), tempfile.mkdtemp(prefix="ray-")
    ray = Path(sys.executable).with_name("ray")
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "180"}
    own |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    head = f"start --head --block --node-ip-address 127.0.0.1 --port {port} --num-cpus 8 --temp-dir {folder}"
    with pytest.MonkeyPatch.context() as patched, open(f"{folder}/said", "w+") as said:
        for name, value in own.items():
            patched.setenv(name, value)
        words = [str(ray), *head.split(), "--include-dashboard=false", f"--metrics-export-port={metrics}"]
        begun = subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)
        until = time.monotonic() + 200
        while "runtime started" not in Path(said.name).read_text() and time.monotonic() < until:
            assert begun.poll() is None, Path(said.name).read_text()
            time.sleep(0.2)
        patched.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        yield Cluster(begun.pid, f"http://127.0.0.1:{metrics}/metrics")
    os.killpg(begun.pid, signal.SIGKILL)
    begun.wait()
    current = Path("/tmp/ray/ray_current_cluster")
    if current.exists() and current.read_text().strip() == f"127.0.0.1:{port}":
        current.unlink()  # as `ray stop` does, which would stop every Ray of this machine
    shutil.rmtree(folder, ignore_errors=True)


def photos(folder: Path, many: int) -> Path:
    """Small JPEGs, three of which are none."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(many):
        noise = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8))
        noise.resize((56, 44)).save(folder / f"{i:05}.jpg", quality=80)
    for i, why in BROKEN.items():
        path = folder / f"{i:05}.jpg"
        path.write_bytes(path.read_bytes()[:-200] if why == "truncated" else b"no image")
    return folder


def plain(model: Path, folder: Path) -> dict[str, Any]:
    """The same by a loop, image by image."""
    from aerogel.preprocess import NoImage, Recipe

    fast, recipe, found = aerogel.load(model), Recipe.parse(RECIPE), dict[str, Any]()
    for path in sorted(folder.iterdir()):
        try:
            found[path.name] = fast.run(None, {"x": recipe.decoded(path.read_bytes())[None]})[0][0]
        except NoImage as why:
            found[path.name] = str(why)
    return found


def rows(raw: list[Any]) -> dict[str, Any]:
    """What parquet files say, by id; each once."""
    found = [row for file in raw for row in pq.read_table(file).to_pylist()]
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row["error"] or row["outputs"]["mean"] for row in found}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, answer in wanted.items():
        if isinstance(answer, str):
            assert found[name] == answer
        else:
            assert found[name]["shape"] == list(answer.shape)
            assert np.array_equal(np.asarray(found[name]["values"], np.float32), answer.reshape(-1))


def test_ray_data_survives_a_killed_actor(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    many, out = count("ray images"), tmp_path / "answers.npz"
    run = [sys.executable, "-m", "tests.rayed", "predict", str(model), str(many), "kill", str(out)]
    subprocess.run(run, check=True, timeout=900, capture_output=True)
    found = np.load(out)
    killed, aborts = found["said"]
    assert aborts == 0
    assert killed in found["pids"]
    # another is begun in its place; by day all may be answered before that one is ready
    assert by_day() or len(found["pids"]) >= 3
    assert sorted(found["ids"].tolist()) == list(range(many))
    fast = aerogel.load(model)
    wanted = [fast.run(None, {"x": images(np.arange(i, min(i + 32, many)))})[0] for i in range(0, many, 32)]
    assert np.array_equal(found["rows"][np.argsort(found["ids"])], np.concatenate(wanted))


def command(*words: object) -> list[str]:
    return [sys.executable, "-c", "from aerogel.cli.main import app; app()", *map(str, words)]


@pytest.mark.skipif(by_day(), reason=BY_NIGHT)
def test_a_batch_goes_on_where_it_was(cluster: Cluster, model: Path, tmp_path: Path, bucket: str) -> None:
    """The driver is killed at three points; then on S3, whole."""
    import s3fs

    many = count("batch images")
    each = many // 10
    folder, out = photos(tmp_path / "photos", many), tmp_path / "out"
    run = command(
        "batch", model, "--input", folder, "--output", out, "--workers", 2, "--rows", each, "--json"
    )
    seen: dict[str, int] = {}
    for part in (1, 4, 7):
        driver = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 240
        while len(list(out.glob("part-*"))) < part and driver.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        driver.kill()
        driver.wait()
        whole = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
        assert whole.items() >= seen.items(), "a finished file was written again"
        seen = whole
        rows([*out.glob("part-*")])
    ended = subprocess.run(run, check=True, timeout=300, capture_output=True, text=True)
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said["found"] == len(seen) >= 3
    wanted = plain(model, folder)
    assert [name for name, answer in wanted.items() if isinstance(answer, str)] == [
        f"{i:05}.jpg" for i in BROKEN
    ]
    same(rows([*out.glob("part-*")]), wanted)
    for words, why in ((("--batch", 16), "batch size"), (("--crop", 16), "way to preprocess")):
        other = subprocess.run([*run, *map(str, words)], capture_output=True, text=True, timeout=120)
        assert other.returncode == 1
        assert f"has results of another {why}" in other.stderr
    store, there = s3fs.S3FileSystem(), bucket.removeprefix("s3://").rpartition("/")[0]
    few = dict(list(wanted.items())[: 2 * each])
    for name in few:
        store.pipe_file(f"{there}/in/{name}", (folder / name).read_bytes())
    to = ("--input", f"s3://{there}/in/*.jpg", "--output", f"s3://{there}/out", "--rows", each)
    subprocess.run(command("batch", model, *to), check=True, timeout=300, capture_output=True)
    same(rows([io.BytesIO(store.cat_file(n)) for n in store.glob(f"{there}/out/part-*.parquet")]), few)


Answer = tuple[int, bytes, str]


def asked(url: str, body: bytes | None, **headers: str) -> Answer:
    """Status, body and replica; status 0 where there was no answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data=body, headers=named)
    try:
        try:
            answer = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as why:
            answer = why
        with answer:  # a server that goes may end it in the middle
            return answer.status, answer.read(), answer.headers.get("x-replica", "")
    except (OSError, http.client.HTTPException) as why:
        return 0, str(why).encode(), ""


def packed(array: Any) -> bytes:
    raw = io.BytesIO()
    np.save(raw, array)
    return raw.getvalue()


NPY = "application/x-npy"


class Client:
    """Eight threads that ask until they are told to stop."""

    def __init__(self, url: str, model: Path) -> None:
        self.url, self.stop = url, threading.Event()
        self.bodies = images(np.arange(64))
        self.wanted = aerogel.load(model).run(None, {"x": self.bodies})[0]
        self.answers: list[tuple[float, int, bool, str]] = []
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(8)]

    def _ask(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not self.stop.is_set():
            i, began = int(rng.integers(64)), time.monotonic()
            status, body, who = asked(self.url, packed(self.bodies[i : i + 1]), content_type=NPY, accept=NPY)
            right = status == 200 and np.array_equal(np.load(io.BytesIO(body)), self.wanted[i : i + 1])
            self.answers.append((began, status, right, who))
            if status != 200:
                time.sleep(0.05)

    def __enter__(self) -> Client:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join()


def malformed(rng: np.random.Generator) -> tuple[bytes, str]:
    """A body that nobody should send."""
    good = packed(np.zeros((1, 3, 32, 32), np.float32))
    shapes = [(3, 32, 32), (1, 4, 32, 32), (1, 3, 32), (0, 3, 32, 32), (1, 3, 1, 1), ()]
    cases: list[tuple[bytes, str]] = [
        (packed(np.zeros(shapes[rng.integers(len(shapes))], np.float32)), NPY),
        (packed(np.zeros((1, 3, 32, 32), rng.choice(["f8", "i1", "c8"]))), NPY),
        (good[: rng.integers(len(good))], NPY),
        (good + b"x", NPY),
        (good.replace(b"(1, 3, 32, 32)", b"(9**9**9, 3,) "), NPY),
        (good.replace(b"(1, 3, 32, 32)", b"(1<<60, 3, 2) "), NPY),
        (good.replace(b"'<f4'", b"'|O8'"), NPY),
        (rng.bytes(100), NPY),
        (rng.bytes(100), "image/png"),
        (b"", "image/jpeg"),
        (rng.bytes(64), "text/html"),
        (rng.bytes(64), "application/json"),
        (b"[" * 200_000, "application/json"),
        (b'{"inputs": ' + b"[" * 900 + b"]" * 900 + b"}", "application/json"),
        (b'{"inputs": [[1, 2], [3]]}', "application/json"),
        (b'{"inputs": [[["a"]]]}', "application/json"),
        (b'{"inputs": {"y": [1]}}', "application/json"),
        (b'{"inputs": NaN}', "application/json"),
        (b'{"inputs": 1' + b"0" * 5000 + b"}", "application/json"),
        (b'{"inputs": [[[[1e999]]]]}', "application/json"),
        (b'{"inputs": ["' + b"x" * 1000 + b'"' + b",1" * 1000 + b"]}", "application/json"),
        (b'{"inputs": [null, 1]}', "application/json"),
        (good.replace(b"(1, 3, 32, 32)", b"(1<<62, 0, 3) "), NPY),
        (good.replace(b"(1, 3, 32, 32)", b"(True, 3072)  "), NPY),
        (
            b"\x93NUMPY\x01\x00\x80\x01"
            + str({"descr": "<f4", "fortran_order": False, "shape": (1,) * 65}).ljust(383).encode()
            + b"\n"
            + bytes(4),
            NPY,
        ),
    ]
    return cases[rng.integers(len(cases))]


def shown(prefix: str) -> set[str]:
    """The metrics of the dashboard that begin so, as an endpoint names their kinds."""
    text = Path("deploy/grafana.json").read_text()
    found = set(re.findall(rf"\\b{prefix}_[a-z_]+", text))
    return {
        name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") if prefix == "ray" else name
        for name in found
    }


def exported(url: str, wanted: set[str], seconds: float) -> set[str]:
    """Of the wanted metrics those that an endpoint has not, after so many seconds at most."""
    until = time.monotonic() + seconds
    while True:
        missing = wanted - set(re.findall(r"^# TYPE (\S+) ", asked(url, None)[1].decode(), re.MULTILINE))
        if not missing or time.monotonic() > until:
            return missing
        time.sleep(1)


@pytest.mark.skipif(by_day(), reason=BY_NIGHT)
def test_a_service_stays_up(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """A replica killed under eight clients, replicas that come by load, malformed requests, and an end that
    answers what it has."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    run = command("serve", model, "--port", port, "--replicas", "1:2", "--batch", 4)
    server = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    assert "ready" in server.stdout.readline()
    assert asked(url + "ready", None)[0] == 200
    assert json.loads(asked(url, None)[1])["inputs"]["x"]["sizes"] == [None, 3, None, None]
    with Client(url, model) as client:
        until = time.monotonic() + 120
        while len({who for *_, who in client.answers[-200:] if who}) < 2:
            assert time.monotonic() < until, "no second replica answered"
            time.sleep(0.5)
        (victim, *_) = descendants(cluster.pid, REPLICA)
        before = len(client.answers)
        os.kill(victim, signal.SIGKILL)
        until = time.monotonic() + 120
        while time.monotonic() < until and (
            len(descendants(cluster.pid, REPLICA) - {victim}) < 2
            or sum(status == 200 for _, status, _, _ in client.answers[before:]) <= 50
        ):
            time.sleep(0.5)
    after = client.answers[before:]
    lost = [status for _, status, _, _ in after if status != 200]
    assert not [a for a in client.answers if a[1] == 200 and not a[2]], "a wrong answer"
    assert all(status == 200 for _, status, _, _ in client.answers[:before])
    assert len(lost) <= 16, lost  # two batches: those that ran, and those that waited there
    assert sum(status == 200 for _, status, _, _ in after) > 50
    print(f"{len(client.answers)} requests, {len(lost)} lost with the replica")
    replicas = descendants(cluster.pid, REPLICA)
    rng = np.random.default_rng(1)
    cases = [malformed(rng) for _ in range(count("malformed requests"))]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda case: asked(url, case[0], content_type=case[1]), cases))
    wrong = [
        (case[0][:80], case[1], said)
        for case, said in zip(cases, found, strict=True)
        if not 400 <= said[0] < 500
    ]
    assert not wrong, wrong[:3]
    # what Ray's proxy refuses itself: it may hang up before its answer is read
    assert asked(url, b"x" * 100, content_type=NPY, transfer_encoding="identity")[0] in (0, 400)
    assert descendants(cluster.pid, REPLICA) >= replicas, "a replica was begun anew"
    with Client(url, model) as client:
        assert not exported(cluster.metrics, shown("ray"), 60)
        ended = time.monotonic()
        server.send_signal(signal.SIGTERM)
        time.sleep(2)
    assert server.wait(90) == 0
    server.stdout.close()
    assert all(right for began, _, right, _ in client.answers if began < ended), (
        "a request was lost at the end"
    )
    assert len(client.answers) > 20
