"""A training that is killed once: `python -m tests.dying 10 MARK program.py ...` sends SIGKILL to itself
after ten steps of a Schedule, unless the file MARK is there, which it writes first."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from aerogel.pruning.schedule import Schedule


def mortal(after: int, mark: Path) -> None:
    """Schedules of this process are so from now on."""
    step = Schedule.step

    def dying(self: Schedule) -> None:
        step(self)
        if self.count == after and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Schedule.step = dying  # type: ignore[method-assign]


if __name__ == "__main__":
    mortal(int(sys.argv[1]), Path(sys.argv[2]))
    sys.argv = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")
