"""Counts, seeds, the parts of a night, and the page that is made from what they wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness import reliability
from tests import conftest, counts, nightly

ROOT = Path(__file__).parent.parent


@pytest.fixture
def chosen() -> Iterator[Any]:
    """choose(mode, seed), undone afterwards."""
    before = counts.mode(), counts.seed()
    yield counts.choose
    counts.choose(*before)


def test_a_tenth_and_a_fiftieth(chosen: Any) -> None:
    for mode, exact, fuzz, few in (
        ("nightly", 20_000, 3_000, 40),
        ("ci", 200, 32, 4),
        ("quick", 200, 32, 1),
    ):
        chosen(mode, 3)
        assert counts.count("exact") == len(counts.seeds("exact")) == exact
        assert counts.count("fuzz networks") == fuzz
        assert counts.count("disk full") == len(counts.some(range(40), counts.count("disk full"))) == few
    with pytest.raises(KeyError):
        counts.count("nothing of the kind")


def test_only_a_nights_seed_follows_the_commit() -> None:
    """CI and --quick give every commit the same verdict; a night of an unpacked archive has no commit."""
    commit = "0000010" + "f" * 33
    assert counts.default_seed("nightly", commit) == 16
    fixed = json.loads((ROOT / "tests" / "seeds.json").read_text())["seed"]
    for mode, known in (("ci", commit), ("quick", commit), ("ci", ""), ("quick", ""), ("nightly", "")):
        assert counts.default_seed(mode, known) == fixed


def test_another_seed_is_another_range(chosen: Any) -> None:
    chosen("nightly", 1)
    here = counts.seeds("exact", skip=5 * 20_000)
    chosen("nightly", 2)
    assert here[-1] < counts.seeds("exact")[0], "runs of different seeds share no case"


def test_in_turns_everything_is_taken(chosen: Any) -> None:
    taken = set[int]()
    for seed in range(10):
        chosen("ci", seed)
        own = counts.some(range(96))
        assert 9 <= len(own) <= 10
        taken |= set(own)
    assert taken == set(range(96))


def test_ci_runs_the_same_cases_of_a_long_test_for_every_seed(chosen: Any) -> None:
    """One of three neighbours, the first case always: a test of one case is never left out."""
    for seed in (0, 1, 2, 4711):
        chosen("ci", seed)
        assert [case for case in range(12) if counts.turn(case, 3)] == [0, 5, 7, 9]
        assert [case for case in range(4) if counts.turn(case, 2)] == [0, 3], "both values of two parameters"
        assert all(counts.turn(0, of) for of in range(1, 9))
    for mode in ("nightly", "quick"):
        chosen(mode, 0)
        assert all(counts.turn(case, 3) for case in range(12))


def test_every_test_that_takes_turns_runs_in_ci(chosen: Any) -> None:
    """And what is selected does not depend on the seed."""
    marks = {"a.py::cases": 2, "a.py::alone": 7, "b.py::cases": 2}
    names = [f"a.py::cases[{i}]" for i in range(5)] + ["a.py::alone", "b.py::cases[x]", "b.py::free"]
    items: list[Any] = []
    for name in names:
        of = marks.get(name.partition("[")[0])
        mark = SimpleNamespace(args=(of,)) if of else None
        items.append(SimpleNamespace(nodeid=name, get_closest_marker=lambda _, mark=mark: mark))
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config: Any = SimpleNamespace(getoption=lambda _: (1, 1), hook=hook)
    for mode, seed, wanted in (
        ("ci", 0, [0, 3, 4, 5, 6, 7]),
        ("ci", 4711, [0, 3, 4, 5, 6, 7]),
        ("quick", 0, list(range(8))),
        ("nightly", 1, list(range(8))),
    ):
        chosen(mode, seed)
        selected = list(items)
        conftest.pytest_collection_modifyitems(config, selected)
        assert [item.nodeid for item in selected] == [names[i] for i in wanted]


def test_parts_are_disjoint_whole_and_alike() -> None:
    names = [f"tests/test_suite.py::test_suite[{i}]" for i in range(213)] + [
        f"tests/test_x.py::test[{i}]" for i in range(700)
    ]
    of = nightly.dealt(names, 7)
    assert set(of) == set(names)
    assert nightly.dealt(names[::-1], 7) == of, "whatever order they are collected in"
    load = [sum(nightly._seconds(n) for n in names if of[n] == part) for part in range(1, 8)]
    assert max(load) - min(load) <= max(nightly.SECONDS.values())
    for bad in ("0/3", "4/3", "3", "a/b", "-1/3"):
        with pytest.raises(ValueError, match="k/n"):
            nightly.fraction(bad)


def test_a_run_says_its_seed_first_and_takes_its_part() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-p",
        "no:cacheprovider",
        "tests/test_house.py",
    ]
    asked = ([], *(["--nightly", "--part", f"{k}/2"] for k in (1, 2)))
    said = [
        subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True).stdout for more in asked
    ]
    assert said[0].startswith(f"seed {counts.FIXED['seed']}, ci counts, commit ")
    night = f"seed {counts.default_seed('nightly', counts.commit())}, nightly counts"
    assert said[1].startswith(night)
    assert said[2].startswith(night), "all parts of a night agree"
    whole, first, second = ({line for line in text.splitlines() if "::" in line} for text in said)
    assert first | second == whole != set(), "all of it"
    assert not first & second


def _line(part: str, **more: Any) -> dict[str, Any]:
    tally = nightly.Tally()
    tally.take("passed", "setup", [])
    tally.take("passed", "call", [("ran", ("workspaces", 300)), ("other", 1)])
    tally.take("failed", "call", [("ran", ("workspaces", 200))])
    tally.take("passed", "call", [("ran", ("exact: direct", 20_000))])
    tally.take("skipped", "setup", [("ran", ("fork", 200))])
    return json.loads(json.dumps(tally.line("c" * 40, part) | {"changed": False} | more))  # type: ignore[no-any-return]


def test_the_page_shows_what_was_run() -> None:
    line = _line("1/2")
    assert line["counts"] == {
        "exact: direct": {"passed": 20_000, "failed": 0},
        "workspaces": {"passed": 300, "failed": 200},
    }
    assert line["tests"] == {"passed": 2, "failed": 1, "skipped": 1}
    other = {"mapping": {"passed": 50, "failed": 0}, "workspaces": {"passed": 500, "failed": 0}}
    older = _line("1/3", commit="d" * 40, date="2026-01-02", counts=other)
    soak = {"kind": "soak", "commit": "e" * 40, "date": "2026-01-03", "hours": 12, "leaked_bytes": 0}
    page = reliability.page([older, line, line, soak], False)
    assert "1 of 2 parts" in page
    assert "| 300, and 200 in tests that failed | " in page, "the same part twice is counted once"
    assert f"| 50 | 2026-01-02, `{'d' * 12}` |" in page, "of each check the newest run that has it"
    assert "| exact |" not in page, "one method is not all of them"
    assert "fork" not in page.partition("## Run it yourself")[0], "what was not run is not listed"
    assert "missing" not in page
    assert f"`{'e' * 12}` |  | 12 hours, 0 leaked bytes |" in page
    assert line["machine"]["cpu"] in page
    assert "soak.png" not in page
    assert "soak.png" in reliability.page([], True)
    assert "pytest --nightly" in reliability.page([], False)


def test_every_check_has_its_row() -> None:
    every = {f"{name}: {m}" if m else name: {"passed": counts.FULL[name], "failed": 0}
             for name in reliability.WHAT for m in reliability.each(name) or ("",)}  # fmt: skip
    page = reliability.page([_line("1/1", counts=every)], False)
    for name in reliability.WHAT:
        assert f"| {name} | " in page
        assert f"| {counts.FULL[name]:,}" in page


def test_a_line_is_appended(tmp_path: Path) -> None:
    for part in ("1/2", "2/2"):
        nightly.append(_line(part), tmp_path / "lines.jsonl")
    assert [json.loads(one)["part"] for one in (tmp_path / "lines.jsonl").read_text().splitlines()] == [
        "1/2",
        "2/2",
    ]
