"""The whole model has the last word: its answers beside torch's, then its time beside torch's forms."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from aerogel.errors import AerogelError, InvalidFile, ShapeError
from aerogel.ir.plan import Timing
from aerogel.runtime.eager import Call, alike, answer, bodies, nearby, runner
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.module import Compiled
from aerogel.runtime.private import restored, writes_weights
from aerogel.runtime.reading import first_line
from aerogel.tune import search
from aerogel.tune.choose import Asked
from aerogel.tune.measure import interleaved

ALONE_US = 2000.0
"""A model that takes this long for one image runs larger batches image by image: calling it costs a hundredth
of that."""
ROUNDS, FEW_ROUNDS, CLEAR = 15, 5, 1.5
"""Rounds of the whole model against torch; few are enough where one takes CLEAR times as long."""


def looked(model: Any, ours: Compiled, call: Call, asked: Asked) -> Compiled:
    """The compiled model if it answers as torch does: on the example, on batches of one and two and on
    another size, wherever the original takes them and the graph says it answers them. Else torch's."""
    assert ours.network is not None
    for number, other in enumerate((call, *nearby(ours.network.captured, call))):
        try:
            with restored(model):
                wanted = answer(model, other)
        except Exception as why:
            if number == 0:
                kind = InvalidFile if isinstance(model, GraphModel) else AerogelError
                raise kind(f"the model does not run on the example: {first_line(why)}") from why
            continue
        captured = ours.network.captured
        if captured.misfit(captured.flat(*other), asked.backend.device) is not None:
            continue
        if number > 0 and not _runs(ours, captured.flat(*other)):
            notes = (
                *ours.notes,
                "the graph holds for the example's sizes; others become programs of their own",
            )
            ours = Compiled(model, ours.network.fixed(), ours.plan, "graph", notes, backend=asked.backend)
            return looked(model, ours, call, asked)
        if not alike(wanted, answer(ours, other), asked.within):
            ours.notes = (
                *ours.notes,
                f"its answers differed from torch's {'on the example' if number == 0 else 'at other sizes'}",
            )
            return differs(model, ours)
    ours.forget()
    return ours


def _runs(ours: Compiled, inputs: list[Any]) -> bool:
    """Whether the graph itself takes these inputs: sizes that torch wrote into it as numbers may not fit
    them."""
    try:
        with torch.no_grad():
            ours.ready()(inputs)
    except ShapeError:
        return False
    return True


def differs(model: Any, ours: Compiled) -> Compiled:
    notes = (*ours.notes, "torch runs the model: please report this")
    return Compiled(model, None, ours.plan, "contiguous", notes, None, ours.captured)


def batched(ours: Compiled, call: Call) -> Compiled:
    """Whether batches run at once or image by image, where maps stay in the caches: timed; for one image, by
    its time."""
    assert ours.network is not None
    plan = replace(ours.plan, image_by_image=True)
    one = Compiled(ours.original, ours.network, plan, "graph", ours.notes, backend=ours.backend)
    several = any(hasattr(v, "shape") and len(v) > 1 for v in ours.network.captured.flat(*call))
    runs = [runner(m, call, "contiguous") for m in ((ours, one) if several else (ours,))]
    times = interleaved(runs, 5, 1, ours.backend.clock)
    middle = [sorted(t)[2] for t in times]
    if not several:
        return one if middle[0] > ALONE_US else ours
    best = one if middle[1] < middle[0] else ours
    best.notes = (
        *best.notes,
        f"a batch at once {middle[0] / 1e3:.1f} ms, image by image {middle[1] / 1e3:.1f} ms",
    )
    return best


def judged(model: Any, ours: Compiled, call: Call, asked: Asked) -> Compiled:
    """The whole model as compiled beside torch in all its torchs; if it is not faster, torch stays and the
    report says so."""
    torchs, notes = bodies(model, asked.dtype), list[str]()
    with ExitStack() as after:
        for body in (ours.body, *torchs.values()):
            after.enter_context(restored(body, writes_weights(model)))
        for layout in list(torchs):
            try:
                runner(torchs[layout], call, layout)()
            except Exception as why:  # a form that torch itself cannot run
                notes.append(f"torch {layout} does not run: {first_line(why)}")
                del torchs[layout]
        if not torchs:
            return ours
        runs = [*(runner(m, call, layout) for layout, m in torchs.items()), runner(ours, call, "contiguous")]
        times = interleaved(runs, FEW_ROUNDS, 2, asked.backend.clock)
        if 1 / CLEAR < min(min(t) for t in times[:-1]) / min(times[-1]) < CLEAR:
            times = [
                few + more
                for few, more in zip(
                    times, interleaved(runs, ROUNDS - FEW_ROUNDS, 1, asked.backend.clock), strict=True
                )
            ]
    middle = [sorted(t)[len(t) // 2] for t in times]
    fastest = min(range(len(torchs)), key=lambda i: middle[i])
    timing = Timing.of(times[-1], times[fastest])
    layout = tuple(torchs)[fastest]
    said = f"torch {layout} {middle[fastest] / 1e3:.1f} ms, aerogel {middle[-1] / 1e3:.1f} ms for the example"
    ours.notes = (*ours.notes, *notes)
    if search.keep(timing):
        return ours.judged(timing, said)
    kept = Timing.of(times[fastest], times[fastest])
    told = (*ours.notes, said, f"not faster than torch {layout}, so torch runs the model")
    return Compiled(model, None, replace(ours.plan, model=kept), layout, told, torchs[layout], ours.captured)
