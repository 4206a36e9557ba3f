"""`aerogel bench`: a model as compiled beside torch and other runtimes, interleaved in one run."""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from torch.utils import _pytree as pytree

from aerogel.cli.source import Source
from aerogel.cli.words import first_line
from aerogel.errors import AerogelError, printable
from aerogel.progress import Progress
from aerogel.runtime import peers
from aerogel.runtime.eager import Call, bodies, channels_last, runner
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.headline import describe_ratio
from aerogel.runtime.module import Compiled
from aerogel.tune.comparison import compare

OPPONENTS = ("torch", "inductor", *peers.TITLES)
NEEDED_TO_EXPORT = ("onnx", "onnxscript")
"""Packages that torch needs to write an ONNX file."""
Run = Callable[[], Any]


def known(against: Sequence[str]) -> None:
    """Whether all of these are opponents."""
    for name in against:
        if name not in OPPONENTS:
            raise typer.BadParameter(
                f"--against takes opponents: {', '.join(OPPONENTS)}; '{printable(name)}' is none of them"
            )


def bench(
    fast: Compiled,
    source: Source,
    against: Sequence[str] | None,
    rounds: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Milliseconds of each, and the ratio opponent / aerogel: medians over the rounds that other work did not
    disturb. What cannot run is named with its reason. `against` None is torch and what is installed."""
    progress = progress or Progress()
    names = ("torch", *peers.TITLES) if against is None else against
    with tempfile.TemporaryDirectory(prefix="aerogel-bench-") as folder:
        runs, absent = _opponents(names, fast, source, Path(folder), progress)
        progress.begin("timing", 1.0)
        result = compare(list(runs.values()), rounds, fast.backend.meter_on_host, progress)
    times = dict(zip(runs, (np.array(t) for t in result.times), strict=True))
    timings = {name: result.timing(0, i) for i, name in enumerate(runs) if i}
    fastest = min(timings, key=lambda n: float(np.median(times[n])), default=None)
    return {
        "ms": {name: {"min": t.min() / 1e3, "p50": float(np.median(t)) / 1e3} for name, t in times.items()},
        "ratio": {name: timing.ratio_p50 for name, timing in timings.items()},
        "interval": {name: timing.ratio_range for name, timing in timings.items()},
        "over": {name: describe_ratio(timing) for name, timing in timings.items()},
        "busy": result.busy,
        "disturbed": result.disturbed.count(True),
        "fastest": fastest,
        "absent": absent,
        "rounds": len(result.disturbed),
        "threads": torch.get_num_threads(),
        "target": str(fast.plan.target),
        "speedup": timings[fastest].ratio_p50 if fastest else None,
    }


def _opponents(
    names: Sequence[str], fast: Compiled, source: Source, folder: Path, progress: Progress
) -> tuple[dict[str, Run], dict[str, str]]:
    """What is timed, aerogel first, and why the others are absent."""
    runs: dict[str, Run] = {"aerogel": runner(fast, source.call)}
    absent: dict[str, str] = {}
    file: tuple[Path, Sequence[str]] | None = None
    for name in names:
        if name in peers.TITLES and not peers.is_installed(name):
            absent[name] = f"not installed: pip install {name}"
            continue
        try:
            if name not in peers.TITLES:
                runs |= _torchs(name, source)
                continue
            file = file or _onnx_file(source, folder, progress)
            runs[name] = peers.open_session(name, *file, _tensors(source.call))
        except Exception as why:  # an opponent's failure is its own, and is reported
            absent[name] = f"{type(why).__name__}: {first_line(why)[:160]}"
    return runs, absent


def _torchs(name: str, source: Source) -> dict[str, Run]:
    """torch in both layouts, or what torch.compile makes of the model."""
    model, call = source.model, source.call
    if name == "torch":
        return {f"torch {way}": runner(m, call, way) for way, m in bodies(model, None).items()}
    compiled = torch.compile(copy.deepcopy(model).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    args = tuple(channels_last(a) if isinstance(a, torch.Tensor) else a for a in call[0])

    def run() -> Any:
        with torch.no_grad():
            return compiled(*args, **call[1])

    run()
    return {"inductor": run}


def _tensors(call: Call) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(call) if isinstance(value, torch.Tensor)]


def _onnx_file(source: Source, folder: Path, progress: Progress) -> tuple[Path, Sequence[str]]:
    """The model as an ONNX file with the names of its inputs: the file it came from, or one that torch
    exports."""
    if source.path is not None and source.path.suffix == ".onnx":
        assert isinstance(source.model, GraphModel)
        return source.path, source.model.captured.graph.inputs
    missing = [package for package in NEEDED_TO_EXPORT if find_spec(package) is None]
    if missing:
        raise AerogelError(
            f"it reads ONNX files, and torch needs {' and '.join(missing)} to write one: pip install "
            f"{' '.join(missing)}"
        )
    progress.begin("exporting the model to ONNX")
    path, names = folder / "model.onnx", [f"input{i}" for i in range(len(_tensors(source.call)))]
    # a copy: models may remember tensors that the export made up
    args, kwargs = source.call
    with _quiet(), torch.no_grad():
        torch.onnx.export(
            copy.deepcopy(source.model),
            args,
            path,
            kwargs=kwargs,
            input_names=names,
            dynamo=True,
            verbose=False,
        )
    return path, names


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says of itself."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
