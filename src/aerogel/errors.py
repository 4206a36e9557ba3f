"""The exceptions a user can meet. Each message names the thing and the remedy.

AerogelError
├── UnsupportedModel   a layer or model aerogel cannot take, and what to do instead
├── InvalidFile        a file, or what was packed, that is not what it claims to be
├── InvalidArgument    an argument or a text that means nothing; a ValueError too
├── PlanMismatch       a plan made for another machine, thread count or layout
└── ShapeError         sizes that do not fit, are missing or overflow; a ValueError too

Remedies are Python's; the command line says its own in their place (cli/words.py). Names in a message may
come from a file, so what a terminal would obey is shown and not sent.
"""


def printable(text: object) -> str:
    """One line that a terminal only shows: line ends are spaces, other control and direction characters are
    written out."""
    line = str(text)
    line = " ".join(line.split()) if "\n" in line or "\t" in line else line
    return (
        line
        if line.isprintable()
        else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    )


class AerogelError(Exception):
    """Anything aerogel refuses to do. A message often quotes a file: no control character in it reaches a
    terminal."""

    def __str__(self) -> str:
        return printable(super().__str__())


class UnsupportedModel(AerogelError):
    """The model or layer asks for something no method covers."""


class InvalidFile(AerogelError):
    """Bytes from outside do not parse."""


class InvalidArgument(AerogelError, ValueError):
    """An argument is of the wrong kind, or a text does not parse."""


class PlanMismatch(AerogelError):
    """A decision made for one machine or layout is used with another."""


class ShapeError(AerogelError, ValueError):
    """Sizes disagree, are missing, or are too large to address."""
