"""Every seeded fault is caught. The list and the command to run it alone are in `faults.py`.

A run tries every second one, the others the day after: they take a third of CI's time. `--nightly` and `python -m tests.faults` try
all of them.
"""

from __future__ import annotations

from datetime import date

import pytest

from tests.faults import FAULTS, run


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=lambda n: f"{n}-{FAULTS[n].why.replace(' ', '_')}")
def test_fault_is_caught(number: int, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--quick"):
        pytest.skip("faults are not part of --quick")
    if (number + date.today().toordinal()) % 2 and not request.config.getoption("--nightly"):
        pytest.skip("its turn is tomorrow")
    assert run(FAULTS[number]) is not None, f"survived: {FAULTS[number].why}; python -m tests.faults --only {number}"
