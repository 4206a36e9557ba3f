"""`aerogel bench`: a model as compiled beside torch and other runtimes, interleaved in one run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import typer

from aerogel.capture import foreign
from aerogel.cli.source import Source
from aerogel.cli.words import first_line
from aerogel.errors import AerogelError, printable
from aerogel.runtime.eager import bodies, channels_last, runner
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.module import Compiled
from aerogel.tune.measure import interleaved

OPPONENTS = ("torch", "inductor", "onnxruntime", "openvino")
Run = Callable[[], Any]


def known(against: list[str]) -> None:
    """Whether all of these are opponents."""
    for name in against:
        if name not in OPPONENTS:
            raise typer.BadParameter(
                f"--against takes opponents: {', '.join(OPPONENTS)}; '{printable(name)}' is none of them"
            )


def bench(fast: Compiled, source: Source, against: list[str], rounds: int) -> dict[str, Any]:
    """Milliseconds of each, and the ratio opponent / aerogel: medians over the rounds. What cannot run is
    named with its reason."""
    runs: dict[str, Run] = {"aerogel": runner(fast, source.call)}
    absent: dict[str, str] = {}
    for name in against:
        try:
            runs |= _opponent(name, source)
        except Exception as why:  # an opponent's failure is its own, and is reported
            missing = isinstance(why, ModuleNotFoundError) and why.name == name
            reason = f"not installed: pip install {name}" if missing else first_line(why)[:160]
            absent[name] = reason if missing else f"{type(why).__name__}: {reason}"
    times = dict(zip(runs, (np.array(t) for t in interleaved(list(runs.values()), rounds)), strict=True))
    ours = times["aerogel"]
    ratios = {name: float(np.median(t / ours)) for name, t in times.items() if name != "aerogel"}
    fastest = min(ratios, key=lambda n: float(np.median(times[n])), default=None)
    return {
        "ms": {name: {"min": t.min() / 1e3, "p50": float(np.median(t)) / 1e3} for name, t in times.items()},
        "ratio": ratios,
        "fastest": fastest,
        "absent": absent,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "target": str(fast.plan.target),
        "speedup": ratios[fastest] if fastest else None,
    }


def _opponent(name: str, source: Source) -> dict[str, Run]:
    model, call = source.model, source.call
    if name == "torch":
        return {f"torch {way}": runner(m, call, way) for way, m in bodies(model, None).items()}
    if name == "inductor":
        compiled = torch.compile(copy.deepcopy(model).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
        args = tuple(channels_last(a) if isinstance(a, torch.Tensor) else a for a in call[0])

        def run() -> Any:
            with torch.no_grad():
                return compiled(*args, **call[1])

        run()
        return {"inductor": run}
    if source.path is None or source.path.suffix != ".onnx":
        raise AerogelError(f"{name} reads ONNX files; this model is none")
    assert isinstance(model, GraphModel)
    names = model.captured.graph.inputs
    if name == "onnxruntime":
        if not foreign.available():
            raise AerogelError("not installed: pip install onnxruntime")
        session = foreign.whole(source.path, names, call[0])
        if session is None:
            raise AerogelError("it does not take the file")
        return {"onnxruntime": session}
    import openvino as ov

    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = ov.Core().compile_model(str(source.path), "CPU", settings).create_infer_request()
    feed = {n: a.numpy() for n, a in zip(names, call[0], strict=True)}
    return {"openvino": lambda: request.infer(feed)}
