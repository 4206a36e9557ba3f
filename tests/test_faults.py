"""Every seeded fault is caught, each by a test of its own. The list and the command to run one alone are in
`faults.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests import counts
from tests.breaking import Server
from tests.faults import run, smallest
from tests.seeded import FAULTS

EVERY = range(len(FAULTS))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    own = Server()
    yield own
    own.close()


def chosen() -> list[int]:
    """All of them in a night, a tenth in CI (others with another commit), a few with --quick."""
    return list(EVERY) if counts.mode() == "nightly" else counts.some(EVERY, counts.count("faults"))


@pytest.mark.parametrize("number", chosen(), ids=lambda n: f"{n}-{FAULTS[n].why.replace(' ', '_')}")
def test_fault_is_caught(number: int, server: Server, ran: Callable[[str, int], None]) -> None:
    done = run(FAULTS[number], server)
    if done["skipped"]:
        pytest.skip(f"the test that catches it is skipped here: {smallest().get(FAULTS[number].why)}")
    ran("faults", 1)
    assert done["caught"], (
        f"survived: {FAULTS[number].why}; python -m tests.faults --only {number}\n{done['said'][-1000:]}"
    )


def test_sound_sources_pass_the_smallest_tests(server: Server) -> None:
    """A test that fails on sound sources catches anything; a few of them each time, all in a night."""
    every = sorted({tuple(words) for words in smallest().values()})
    for words in counts.some(every, None if counts.mode() == "nightly" else 4):
        done = server.ask("", "", "", list(words))
        assert not done["caught"], f"{words}: {done['said']}"


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
