"""The command `aerogel`: Ctrl-C ends it with one line and exit code 130, also while it still imports."""

import sys

INTERRUPTED = 130
"""The exit code of a command that was interrupted, as shells have it: 128 and the signal's number."""


def main() -> None:
    """Run the command line."""
    try:
        from aerogel.cli.main import app  # imports torch: a second in which people press Ctrl-C

        app()
    except KeyboardInterrupt:
        _leave()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _leave()
        raise


def _leave() -> None:
    """End the process with one line."""
    sys.stderr.write("Interrupted.\n")
    raise SystemExit(INTERRUPTED)
