"""compile(): the one path, read top to bottom.

capture -> fuse -> does the store know the model? then its choices again; else
time each layer's candidates beside dense -> assign layers to kernels with the copies between them counted -> check the answer
-> time the whole model against torch in both its layouts -> Plan -> Compiled
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aerogel.candidate import Config
from aerogel.capture.export import capture
from aerogel.capture.fuse import fuse
from aerogel.errors import AerogelError, PlanMismatch, UnsupportedModel
from aerogel.methods import METHODS
from aerogel.plan import Choice, Plan, Timing
from aerogel.runtime import pool
from aerogel.runtime.eager import Call, agree, as_call, in_both_layouts, record, runner, with_convolutions
from aerogel.runtime.module import Compiled, Network, Timings
from aerogel.target import Target, host
from aerogel.tune import search
from aerogel.tune.assign import assigned
from aerogel.tune.measure import interleaved
from aerogel.tune.store import Known, Store, model_key, offered

Advance = Callable[[str], None]
ROUNDS = 15
"""Rounds of the whole model against torch."""


def compile(
    model: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    tune: str | float = "fast",
    methods: Iterable[str] | None = None,
    plan: Plan | None = None,
    store: str | Path | None = None,
    strict_nan: bool = False,
    progress: bool | None = None,
) -> Compiled:
    """A module with the same answers, each layer on the fastest kernel measured here, dense kept wherever it is faster.

    `args` and `kwargs` are an example call, as for torch.export; a bare tensor will do. `tune` is "off" (rules, no timing),
    "fast", "full" or a budget in seconds for timing the layers. `methods` restricts the choice. `plan` replays one exactly and
    times nothing. `store` is a folder of tuning records, by default the user's own: what was measured once is not measured again.
    `strict_nan` keeps every layer dense, so that a NaN meeting a pruned weight is a NaN.
    """
    call, names = as_call(args, kwargs), tuple(METHODS if methods is None else methods)
    unknown = [n for n in names if n not in METHODS]
    if unknown:
        raise AerogelError(f"methods are {', '.join(METHODS)}; '{unknown[0]}' is none of them")
    asked = _Asked(tune, search.effort(tune), ("dense",) if strict_nan else names, Store(store, _target()))
    if isinstance(model, Compiled):
        model = model.original
    with _progress(progress) as advance:
        try:
            network, notes = _read(model, call, dynamic_shapes, advance)
        except UnsupportedModel as why:
            if plan is not None:
                raise
            return _parts(model, call, str(why), asked, advance)
        if plan is not None:
            return Compiled(model, network, _checked(plan, network), "graph", notes)
        weights = [network.arrays[n.conv_inputs()[1]] for n in network.convs()]
        sizes = [tuple(v.shape) for v in network.flat(*call) if hasattr(v, "shape")]
        key = model_key(network.graph.to_json(), weights, sizes, (tune, asked.names))
        known = None if asked.effort is None else asked.store.model(key, weights)
        if known is not None:
            return _replayed(model, network, known, call)
        ours = Compiled(model, network, _tuned(network, call, asked, advance), "graph", notes)
        if asked.effort is None:
            return ours
        advance("timing the whole model")
        judged = _judged(model, ours, call)
        asked.store.put_model(key, judged.plan, judged.how, judged.notes)
        return judged


@dataclass(frozen=True)
class _Asked:
    """What the user asked of the tuner, and where its records are."""

    tune: str | float
    effort: search.Effort | None
    names: tuple[str, ...]
    store: Store


def _target() -> Target:
    return replace(host(), threads=pool.threads())


def _read(model: Any, call: Call, dynamic_shapes: Any, advance: Advance) -> tuple[Network, tuple[str, ...]]:
    """Capture and fuse. Raises UnsupportedModel where the model does not export."""
    advance("reading the model")
    captured = capture(model, call[0], call[1], dynamic_shapes)
    graph, constants, left = fuse(captured.graph, captured.constants, captured.shapes)
    network = Network(captured, graph, constants)
    notes = [f"{layer}: {reason}" for layer, reason in left.items()]
    notes += [f"input '{n}' is fixed at {s}: the model forbids other sizes" for n, s in _fixed(network)]
    return network, tuple(notes)


def _tuned(network: Network, call: Call, asked: _Asked, advance: Advance) -> Plan:
    """Time the layers and choose; by rule where nothing is to be timed."""
    target, inputs = asked.store.target, network.flat(*call)
    shapes = network.shapes(inputs)
    choices = _layers(network, shapes, asked, advance)
    if asked.effort is not None:
        advance("choosing layouts")
        choices = assigned(network.graph, shapes, choices, target)
        advance("timing the best two of each layer in the running network")
        choices = _refined(network, shapes, choices, inputs, asked.effort.rounds)
    return Plan(target, tuple(choices))


def _checked(plan: Plan, network: Network) -> Plan:
    """The user's plan, if every configuration in it is one its method offers for that layer."""
    convs = {n.name: n for n in network.convs()}
    for choice in plan.choices:
        node = convs.get(choice.node)
        if node is None or node.conv is None or node.conv != choice.conv.layer():
            raise PlanMismatch(f"the plan has a layer '{choice.layer}' ({choice.conv}) that this model has not. Compile again.")
        if not offered(choice, network.arrays[node.conv_inputs()[1]], plan.target):
            raise PlanMismatch(f"'{choice.config}' is no configuration for '{choice.layer}' on {plan.target}. Compile again.")
    return plan


def _replayed(model: Any, network: Network, known: Known, call: Call) -> Compiled:
    """A model measured before: its choices again, its answer looked at, nothing timed."""
    notes = (*known.notes, f"choices and timings are from the store, measured on {known.measured}")
    if known.how != "graph":
        return Compiled(model, None, known.plan, known.how, notes, in_both_layouts(model)[known.how])
    ours = Compiled(model, network, known.plan, "graph", notes)
    return ours if agree(model, ours, call) else _differs(model, ours)


def _refined(network: Network, shapes: Any, choices: list[Choice], inputs: list[Any], rounds: int) -> list[Choice]:
    """What only the running network can say: the pitch of each image size, then the better of each layer's best two."""

    def both(plans: list[dict[str, Config]]) -> Timings | None:
        return network.in_place(shapes, plans, inputs, rounds) if plans[0] != plans[1] else None

    times = both([{c.node: c.config for c in choices}, {c.node: search.narrow(c) for c in choices}])
    choices = choices if times is None else search.pitched(choices, times)
    second = {c.node: search.runner_up(c) for c in choices}
    times = both([{c.node: c.config for c in choices}, second])
    if times is None:
        return choices
    return [search.refined(c, second[c.node], [t.get(c.node, []) for t in times]) for c in choices]


def _layers(network: Network, shapes: Any, asked: _Asked, advance: Advance) -> list[Choice]:
    """One Choice for each convolution; layers alike share their timings."""
    choices = []
    groups = search.group_layers(network.graph, shapes, network.arrays)
    effort, store = asked.effort, asked.store
    if effort is not None and effort.seconds is not None:
        effort = replace(effort, seconds=effort.seconds / len(groups))
    for group in groups:
        (node, conv), weight = group[0], network.arrays[group[0][0].conv_inputs()[1]]
        advance(f"{node.layer or node.name} {conv}")
        if effort is None:
            timed = search.rule(conv, weight, store.target, asked.names)
        else:
            kind = f"{asked.tune} {asked.names}"
            found = store.layer(conv, weight, kind)
            timed = found or search.time_layer(conv, weight, store.target, asked.names, effort, store.near(conv, weight, kind))
            if found is None:
                store.put_layer(weight, timed, kind)
        for other, own in group:
            sparsity = network.stats(other).sparsity
            choices.append(replace(timed, layer=other.layer or other.name, node=other.name, conv=own, sparsity=sparsity))
    order = {node.name: i for i, node in enumerate(network.graph.nodes)}
    return sorted(choices, key=lambda c: order[c.node])


def _judged(model: Any, ours: Compiled, call: Call) -> Compiled:
    """The whole model as compiled beside torch in both its layouts; if it is not faster, torch stays and the report says so."""
    if not agree(model, ours, call):
        return _differs(model, ours)
    bodies = in_both_layouts(model)
    times = interleaved([*(runner(m, call, layout) for layout, m in bodies.items()), runner(ours, call, "contiguous")], ROUNDS)
    middle = [sorted(t)[len(t) // 2] for t in times]
    fastest = 0 if middle[0] <= middle[1] else 1
    timing = Timing.of(times[2], times[fastest])
    layout = tuple(bodies)[fastest]
    said = f"torch {layout} {middle[fastest] / 1e3:.1f} ms, aerogel {middle[2] / 1e3:.1f} ms for the example"
    if search.keep(timing):
        return ours.judged(timing, said)
    kept = Timing.of(times[fastest], times[fastest])
    notes = (*ours.notes, said, f"not faster than torch {layout}, so torch runs the model")
    return Compiled(model, None, replace(ours.plan, model=kept), layout, notes, bodies[layout])


def _differs(model: Any, ours: Compiled) -> Compiled:
    notes = (*ours.notes, "its answers differed from torch's on the example, so torch runs the model: please report this")
    return Compiled(model, None, ours.plan, "contiguous", notes)


def _parts(model: Any, call: Call, why: str, asked: _Asked, advance: Advance) -> Compiled:
    """Where the whole does not export: the largest submodules that do, each compiled for what the example feeds it."""
    body, fed = copy.deepcopy(model), record(model, call)
    choices: list[Choice] = []
    notes = [why]

    def visit(parent: Any, path: str) -> None:
        for name, child in with_convolutions(parent):
            full = f"{path}{name}"
            try:
                if full not in fed:
                    raise UnsupportedModel("the example never calls it")
                network, left = _read(child, fed[full], None, advance)
                part = Compiled(child, network, _tuned(network, fed[full], asked, advance), "graph", left)
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
    return ours if asked.effort is None else _judged(model, ours, call)


def _fixed(network: Network) -> list[tuple[str, str]]:
    """Image inputs whose batch or image sizes the model forbids to change."""
    found = []
    for name, sizes in zip(network.graph.inputs, network.captured.sizes, strict=True):
        if len(sizes) in (3, 4) and any(isinstance(s, int) for i, s in enumerate(sizes) if i != 1):
            found.append((name, "x".join(str(s) if isinstance(s, int) else "any" for s in sizes)))
    return found


def _progress(wanted: bool | None) -> AbstractContextManager[Advance]:
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
