"""Crashes, full and read-only disks, many processes at once: they cost at most time, and no file is ever half
written."""

from __future__ import annotations

import logging
import os
import pwd
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import aerogel
from aerogel import disk
from aerogel.backends.cpu.backend import Cpu
from aerogel.ir import host
from aerogel.tune.store import Store, mask_digest
from tests import counts
from tests.limited import apart
from tests.test_store import CONV

Ran = Callable[[str, int], None]

_KILLED = """
import hashlib, importlib.util, os, pathlib, random, signal, sys, time
spec = importlib.util.spec_from_file_location("disk", sys.argv[1])
disk = importlib.util.module_from_spec(spec)
spec.loader.exec_module(disk)
folder, naive, torn = pathlib.Path(sys.argv[2]), sys.argv[3] == "naive", 0
random.seed(int(sys.argv[5]))
contents = [hashlib.sha256(raw).digest() + raw for raw in (os.urandom(500_000) for _ in range(4))]
for i in range(int(sys.argv[4])):
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        random.seed(i)
        os.write(go, b"!")
        while True:
            content, path = random.choice(contents), folder / f"{random.randrange(4)}"
            path.write_bytes(content) if naive else disk.write_whole(path, content)
    os.read(ready, 1)
    time.sleep(random.uniform(0, 0.005))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready), os.close(go)
    for path in folder.glob("?"):
        raw = path.read_bytes()
        torn += hashlib.sha256(raw[32:]).digest() != raw[:32]
    if naive and torn:
        break
print(torn)
"""


def test_a_writer_killed_at_any_moment_leaves_no_torn_file(tmp_path: Path, ran: Ran) -> None:
    """Beside the writers a naive one, which must be seen to tear files, or the test shows nothing."""
    killed = counts.count("kill -9")
    ran("kill -9", killed)
    disk = Path(aerogel.__file__).parent / "disk.py"
    torn = {}
    for how, count in (("whole", killed), ("naive", 600)):
        (tmp_path / how).mkdir()
        command = [
            sys.executable,
            "-c",
            _KILLED,
            str(disk),
            str(tmp_path / how),
            how,
            str(count),
            str(counts.seed()),
        ]
        torn[how] = int(
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
        )
    assert torn["whole"] == 0
    assert torn["naive"] > 0


_TOGETHER = """
import os, sys
from tests.test_store import _choice, _weight, CONV
from aerogel.backends.cpu.backend import Cpu
from aerogel.ir.target import host
from aerogel.tune import store as records

if sys.argv[2] == "naive":
    records.write_whole = lambda path, content: (
        path.parent.mkdir(parents=True, exist_ok=True), path.write_bytes(content)
    )
store, weights = records.Store(sys.argv[1], Cpu(host())), [_weight(0.9, seed) for seed in range(4)]
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


def test_sixteen_processes_on_one_store(tmp_path: Path, ran: Ran) -> None:
    """Records written and read back under four keys; a naive writer beside it must be seen to lose some."""
    each = -(-counts.count("16 processes") // 16)
    ran("16 processes", 16 * each)
    missed = {}
    for how, count in (("whole", each), ("naive", 100)):
        command = [sys.executable, "-c", _TOGETHER, str(tmp_path / how), how, str(count)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        missed[how] = int(done.stdout)
    assert missed["whole"] == 0
    assert missed["naive"] > 0


_FULL = """
import logging, os, resource, sys, warnings
from pathlib import Path

import torch
from torch import nn

import aerogel
from aerogel.codegen.cpu import llvm
from aerogel.errors import AerogelError
from tests.small_models import sparse

said = []
logging.getLogger("aerogel").addHandler(
    type("Heard", (logging.Handler,), {"emit": lambda self, record: said.append(record)})()
)
torch.set_num_threads(1)
folder = Path(sys.argv[1])
model = sparse(nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1)))
x = torch.randn(1, 8, 12, 12)
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
places = [
    folder / "file" / "cache", *(folder / n for n in ("loop", "gone")),
    *map(Path, ("/proc/x", "/sys/x", "/dev/null/x")),
]
points = [lambda p=p: compiled(p) for p in places]
points += [lambda n=n: compiled(folder / f"cache{n}", n) for n in (0, 1, 500, 1500)]
points += [
    lambda n=n: saved(n) for n in [0, 1, 7, 8, 9, *(size * i // 24 for i in range(1, 24)), size - 1, size]
]
failed = [i for i in map(int, sys.argv[2:]) if apart(points[i])]
print(len(points), failed)
"""


def test_a_disk_that_is_full_or_read_only(tmp_path: Path, ran: Ran) -> None:
    """Forty points, each in a process of its own: places where nothing can be made, and files that may not
    grow."""
    points = counts.some(range(40), counts.count("disk full"))
    ran("disk full", len(points))
    command = [sys.executable, "-c", _FULL, str(tmp_path), *map(str, points)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["40 []"], f"{points}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.mark.parametrize("room", ["somewhere", "nowhere"])
def test_a_user_without_a_home_or_a_name(
    room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kept for this process in a folder nobody can foresee, or not at all; said once."""

    def nameless(_: int) -> None:
        raise KeyError("no such user")

    for name in ("HOME", "AEROGEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nameless)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / room))
    (tmp_path / "somewhere").mkdir()
    monkeypatch.setattr(disk, "_said", set())
    disk._for_this_process.cache_clear()
    try:
        assert disk.compiled("name", lambda: b"code") == b"code"
        again = disk.compiled("name", lambda: b"other")
        assert again == (b"code" if room == "somewhere" else b"other")
        for made in (tmp_path / "somewhere").iterdir():
            assert stat.S_IMODE(made.stat().st_mode) == 0o700
        Store(None, Cpu(host())).near(CONV, np.ones(CONV.weight_shape, np.float32), "fast")
    finally:
        disk._for_this_process.cache_clear()
    assert len([r for r in caplog.records if "no home folder" in r.getMessage()]) == 1


def test_a_cache_that_may_not_be_searched_is_a_miss() -> None:
    """Its owner is somebody else: nothing is found, nothing kept, one warning."""
    with tempfile.TemporaryDirectory() as folder:
        closed, weight = Path(folder) / "closed", np.ones(CONV.weight_shape, np.float32)
        store = Store(closed, Cpu(host()))
        store.layer(CONV, weight, "fast")
        path, _ = store._layer(CONV, "", "fast")
        path.parent.mkdir(parents=True)
        Path(folder).chmod(0o755)
        closed.chmod(0)

        def work() -> dict[str, object]:
            if os.geteuid() == 0:
                os.setresuid(54321, 54321, 54321)
            said: list[str] = []
            handler = logging.Handler()
            handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
            logging.getLogger("aerogel").addHandler(handler)
            disk._said.clear()
            os.environ["AEROGEL_CACHE"] = str(closed)
            found = [
                store.near(CONV, weight, "fast"),
                store.layer(CONV, weight, "fast"),
                disk.compiled("x", lambda: b"y") == b"y",
            ]
            return {"kind": repr(found), "said": said}

        got = apart(work)
        closed.chmod(0o700)
    assert got["kind"] == "[(), None, True]", got
    assert len(got["said"]) == 1
    assert "not kept" in got["said"][0]


def test_a_record_that_is_no_file_is_a_miss(tmp_path: Path) -> None:
    """A pipe that nobody writes to would never answer."""
    store, weight = Store(tmp_path, Cpu(host())), np.ones(CONV.weight_shape, np.float32)
    path, _ = store._layer(CONV, mask_digest(weight), "fast")
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert apart(lambda: {"kind": str(store.layer(CONV, weight, "fast"))})["kind"] == "None"


def test_a_link_at_the_scratch_name_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, path = tmp_path / "victim", tmp_path / "folder" / "entry"
    victim.write_bytes(b"precious")
    path.parent.mkdir()
    foreseen = f"entry.{os.getpid()}.{threading.get_ident()}"
    path.with_name(foreseen).symlink_to(victim)
    disk.write_whole(path, b"new")
    assert victim.read_bytes() == b"precious"
    assert path.read_bytes() == b"new"
    assert stat.S_ISREG(path.lstat().st_mode)
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    path.with_name("entry.guessed").symlink_to(victim)
    with pytest.raises(FileExistsError):
        disk.write_whole(path, b"newer")
    assert victim.read_bytes() == b"precious"
    assert path.read_bytes() == b"new"
