"""What the verbs of the command line share: their options, and what each option takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from aerogel.errors import InvalidArgument, printable
from aerogel.ir import MOST_THREADS
from aerogel.ir.dtypes import suggest_precision
from aerogel.optional import import_optional
from aerogel.outputs import Input, check_output

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
_MODEL = typer.Argument(
    help="model.onnx, model.aero, package.module:build, or model.pt2 with --trust-pickle."
)
Model = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]
Zoo = Annotated[
    str | None,
    typer.Option("--zoo", help="In a model's place: an architecture with seeded weights, such as resnet50."),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="NAME=1x3x640x640, once for each input whose sizes the model leaves open."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, max=MOST_THREADS, help="Threads to run and tune with; torch's own number if not given."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float16 or bfloat16: weights and maps in 16 bits; int8: in bytes (compile, advise and slim). "
        "Never changed unasked."
    ),
]
Tune = Annotated[
    str | None,
    typer.Option(
        help="off (rules, no timing), fast, full, or seconds for the whole call.  [default: "
        "fast; .aero: as saved]"
    ),
]
Stored = Annotated[
    str | None,
    typer.Option(
        "--store", help="Folder of tuning records, or s3://bucket/path; the user's own if not given."
    ),
]
Weights = Annotated[
    Path | None, typer.Option(help="A .safetensors file with the state of package.module:build's module.")
]
Trust = Annotated[
    bool, typer.Option("--trust-pickle", help="Read a .pt2, which may run Python code of whoever made it.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on the terminal.")]
Calibration = Annotated[
    Path | None,
    typer.Option(help="Real inputs, for int8: a folder of images, or a .npy or .npz file of arrays."),
]
Sparsity = Annotated[
    float | None,
    typer.Option(help="Prune every layer by magnitude first: the speed it would have, not the accuracy."),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Batch to tune for.")]


def numbers(text: str, flag: str) -> list[int]:
    """A list of whole numbers above zero, as in 1,8."""
    if text and not all(n.isascii() and n.isdigit() and 0 < int(n) < 2**31 for n in text.split(",")):
        raise typer.BadParameter(f"{flag} is a list of numbers such as 1,8, not '{printable(text)}'")
    return [int(n) for n in text.split(",") if n]


Ranges = Annotated[
    str | None,
    typer.Option(
        help="For int8, how far a map's bytes reach: mean-square, percentile or min-max.  [default: "
        "mean-square]"
    ),
]


def half(dtype: str | None, calibration: object = None) -> str | None:
    """The name of a precision; int8 where something shows which numbers maps hold."""
    if dtype == "int8" and calibration is not None:
        return dtype
    if dtype == "int8":
        raise typer.BadParameter(
            "--dtype int8 looks at real inputs: say compile --calibration with a folder of images and "
            "--preprocess, or with a .npz file of arrays. What it writes, the other verbs take"
        )
    if dtype not in (None, "float16", "bfloat16"):
        raise typer.BadParameter(
            f"--dtype must be float16, bfloat16 or int8; got '{printable(dtype)}'. {suggest_precision(dtype)}"
        )
    return dtype


def reach(ranges: str) -> str:
    """How int8 takes the range of a map."""
    from aerogel.tune.quantize import RANGES

    if ranges not in RANGES:
        raise typer.BadParameter(f"--ranges is one of {', '.join(RANGES)}; not '{printable(ranges)}'")
    return ranges


def effort(tune: str | None) -> str | float | None:
    """`off`, `fast`, `full`, or a number of seconds; None where nothing was said."""
    if tune is None or tune in ("off", "fast", "full"):
        return tune
    seconds = number(tune)
    if not 0 < seconds < math.inf:
        raise typer.BadParameter(f"--tune is off, fast, full or seconds such as 30, not '{printable(tune)}'")
    return seconds


def number(text: str) -> float:
    """A number from text; NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def share(value: float, flag: str) -> float:
    """A share of zeros."""
    if not 0 < value < 1:
        percent = f": for {value:g} % say {value / 100:g}" if 1 < value < 100 else ""
        raise typer.BadParameter(f"{flag} is between 0 and 1, not {value:g}{percent}")
    return value


def above_zero(value: float | None, flag: str) -> None:
    """How many times as fast, if it is asked for."""
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{flag} is a number above 0 such as 1.5, not {value:g}")


def sizes(given: list[str] | None) -> dict[str, tuple[int, ...]]:
    """`NAME=1x3x640x640`, several of them, as a dict."""
    found: dict[str, tuple[int, ...]] = {}
    for text in given or []:
        name, _, numbers = text.rpartition("=")
        parts = numbers.split("x")
        if not name or not all(p.isascii() and p.isdigit() and 0 < int(p) < 2**31 for p in parts):
            raise typer.BadParameter(
                f"'{printable(text)}' is no shape; one looks like --shape images=1x3x640x640"
            )
        if name in found:
            raise typer.BadParameter(f"--shape says '{printable(name)}' twice")
        found[name] = tuple(map(int, parts))
    return found


def check_result(
    out: Path,
    suffixes: Sequence[str],
    inputs: Iterable[Input],
    option: str = "-o",
    strict: bool = True,
    note: str = "",
) -> Path:
    """Return the path of a result if it may be written, checked before an hour of timing. A path that is
    wrong in itself is wrong usage."""
    try:
        return check_output(out, suffixes, option=option, inputs=inputs, strict=strict, note=note)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None


def check_plot(plot: Path | None, *inputs: Input) -> None:
    """Raise where a plot is requested and cannot be drawn or written, before an hour of timing."""
    if plot is not None:
        check_result(plot, (".png", ".svg", ".pdf"), inputs, "--plot")
        import_optional("matplotlib", "plot", "--plot")
