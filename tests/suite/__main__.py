"""Repeat a case, or a range of them: python -m tests.suite --kind exact --seed 17 [--count 1000] [--method
direct] [--isa avx2]"""

from __future__ import annotations

import argparse
import sys

from tests.suite.cases import KINDS
from tests.suite.sweep import levels, native, sweep


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suite", description=__doc__)
    parser.add_argument("--method", help="a name from METHODS (default: every one with kernels of ours)")
    parser.add_argument("--isa", help="avx512, avx2, generic or avx2+avx512vnni (default: all that run here)")
    parser.add_argument("--kind", choices=KINDS, default="exact")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument(
        "--threads", default="1", help="thread counts whose results must have the same bits, e.g. 1,2,3,8"
    )
    parser.add_argument("--stop", type=int, default=5, help="give up after this many failures")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="one case after the other, each said before it runs, until one fails",
    )
    parser.add_argument("--few", action="store_true", help="of few shapes of kernel, as in CI")
    given = parser.parse_args()
    threads = tuple(int(t) for t in given.threads.split(","))
    if given.trace:
        return trace(given.method, given.kind, range(given.seed, given.seed + given.count), threads)
    failed = 0
    for name in [given.method] if given.method else native():
        seeds = range(given.seed, given.seed + given.count)
        done = sweep(name, given.kind, seeds, threads, given.isa, given.stop, given.few)
        failed += len(done.failures)
        print(f"{name} {given.kind}: {done.ran} ran, {done.refused} refused, {len(done.failures)} failed")
        for line in done.failures[:10]:
            print("  " + line)
    return 1 if failed else 0


def trace(name: str, kind: str, seeds: range, threads: tuple[int, ...]) -> int:
    """So that even a crash says its case. AVX2 first: most machines have it."""
    for seed in seeds:
        for isa in sorted(levels(name), key=lambda level: level != "avx2"):
            said = (
                f"--method {name} --kind {kind} --seed {seed} --isa {isa} --threads "
                f"{','.join(map(str, threads))}"
            )
            print(f"trace: tests.suite {said}", flush=True)
            if sweep(name, kind, [seed], threads, isa, 1).failures:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
