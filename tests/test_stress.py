"""Everything at once, and a long life, in short: python -m tests.fuzz.stress and python -m tests.fuzz.soak
are the whole of it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import aerogel
from aerogel.capture import export
from tests import counts
from tests.fuzz import soak
from tests.fuzz.stress import Branching
from tests.small_models import sparse

Ran = Callable[[str, int], None]


def test_everything_at_once(ran: Ran) -> None:
    """In a process of its own: it forks, and one that hangs can be ended."""
    seconds = counts.count("stress, seconds")
    ran("stress, seconds", seconds)
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.stress",
        "--minutes",
        str(seconds / 60),
        "--seed",
        str(counts.seed()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 900, cwd=counts.ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_while_a_further_program_is_captured_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export puts fake weights into the module it reads: that is none that another thread's call may
    meet."""
    model = sparse(Branching())
    narrow, wide = torch.randn(2, 3, 16, 20), torch.randn(2, 3, 16, 40)
    fast = aerogel.compile(model, narrow, tune="off")
    with torch.no_grad():
        wanted = model(wide)
    answers, exported = list[Any](), export._exported

    def meanwhile(read: torch.nn.Module, *args: Any) -> Any:
        forward = read.forward

        def looked_at(x: torch.Tensor) -> Any:
            other = threading.Thread(target=lambda: answers.append(fast.original(wide)))
            other.start()
            other.join()
            return forward(x)

        read.forward = looked_at
        assert read is not fast.original
        assert all(a is b for a, b in zip(read.parameters(), fast.original.parameters(), strict=True)), (
            "no copies of weights"
        )
        return exported(read, *args)

    monkeypatch.setattr(export, "_exported", meanwhile)
    fast(wide)
    monkeypatch.undo()
    assert answers
    assert {type(got) for got in answers} == {torch.Tensor}
    assert all(torch.allclose(got.detach(), wanted, atol=1e-5) for got in answers)
    assert len(fast._others._made) == 1


def test_a_forked_childs_first_call_may_be_of_another_kind() -> None:
    """torch answers it, whose pool has no threads in the child: it goes down to one before that call too."""
    script = """
import os, signal, torch, aerogel
from tests.fuzz.stress import Branching
from tests.small_models import sparse
torch.set_num_threads(2)
model, wide = sparse(Branching()), torch.randn(4, 3, 64, 64)
fast = aerogel.compile(model, torch.randn(2, 3, 16, 20), tune="off")
with torch.no_grad():
    wanted = model(wide)
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(not torch.allclose(fast(wide), wanted, atol=1e-4))
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, cwd=counts.ROOT)


def test_a_child_is_not_held_by_a_count_that_its_parent_was_at() -> None:
    """Another thread counts a weight's zeros while this one forks: the child counts its own."""
    script = """
import os, signal, threading, time, numpy as np
from aerogel.ir.config import Weight
from aerogel.ir.stats import Stats
w = np.ones((4, 4, 1, 1), np.float32)
def slow():
    begun.set(); time.sleep(3); return w
begun = threading.Event()
held, other = Weight(w), Weight(w)
held.let_go(slow)
thread = threading.Thread(target=lambda: held.stats)
thread.start(); begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(other.stats != Stats.of(w))
assert os.waitpid(child, 0)[1] == 0
thread.join()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, cwd=counts.ROOT)


def _environments() -> int:
    gc.collect()
    return sum(type(one) is ShapeEnv for one in gc.get_objects())


def test_a_capture_leaves_nothing_of_torchs_behind() -> None:
    """Caches of torch's hold every environment of symbols that was ever asked, unless they are told to
    forget."""
    x, before = torch.randn(2, 3, 16, 20), _environments()
    for _ in range(3):
        fast = aerogel.compile(sparse(Branching()), x, tune="off")
        fast(torch.randn(2, 3, 16, 40))
        assert len(fast._others._made) == 1
    assert _environments() <= before + 1


def test_nothing_grows(ran: Ran, tmp_path: Path) -> None:
    calls, compiles = counts.count("soak calls"), counts.count("soak compiles")
    ran("soak calls", calls)
    ran("soak compiles", compiles)
    halves, grew = soak.soak(calls, compiles, counts.seed(), looks=20)
    assert [looks[-1].calls for looks in halves.values()] == [calls, calls]
    short = counts.mode() != "nightly"  # what is loaded on first use is not yet there in the second tenth
    assert not [what for what in grew if not (short and "memory" in what)], grew
    assert halves["compiles"][-1].rss_mb - halves["calls"][0].rss_mb < 300
    soak.draw(halves, {"cpu": "some", "cores": 2}, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").stat().st_size > 10_000


def test_growth_is_seen() -> None:
    flat = [soak.Look(i, 0, 0.0, 500.0, 9, 200, 100) for i in range(100)]
    assert not soak.grown(flat)
    for change in ({"rss_mb": 531.0}, {"fds": 10}, {"linked": 1000}, {"executable": 300}):
        looks = [soak.Look(**{**vars(one), **(change if one.calls > 80 else {})}) for one in flat]
        assert len(soak.grown(looks)) == 1, change
