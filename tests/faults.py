"""Faults seeded by hand, one at a time, each of which the tests must catch.

    python -m tests.faults             every fault; prints who caught it and fails on a survivor
    python -m tests.faults --only 7    one of them
    python -m tests.faults --locate    finds the smallest test of those without one, into smallest.json

A fault is a file, the text to find in it (exactly once) and what to put there instead, in a copy of the
sources. The shared suite catches most (a crash counts: guard pages work by crashing); a fault that lives
elsewhere names its test. `smallest.json` holds what catches each of them alone, so that all of them can be
tried in a night. CI tries those that `seeds.json` lists, which every machine can catch.

The smallest test of some is for an ISA. Where the machine lacks that, everything the list names is tried, and
a fault that survives it was not tried at all.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from aerogel.ir import here_levels, host
from tests.breaking import Server
from tests.seeded import FAULTS, IDLE, METHOD, SUITE, Fault

SMALLEST = Path(__file__).parent / "smallest.json"
SWEEPS = (
    ("exact", 60, "1"),
    ("edges", 150, "1"),
    ("real", 60, "1"),
    ("special", 80, "1"),
    ("half", 60, "1"),
    ("half-edges", 60, "1"),
    ("half-special", 60, "1"),
    ("real", 40, "1,2,3"),
)
BYTES = {
    "quads": (("bytes", 60, "1"), ("bytes-edges", 100, "1")),
    "depthwise": (("depthwise", 60, "1"), ("depthwise-edges", 100, "1")),
}


def words(fault: Fault) -> list[list[str]]:
    """Its own smallest test, then everything that the list names: on another machine the smallest may be
    another."""
    own = smallest().get(fault.why)
    return [*([own] if own and not missing_level(fault) else []), *_wide(fault)]


def missing_level(fault: Fault) -> str:
    """Return the ISA that the smallest test of a fault runs on and this machine lacks; empty if it has it."""
    text = " ".join(smallest().get(fault.why, ()))
    named = re.search(r"(?<=--isa )\S+|(?<=[\[-])(avx512|avx2|generic)\b", text)
    if named is None:
        return ""
    isa, *products = named[0].split("+")
    return "" if isa in here_levels() and {*products} <= {*host().extras} else named[0]


def _wide(fault: Fault) -> list[list[str]]:
    on_gpu = re.search(r"::test_the_shared_cases_\w+\[(\w+)-([\w-]+)\]", fault.caught_by)
    if on_gpu:
        return [
            ["tests.suite.gpu", "--method", on_gpu[1], "--kind", on_gpu[2], "--stop", "1", "--count", "40"]
        ]
    if fault.caught_by != SUITE:
        return [[fault.caught_by]]
    method = METHOD.get(fault.file, "direct")
    sweeps = BYTES.get(method, (*(IDLE if method == "actsparse" else ()), *SWEEPS))
    head = ["tests.suite", "--method", method, "--stop", "1"]
    return [
        [*head, "--kind", kind, "--threads", threads, "--count", str(count)]
        for kind, count, threads in sweeps
    ]


def smallest() -> dict[str, list[str]]:
    """What catches each fault alone, as `--locate` found it: a case of the suite or one test."""
    return json.loads(SMALLEST.read_text()) if SMALLEST.exists() else {}


def run(fault: Fault, server: Server) -> dict[str, Any]:
    """What came of it: `caught` says how, and is empty for a survivor."""
    return server.ask(fault.file, fault.find, fault.put, *words(fault))


def locate(fault: Fault, server: Server) -> list[str] | None:
    """The first single case or test that catches the fault when nothing ran before it."""
    for wide in _wide(fault):
        if fault.caught_by != SUITE:
            answer = server.ask(fault.file, fault.find, fault.put, wide)
            named = re.search(r"python -m (tests\.suite\.gpu .*?) +#", answer["said"])
            found = named[1].split() if named else answer["failed"][:1] or wide
            return (
                found
                if answer["caught"] and server.ask(fault.file, fault.find, fault.put, found)["caught"]
                else None
            )
        first, count = 0, int(wide[-1])
        while first < count:
            asked = [*wide[:-1], str(count - first), "--seed", str(first), "--trace"]
            answer = server.ask(fault.file, fault.find, fault.put, asked)
            if not answer["caught"] or not answer["traced"]:
                break
            found = shlex.split(answer["traced"][0])
            if server.ask(fault.file, fault.find, fault.put, found)["caught"]:
                return found
            first = int(found[found.index("--seed") + 1]) + 1
    return None


def _locate_all(chosen: list[tuple[int, Fault]], server: Server) -> int:
    lost = 0
    for number, fault in chosen:
        found = locate(fault, server)
        lost += found is None
        print(f"{number:3d} {fault.why}: {'NOT FOUND' if found is None else ' '.join(found)}", flush=True)
        if found is not None:
            known = smallest() | {fault.why: found}
            ordered = {f.why: known[f.why] for f in FAULTS if f.why in known}
            lines = [f"  {json.dumps(why)}: {json.dumps(own)}" for why, own in ordered.items()]
            SMALLEST.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return lost


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of some faults")
    parser.add_argument(
        "--locate", action="store_true", help="find the smallest test of those that have none, or of --only"
    )
    given = parser.parse_args()
    chosen = [(n, fault) for n, fault in enumerate(FAULTS) if given.only is None or n in given.only]
    server, survivors = Server(), 0
    if given.locate:
        missing = [(n, fault) for n, fault in chosen if given.only is not None or fault.why not in smallest()]
        return 1 if _locate_all(missing, server) else 0
    for number, fault in chosen:
        done = run(fault, server)
        untried = "a tool" if done["skipped"] else missing_level(fault)
        survivors += not done["caught"] and not untried
        said = f"not tried, {untried} is missing" if untried else "SURVIVED"
        said = f"caught by {done['caught']}" if done["caught"] else said
        print(f"{number:3d} {fault.why}: {said}", flush=True)
    server.close()
    print(f"{survivors} of {len(chosen)} faults survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
