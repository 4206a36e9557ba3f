"""Random networks: composed from a seed, judged in a child that may crash or hang, counted.

python -m tests.fuzz.networks --seed 1 --count 300
python -m tests.fuzz.networks --seed 123 --count 1 --only aliases
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.blocks import FEATURES, Block
from tests.fuzz.calls import COMMON_HEADS
from tests.fuzz.judge import Result, judge
from tests.fuzz.onnx_files import by_hand
from tests.fuzz.sketch import Size, Sketch, image
from tests.fuzz.spec import Spec
from tests.fuzz.texts import COMMON

ROOT = Path(__file__).parents[2]
SECONDS, PATIENCE, PIECE = 60.0, 3, 100
"""A network that takes longer is tried again alone for three times that, then it hangs; a child judges so
many."""
FAILURES = (
    "wrong", "untyped", "accepts", "zeroed", "follows", "copied", "saved", "overwritten", "changed model",
    "changed example", "state_dict", "trace", "crash", "hang",
)  # fmt: skip
"""wrong: a call. zeroed, follows, copied, saved: only after outputs were zeroed, the original's weights
changed, a copy, a file."""
SEPARATE = ("input effect",)
"""Counted and printed, but no failure: eager changes its argument and the compiled module does not."""
FILES = ("onnx dynamo", "onnx legacy", "onnx by hand")
EXPORTABLE = (
    "pads",
    "pools",
    "resize",
    "convs",
    "norms",
    "concat",
    "activations",
    "attention",
    "shared",
    "heads",
)
KINDS = (*FEATURES, *FILES)


def spec(seed: int, only: str | None = None) -> Spec:
    """The network of a seed. The feature goes round with the seed, its variants with each round; of one
    feature, with each seed."""
    rng = Random(seed)
    feature, turn = (only, seed) if only else (KINDS[seed % len(KINDS)], seed // len(KINDS))
    tune: str | float = 0.2 if rng.random() < 0.1 else "off"
    sparsity = rng.choice([0.0, 0.5, 0.8, 0.95])
    sketch = Sketch(rng)
    if feature == "onnx by hand":
        data, title = by_hand(rng, turn)
        sketch.channels = 3
        sketch.argument("image", image(3))
        return Spec(
            seed, f"{feature}: {title}", sketch, sizes(rng, set(), file=True), 0.0, "off", "by hand", data
        )
    if feature == "onnx dynamo" and turn % 3 and not only:
        feature = "onnx legacy"  # that exporter takes seconds
    file = feature.removeprefix("onnx ") if feature in FILES else ""
    inner = EXPORTABLE[turn % len(EXPORTABLE)] if file else feature
    blocks = FEATURES[inner]
    main = blocks[turn % len(blocks)]
    sketch.turns = turn // len(EXPORTABLE) if file else turn
    compose(sketch, main, not file)
    if file:
        tune = "off"
    title = f"{feature}{f' {inner}' if file else ''}"
    return Spec(seed, title, sketch, sizes(rng, sketch.flags, bool(file)), sparsity, tune, file)


def compose(s: Sketch, main: Block, odd: bool) -> None:
    """Stem, a few blocks with the main one among them, a head."""
    turn, s.turns = s.turns, -1

    def write(block: Block, chosen: bool = False) -> None:
        s.turns = turn if chosen else -1
        block.write(s)
        s.turns = -1

    if main.place == "whole":
        write(main, True)
        return
    s.channels = s.pick(1, 3, 3, 4)
    s.argument("image", image(s.channels))
    s.do("x = image")
    if main.place == "first":
        write(main, True)
    s.do(
        f"x = {s.pick('F.relu(', 'torch.tanh(', '(')}"
        f"{s.conv(s.pick(4, 5, 7, 8, 12, 16, 24, 32, 48), s.pick(1, 3, 3, 5))}(x))"
    )
    before = s.pick(0, 0, 1, 2)
    for i in range(3):
        if i == before and main.place == "middle":
            write(main, True)
        elif s.chance(0.6):
            texts = [t for t in COMMON if s.room(t) and not ("#halves" in t and i < before)]
            s.do(s.pick(*texts))
        elif odd and s.chance(0.25):
            feature = s.pick(
                "branches", "inplace", "aliases", "shared", "activations", "norms", "concat", "pads"
            )
            write(
                s.pick(
                    *[b for b in FEATURES[feature] if b.place == "middle" and s.room(b.text) and s.low >= 8]
                    or [Block(lambda _: None)]
                )
            )
    if main.place == "last":
        write(main, True)
    elif s.chance(0.4):
        write(s.pick(*FEATURES["heads"][:COMMON_HEADS]))


def sizes(rng: Random, flags: set[str], file: bool = False) -> list[tuple[Size, str]]:
    """The example's, and four more: other data, one image of another size, the far side of most branches, an
    odd one."""
    n, h, w = rng.choice([1, 1, 2, 3, 5] if not file else [2, 3]), rng.randint(8, 32), rng.randint(8, 32)
    layouts = ["contiguous"] * 4 + ["channels_last", "transposed", "sliced", "expanded"]
    plain = file or "contiguous" in flags or "writes_input" in flags
    far = Size(
        6 if n < 5 else 2, 31 - h % 2 if h < 16 else 9 - h % 2, 30 + w % 2 if w <= 16 else 12 + w % 2, True
    )
    square = rng.randint(8, 28)
    found = [Size(n, h, w), Size(n, h, w), Size(1, rng.randint(8, 32), rng.randint(8, 32)), far]
    found.append(
        Size(0 if rng.random() < 0.1 else rng.choice([1, 2, 3, 5]), square, square, rng.random() < 0.5)
    )
    return [(size, "contiguous" if plain else rng.choice(layouts)) for size in found]


def outcome(result: dict[str, Any]) -> str:
    """Return what became of a network in words that repeat: how it runs, and how many calls were refused.

    Whether kernels or torch run a network that is timed is for the machine to say; it is "whole" either way.
    """
    how = result["how"] or "not compiled"
    if spec(result["seed"]).tune != "off" and how not in ("not compiled", "parts"):
        how = "whole"
    refused = len(result["refused"]) + result["allowed"]
    return f"{how}, {refused} refused" if refused else how


@dataclass
class Tally:
    """Results added up."""

    results: list[dict[str, Any]] = field(default_factory=list)

    def number(self, name: str) -> int:
        return sum(int(r[name]) for r in self.results)

    def failed(self, *kinds: str) -> list[tuple[dict[str, Any], str, str]]:
        """A network's first failure of each kind; of a network that is wrong anyway, only that."""
        found = []
        for result in self.results:
            first = {
                kind: words for kind, words in reversed(result["failures"]) if kind in (kinds or FAILURES)
            }
            if "wrong" in first:
                first = {
                    kind: words
                    for kind, words in first.items()
                    if kind not in ("zeroed", "follows", "copied", "saved")
                }
            found += [(result, kind, words) for kind, words in first.items()]
        return found

    @property
    def answered(self) -> float:
        """Of the calls eager answers and aerogel may not refuse, the share that was not refused."""
        calls = self.number("calls") - self.number("allowed")
        return 1 - sum(len(r["refused"]) for r in self.results) / max(calls, 1)

    @property
    def whole(self) -> float:
        """Of the networks that compiled or should have, the share in one graph (or that torch runs, by
        measurement)."""
        never = ("not exported", "eager refuses the example")
        asked = [r for r in self.results if r["how"] not in never and not r["may_refuse"]]
        return sum(r["how"] not in ("", "parts") for r in asked) / max(len(asked), 1)

    def summary(self) -> str:
        seconds = sum(r["seconds"] for r in self.results)
        hows = Counter(r["how"] or "not compiled" for r in self.results)
        kinds = Counter(kind for _, kind, _ in self.failed(*FAILURES, *SEPARATE))
        refused = Counter(reason for r in self.results for reason in r["refused"])
        lines = [
            f"networks {len(self.results)}: " + ", ".join(f"{how} {n}" for how, n in hows.most_common()),
            f"calls eager answers {self.number('calls')}, right {self.number('right')}, refused "
            f"{sum(refused.values())}, "
            f"refused where that is right {self.number('allowed')}; calls eager refuses "
            f"{self.number('raised')}",
            f"answered {self.answered:.2%}, compiled whole {self.whole:.2%}, "
            f"{seconds / max(len(self.results), 1):.2f} s a network",
            "failures: " + (", ".join(f"{kind} {n}" for kind, n in kinds.most_common()) or "none"),
        ]
        return "\n".join(lines + [f"  refused {n}: {reason}" for reason, n in refused.most_common(30)])


def judged(seeds: list[int], only: str | None = None) -> Iterator[dict[str, Any]]:
    """Results of these networks. A child judges them; where it dies or stops, the network it was at is to
    blame."""
    left, again = list(seeds), False
    while left:
        piece, seconds = (left[:1], SECONDS * PATIENCE) if again else (left[:PIECE], SECONDS)
        command = [
            sys.executable,
            "-m",
            "tests.fuzz.networks",
            "--child",
            ",".join(map(str, piece)),
            *(["--only", only] if only else []),
        ]
        with tempfile.TemporaryFile() as errors:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT)
            done = 0
            try:
                for line in _lines(child, seconds):
                    yield json.loads(line)
                    done += 1
            except TimeoutError:
                child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()[-1:]
        hung = done < len(piece) and child.returncode == -9
        if hung and not again:
            left, again = left[done:], True
            continue
        again = False
        if done < len(piece):
            words = (
                f"no answer in {seconds:.0f} s" if hung else f"exit {child.returncode} {' '.join(said)[:200]}"
            )
            yield Result(
                piece[done], spec(piece[done], only).title, failures=[("hang" if hung else "crash", words)]
            ).json()
            done += 1
        left = left[done:]


def _lines(child: subprocess.Popen[bytes], seconds: float) -> Iterator[bytes]:
    """Lines as they come; TimeoutError where the next takes too long."""
    assert child.stdout is not None
    held = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(seconds):
                raise TimeoutError
            got = os.read(child.stdout.fileno(), 1 << 16)
            if not got:
                return
            *lines, held = (held + got).split(b"\n")
            yield from lines


def _child(seeds: list[int], only: str | None) -> None:
    """Judge and print, one line each; what others print goes to stderr."""
    import warnings

    import torch

    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for seed in seeds:
        print(json.dumps(judge(spec(seed, only)).json()), file=out, flush=True)


def run(seed: int, count: int, only: str | None = None, jobs: int = 1) -> Tally:
    """`count` networks from this seed on."""
    seeds = list(range(seed, seed + count))
    with ThreadPoolExecutor(jobs) as threads:
        parts = threads.map(lambda k: list(judged(seeds[k::jobs], only)), range(jobs))
        return Tally([r for part in parts for r in part])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", help="write every result there, one a line")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    os.environ.setdefault("AEROGEL_CACHE", str(ROOT / ".pytest_cache" / "aerogel"))
    if asked.child:
        _child([int(s) for s in asked.child.split(",")], asked.only)
        return 0
    tally = run(asked.seed, asked.count, asked.only, asked.jobs)
    if asked.json:
        Path(asked.json).write_text("".join(json.dumps(r) + "\n" for r in tally.results))
    only = f" --only {asked.only!r}" if asked.only else ""
    for result, kind, words in tally.failed(*FAILURES, *SEPARATE):
        print(
            f"{kind}: {words}\n  [{result['blocks']}] python -m tests.fuzz.networks --seed "
            f"{result['seed']} --count 1{only}"
        )
        if asked.count == 1:
            print(result["source"])
    print(tally.summary())
    return 1 if tally.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
