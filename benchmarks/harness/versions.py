r"""Two versions of aerogel beside each other in one run: the same bits, and no slower.

    python -m benchmarks.harness.versions answers OLD NEW --json versions.jsonl
    python -m benchmarks.harness.versions speed OLD NEW \
        --pattern resnet50-90.npz --json versions.jsonl

OLD and NEW are checkouts. `answers` lets OLD compile every architecture (by rule) at 0, 80 and 95 % zeros and
save it; NEW loads the file, and its outputs must be the same bits. `speed` lets both load the file that OLD
compiled and calls them in turn; then processes that load it and give their first answer, in turn. With
`--tune default --own` each compiles the model itself, with an empty store, and is called in turn: what a user
gains by the new version, and what it costs to compile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.nightly import machine

SPARSITIES = (0.0, 0.8, 0.95)
_CHILD = r"""
import json, pathlib, sys, time
import numpy as np, torch
import aerogel
try:
    from aerogel.zoo import models
    from benchmarks.zoo.patterns import prune_pattern
except ModuleNotFoundError:  # where they stood in earlier versions
    try:
        from benchmarks.zoo import models
    except ModuleNotFoundError:
        from benchmarks import models
    prune_pattern = models.prune_pattern
torch.set_num_threads(int(sys.argv[1]))
for line in sys.stdin:
    asked = json.loads(line)
    torch.manual_seed(0)
    began, cpu = time.perf_counter(), time.process_time()
    if asked["do"] == "save":
        model = models.make(asked["model"]).eval()
        if asked["pattern"]:
            prune_pattern(model, pathlib.Path(asked["pattern"]))
        elif asked["sparsity"]:
            models.prune(model, asked["sparsity"])
        args, kwargs = models.example(asked["model"])
        fast = aerogel.compile(model, args, kwargs, tune=asked["tune"], progress=False)
        answer = "saved"
        try:
            aerogel.save(fast, asked["file"])
        except aerogel.UnsupportedModel:
            answer = "compiled in parts"
    elif asked["do"] == "load":
        fast = aerogel.load(asked["file"])
        answer = None
    elif asked["do"] == "call":
        args, kwargs = models.example(asked["model"])
        began = time.perf_counter()
        for _ in range(asked["times"]):
            fast(*args, **kwargs)
        answer = None
    else:
        args, kwargs = models.example(asked["model"])
        found = torch.utils._pytree.tree_leaves(fast(*args, **kwargs))
        np.savez(asked["file"], *(t.float().numpy() for t in found))
        answer = [str(t.dtype) for t in found]
    print(json.dumps([time.perf_counter() - began, answer, time.process_time() - cpu]), flush=True)
"""


class Version:
    """A process that speaks for one version."""

    def __init__(self, folder: Path, threads: int, store: Path | None = None) -> None:
        own = folder.resolve()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(own / "src"), str(own)])}
        if store is not None:
            environment["AEROGEL_CACHE"] = str(store)
        pipe = subprocess.PIPE
        self.answer: Any = None
        self.cpu = 0.0
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _CHILD, str(threads)],
            stdin=pipe, stdout=pipe, text=True, env=environment, cwd=own,
        )  # fmt: skip

    def ask(self, do: str, **more: Any) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"do": do, **more}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process ended at '{do}' {more}")
        spent, self.answer, self.cpu = json.loads(line)
        return float(spent)

    def close(self) -> None:
        with self.process:
            pass


def answers(given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    from aerogel.zoo import models

    old, new = (Version(own, given.threads) for own in (given.old, given.new))
    rows = []
    for name in given.models.split(",") if given.models else sorted(models.MODELS):
        for sparsity in SPARSITIES:
            file = str(folder / "model.aero")
            more = {"model": name, "sparsity": sparsity, "pattern": "", "tune": "off"}
            old.ask("save", file=file, **more)
            if old.answer == "saved":
                new.ask("load", file=file)
            else:  # no file to pass on: each compiles its own
                new.ask("save", file=file, **more)
            for version, own in ((old, "old.npz"), (new, "new.npz")):
                version.ask("answer", model=name, file=str(folder / own))
            with np.load(folder / "old.npz") as a, np.load(folder / "new.npz") as b:
                same = all(np.array_equal(a[k], b[k], equal_nan=True) for k in {*a.files, *b.files})
            rows.append({"kind": "versions answers", "model": name, "sparsity": sparsity, "same": same})
            print(name, sparsity, "the same bits" if same else "OTHER BITS", flush=True)
    old.close()
    new.close()
    return rows


def _in_turn(old: Version, new: Version, name: str, rounds: int) -> list[float]:
    """Old over new, call by call; both end with it."""
    for version in (old, new):
        version.ask("call", model=name, times=5)
    found = []
    for _ in range(rounds):
        spent = [version.ask("call", model=name, times=3) for version in (old, new)]
        found.append(spent[0] / spent[1])
    old.close()
    new.close()
    return found


def _row(kind: str, given: argparse.Namespace, **ratios: list[float]) -> dict[str, Any]:
    """Quartiles of each, printed too."""
    row: dict[str, Any] = {"kind": kind, "pattern": given.pattern.stem, "threads": given.threads}
    for name, several in ratios.items():
        row[name] = [round(float(q), 4) for q in np.quantile(several, [0.25, 0.5, 0.75])]
        print(f"{name}: new is {row[name][1]:.3f} times as fast as old (quartiles {row[name]})")
    return row


def speed(given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    file, name = str(folder / "model.aero"), given.pattern.stem.partition("-")[0]
    old, new = (Version(own, given.threads) for own in (given.old, given.new))
    pattern = str(given.pattern.resolve())
    old.ask("save", model=name, sparsity=0, pattern=pattern, tune=given.tune, file=file)
    for version in (old, new):
        version.ask("load", file=file)
    calls, firsts = _in_turn(old, new, name, given.rounds), list[float]()
    for _ in range(given.starts):
        spent = []
        for own in (given.old, given.new):
            version = Version(own, given.threads)
            version.ask("load", file=file)
            version.ask("call", model=name, times=1)
            spent.append(time.perf_counter() - version.began)
            version.close()
        firsts.append(spent[0] / spent[1])
    return [_row("versions speed", given, call=calls, **{"load and first answer": firsts})]


def own(given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Each version's own choices, and the CPU seconds of making them."""
    name, pattern = given.pattern.stem.partition("-")[0], str(given.pattern.resolve())
    trees = {"old": given.old, "new": given.new}
    old, new = (Version(tree, given.threads, folder / which) for which, tree in trees.items())
    more = {"model": name, "sparsity": 0, "pattern": pattern, "tune": given.tune}
    seconds = []
    for version in (old, new):
        version.ask("save", file=str(folder / "model.aero"), **more)
        seconds.append(version.cpu)
    row = _row("versions own", given, call=_in_turn(old, new, name, given.rounds))
    row["compile, CPU s"] = [round(s, 1) for s in seconds]
    print(f"compiling took {seconds[1] / seconds[0]:.2f} times the CPU seconds ({row['compile, CPU s']})")
    return [row]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=("answers", "speed"))
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--models", default="", help="some of the architectures; default all")
    parser.add_argument("--pattern", type=Path, default=Path("../shared/patterns/resnet50-90.npz"))
    parser.add_argument("--tune", default="off")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--starts", type=int, default=8, help="processes of each that load and answer once")
    parser.add_argument("--json", type=Path, help="append the rows there")
    parser.add_argument("--own", action="store_true", help="speed: each compiles the model itself")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = answers if given.what == "answers" else own if given.own else speed
        rows = run(given, Path(folder))
    if given.json:
        with given.json.open("a") as file:
            file.writelines(json.dumps({**row, "machine": machine()}) + "\n" for row in rows)
    if not all(row.get("same", True) for row in rows):
        raise SystemExit("answers differ")


if __name__ == "__main__":
    main()
