"""The whole model has the last word: its answers beside torch's, then its time beside torch's forms."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from aerogel.errors import AerogelError, InvalidFile
from aerogel.ir import EAGER, GRAPH, Timing
from aerogel.progress import Progress
from aerogel.runtime.eager import Call, alike, answer, bodies, nearby, runner
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.module import Compiled
from aerogel.runtime.private import restored, writes_weights
from aerogel.runtime.reading import does_not_run, first_line
from aerogel.tune import nodewise, search
from aerogel.tune.choose import Asked
from aerogel.tune.comparison import Comparison, compare
from aerogel.tune.measure import interleaved

ALONE_US = 2000.0
"""A model that takes this long for one image runs larger batches image by image: calling it costs a hundredth
of that."""
IN_BYTES = 0.05
"""How far answers may be apart where a number that is rounded elsewhere may become the next byte."""
ROUNDS, CLEAR = 15, 1.5
"""Rounds of the whole model against torch; few are enough where one takes CLEAR times as long."""


def looked(model: Any, ours: Compiled, call: Call, asked: Asked) -> Compiled:
    """The compiled model if it answers as torch does: on the example, on batches of one and two and on
    another size, wherever the original takes them and the graph says it answers them. Else torch's."""
    assert ours.network is not None
    failures = dict[str, str]()
    try:
        sizes = nearby(ours.network.captured, call)
    except Exception as why:  # a device without the memory for it; the example itself is still compared
        sizes, note = [], f"answers at other sizes were not compared with torch's: {first_line(why)}"
        ours.notes = (*ours.notes, note)
    for number, other in enumerate((call, *sizes)):
        try:
            with restored(model):
                wanted = answer(_meant(model, ours), other)
        except Exception as why:
            if number == 0:
                error = InvalidFile if isinstance(model, GraphModel) else AerogelError
                raise does_not_run(model, call, why, kind=error) from why
            continue
        captured = ours.network.captured
        if captured.misfit(captured.flat(*other), asked.backend.device) is not None:
            continue
        if not ours.runs(captured.flat(*other)):
            if number == 0:
                return differs(model, ours, "on the example")
            notes = (
                *ours.notes,
                "the graph holds for the example's sizes; others become programs of their own",
            )
            ours = Compiled(model, ours.network.fixed(), ours.plan, GRAPH, notes, backend=asked.backend)
            return looked(model, ours, call, asked)
        if number == 0:
            failures = dict(ours.ready().failures)
        floats, got = _meant(model, ours) is model, answer(ours, other)
        if not alike(wanted, got, asked.within if floats else IN_BYTES) and (
            floats or not _right(ours, captured.flat(*other), asked)
        ):
            return differs(model, ours, "on the example" if number == 0 else "at other sizes")
    if failures and ours.network is not None:
        plan = search.without_kernels(asked.backend, ours.network, ours.plan, failures)
        return Compiled(model, ours.network, plan, GRAPH, ours.notes, backend=asked.backend)
    ours.forget()
    return ours


def _right(ours: Compiled, inputs: list[Any], asked: Asked) -> bool:
    """Whether each node of a network in bytes is right for itself."""
    assert ours.network is not None
    return nodewise.right(ours.network, ours.plan, asked.backend, inputs, ours.ready()(inputs))


def _meant(model: Any, ours: Compiled) -> Any:
    """Whose answers ours are compared with: the model's; in int8 those of the same bytes in torch. What int8
    loses is another question, and was asked layer by layer."""
    network = ours.network
    if network is None or not network.meanings:
        return model
    captured = replace(network.captured, graph=network.graph, constants=network.real())
    return GraphModel(captured, captured.constants)


def differs(model: Any, ours: Compiled, where: str) -> Compiled:
    """torch runs the model, because ours did not answer as it does."""
    plan = replace(ours.plan, differed=f"its answers differed from torch's {where}")
    notes = (*ours.notes, f"{plan.differed}; torch runs the model: please report this")
    return Compiled(model, None, plan, EAGER, notes, None, ours.captured)


def batched(ours: Compiled, call: Call) -> Compiled:
    """Whether batches run at once or image by image, where maps stay in the caches: timed; for one image, by
    its time."""
    assert ours.network is not None
    plan = replace(ours.plan, image_by_image=True)
    one = Compiled(ours.original, ours.network, plan, GRAPH, ours.notes, backend=ours.backend)
    several = any(hasattr(v, "shape") and len(v) > 1 for v in ours.network.captured.flat(*call))
    runs = [runner(m, call) for m in ((ours, one) if several else (ours,))]
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


def _clear(times: Sequence[Sequence[float]]) -> bool:
    """Whether a few rounds say enough of ours, the last, beside torch's: one is CLEAR times as fast, and the
    rule that keeps a model says so too. Where other work held ours up in some rounds, it does not."""
    lowest = min(times[:-1], key=min)
    ratio = min(lowest) / min(times[-1])
    timing = Timing.of(times[-1], lowest)
    if timing.ranged(times[-1], lowest, disturbed=False).doubt:
        return False
    return not 1 / CLEAR < ratio < CLEAR and (ratio > 1) == search.keep(timing)


def _faster(result: Comparison, fastest: int) -> bool:
    """Whether the last candidate is faster than `fastest`: in the rounds that count, and in all of them, so
    that leaving out rounds never makes the rule milder."""
    every = result.all_times
    return search.keep(result.timing(-1, fastest)) and search.keep(Timing.of(every[-1], every[fastest]))


def judged(
    model: Any, ours: Compiled, call: Call, asked: Asked, progress: Progress | None = None
) -> Compiled:
    """The whole model as compiled beside torch in all its ways; if it is not faster, torch stays and the
    report says so."""
    torchs, notes = bodies(model, asked.dtype), list[str]()
    until = None if asked.effort is None else asked.effort.until
    with ExitStack() as after:
        for body in (ours.body, *torchs.values()):
            after.enter_context(restored(body, writes_weights(model)))
        wanted = answer(model, call)
        for way in list(torchs):
            try:
                got = answer(torchs[way], call, way)
            except Exception as why:  # a form that torch itself cannot run
                notes.append(f"torch {way} does not run: {first_line(why)}")
                del torchs[way]
                continue
            # a model that writes to a view answers otherwise where its maps lie otherwise
            if torchs[way] is not model and not alike(wanted, got, asked.within):
                notes.append(f"torch {way} gives another answer")
                del torchs[way]
        if not torchs:
            return ours
        runs = [*(runner(m, call, way) for way, m in torchs.items()), runner(ours, call)]
        result = compare(runs, ROUNDS, asked.backend.meter, progress or Progress(), _clear, until)
    middle = [sorted(t)[len(t) // 2] for t in result.times]
    fastest = min(range(len(torchs)), key=lambda i: middle[i])
    way = tuple(torchs)[fastest]
    said = f"torch {way} {middle[fastest] / 1e3:.1f} ms, aerogel {middle[-1] / 1e3:.1f} ms for the example"
    if result.busy:
        counted = result.disturbed
        notes.append(
            f"measured on a busy machine: other work held up {counted.count(True)} of {len(counted)} rounds. "
            "Compile again when it is idle; this comparison with torch is not stored"
        )
    ours.notes = (*ours.notes, *notes)
    if _faster(result, fastest):
        return ours.judged(result.timing(-1, fastest), said)
    plan = replace(ours.plan, model=replace(result.timing(fastest, fastest), ratio_range=None))
    told = (*ours.notes, said, f"not faster than torch {way}, so torch runs the model")
    return Compiled(model, None, plan, way, told, torchs[way], ours.captured)


def faster(ours: Compiled, floats: Compiled, call: Call, asked: Asked) -> Compiled:
    """A network in int8, or the same in floats where that is faster."""
    runs = [runner(ours, call), runner(floats, call)]
    mine, other = (sorted(t)[len(t) // 2] for t in interleaved(runs, ROUNDS, 1, asked.backend.clock))
    if mine <= other:
        return ours
    floats.notes = (
        *floats.notes,
        f"stays in floats: they take {other / 1e3:.1f} ms here, int8 {mine / 1e3:.1f} ms. "
        "This CPU has no instruction for products of bytes; prune in blocks for it: pattern='1x4'",
    )
    return floats
