"""Every seeded fault is caught, each by a test of its own. The list and the command to run one alone are in
`faults.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests import counts
from tests.breaking import Server
from tests.faults import missing_level, run, smallest, words
from tests.seeded import FAULTS

EVERY = range(len(FAULTS))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    own = Server()
    yield own
    own.close()


def chosen() -> list[int]:
    """Return all of them in a night, those of `seeds.json` in CI, the first few of those with --quick."""
    if counts.mode() == "nightly":
        return list(EVERY)
    number = {fault.why: i for i, fault in enumerate(FAULTS)}
    return [number[why] for why in counts.FIXED["faults"]][: counts.count("faults")]


@pytest.mark.parametrize("number", chosen(), ids=lambda n: f"{n}-{FAULTS[n].why.replace(' ', '_')}")
def test_fault_is_caught(number: int, server: Server, ran: Callable[[str, int], None]) -> None:
    done = run(FAULTS[number], server)
    if done["skipped"]:
        pytest.skip(f"the test that catches it is skipped here: {smallest().get(FAULTS[number].why)}")
    if not done["caught"] and (level := missing_level(FAULTS[number])):
        pytest.skip(f"only {level} is known to catch it: {smallest()[FAULTS[number].why]}")
    ran("faults", 1)
    assert done["caught"], (
        f"survived: {FAULTS[number].why}; python -m tests.faults --only {number}\n{done['said'][-1000:]}"
    )


def test_sound_sources_pass_the_smallest_tests(server: Server) -> None:
    """A test that fails on sound sources catches anything; a few of them each time, all in a night."""
    able = [fault for fault in FAULTS if fault.why in smallest() and not missing_level(fault)]
    every = sorted({tuple(smallest()[fault.why]) for fault in able})
    for test in counts.some(every, None if counts.mode() == "nightly" else 4):
        done = server.ask("", "", "", list(test))
        assert not done["caught"], f"{test}: {done['said']}"


def test_every_fault_has_a_smallest_test() -> None:
    reasons = [fault.why for fault in FAULTS]
    assert len(set(reasons)) == len(reasons), "two faults have the same name"
    assert set(smallest()) <= set(reasons), "smallest.json holds a fault that is not in the list"
    wide = {fault.why for fault in FAULTS if "::" not in fault.caught_by}
    assert wide <= set(smallest()), (
        f"python -m tests.faults --locate finds what catches {sorted(wide - set(smallest()))}"
    )


def test_every_fault_stands_once() -> None:
    """In every run, and not only where its turn has come."""
    for fault in FAULTS:
        text = (counts.ROOT / "src" / "aerogel" / fault.file).read_text()
        assert text.count(fault.find) == 1, f"{fault.why}: {fault.file} has it {text.count(fault.find)} times"


def test_faults_that_ci_tries_need_no_special_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without AVX-512 tries the same ones, and leaves those alone that only AVX-512 shows."""
    listed = counts.FIXED["faults"]
    assert len(set(listed)) == len(listed) == counts.CI["faults"]
    by_reason = {fault.why: fault for fault in FAULTS}
    monkeypatch.setattr("tests.faults.here_levels", lambda: ("avx2", "generic"))
    assert not [why for why in listed if missing_level(by_reason[why])]
    for why in ("sums of high registers go to low ones", "bf16 ties round away from even"):
        assert missing_level(by_reason[why]) == "avx512"
        assert smallest()[why] not in words(by_reason[why])
