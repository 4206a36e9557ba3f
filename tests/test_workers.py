"""Torch's thread pool under our kernels: found through torch, quiet after fork, optional."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from aerogel.backends.cpu import threads as workers
from aerogel.codegen.cpu.abi import native
from aerogel.ir import Config, Conv, host
from aerogel.methods import cpu_form
from aerogel.methods.direct import cpu as direct
from aerogel.reference import reference
from tests import counts
from tests.suite.run import worth_it

CONV = Conv.parse("n1c16h12w12k32r3s3u1p1")


def _layer() -> tuple[workers.Segment, np.ndarray, np.ndarray, list[object]]:
    rng = np.random.default_rng(0)
    weight = (rng.integers(-3, 4, CONV.weight_shape) * (rng.random(CONV.weight_shape) < 0.2)).astype(
        np.float32
    )
    x = rng.integers(-3, 4, CONV.x_shape).astype(np.float32)
    config = Config.make("direct", vectors=3, channels=8, groups=4, ahead=0, aligned=0)
    reads, writes = direct.layouts(CONV, config, host())
    (kernel,) = direct.build(direct.pack(weight, CONV, config), CONV, config, host(), reads, writes)
    xb, yb = (
        np.zeros(lay.elements(s), np.float32) for lay, s in ((reads, CONV.x_shape), (writes, CONV.y_shape))
    )
    reads.write(xb, x)
    scratch = np.zeros(kernel.scratch_bytes * 8, np.uint8)
    bound = kernel.bind(x=xb.ctypes.data, y=yb.ctypes.data, scratch=scratch.ctypes.data)
    wanted = reference(x.astype(np.float64), weight.astype(np.float64), CONV)
    return workers.Segment([(kernel, bound)] * 3, 2), wanted, writes.view(yb, CONV.y_shape), [xb, yb, scratch]


def test_the_pool_is_torchs_own() -> None:
    """The address belongs to the libgomp that torch brought, even beside another one."""
    entries = workers.entries()
    assert set(entries) == {"parallel", "barrier", "thread_num", "num_threads"}
    owner = next(
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if int(line.split("-")[0], 16) <= entries["parallel"] < int(line.split()[0].split("-")[1], 16)
    )
    assert Path(torch.__file__).parent.parent in Path(owner).parents
    assert "gomp" in Path(owner).name


def test_threads_follow_torch() -> None:
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert workers.threads() == count
    finally:
        torch.set_num_threads(before)


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", ["direct", "stridepack", "tilewise"])
def test_a_thread_writes_no_other_threads_scratch(name: str) -> None:
    """Asked of the code itself, one thread at a time: two threads that race would often get away with it."""
    module, weight = cpu_form(name), np.ones(CONV.weight_shape, np.float32)
    weight[:, ::3] = 0
    used = 0
    for config in module.configs(CONV, host(), worth_it(weight)):
        reads, writes = module.layouts(CONV, config, host())
        (kernel,) = native(
            module.build(module.pack(weight, CONV, config), CONV, config, host(), reads, writes)
        )
        if not kernel.scratch_bytes or used == 12:
            continue
        xb, yb = (
            np.zeros(lay.elements(s), np.float32)
            for lay, s in ((reads, CONV.x_shape), (writes, CONV.y_shape))
        )
        scratch = np.full((3, kernel.scratch_bytes), 0xA5, np.uint8)
        block = kernel.bind(x=xb.ctypes.data, y=yb.ctypes.data, scratch=scratch.ctypes.data)
        assert kernel.entry is not None
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(kernel.entry.address)(
            block.ctypes.data, 1, 3
        )
        assert (scratch[[0, 2]] == 0xA5).all(), config
        used += bool((scratch[1] != 0xA5).any())  # a layer in one piece leaves nothing for the second thread
    assert used


def test_without_libgomp_one_thread_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SYMBOLS", {"parallel": "no_such_symbol_in_any_library"})
    workers.entries.cache_clear()
    try:
        assert workers.entries() == {}
        assert workers.threads() == 1
        from aerogel.cli.doctor import examine

        (finding,) = (f for f in examine() if f.what == "thread pool")
        assert not finding.good
        assert "one thread" in finding.says
    finally:
        monkeypatch.undo()
        workers.entries.cache_clear()


def test_a_forked_child_answers_on_one_thread(ran: Callable[[str, int], None]) -> None:
    """The parent's pool is warm with two threads; entering it in the child would hang for ever."""
    script = """
import os, signal, sys, numpy as np, torch
torch.set_num_threads(2); torch.randn(500, 500) @ torch.randn(500, 500)
from tests.test_workers import _layer
from aerogel.backends.cpu import threads as workers
segment, wanted, y, kept = _layer()
segment(); assert (y == wanted).all()
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        signal.alarm(200)
        y[...] = np.nan
        segment()
        os._exit(0 if (y == wanted).all() and workers.threads() == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
segment(); assert (y == wanted).all() and workers.threads() == 2
"""
    children = counts.count("fork")
    ran("fork", children)
    folder = Path(__file__).parent.parent
    subprocess.run(
        [sys.executable, "-c", script, str(children)],
        check=True,
        timeout=900,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": "src"},
    )


_CHILDREN = """
import os, signal, sys, torch
from torch import nn
import aerogel
from aerogel.ir.way import Way
from tests.small_models import Small, sparse

torch.set_num_threads(2)
torch.manual_seed(0)


class Both(nn.Module):
    # layers of ours, and layers that only torch has
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.up = nn.ConvTranspose2d(64, 64, 2, stride=2)
        self.norm = nn.GroupNorm(4, 64)

    def forward(self, x):
        y = self.norm(torch.sigmoid(self.second(torch.relu(self.first(x)))))
        return torch.softmax(self.up(y), 1)


model = sparse(Both())
fast = aerogel.compile(model, torch.randn(1, 8, 48, 48), tune="off")
eager = aerogel.Compiled(model, None, fast.plan, Way("torch"), (), None, fast.captured)
new = torch.randn(2, 8, 64, 56)
with torch.no_grad():
    wanted = model(new)
    for size in (48, 40):
        fast(torch.randn(1, 8, size, size))
    nn.Conv2d(64, 64, 3)(torch.randn(4, 64, 128, 128))
right = 0
for how in (fast, eager) * int(sys.argv[1]):
    child = os.fork()
    if child == 0:
        signal.alarm(200)
        with torch.no_grad():
            got = how(new)
        os._exit(0 if (got - wanted).abs().max() < 1e-4 and torch.get_num_threads() == 1 else 1)
    if os.waitpid(child, 0)[1] != 0:
        break  # one that hangs is enough
    right += 1
assert torch.get_num_threads() == 2
assert (fast(new) - wanted).abs().max() < 1e-4
print("right", right)
"""


@pytest.mark.filterwarnings("ignore:tuned for")
def test_a_forked_child_answers_at_a_new_shape() -> None:
    """Nothing is run by torch's lost threads: sizes are computed, and torch's own layers take one thread."""
    many = max(2, counts.count("fork") // 2)
    ran = subprocess.run(
        [sys.executable, "-c", _CHILDREN, str(many)], capture_output=True, text=True, timeout=60 * many + 900
    )
    assert ran.stdout.split() == ["right", str(2 * many)], ran.stdout + ran.stderr[-2000:]
