"""What is being done, while it is being done: one line on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from aerogel.errors import printable

Advance = Callable[[str], None]
"""Says what is begun."""


def progress_line(wanted: bool | None) -> AbstractContextManager[Advance]:
    """A line on the terminal that says what is being done; nothing where there is no terminal, unless asked
    for."""
    from rich.console import Console

    console = Console(stderr=True)
    if wanted is False or (wanted is None and not console.is_terminal):
        return nullcontext(lambda _: None)
    return _Status(console)


class _Status(AbstractContextManager[Advance]):
    def __init__(self, console: Any) -> None:
        self.status = console.status("aerogel")

    def __enter__(self) -> Advance:
        from rich.text import Text

        self.status.start()
        return lambda text: self.status.update(Text(f"aerogel: {printable(text)}"))

    def __exit__(self, *_: object) -> None:
        self.status.stop()
