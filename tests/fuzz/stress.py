"""Everything at once: python -m tests.fuzz.stress [--minutes 10] [--seed 1] [--record]

32 threads call a few compiled modules at mixed sizes, on both sides of branches on them; one more compiles
all the while, new models and those modules again; the main thread forks children that call the modules at
sizes known and new. Every answer is held against one that was computed alone before: bit for bit where all
layers are ours, else closely.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aerogel
from tests import counts, nightly
from tests.small_models import Skip, Small, runs, sparse

CALLERS, TORCH_THREADS = 32, 2
CLOSE = 1e-5
"""Relative to the largest output, where torch or other kernels may have answered."""
TUNED = 6
"""One compile in so many is timed for a tenth of a second; the others go by rule."""
PAUSE = 0.2
"""At most between two calls of a thread, in seconds: else the one that compiles would hardly get a turn."""
CHILD_SECONDS, STUCK_SECONDS = 60, 180
"""What a child may take, and a single call beside 32 others."""


class Branching(nn.Module):
    """Other layers for wide images, another scale for a single one: four programs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.wide, self.narrow = (nn.Conv2d(*c, 3, padding=1) for c in ((3, 8), (8, 6), (8, 6)))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        y = self.wide(y) if x.shape[-1] > 30 else F.relu(self.narrow(y))
        return y * 0.5 if x.shape[0] == 1 else y


MODULES: list[tuple[Callable[[], nn.Module], list[tuple[int, int]], list[tuple[int, int]]]] = [
    (
        Branching,
        [(1, 20), (2, 20), (5, 24), (1, 36), (3, 40), (2, 33), (4, 28), (1, 24), (5, 31), (1, 44)],
        [(3, 22), (1, 48)],
    ),
    (Small, [(1, 48), (2, 48), (3, 48), (1, 64), (4, 32), (5, 40)], [(2, 56), (1, 72)]),
    (Skip, [(n, w) for n in (1, 2, 3, 4, 5) for w in (18, 23, 32)], [(2, 27), (5, 19)]),
]
"""Each with batches and sizes that threads call, and such that only children do."""


@dataclass(frozen=True)
class Case:
    """A call, its answer computed alone, and whether every kernel of it is ours: then the bits are
    promised."""

    x: Tensor
    wanted: Tensor
    ours: bool

    def right(self, got: Tensor, by_rule: bool) -> bool:
        if by_rule and self.ours:
            return torch.equal(got, self.wanted)
        return got.shape == self.wanted.shape and float((got - self.wanted).abs().max()) <= CLOSE * float(
            self.wanted.abs().max()
        )


@dataclass
class Slot:
    """A model, its compiled form (replaced now and then, as services do), and calls with their answers."""

    model: nn.Module
    example: Tensor
    fast: aerogel.Compiled
    by_rule: bool = True
    cases: list[Case] = field(default_factory=list)
    new: list[Case] = field(default_factory=list)
    """Of sizes that no thread calls: for the children."""


@dataclass
class Counts:
    """What was done. A failure is put into words once."""

    calls: int = 0
    compiles: int = 0
    forks: int = 0
    programs: int = 0
    wrong: int = 0
    errors: int = 0
    hangs: int = 0
    said: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str, words: str = "") -> None:
        with self.lock:
            setattr(self, what, getattr(self, what) + 1)
            if words and len(self.said) < 20:
                self.said.append(f"{what}: {words}")

    @property
    def failed(self) -> int:
        return self.wrong + self.errors + self.hangs

    def numbers(self) -> dict[str, int]:
        return {
            n: getattr(self, n)
            for n in ("calls", "compiles", "forks", "programs", "wrong", "errors", "hangs")
        }

    def __str__(self) -> str:
        return "\n".join([", ".join(f"{n} {what}" for what, n in self.numbers().items()), *self.said])


def slots() -> list[Slot]:
    """The modules, and what they answer when nothing else runs."""
    made = []
    for number, (make, sizes, new) in enumerate(MODULES):
        generator = torch.Generator().manual_seed(number)
        images = [torch.randn(n, 3, w, w, generator=generator) for n, w in (*sizes, *new)]
        model = sparse(make())
        fast = aerogel.compile(model, images[0], tune="off", progress=False)
        cases = [_alone(fast, x) for x in images]
        made.append(Slot(model, images[0], fast, True, cases[: len(sizes)], cases[len(sizes) :]))
    return made


def _alone(fast: aerogel.Compiled, x: Tensor) -> Case:
    """Called until the answer is that of a program of its own."""
    fast(x)
    wanted, first = fast(x), fast.misfit([x]) is None
    native = any(
        key[2] == tuple(x.shape) and not any(p.node for p in program.parts)
        for key, program in runs(fast).programs.items()
    )
    return Case(x, wanted, first and native)


def _call(slot: Slot, case: Case, tally: Counts) -> None:
    fast, by_rule, where = slot.fast, slot.by_rule, f"{type(slot.model).__name__} at {tuple(case.x.shape)}"
    try:
        got = fast(case.x)
        if type(got) is not Tensor:
            tally.add("wrong", f"{where}: a {type(got).__name__}")
        elif not case.right(got, by_rule and slot.by_rule and fast is slot.fast):
            off = (
                (got - case.wanted).abs().max()
                if got.shape == case.wanted.shape
                else f"of shape {tuple(got.shape)}"
            )
            tally.add("wrong", f"{where}: off by {off}, ours: {case.ours}")
    except Exception:  # every call is one that the model takes
        tally.add("errors", f"{where}: {traceback.format_exc()}")
    tally.add("calls")


def _compile(every: list[Slot], rng: random.Random, number: int, tally: Counts, store: Path) -> None:
    """A new model, by turns with one of the modules again, compiled or copied: its further programs are then
    captured anew."""
    tune: str | float = 0.1 if number % TUNED == TUNED - 1 else "off"
    try:
        slot = rng.choice(every)
        if number % 4 == 1 and slot.by_rule:
            slot.fast = copy.deepcopy(slot.fast)
        elif number % 2:
            fast = aerogel.compile(
                slot.model, slot.example, tune=tune, progress=False, store=store / str(number)
            )
            slot.by_rule = (
                False  # first: bits are asked of a call only where this was by rule before and after it
            )
            slot.fast = fast
            slot.by_rule = tune == "off"
        else:
            c, k = rng.randrange(1, 9), rng.randrange(1, 17)
            steps = [
                nn.Conv2d(c, k, 3, rng.choice((1, 2)), 1),
                nn.ReLU(),
                nn.Conv2d(k, rng.randrange(1, 9), rng.choice((1, 3))),
            ]
            model, x = (
                nn.Sequential(*steps).eval(),
                torch.randn(rng.randrange(1, 4), c, 12 + rng.randrange(12), 16),
            )
            with torch.no_grad():
                for weight in (p for p in model.parameters() if p.dim() > 1):
                    weight.mul_(torch.rand_like(weight) < 0.3)
            fast = aerogel.compile(model, x, tune=tune, progress=False, store=store / str(number))
            with torch.no_grad():
                if not Case(x, model(x), False).right(fast(x), False):
                    tally.add("wrong", f"compile {number}: {model} at {tuple(x.shape)}")
    except Exception:
        tally.add("errors", f"compile {number}: {traceback.format_exc()}")
    tally.add("compiles")


def _child(every: list[Slot], rng: random.Random) -> int:
    """In a forked child: 0, or 1 where an answer is wrong, or 2 for an error."""
    signal.alarm(CHILD_SECONDS)
    try:
        for slot in every:
            for case in (rng.choice(slot.cases), rng.choice(slot.new)):
                if not case.right(slot.fast(case.x), slot.by_rule):
                    print(
                        f"child: {type(slot.model).__name__} at {tuple(case.x.shape)} is wrong",
                        file=sys.stderr,
                        flush=True,
                    )
                    return 1
        return 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 2


def _fork(every: list[Slot], rng: random.Random, tally: Counts, said: Any) -> None:
    said.seek(0)
    said.truncate()
    child = os.fork()
    if child == 0:
        os.dup2(said.fileno(), 2)
        os._exit(_child(every, rng))
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    tally.add("forks")
    if ended:
        said.seek(0)
        kind = {1: "wrong", -signal.SIGALRM: "hangs"}.get(ended, "errors")
        tally.add(kind, f"child {tally.forks} ended with {ended}: {said.read()[-6000:]}")


def run(seconds: float, seed: int, say: Callable[[str], object] = print, rest: float = 1.0) -> Counts:
    """All of it for so long. A thread that is stuck is shown and ends the process: it cannot be stopped."""
    tally, rng, ends, clock = Counts(), random.Random(seed), threading.Event(), [time.monotonic()] * CALLERS
    before = torch.get_num_threads()
    torch.set_num_threads(TORCH_THREADS)
    with (
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory() as folder,
        (Path(folder) / "child").open("w+") as said,
    ):
        # "tuned for 2 threads, running on 1", "torch runs calls of more than 8 kinds"
        warnings.simplefilter("ignore")
        faulthandler.register(signal.SIGALRM, file=said, chain=True)
        faulthandler.dump_traceback_later(2 * STUCK_SECONDS, exit=True)
        every, made = slots(), set[int]()
        say(
            f"{sum(c.ours for s in every for c in s.cases)} of {sum(len(s.cases) for s in every)} "
            "calls have bits promised"
        )

        def caller(own: int) -> None:
            mine = random.Random(seed * CALLERS + own)
            while not ends.is_set():
                slot = mine.choice(every)
                _call(slot, mine.choice(slot.cases), tally)
                clock[own] = time.monotonic()
                time.sleep(PAUSE * mine.random())

        def compiler() -> None:
            mine = random.Random(-seed - 1)
            for number in count():
                if ends.is_set():
                    return
                _compile(every, mine, number, tally, Path(folder))

        clock[:] = [time.monotonic()] * CALLERS
        threads = [threading.Thread(target=caller, args=(i,), daemon=True) for i in range(CALLERS)]
        threads.append(threading.Thread(target=compiler, daemon=True))
        for thread in threads:
            thread.start()
        stop = time.monotonic() + seconds
        while any(t.is_alive() for t in threads):
            faulthandler.dump_traceback_later(2 * STUCK_SECONDS, exit=True)
            if time.monotonic() < stop:
                _fork(every, rng, tally, said)
                time.sleep(min(rest * rng.random() * 2, max(0.0, stop - time.monotonic())))
            else:
                ends.set()
                time.sleep(0.05)
            for other in (o for slot in every for o in slot.fast._others._made):
                made.add(other._number)
            tally.programs = len(made)
            if any(
                t.is_alive() and time.monotonic() - c > STUCK_SECONDS
                for t, c in zip(threads, clock, strict=False)
            ):
                faulthandler.dump_traceback()
                tally.add("hangs", f"a call took more than {STUCK_SECONDS} seconds")
                break
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGALRM)
    torch.set_num_threads(before)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--record", action="store_true", help="append a line to benchmarks/results/reliability.jsonl"
    )
    asked = parser.parse_args()
    tally = run(60 * asked.minutes, asked.seed)
    print(tally, flush=True)
    if asked.record:
        head = {
            "kind": "stress",
            "commit": counts.commit(),
            "date": date.today().isoformat(),
            "machine": nightly.machine(),
        }
        nightly.append({**head, "seed": asked.seed, "minutes": asked.minutes, **tally.numbers()})
    os._exit(1 if tally.failed else 0)  # a stuck thread would keep the process


if __name__ == "__main__":
    main()
