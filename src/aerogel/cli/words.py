"""The command line's own words: remedies as flags where a sentence names Python's, and failures as sentences.

The library's sentences are Python's, in errors, notes, refusals and files that were saved with them.
`in_shell` turns the remedies in them into the command line's; a test reads every sentence that is raised and
fails where one is left.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from aerogel.errors import AerogelError, printable

TRACEBACK = [False]
"""Whether errors are shown as Python shows them: --traceback."""
_FAULT = "This is a fault of aerogel: please report it with what 'aerogel --traceback ...' prints"


def _shape(found: re.Match[str]) -> str:
    sizes = "x".join(re.findall(r"\d+", found[2])) or "1x3x640x640"
    return f"Say --shape {found[1]}={sizes}"


_REMEDIES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"Call aerogel\.compile\(path, shapes=\{\"(.*?)\": ([^}]*)\}\)", _shape),
    (r"give them as args, or their sizes as shapes=\{name: sizes\}", "say --shape NAME=1x3x640x640 for each"),
    (r"shapes=\{name: sizes\}", "--shape NAME=1x3x640x640"),
    (r"shapes=\{\"images\": \(1, 3, 640, 640\)\}", "--shape images=1x3x640x640"),
    (r"aerogel\.load\(path\) opens it", "aerogel explain and aerogel bench open it"),
    (r"load\(\) takes the path", "a model is the path"),
    (r"with an example like this call", "with --shape NAME=1x3x640x640 like this call"),
    (r"with an example of the new size", "with --shape NAME=1x3x640x640 of the new size"),
    (r"load\(path, tune=['\"](\w+)['\"]\)", r"--tune \1"),
    (r"\(tune=['\"](\w+)['\"]\)", r"(--tune \1)"),
    (r"\btune is 'off', 'fast', 'full' or seconds", "--tune is off, fast, full or seconds"),
    (r"[Cc]all torch\.set_num_threads\((\w+)\)", r"say --threads \1"),
    (
        r"dtype must be None, torch\.float16, torch\.bfloat16 or \"int8\"",
        "--dtype must be float16, bfloat16 or int8",
    ),
    (r"Leave dtype out", "Leave --dtype out"),
    (
        r"Load its weights into a torch\.nn\.Module, then call aerogel\.compile\(model, \(x,\)\)",
        "Say package.module:build and --weights FILE.safetensors",
    ),
    (
        r"Compile torch\.export\.load\(path\)\.module\(\) with an example input",
        "Say --trust-pickle to compile it",
    ),
    (r"aerogel\.compile\((['\"])(.*?)\1\)", r"aerogel compile \2 -o FILE.aero"),
    (r"Call aerogel\.compile\(model, \(x,\)\)", "Say --shape NAME=1x3x224x224"),
    (r"say state= with another folder", "say --state with another folder"),
    (r"\bpattern='(\w+)'", r"--pattern \1"),
    (r"aerogel\.prune\(model, ([\d.]+)\)", r"aerogel prune MODEL -o FILE --sparsity \1"),
    (r"advise\(model, args, speedup=([\d.]+)\)", r"aerogel advise MODEL --speedup \1"),
    (
        r"give real inputs as compile\(calibration=\.\.\.\)",
        "real inputs are given in Python, compile(calibration=...)",
    ),
    (r"\bexplain\(\) says", "aerogel explain says"),
    (r"explain\(fast, layer=('.*?')\), or all of it: verbose=True", r"--layer \1, or all of it: --verbose"),
)


def in_shell(text: str) -> str:
    """A sentence of the library with the command line's remedies."""
    for pattern, remedy in _REMEDIES:
        text = re.sub(pattern, remedy, text)
    return text


def refuse(why: BaseException, said: str = "") -> typer.Exit:
    """Say what is wrong on stderr, in one line; exit code 1."""
    typer.echo(f"{type(why).__name__}: {said or printable(in_shell(str(why)))}", err=True)
    return typer.Exit(1)


def first_line(why: BaseException) -> str:
    """The first line of what somebody else raised, or its type where it says nothing."""
    return printable((str(why).strip().splitlines() or [""])[0][:300]) or type(why).__name__


@contextmanager
def in_words() -> Iterator[None]:
    """What is refused or goes wrong within is a sentence on stderr and exit code 1, not a traceback; so are
    warnings."""
    with warnings.catch_warnings():
        warnings.showwarning = _warned
        try:
            yield
        except (typer.BadParameter, typer.Exit, typer.Abort):
            raise
        except Exception as why:
            if TRACEBACK[0]:
                raise
            if isinstance(why, AerogelError):
                raise refuse(why) from None
            if isinstance(why, MemoryError):
                raise refuse(
                    why, "there is not enough memory here for this model; try a smaller --shape or --batch"
                ) from None
            raise refuse(why, f"{first_line(why).rstrip('.')}. {_FAULT}.") from None


def _warned(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    typer.echo(f"{category.__name__}: {printable(in_shell(str(message)))}", err=True)


def safe_output() -> None:
    """A name that the terminal's encoding has not is written out, where Python would raise."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
