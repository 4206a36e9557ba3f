"""Crashes, full and read-only disks, many processes at once: they cost at most time, and no file is ever half written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import aerogel

_KILLED = """
import hashlib, importlib.util, os, pathlib, random, signal, sys, time
spec = importlib.util.spec_from_file_location("disk", sys.argv[1]); disk = importlib.util.module_from_spec(spec)
spec.loader.exec_module(disk)
folder, naive, torn = pathlib.Path(sys.argv[2]), sys.argv[3] == "naive", 0
random.seed(0)
for i in range(int(sys.argv[4])):
    child = os.fork()
    if child == 0:
        while True:
            content = os.urandom(200_000)
            content = hashlib.sha256(content).digest() + content
            path = folder / f"{random.randrange(4)}"
            path.write_bytes(content) if naive else disk.write_whole(path, content)
    time.sleep(random.uniform(0.001, 0.006))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for path in folder.glob("?"):
        raw = path.read_bytes()
        torn += hashlib.sha256(raw[32:]).digest() != raw[:32]
print(torn)
"""


def test_a_writer_killed_at_any_moment_leaves_no_torn_file(tmp_path: Path) -> None:
    """2,000 writers killed; beside them a naive writer, which must be seen to tear files, or the test shows nothing."""
    disk = Path(aerogel.__file__).parent / "disk.py"
    torn = {}
    for how, count in (("whole", 2000), ("naive", 300)):
        (tmp_path / how).mkdir()
        command = [sys.executable, "-c", _KILLED, str(disk), str(tmp_path / how), how, str(count)]
        torn[how] = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
    assert torn["whole"] == 0
    assert torn["naive"] > 0


_TOGETHER = """
import os, sys
from tests.test_store import _choice, _weight, CONV
from aerogel.target import host
from aerogel.tune import store as records

if sys.argv[2] == "naive":
    records.write_whole = lambda path, content: (path.parent.mkdir(parents=True, exist_ok=True), path.write_bytes(content))
store, weights = records.Store(sys.argv[1], host()), [_weight(0.9, seed) for seed in range(4)]
choices = [_choice(w) for w in weights]
children = []
for process in range(16):
    children.append(os.fork())
    if children[-1] == 0:
        missed = 0
        for i in range(int(sys.argv[3])):
            own = (process + i) % len(weights)
            store.put_layer(weights[own], choices[own], "fast")
            missed += store.layer(CONV, weights[own], "fast") != choices[own]
        os._exit(min(missed, 99))
print(sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_sixteen_processes_on_one_store(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """7,680 records written and read back under four keys; a naive writer beside it must be seen to lose some."""
    missed = {}
    for how, count in (("whole", 48 if request.config.getoption("--quick") else 480), ("naive", 100)):
        command = [sys.executable, "-c", _TOGETHER, str(tmp_path / how), how, str(count)]
        ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        missed[how] = int(ran.stdout)
    assert missed["whole"] == 0
    assert missed["naive"] > 0


_FULL = """
import logging, os, resource, sys, warnings
from pathlib import Path

import torch
from torch import nn

import aerogel
from aerogel.codegen import llvm
from aerogel.errors import AerogelError
from tests.small_models import sparse

said = []
logging.getLogger("aerogel").addHandler(type("Heard", (logging.Handler,), {"emit": lambda self, record: said.append(record)})())
torch.set_num_threads(1)
folder = Path(sys.argv[1])
model, x = sparse(nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1))), torch.randn(1, 8, 12, 12)
fast = aerogel.compile(model, x, tune="off", store=folder / "store")
expected = fast(x)
aerogel.save(fast, folder / "whole.aero")
size = (folder / "whole.aero").stat().st_size


def apart(point):
    child = os.fork()
    if child == 0:
        try:
            point()
        except BaseException as why:
            print(f"{type(why).__name__}: {why}", flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def compiled(cache, limit=None):
    # right, with one warning
    os.environ["AEROGEL_CACHE"] = str(cache)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    held = [*llvm._jit, *llvm._loaded.values()]  # what `fast` runs stays; nothing of it is found again
    llvm._loaded.clear(), llvm._jit.clear()
    again = aerogel.compile(model, x, tune=0.01)
    assert (again(x) - model(x)).abs().max() < 1e-4
    assert len([s for s in said if s.levelno == logging.WARNING]) == 1, [s.getMessage() for s in said]


def saved(limit):
    # typed, and the file that stood there still stands
    path = folder / "old.aero"
    path.write_bytes(b"old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        aerogel.save(fast, path)
    except AerogelError as why:
        assert "cannot be written" in str(why)
        assert path.read_bytes() == b"old"
        assert [f.name for f in folder.glob("old*")] == ["old.aero"]
        return
    assert limit >= size, "a file cut short was taken for whole"
    assert torch.equal(aerogel.load(path)(x), expected)


(folder / "file").write_text("")
(folder / "loop").symlink_to(folder / "loop")
(folder / "gone").symlink_to("/proc/nowhere")
places = [folder / "file" / "cache", *(folder / n for n in ("loop", "gone")), *map(Path, ("/proc/x", "/sys/x", "/dev/null/x"))]
points = [lambda p=p: compiled(p) for p in places]
points += [lambda n=n: compiled(folder / f"cache{n}", n) for n in (0, 1, 500, 1500)]
points += [lambda n=n: saved(n) for n in [0, 1, 7, 8, 9, *(size * i // 24 for i in range(1, 24)), size - 1, size]]
failed = [i for i, point in enumerate(points) if apart(point)]
print(len(points), failed)
"""


def test_a_disk_that_is_full_or_read_only(tmp_path: Path) -> None:
    """Forty points, each in a process of its own: places where nothing can be made, and files that may not grow."""
    ran = subprocess.run([sys.executable, "-c", _FULL, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert ran.stdout.splitlines()[-1:] == ["40 []"], ran.stdout[-2000:] + ran.stderr[-2000:]
