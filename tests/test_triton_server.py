"""A repository that `aerogel export` wrote, in Triton's own server (the one inside nvidia-pytriton)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import aerogel
from aerogel.cli.main import app
from aerogel.serving.triton import _text
from tests.counts import count
from tests.processes import descendants
from tests.rayed import images
from tests.test_engines import asked, exported, shown
from tests.test_engines import model as model
from tests.test_fleet_store import free_port

pytestmark = pytest.mark.loopback
SITE = Path(os.environ.get("TRITON_SITE", Path(sys.prefix) / "tritonserver"))
"""Where `pip install --no-deps --target` put nvidia-pytriton: it pins numpy below 2 for itself."""


class Server:
    """The real one, begun with a repository, and what its ports are."""

    def __init__(self, repository: Path, folder: Path) -> None:
        own = SITE / "pytriton" / "tritonserver"
        backends = folder / "backends"
        if not backends.exists():
            shutil.copytree(own / "backends", backends)
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            shutil.copy2(
                own / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python"
            )
        self.http, self.metrics = free_port(), free_port()
        loopback = {"http-address": "127.0.0.1", "grpc-address": "127.0.0.1", "metrics-address": "127.0.0.1"}
        said = {
            **loopback,
            "http-port": self.http,
            "grpc-port": free_port(),
            "metrics-port": self.metrics,
            "model-repository": repository,
            "backend-directory": backends,
        }
        libraries = f"{sysconfig.get_config_var('LIBDIR')}:{SITE / 'nvidia_pytriton.libs'}"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        words = [str(own / "bin" / "tritonserver"), "--disable-auto-complete-config"]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*words, *(f"--{name}={value}" for name, value in said.items())],
                env={**os.environ, "LD_LIBRARY_PATH": libraries, "PATH": path},
                stdout=log,
                stderr=log,
            )
        self.url = f"http://127.0.0.1:{self.http}/v2/"
        until = time.monotonic() + 90
        while asked(f"{self.url}health/ready", None)[0] != 200:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < until
            time.sleep(0.2)

    def infer(self, array: Any, name: str = "net") -> tuple[int, Any]:
        """An answer by the server's own protocol."""
        tensor = {
            "name": "x",
            "shape": list(array.shape),
            "datatype": "FP32",
            "data": array.reshape(-1).tolist(),
        }
        status, body, _ = asked(f"{self.url}models/{name}/infer", json.dumps({"inputs": [tensor]}).encode())
        if status != 200:
            return status, body
        (answer,) = json.loads(body)["outputs"]
        return status, np.asarray(answer["data"], np.float32).reshape(answer["shape"])

    def probed(self) -> int:
        """The probe's exit code."""
        words = ["-m", "aerogel.serving.probe", f"http://127.0.0.1:{self.http}", "net"]
        return subprocess.run([sys.executable, *words], capture_output=True).returncode

    def counter(self, name: str) -> float:
        text = asked(f"http://127.0.0.1:{self.metrics}/metrics", None)[1].decode()
        return sum(float(n) for n in re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE))


@contextmanager
def serving(repository: Path, folder: Path) -> Iterator[Server]:
    server = Server(repository, folder)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def test_the_server_answers_as_a_call_does(model: Path, tmp_path: Path) -> None:
    """Sixteen clients, batches that form, requests that are refused; a worker that dies fails the probe, and
    a server begun again passes it."""
    if not SITE.exists():
        pytest.skip("pip install --no-deps --target .venv/tritonserver nvidia-pytriton==0.7.0")
    words = ["export", str(model), "-o", str(tmp_path / "models"), "--batch", "16", "--wait-us", "200000"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    many = count("triton requests")
    rows = images(np.arange(many))
    wanted = np.concatenate([aerogel.load(model).run(None, {"x": rows[i : i + 1]})[0] for i in range(many)])
    with serving(tmp_path / "models", tmp_path) as server:
        before = server.counter("nv_inference_count"), server.counter("nv_inference_exec_count")
        with ThreadPoolExecutor(16) as clients:
            found = list(clients.map(lambda i: server.infer(rows[i : i + 1]), range(many)))
        assert all(status == 200 for status, _ in found)
        assert np.array_equal(np.concatenate([answer for _, answer in found]), wanted)
        answered = server.counter("nv_inference_count") - before[0]
        together = answered / (server.counter("nv_inference_exec_count") - before[1])
        assert answered == many
        assert together > 1
        print(f"{many} of {many} bit-equal; {together:.1f} requests a batch")
        for shape in ((1, 4, 32, 32), (3, 32, 32), (1, 3, 1, 1), (99, 3, 32, 32)):
            assert 400 <= server.infer(np.zeros(shape, np.float32))[0] < 500, shape
        assert server.infer(rows[:1])[0] == 200
        assert not exported(f"http://127.0.0.1:{server.metrics}/metrics", shown("nv"), 5)
        assert server.probed() == 0
        (worker, *_) = descendants(server.process.pid, "triton_python_backend_stub")
        os.kill(worker, signal.SIGKILL)
        assert server.probed() == 1
        assert asked(f"{server.url}health/ready", None)[0] == 200  # which is why the probe computes
    with serving(tmp_path / "models", tmp_path) as server:
        assert server.probed() == 0
        status, answer = server.infer(rows[:1])
        assert status == 200
        assert np.array_equal(answer, wanted[:1])


def test_export_refuses_in_words(model: Path, tmp_path: Path) -> None:
    for words, why in (
        (["--name", "../x"], "is no name for a model"),
        (["--name", "triton"], "hides the package"),
        (["--format", "onnx"], "--format is triton"),
    ):
        done = CliRunner().invoke(app, ["export", str(model), "-o", str(tmp_path / "r"), *words])
        assert done.exit_code in (1, 2)
        assert why in done.output
    assert CliRunner().invoke(app, ["export", str(model), "-o", str(tmp_path / "r")]).exit_code == 0
    again = CliRunner().invoke(app, ["export", str(model), "-o", str(tmp_path / "r")])
    assert again.exit_code == 1
    assert "exists: remove it" in again.output
    assert _text('a" }\n\\') == '"a\\042\\040\\175\\012\\134"'
