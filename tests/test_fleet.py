"""A process that is cheap to have many of: weights shared between them, any batch size, code made before."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import aerogel
from aerogel.backends.cpu.runner import CpuRunner, batches, pieces
from aerogel.cli.main import app
from aerogel.errors import AerogelError, InvalidFile
from aerogel.ir import here_levels
from aerogel.saved import container
from tests.small_models import Small, sparse

X = torch.randn(1, 3, 32, 32)


def net(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers).eval()


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that only this user can write to, and so can each above it."""
    made = Path(tempfile.mkdtemp(dir=os.environ["AEROGEL_CACHE"]))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def saved(home: Path) -> tuple[Path, torch.Tensor]:
    fast = aerogel.compile(sparse(net()), X, tune="off")
    aerogel.save(fast, home / "m.aero")
    return home / "m.aero", fast(X)


def mapped(fast: Any) -> bool:
    return isinstance(fast.source.content, mmap.mmap)


def test_weights_are_read_from_the_file(home: Path) -> None:
    made = aerogel.compile(sparse(net()), X, tune="off", methods=["dense", "stridepack"])
    aerogel.save(made, home / "m.aero")
    fast: Any = aerogel.load(home / "m.aero")
    if not mapped(fast):
        pytest.skip("this machine's temporary folder is one that others can write to")
    assert torch.equal(fast(X), made(X))
    assert not any(weight.held for weight in fast.network.weights.values()), "no dense copy"
    content = np.frombuffer(fast.source.content, np.uint8)
    first, last = content.ctypes.data, content.ctypes.data + content.size
    (program,) = fast.ready().programs.values()
    owned = [a for part in program.parts for native in part.natives for a in native.kernel.owned]
    inside = sum(a.nbytes for a in owned if first <= a.ctypes.data < last)
    assert inside > 0.3 * sum(a.nbytes for a in owned), "values, where kernels read them"
    assert all(a.ctypes.data % 64 == 0 for a in owned if first <= a.ctypes.data < last)


def test_what_others_can_write_is_copied(saved: tuple[Path, torch.Tensor]) -> None:
    """Offsets that change after they were looked at would let a kernel read anywhere."""
    path, wanted = saved
    path.chmod(0o666)
    fast = aerogel.load(path)
    assert not mapped(fast)
    path.write_bytes(bytes(len(path.read_bytes())))
    assert torch.equal(fast(X), wanted)
    assert torch.equal(fast(torch.cat([X, X, X]))[:1], wanted)


def test_a_file_is_replaced_by_renaming(saved: tuple[Path, torch.Tensor]) -> None:
    path, wanted = saved
    fast = aerogel.load(path)
    aerogel.save(aerogel.compile(sparse(net(32)), X, tune="off"), path)
    assert torch.equal(fast(X), wanted), "the old one is there as long as somebody reads it"
    assert aerogel.load(path)(X).shape[1] == 32


def test_a_file_cut_off_in_use_ends_the_process(saved: tuple[Path, torch.Tensor]) -> None:
    """As documented: files are replaced by renaming, never written over."""
    path, _ = saved
    code = """
        import os, sys, torch, aerogel
        fast = aerogel.load(sys.argv[1])
        os.truncate(sys.argv[1], 4096)
        print("mapped" if hasattr(fast.source.content, "madvise") else "copied", flush=True)
        fast(torch.randn(1, 3, 32, 32))
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path)], capture_output=True, text=True
    )
    assert ran.returncode == (-signal.SIGBUS if ran.stdout.strip() == "mapped" else 0), ran.stderr


def test_every_packed_array_is_looked_at(saved: tuple[Path, torch.Tensor]) -> None:
    """Whatever stands in them, a kernel stays within its memory."""
    path, _ = saved
    texts, arrays = container.from_bytes(path.read_bytes())
    packed = [name for name in arrays if name.startswith(container.PACKED)]
    assert {name.rpartition(".")[2] for name in packed} >= {"position", "row", "start", "group", "value"}
    rng, refused = np.random.default_rng(0), 0
    for name in packed:
        dtype, array = arrays[name]
        if array.dtype.kind not in "iu" or not array.size:
            continue
        most = np.iinfo(array.dtype).max
        for value in (most, most // 2, int(array.max()) + 1):
            changed = array.copy()
            changed[rng.integers(len(changed))] = value
            path.write_bytes(container.to_bytes(texts, {**arrays, name: (dtype, changed)}))
            with pytest.raises(InvalidFile):
                aerogel.load(path)
            refused += 1
        path.write_bytes(container.to_bytes(texts, {**arrays, name: (dtype, array[:-1])}))
        with pytest.raises(InvalidFile):
            aerogel.load(path)
    assert refused >= 12


def test_a_packed_array_begins_with_a_line(saved: tuple[Path, torch.Tensor]) -> None:
    path, _ = saved
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    moved = json.dumps(header).encode()
    moved += b" " * ((32 - 8 - len(moved)) % 64)  # tensors begin in the middle of a line
    path.write_bytes(len(moved).to_bytes(8, "little") + moved + content[8 + size :])
    with pytest.raises(InvalidFile, match="multiple of 64"):
        aerogel.load(path)


def test_packed_arrays_that_are_not_there(saved: tuple[Path, torch.Tensor]) -> None:
    path, _ = saved
    texts, arrays = container.from_bytes(path.read_bytes())
    for change in ("weight", "config", "format", "version", "meta", "stats", "arrays"):
        model = json.loads(texts["model"])
        for one in model["network"]["packed"]:
            one[change] = "x" if isinstance(one[change], str) else [] if change == "stats" else -1
        path.write_bytes(container.to_bytes(texts | {"model": json.dumps(model)}, arrays))
        with pytest.raises(AerogelError):
            aerogel.load(path)


def test_another_process_has_the_packed_form(saved: tuple[Path, torch.Tensor]) -> None:
    path, wanted = saved
    dense = sum(value.nbytes for value in net().state_dict().values())
    model = sparse(net())
    for fast in (aerogel.load(path), aerogel.compile(model, X, tune="off")):
        assert torch.equal(fast(X), wanted)
        sent = pickle.dumps(fast)
        assert len(sent) < 0.6 * dense + 40_000
        again = pickle.loads(sent)
        assert torch.equal(again(X), wanted)
        for name, value in again.state_dict().items():
            assert torch.equal(value, model.state_dict()[name])
        assert torch.equal(again.original(X), model(X))


def test_any_batch_in_the_sizes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(pieces(29, (8, 1))) == [8, 8, 8, 1, 1, 1, 1, 1]
    assert list(pieces(45, (32, 8, 1))) == [32, 8, 1, 1, 1, 1, 1]
    model = sparse(net(16))
    fast = aerogel.compile(model, torch.randn(4, 3, 16, 16), tune="off")
    assert fast.network is not None
    sizes = batches(fast.network, fast.plan)
    assert sizes == (8, 4, 1)
    runner = fast.ready()
    assert isinstance(runner, CpuRunner)
    made, build = list[Any](), runner._program

    def counted(*given: Any) -> Any:
        made.append(given)
        return build(*given)

    monkeypatch.setattr(runner, "_program", counted)
    rng = np.random.default_rng(0)
    for images in rng.permutation(np.arange(1, 33)).tolist() * 2:
        x = torch.randn(images, 3, 16, 16)
        assert torch.allclose(fast(x), model(x), atol=1e-4)
    assert len(made) == len(sizes), "as many programs as there are sizes"
    assert fast(torch.randn(0, 3, 16, 16)).shape == (0, 16, 16, 16)


class Meets(nn.Module):
    """Images of a batch meet: it cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(x)
        return y - y.mean(0, keepdim=True)


def test_images_that_meet_stay_together() -> None:
    model = sparse(Meets())
    fast = aerogel.compile(model, torch.randn(4, 3, 16, 16), tune="off")
    assert fast.network is not None
    assert batches(fast.network, fast.plan) == ()
    for images in (1, 3, 11):
        x = torch.randn(images, 3, 16, 16)
        assert torch.allclose(fast(x), model(x), atol=1e-4)


def test_workspaces_stay_within_a_limit() -> None:
    fast = aerogel.compile(sparse(Small()), torch.randn(1, 3, 64, 64), tune="off")
    for side in (64, 96, 128):
        fast(torch.randn(1, 3, side, side))
    every = fast.workspace_bytes()
    fast.workspace_limit = every // 4
    fast(torch.randn(1, 3, 64, 64))
    assert 0 < fast.workspace_bytes() <= every // 2, "the last size keeps one"
    fast.workspace_limit = 0
    fast(torch.randn(1, 3, 64, 64))
    assert fast.workspace_bytes() > 0
    with pytest.raises(aerogel.AerogelError, match="number of bytes"):
        fast.workspace_limit = "1 GB"  # type: ignore[assignment]


STRANGER = """
    import os, sys, time
    import torch
    torch.set_num_threads(1)
    path, isa, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
    began = time.process_time()
    import aerogel
    from dataclasses import replace
    from aerogel.backends import using
    from aerogel.backends.cpu.backend import Cpu
    from aerogel.codegen.cpu import llvm
    from aerogel.ir import host
    def never(*_, **__): raise SystemExit("compiled something")
    llvm.object_code = never
    with using(Cpu(replace(host().lower(isa), threads=1))):
        fast = aerogel.load(path)
        fast(torch.randn(batch, 3, 32, 32))
    print(time.process_time() - began)
"""


def test_after_warm_nothing_is_compiled(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where another user runs it, who has no home."""
    monkeypatch.setenv("AEROGEL_CACHE", str(home / "cache"))
    aerogel.save(aerogel.compile(sparse(net()), X, tune="off"), home / "m.aero")
    levels = [isa for isa in here_levels() if isa in ("avx512", "avx2")]
    if not levels:
        pytest.skip("x86-64 only")
    given = ["warm", str(home / "m.aero"), "--batch", "1,11", "--threads", "1"]
    ran = CliRunner().invoke(app, [*given, "--isa", ",".join(levels), "--json"])
    assert ran.exit_code == 0, ran.output
    said = json.loads(ran.stdout)
    assert [one["isa"] for one in said["isa"]] == levels
    assert all(one["kernels"] >= 3 for one in said["isa"])
    for isa in levels:
        for batch in (1, 11):
            env = {"AEROGEL_CACHE": str(home / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
            code = [sys.executable, "-c", textwrap.dedent(STRANGER), str(home / "m.aero"), isa, str(batch)]
            done = subprocess.run(code, capture_output=True, text=True, env=env)
            assert done.returncode == 0, done.stderr
    assert (home / "cache" / "objects").stat().st_mode & 0o777 == 0o755
    again = CliRunner().invoke(app, given)
    assert " 0 compiled now" in again.stdout


def test_warm_says_what_is_wrong(saved: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = saved
    for given, says in (
        (["--isa", "sse9"], "is no ISA"),
        (["--batch", "a"], "list of numbers"),
        (["--threads", "0"], "list of numbers"),
    ):
        ran = CliRunner().invoke(app, ["warm", str(path), *given])
        assert ran.exit_code in (1, 2)
        assert says in ran.output
    monkeypatch.setenv("AEROGEL_CACHE", os.devnull)
    ran = CliRunner().invoke(app, ["warm", str(path)])
    assert ran.exit_code == 1
    assert "cannot be kept" in ran.output


FEW_CORES = """
    import os, sys, threading
    import torch
    from aerogel.backends.cpu import cores
    cores.cores, cores.cpu_quota = lambda: 4, lambda: 1.5
    os.cpu_count = lambda: 4
    torch.set_num_threads(int(sys.argv[1]))
    import aerogel
    fast = aerogel.compile(torch.nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8), tune="off")
    seen = [torch.get_num_threads(), fast.plan.target.threads]
    def call():
        fast(torch.randn(1, 3, 8, 8))
        seen.append(torch.get_num_threads())
    other = threading.Thread(target=call)
    other.start()
    other.join()
    print(seen)
"""


@pytest.mark.parametrize(
    ("threads", "variable", "wanted"), [(4, "", [1, 1, 1]), (3, "", [3, 3]), (4, "4", [4, 4])]
)
def test_threads_follow_the_quota(threads: int, variable: str, wanted: list[int]) -> None:
    """Where nobody has set a number."""
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    env |= {"OMP_NUM_THREADS": variable} if variable else {}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FEW_CORES), str(threads)],
        capture_output=True,
        text=True,
        env=env,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)[: len(wanted)] == wanted
