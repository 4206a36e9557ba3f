"""compile(): the one path, read top to bottom.

capture -> fuse -> does the store know the model? then its choices again; else
tune/choose.py, a Choice for each layer -> check the answer -> time the whole model against torch in all its forms -> Plan
-> Compiled
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from aerogel.capture import foreign
from aerogel.capture.export import Captured, capture
from aerogel.capture.fuse import fuse
from aerogel.capture.separate import separate
from aerogel.errors import AerogelError, InvalidFile, PlanMismatch, UnsupportedModel
from aerogel.methods import METHODS
from aerogel.methods.dense import TORCH
from aerogel.plan import Choice, Plan, Timing
from aerogel.pruning.prune import as_weights
from aerogel.runtime import pool
from aerogel.runtime.eager import Call, agree, as_call, bodies, first_image, record, runner, with_convolutions
from aerogel.runtime.gpu import Device, device_of, on_cpu
from aerogel.runtime.gpu.module import OnDevice
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.module import Compiled, Network
from aerogel.runtime.points import Several
from aerogel.target import Target, host
from aerogel.tune import ondevice, search
from aerogel.tune.choose import Advance, Asked, as_planned, tuned
from aerogel.tune.measure import Clock, host_clock, interleaved
from aerogel.tune.store import Known, Store, model_key, not_offered

APART_US = 2000.0
"""A model that takes this long for one image runs larger batches image by image: calling it costs a hundredth of that."""
ROUNDS, FEW_ROUNDS, CLEAR = 15, 5, 1.5
"""Rounds of the whole model against torch; few are enough where one takes CLEAR times as long as the other."""


def compile(
    model: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    shapes: Mapping[str, tuple[int, ...]] | Sequence[Mapping[str, tuple[int, ...]]] | None = None,
    dtype: Any = None,
    tune: str | float = "fast",
    methods: Iterable[str] | None = None,
    calibration: Iterable[Any] | None = None,
    plan: Plan | None = None,
    store: str | Path | None = None,
    strict_nan: bool = False,
    progress: bool | None = None,
) -> Compiled:
    """A module with the same answers, each layer on the fastest kernel measured here, dense kept wherever it is faster.

    `model` is a module, or the path of an ONNX file. `args` and `kwargs` are an example call, as for torch.export; a bare tensor
    will do. An ONNX file needs none: `shapes` gives the sizes of inputs that the file leaves open, by name; a list of such gives
    several tuned points, and a call goes to its own or the nearest. `dtype` None keeps the model's own precision; torch.float16 or
    torch.bfloat16 stores weights and maps in 16 bits: inputs and outputs keep their types, and layers that lose too much on the
    example or on `calibration` (more such calls: tuples of arguments, or tensors) stay as they are, by name in explain().
    `calibration` also tells how much of each layer's input is zero, for the method that skips it. `tune` is
    "off" (rules, no timing), "fast", "full" or a budget in seconds for timing the layers. `methods` restricts the choice. `plan`
    replays one exactly and times nothing. `store` is a folder of tuning records, by default the user's own: what was measured once
    is not measured again. `strict_nan` keeps every layer dense, so that a NaN meeting a pruned weight is a NaN.
    """
    call, names = as_call(args, kwargs), tuple(METHODS if methods is None else methods)
    unknown = [n for n in names if n not in METHODS]
    if unknown:
        raise AerogelError(f"methods are {', '.join(METHODS)}; '{unknown[0]}' is none of them")
    if dtype is not None and dtype not in (TORCH["f16"], TORCH["bf16"]):
        raise AerogelError(f"dtype is None, torch.float16 or torch.bfloat16, not {dtype}")
    samples = [as_call(sample, None) for sample in calibration or ()]
    asked = Asked(tune, search.effort(tune), ("dense",) if strict_nan else names, Store(store, target()), dtype, samples)
    if isinstance(model, str | Path):
        options = {"dtype": dtype, "tune": tune, "methods": names, "calibration": calibration, "plan": plan, "store": store}
        options |= {"strict_nan": strict_nan, "progress": progress}
        points = [shapes or {}] if shapes is None or isinstance(shapes, Mapping) else list(shapes)
        return together([_from_onnx(model, call, point, options) for point in points])
    if isinstance(model, Compiled):
        model = model.original
    model = as_weights(model)
    with progress_line(progress) as advance:
        if (device := device_of(call)) is not None:
            if plan is not None:
                raise AerogelError("on a GPU layers are timed anew; leave plan out")
            return _on(device, model, call, dynamic_shapes, asked, advance)
        try:
            network, notes = read(model, call, dynamic_shapes, advance)
        except UnsupportedModel as why:
            if plan is not None:
                raise
            return _parts(model, call, str(why), asked, advance)
        if plan is not None:
            network = as_planned(network, plan, call, asked)
            return Compiled(model, network, checked(plan, network), "graph", notes)
        weights = [network.arrays[n.conv_inputs()[1]] for n in network.convs()]
        sizes = [tuple(v.shape) for v in network.flat(*call) if hasattr(v, "shape")]
        key = model_key(network.graph.to_json(), weights, sizes, (tune, asked.names, dtype))
        known, alone = None if asked.effort is None or samples else asked.store.model(key, weights), separate(network.captured)
        if known is not None and (alone or not known.plan.apart):
            return _replayed(model, as_planned(network, known.plan, call, asked), known, call, asked)
        apart = alone and asked.effort is not None
        network, choices, said = tuned(network, first_image(call) if apart else call, asked, advance)
        ours = Compiled(model, network, choices, "graph", (*notes, *said))
        if asked.effort is None:
            return ours
        advance("timing the whole model")
        judged = _judged(model, _batched(ours, call) if apart else ours, call, asked)
        if not samples:  # a record says nothing of what was calibrated
            asked.store.put_model(key, judged.plan, judged.how, judged.notes)
        return judged


def together(points: Sequence[Compiled]) -> Compiled:
    """A module that is tuned at each of these points."""
    if not points:
        raise AerogelError("shapes is an empty list: name the sizes of at least one point")
    return points[0] if len(points) == 1 else Several(points)


def target() -> Target:
    """This machine with the threads torch uses now."""
    return replace(host(), threads=pool.threads())


def read(model: Any, call: Call, dynamic_shapes: Any, advance: Advance = lambda _: None) -> tuple[Network, tuple[str, ...]]:
    """Capture and fuse. Raises UnsupportedModel where the model does not export."""
    advance("reading the model")
    return fused(model.captured if isinstance(model, GraphModel) else capture(model, call[0], call[1], dynamic_shapes))


def fused(captured: Captured) -> tuple[Network, tuple[str, ...]]:
    """A captured model as a network, and what is to be said of it."""
    graph, constants, left = fuse(captured.graph, captured.constants, captured.shapes)
    network = Network(captured, graph, constants)
    notes = [f"{layer}: {reason}" for layer, reason in left.items()]
    notes += [f"{n.layer or n.name} runs in onnxruntime" for n in captured.graph.nodes if n.op == "onnx"]
    notes += [f"input '{n}' is fixed at {s}: the model forbids other sizes" for n, s in _fixed(network)]
    return network, tuple(notes)


def _from_onnx(path: str | Path, call: Call, shapes: Mapping[str, tuple[int, ...]], options: dict[str, Any]) -> Compiled:
    """An ONNX file, compiled as a module that is only its graph. Where onnxruntime is installed its time is said first."""
    from aerogel.capture.onnx import read as read_file

    if call[1]:
        raise AerogelError("the inputs of an ONNX file have an order: give them as args, or their sizes as shapes={name: sizes}")
    with progress_line(options["progress"]) as advance:
        advance("reading the file")
        captured = read_file(path, shapes, [tuple(a.shape) for a in call[0]])
    model, call = GraphModel(captured, captured.constants), call if call[0] else captured.filled()
    try:
        fast = compile(model, *call, **options)
    except (RuntimeError, ValueError, IndexError) as why:  # torch's words on a graph that fits its shapes, but not its numbers
        raise InvalidFile(f"'{path}' does not run: {str(why).splitlines()[0][:200]}") from why
    session = None if options["tune"] == "off" or options["plan"] else foreign.whole(path, fast.input_names, call[0])
    if session is None:
        return fast
    with progress_line(options["progress"]) as advance:
        advance("timing onnxruntime")
        theirs, ours = (sorted(t)[len(t) // 2] for t in interleaved([session, runner(fast, call, "contiguous")], ROUNDS))
    advice = "aerogel is faster" if ours < theirs else "keep onnxruntime"
    fast.notes = (f"onnxruntime {theirs / 1e3:.1f} ms, aerogel {ours / 1e3:.1f} ms: {advice}", *fast.notes)
    return fast


def _batched(ours: Compiled, call: Call) -> Compiled:
    """Whether batches run at once or image by image, where maps stay in the caches: timed; for one image, by its time."""
    one = Compiled(ours.original, ours.network, replace(ours.plan, apart=True), "graph", ours.notes)
    assert ours.network is not None
    several = any(hasattr(v, "shape") and len(v) > 1 for v in ours.network.flat(*call))
    times = interleaved([runner(m, call, "contiguous") for m in ((ours, one) if several else (ours,))], 5, 1)
    middle = [sorted(t)[2] for t in times]
    if not several:
        return one if middle[0] > APART_US else ours
    best = one if middle[1] < middle[0] else ours
    best.notes = (*best.notes, f"a batch at once {middle[0] / 1e3:.1f} ms, image by image {middle[1] / 1e3:.1f} ms")
    return best


def checked(plan: Plan, network: Network) -> Plan:
    """The user's plan, if every configuration in it is one its method offers for that layer."""
    if plan.apart and not separate(network.captured):
        raise PlanMismatch(
            "the plan runs a batch image by image, and this model's images are not known to be apart. Compile again."
        )
    convs = {n.name: n for n in network.convs()}
    for choice in plan.choices:
        node = convs.get(choice.node)
        if node is None or node.conv is None or node.conv != choice.conv.layer():
            raise PlanMismatch(f"the plan has a layer '{choice.layer}' ({choice.conv}) that this model has not. Compile again.")
    weights = [network.arrays[convs[choice.node].conv_inputs()[1]] for choice in plan.choices]
    if (wrong := not_offered(plan.choices, weights, plan.target)) is not None:
        raise PlanMismatch(f"'{wrong.config}' is no configuration for '{wrong.layer}' on {plan.target}. Compile again.")
    return plan


def _replayed(model: Any, network: Network, known: Known, call: Call, asked: Asked) -> Compiled:
    """A model measured before: its choices again, its answer looked at, nothing timed."""
    notes = (*known.notes, f"choices and timings are from the store, measured on {known.measured}")
    if known.how != "graph":
        return Compiled(model, None, known.plan, known.how, notes, bodies(model, asked.dtype)[known.how], network.captured)
    ours = Compiled(model, network, known.plan, "graph", notes)
    return ours if agree(model, ours, call, asked.within) else _differs(model, ours)


def _on(device: Device, model: Any, call: Call, dynamic_shapes: Any, asked: Asked, advance: Advance) -> Compiled:
    """The same path on a GPU: read on the CPU, every layer timed on the device beside torch's, the whole model last."""
    there = on_cpu(call)
    network, notes = read(copy.deepcopy(model).cpu(), there, dynamic_shapes, advance)
    asked = replace(asked, samples=[on_cpu(sample) for sample in asked.samples])
    network, choices, said = ondevice.tuned(network, network.flat(*there), asked, device, advance)
    plan, body = Plan(asked.store.target, tuple(choices), device=device.target), OnDevice(network, device, choices)
    ours = Compiled(model, None, plan, "gpu", (*notes, *said), body, network.captured)
    advance("timing the whole model")
    return ours if asked.effort is None else _judged(model, ours, call, asked, device.clock)


def _judged(model: Any, ours: Compiled, call: Call, asked: Asked, clock: Clock = host_clock) -> Compiled:
    """The whole model as compiled beside torch in all its forms; if it is not faster, torch stays and the report says so."""
    if not agree(model, ours, call, asked.within):
        return _differs(model, ours)
    forms = bodies(model, asked.dtype)
    runs = [*(runner(m, call, layout) for layout, m in forms.items()), runner(ours, call, "contiguous")]
    times = interleaved(runs, FEW_ROUNDS, 2, clock)
    if 1 / CLEAR < min(min(t) for t in times[:-1]) / min(times[-1]) < CLEAR:
        times = [few + more for few, more in zip(times, interleaved(runs, ROUNDS - FEW_ROUNDS, 1, clock), strict=True)]
    middle = [sorted(t)[len(t) // 2] for t in times]
    fastest = min(range(len(forms)), key=lambda i: middle[i])
    timing = Timing.of(times[-1], times[fastest])
    layout = tuple(forms)[fastest]
    said = f"torch {layout} {middle[fastest] / 1e3:.1f} ms, aerogel {middle[-1] / 1e3:.1f} ms for the example"
    if search.keep(timing):
        return ours.judged(timing, said)
    kept = Timing.of(times[fastest], times[fastest])
    notes = (*ours.notes, said, f"not faster than torch {layout}, so torch runs the model")
    return Compiled(model, None, replace(ours.plan, model=kept), layout, notes, forms[layout], ours.captured)


def _differs(model: Any, ours: Compiled) -> Compiled:
    notes = (*ours.notes, "its answers differed from torch's on the example, so torch runs the model: please report this")
    return Compiled(model, None, ours.plan, "contiguous", notes, None, ours.captured)


def _parts(model: Any, call: Call, why: str, asked: Asked, advance: Advance) -> Compiled:
    """Where the whole does not export: the largest submodules that do, each compiled for what the example feeds it."""
    body, fed = copy.deepcopy(model), record(model, call)
    fed_asked = replace(asked, samples=[])  # samples are calls of the whole
    choices: list[Choice] = []
    notes = [why]

    def visit(parent: Any, path: str) -> None:
        for name, child in with_convolutions(parent):
            full = f"{path}{name}"
            try:
                if full not in fed:
                    raise UnsupportedModel("the example never calls it")
                network, left = read(child, fed[full], None, advance)
                network, own, said = tuned(network, fed[full], fed_asked, advance)
                part = Compiled(child, network, own, "graph", (*left, *said))
            except UnsupportedModel as reason:
                notes.append(f"{full}: {reason}")
                visit(child, f"{full}.")
                continue
            setattr(parent, name, part)
            notes.append(f"{full}: compiled as a part of its own")
            choices.extend(replace(c, layer=f"{full}.{c.layer}", node=f"{full}:{c.node}") for c in part.plan.choices)

    visit(body, "")
    if not choices:
        notes.append("no part of the model could be compiled; torch runs it")
    ours = Compiled(model, None, Plan(asked.store.target, tuple(choices)), "parts", tuple(notes), body)
    return ours if asked.effort is None else _judged(model, ours, call, asked)


def _fixed(network: Network) -> list[tuple[str, str]]:
    """Image inputs whose batch or image sizes the model forbids to change."""
    found = []
    for name, sizes in zip(network.graph.inputs, network.captured.sizes, strict=True):
        if len(sizes) in (3, 4) and any(isinstance(s, int) for i, s in enumerate(sizes) if i != 1):
            found.append((name, "x".join(str(s) if isinstance(s, int) else "any" for s in sizes)))
    return found


def progress_line(wanted: bool | None) -> AbstractContextManager[Advance]:
    """A line on the terminal that says what is being done; nothing where there is no terminal, unless asked for."""
    from rich.console import Console

    console = Console(stderr=True)
    if wanted is False or (wanted is None and not console.is_terminal):
        return nullcontext(lambda _: None)
    return _Status(console)


class _Status(AbstractContextManager[Advance]):
    def __init__(self, console: Any) -> None:
        self.status = console.status("aerogel")

    def __enter__(self) -> Advance:
        self.status.start()
        return lambda text: self.status.update(f"aerogel: {text}")

    def __exit__(self, *_: object) -> None:
        self.status.stop()
