"""A long life in one process: python -m tests.fuzz.soak [--calls 20000] [--compiles 200] [--record]

Calls at hundreds of sizes, of which a module keeps a few bound, then compiles whose modules are dropped. On
the way memory, files, executable mappings and linked code are counted; none may grow. Writes
benchmarks/results/soak.json and docs/soak.png.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import aerogel
from aerogel.codegen.cpu import llvm
from tests import counts, nightly
from tests.small_models import Skip, sparse

SERIES = counts.ROOT / "benchmarks" / "results" / "soak.json"
PLOT = counts.ROOT / "docs" / "soak.png"
LOOKS = 100
"""On the way of each half."""
GROWTH, GROWTH_MB = 0.05, 30.0
"""What memory may grow from the second tenth to the last: both."""
KEPT = 6
"""One call in three is at one of so many sizes, which stay bound."""


@dataclass(frozen=True)
class Look:
    """The process after so many calls and compiles."""

    calls: int
    compiles: int
    seconds: float
    rss_mb: float
    fds: int
    executable: int
    linked: int


def look(calls: int, compiles: int, began: float) -> Look:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    executable = sum(line.split()[1][2] == "x" for line in Path("/proc/self/maps").read_text().splitlines())
    fds = len(os.listdir("/proc/self/fd"))
    rss = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Look(
        calls, compiles, round(time.monotonic() - began, 1), round(rss, 1), fds, executable, len(llvm._loaded)
    )


def called(many: int, seed: int, began: float, looks: int = LOOKS) -> Iterable[Look]:
    """Calls of one module at 640 sizes."""
    rng = random.Random(seed)
    model = sparse(Skip())
    sizes = [(n, h, w) for n in (1, 2) for h in range(12, 28) for w in range(12, 32)]
    fast = aerogel.compile(model, torch.randn(1, 3, 16, 16), tune="off", progress=False)
    usual, source = rng.sample(sizes, KEPT), torch.randn(2, 3, 32, 32)
    for i in range(many):
        n, h, w = rng.choice(usual if i % 3 == 2 else sizes)
        x = source[:n, :, :h, :w].contiguous()
        got = fast(x)
        if i % 100 == 0:
            with torch.no_grad():
                wanted = model(x)
            assert float((got - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max()), (
                f"call {i} at {n}x3x{h}x{w}"
            )
        if (i + 1) % max(1, many // looks) == 0:
            yield look(i + 1, 0, began)


class Net(nn.Module):
    """As many different ones as there are numbers, with a branch on sizes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        wide = 4 + number % 7
        self.a, self.b, self.c = (
            nn.Conv2d(3, wide, 3, padding=1),
            nn.Conv2d(wide, 8, 3, 2, 1),
            nn.Conv2d(8, 1 + number % 5, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.relu(self.a(x)))
        return self.c(torch.relu(y)) if x.shape[-1] > 20 else self.c(y)  # type: ignore[no-any-return]


def compiled(many: int, calls: int, began: float, store: Path, looks: int = LOOKS) -> Iterable[Look]:
    """Compiles; each module is called on both sides of its branch and dropped. One in ten is timed."""
    for i in range(many):
        model = sparse(Net(i), 0.8)
        fast = aerogel.compile(
            model, torch.randn(1, 3, 16, 16), tune=0.1 if i % 10 == 0 else "off", progress=False, store=store
        )
        for width in (16, 24, 24):
            x = torch.randn(1, 3, 16, width)
            with torch.no_grad():
                wanted = model(x)
            assert float((fast(x) - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max()), (
                f"model {i} at {width}"
            )
        del fast, model
        if (i + 1) % max(1, many // looks) == 0:
            yield look(calls, i + 1, began)


def grown(looks: list[Look]) -> list[str]:
    """What grew from the second tenth of a half to its last, in words."""
    tenth = max(1, len(looks) // 10)
    early, late = looks[tenth : 2 * tenth], looks[-tenth:]
    if len(looks) < 3 * tenth:
        return ["too few looks to tell"]
    said = []
    before, after = (median(one.rss_mb for one in part) for part in (early, late))
    if after - before > GROWTH_MB or after > before * (1 + GROWTH):
        said.append(f"memory from {before:.0f} to {after:.0f} MB")
    if late[-1].fds > early[-1].fds:
        said.append(f"open files from {early[-1].fds} to {late[-1].fds}")
    if (
        most := max(one.linked for one in looks)
    ) > llvm.STRONG + 64:  # those that a few bound sizes hold come on top
        said.append(f"linked code to {most} pieces")
    if (
        max(one.executable - one.linked for one in late)
        > max(one.executable - one.linked for one in early) + 8
    ):
        said.append(f"executable mappings from {early[-1].executable} to {late[-1].executable}")
    return said


def soak(
    calls: int, compiles: int, seed: int, say: Callable[[str], object] = print, looks: int = LOOKS
) -> tuple[dict[str, list[Look]], list[str]]:
    """The looks of each half, and what grew. One thread: that is what a busy service gives each process."""
    before, began = torch.get_num_threads(), time.monotonic()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            halves = {"calls": list[Look](), "compiles": list[Look]()}
            ways = {
                "calls": called(calls, seed, began, looks),
                "compiles": compiled(compiles, calls, began, Path(folder), looks),
            }
            for name, way in ways.items():
                for i, one in enumerate(way):
                    halves[name].append(one)
                    if i % 10 == 9:
                        say(str(one))
    finally:
        torch.set_num_threads(before)
    return halves, [f"{name}: {what}" for name, own in halves.items() for what in grown(own)]


def draw(halves: dict[str, list[Look]], machine: dict[str, Any], path: Path = PLOT) -> None:
    """Two panels: calls, compiles. Memory against the left axis, the counts against the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    highest = max(one.rss_mb for looks in halves.values() for one in looks)
    for panel, (name, looks) in zip(panels, halves.items(), strict=True):
        at = [getattr(one, name) for one in looks]
        (memory,) = panel.plot(at, [one.rss_mb for one in looks], color="C0", label="resident memory (left)")
        panel.set(xlabel=name, ylabel="resident memory, MB", ylim=(0, 1.15 * highest))
        panel.set_title(
            f"{at[-1]:,} calls at 640 sizes"
            if name == "calls"
            else f"{at[-1]:,} compiles, each module dropped"
        )
        right = panel.twinx()
        lines = [memory]
        for key, label, color in (
            ("fds", "open files", "C1"),
            ("executable", "executable mappings", "C2"),
            ("linked", "linked code", "C3"),
        ):
            lines += right.plot(
                at, [getattr(one, key) for one in looks], color=color, lw=1, label=f"{label} (right)"
            )
        right.set(ylabel="count", ylim=(0, None))
        panel.grid(alpha=0.3)
    figure.legend(handles=lines, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"One process, {machine['cpu']}, {machine['cores']} cores", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--compiles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--record", action="store_true", help="also append a line to benchmarks/results/reliability.jsonl"
    )
    asked = parser.parse_args()
    halves, said = soak(asked.calls, asked.compiles, asked.seed, lambda text: print(text, flush=True))
    machine = nightly.machine()
    kept = {name: [asdict(one) for one in looks] for name, looks in halves.items()}
    SERIES.write_text(json.dumps({"machine": machine, "commit": counts.commit(), **kept}, indent=1) + "\n")
    draw(halves, machine)
    if asked.record:
        first, last = halves["calls"][len(halves["calls"]) // 10], halves["compiles"][-1]
        head = {
            "kind": "soak",
            "commit": counts.commit(),
            "date": date.today().isoformat(),
            "machine": machine,
        }
        took = {"minutes": round(last.seconds / 60, 1), "mb_early": first.rss_mb, "mb_end": last.rss_mb}
        nightly.append(
            {
                **head,
                "seed": asked.seed,
                "calls": asked.calls,
                "compiles": asked.compiles,
                **took,
                "grew": said,
            }
        )
    print("\n".join(said) or "nothing grew")
    sys.exit(bool(said))


if __name__ == "__main__":
    main()
