"""The exceptions a user can meet. Each message names the thing and the remedy.

AerogelError
├── UnsupportedModel   a layer or model aerogel cannot take, and what to do instead
├── InvalidFile        a file, or what was packed, that is not what it claims to be
├── InvalidArgument    an argument or a text that means nothing; a ValueError too
├── PlanMismatch       a plan made for another machine, thread count or layout
├── ShapeError         sizes that do not fit, are missing or overflow; a ValueError too
└── UnsupportedTorch   a torch that is too old; an ImportError too

UntestedTorchWarning   a torch newer than every tested one

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
    """Anything aerogel refuses to do; the message says what to do instead.

    Example:
        >>> try:
        ...     aerogel.load("nothing.aero")  # doctest: +ELLIPSIS
        ... except aerogel.AerogelError as why:
        ...     print(why)
        'nothing.aero' cannot be read: No such file or directory. Check the path...
    """

    # a message often quotes a file: no control character in it reaches a terminal

    def __str__(self) -> str:
        return printable(super().__str__())


class UnsupportedModel(AerogelError):
    """The model or layer asks for something that cannot be done.

    Example:
        >>> issubclass(aerogel.UnsupportedModel, aerogel.AerogelError)
        True
    """


class InvalidFile(AerogelError):
    """A file is damaged, hostile, or none of ours.

    Example:
        >>> size = open("text.aero", "w").write("no model")
        >>> aerogel.load("text.aero")
        Traceback (most recent call last):
        aerogel.errors.InvalidFile: ...
    """


class InvalidArgument(AerogelError, ValueError):
    """An argument is of the wrong kind, or a text does not parse."""


class PlanMismatch(AerogelError):
    """A decision made for one machine or model is used with another.

    Example:
        >>> other = aerogel.compile(nn.Conv2d(3, 8, 1), x, tune="off").plan
        >>> aerogel.compile(model, (x,), plan=other)
        Traceback (most recent call last):
        aerogel.errors.PlanMismatch: ...
    """


class ShapeError(AerogelError, ValueError):
    """Sizes disagree, are missing, or are too large to address.

    Example:
        >>> fast = aerogel.compile(model, (x,), tune="off")
        >>> fast.run(None, {"images": x.numpy()})
        Traceback (most recent call last):
        aerogel.errors.ShapeError: ...
    """


class UnsupportedTorch(AerogelError, ImportError):
    """The installed torch is older than every version that aerogel runs on."""


class UntestedTorchWarning(UserWarning):
    """The installed torch is newer than every version that aerogel is tested with.

    The first `compile` or `load` of a process warns; everything works as far as torch has not changed.

    Example:
        >>> import warnings
        >>> warnings.filterwarnings("ignore", category=aerogel.errors.UntestedTorchWarning)
    """
