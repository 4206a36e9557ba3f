"""compile(): the one path, read top to bottom.

read the model (capture, fuse) -> does the store know it? then its choices again; else a Choice for each layer
(tune/choose.py) -> check the answer -> time the whole model against torch in all its forms -> Compiled
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aerogel.arguments import (
    Sizes,
    check_call,
    check_types,
    dtype_of,
    looked_at,
    names_of,
    points_of,
    ranges_of,
    samples_of,
    warn_of_few,
)
from aerogel.backends import backend_of
from aerogel.capture.network import Network
from aerogel.capture.separate import separate
from aerogel.errors import (
    AerogelError,
    InvalidArgument,
    InvalidFile,
    PlanMismatch,
    ShapeError,
    UnsupportedModel,
)
from aerogel.ir import GRAPH, PARTS, Beside, Choice, Plan, multiplies_bytes
from aerogel.methods import BASELINE
from aerogel.progress import Progress, shown
from aerogel.runtime import peers
from aerogel.runtime.eager import (
    Call,
    agree,
    as_call,
    body,
    first_image,
    record,
    runner,
    ways,
    with_convolutions,
)
from aerogel.runtime.graphmodel import GraphModel
from aerogel.runtime.module import Compiled
from aerogel.runtime.points import Several
from aerogel.runtime.private import private, restored, writes_weights
from aerogel.runtime.reading import first_line, network_of, steady
from aerogel.runtime.weights import as_weights
from aerogel.torch_versions import warn_if_untested
from aerogel.tune import quantize, search
from aerogel.tune.agreed import Known
from aerogel.tune.choose import Asked, as_planned, tuned
from aerogel.tune.comparison import compare
from aerogel.tune.store import Store, model_key, not_offered
from aerogel.tune.whole import ROUNDS, batched, differs, faster, judged, looked


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
    ranges: str = "mean-square",
    plan: Plan | None = None,
    store: str | Path | None = None,
    strict_nan: bool = False,
    progress: bool | None = None,
) -> Compiled:
    """Compile a model for this machine: same answers, each layer on the fastest kernel measured here.

    Dense is one of the candidates, of each layer and of the whole model, so the result is never slower.

    Example:
        >>> fast = aerogel.compile(model, (x,))
        >>> same = torch.allclose(fast(x), model(x), atol=1e-3)

    Args:
        model: An `nn.Module`, or the path of an ONNX file.
        args: An example call's arguments, as for `torch.export`; a bare tensor will do. An ONNX file needs
            none.
        kwargs: The example's keyword arguments.
        dynamic_shapes: As for `torch.export`. By default batch, height and width stay open.
        shapes: Sizes of an ONNX file's inputs where the file leaves them open,
            `{"images": (1, 3, 640, 640)}`. A list of such tunes for each of them; a call goes to the nearest.
        dtype: None keeps the model's precision. `torch.float16` or `torch.bfloat16`, or `"float16"` or
            `"bfloat16"`, stores weights and feature maps in 16 bits; `"int8"` quantizes them by what
            `calibration` shows. Inputs and outputs keep their types. Layers that lose too much on the
            example or on `calibration` stay as they are, and `explain` names them.
        tune: "fast", "full" (more is tried), "off" (rules, nothing is timed), or a budget in seconds for the
            whole call. What a budget does not reach goes by rule; reading the model and the last comparison
            with torch are always done.
        methods: Restrict the choice to these methods (`aerogel methods` lists them).
        calibration: Real inputs: tensors, tuples of all inputs in order, or dicts by name. They tell how much
            of each layer's input is zero, in half precision what is lost, and for int8 which numbers maps
            hold: some dozens of images.
        ranges: For int8, how far the bytes of a map reach: "mean-square" cuts off what costs the others more,
            "percentile" one number in 10,000 on each side, "min-max" nothing.
        plan: The `.plan` of a compiled model: replayed exactly, nothing is timed.
        store: A folder of tuning records, by default in the user's cache folder. What was measured once is
            not measured again.
        strict_nan: Keep every layer dense, so that a NaN that meets a pruned weight stays a NaN.
        progress: False shows no progress, True also where nobody seems to look.

    Returns:
        A `Compiled` module for inference.
    """
    warn_if_untested(torch.__version__)
    looked_at(plan, store, dynamic_shapes)
    stored_as = dtype_of(dtype)
    call, names, samples = as_call(args, kwargs), names_of(methods), samples_of(calibration)
    check_call(model.original if isinstance(model, Compiled) else model, call, "compile")
    warn_of_few(stored_as, samples)
    backend = backend_of(call)
    wanted = (BASELINE,) if strict_nan else names
    asked = Asked(tune, search.effort(tune), wanted, backend, Store(store, backend), stored_as, samples)
    asked = replace(asked, ranges=ranges_of(ranges))
    with torch.random.fork_rng(devices=[]), shown(progress) as line, asked.store.shared():
        if isinstance(model, str | Path):
            points, found = points_of(shapes), list[Compiled]()
            line.split(len(points))
            for i, point in enumerate(points, 1):
                effort = None if asked.effort is None else asked.effort.shared(len(points) - i)
                own = replace(asked, effort=effort)
                found.append(_from_onnx(model, call, point, plan, own, line))
            return together(found)
        if shapes is not None:
            raise InvalidArgument(
                "shapes names the inputs of an ONNX file; a module takes an example: compile(model, (x,))"
            )
        if isinstance(model, Compiled):
            model = model.original
        return _compiled(as_weights(private(model, call)), call, dynamic_shapes, plan, asked, line)


def _compiled(
    model: Any, call: Call, dynamic_shapes: Any, plan: Plan | None, asked: Asked, progress: Progress
) -> Compiled:
    """A model of our own, compiled. In int8, on a machine with no instruction for that, floats may be faster:
    both are made and timed."""
    fast = _as_asked(model, call, dynamic_shapes, plan, asked, progress)
    if asked.dtype != torch.int8 or plan is not None or asked.effort is None:
        return fast
    if multiplies_bytes(asked.backend.target):
        return fast
    floats = _as_asked(model, call, dynamic_shapes, None, replace(asked, dtype=None), progress)
    return faster(fast, floats, call, asked)


def _as_asked(
    model: Any, call: Call, dynamic_shapes: Any, plan: Plan | None, asked: Asked, progress: Progress
) -> Compiled:
    """Each step has a name."""
    here, (there, *samples) = asked.backend.host(model, [call, *asked.samples])
    asked = replace(asked, samples=samples)
    try:
        steady(model, call)
        network, notes = network_of(here, there, dynamic_shapes, progress)
    except UnsupportedModel as reason:
        if plan is not None:
            raise
        return _parts(model, call, str(reason), asked, progress)
    samples = fit(network, asked.samples)
    if asked.dtype == torch.int8:
        network, said, lost = quantize.quantized(
            network, network.captured.flat(*there), samples, asked.backend, progress, asked.ranges
        )
        asked = replace(
            asked, dtype=None, samples=[], lost=lost
        )  # what is asked then is asked of any network
        notes = (*notes, *said)
    if plan is not None:
        network = as_planned(network, plan, there, asked)
        return looked(model, _made(model, network, checked(plan, network, asked), notes, asked), call, asked)
    key, known = _known(model, network, there, asked)
    alone = separate(network.captured)
    if known is not None and (alone or not known.plan.image_by_image):
        return _replayed(model, as_planned(network, known.plan, there, asked), known, call, asked)
    alone = alone and asked.effort is not None and asked.backend.image_by_image
    network, found, said = tuned(network, first_image(there) if alone else there, asked, progress)
    ours = looked(model, _made(model, network, found, (*notes, *said), asked), call, asked)
    if asked.effort is None or ours.how != GRAPH:
        return ours
    progress.begin("timing the whole model", 0.1)
    kept = judged(model, batched(ours, call) if alone else ours, call, asked, progress)
    choices = kept.plan.choices
    passing = search.unfinished(asked.effort, choices) or search.has_failures(choices)
    passing = passing or (kept.plan.model is not None and kept.plan.model.disturbed)
    if not asked.samples and not passing:
        # a record says nothing of what was calibrated, and one of a busy machine would stay for good
        asked.store.put_model(key, kept.plan, kept.how, kept.notes)
    return kept


def _made(model: Any, network: Network, plan: Plan, notes: tuple[str, ...], asked: Asked) -> Compiled:
    choices = tuple(replace(c, lost=asked.lost.get(c.node, c.lost)) for c in plan.choices)
    return Compiled(model, network, replace(plan, choices=choices), GRAPH, notes, backend=asked.backend)


def fit(network: Network, samples: Sequence[Call]) -> list[list[Any]]:
    """Calibration calls as inputs of the model as it was read."""
    found = [network.captured.sample(*sample) for sample in samples]
    for number, sample in enumerate(found):
        if (why := network.captured.misfit(sample)) is not None:
            raise ShapeError(f"calibration[{number}]: {why}")
    return found


def _known(model: Any, network: Network, call: Call, asked: Asked) -> tuple[str, Known | None]:
    """The model's key in the store, and its record if there is one that can be replayed."""
    weights = [network.weight(n).array for n in network.convs()]
    sizes = [tuple(v.shape) for v in network.captured.flat(*call) if hasattr(v, "shape")]
    key = model_key(network.graph.to_json(), weights, sizes, (asked.tune, asked.names, asked.dtype))
    if asked.effort is None or asked.samples:
        return key, None
    layers = [(n.name, n.conv, w) for n, w in zip(network.convs(), weights, strict=True) if n.conv]
    return key, asked.store.model(key, layers, ways(model, asked.dtype))


def together(points: Sequence[Compiled]) -> Compiled:
    """A module that is tuned at each of these points."""
    if not points:
        raise InvalidArgument("shapes is an empty list: name the sizes of at least one point")
    return points[0] if len(points) == 1 else Several(points)


def _from_onnx(
    path: str | Path, call: Call, shapes: Sizes, plan: Plan | None, asked: Asked, progress: Progress
) -> Compiled:
    """An ONNX file, compiled as a module that is only its graph. Where onnxruntime or OpenVINO is installed
    its time is said first."""
    from aerogel.capture.onnx.read import read as read_file

    if call[1]:
        raise InvalidArgument(
            "the inputs of an ONNX file have an order: give them as args, or their sizes as "
            "shapes={name: sizes}"
        )
    if Path(path).suffix == ".aero":
        raise InvalidFile(f"'{path}' is compiled already: aerogel.load(path) opens it")
    if not all(isinstance(a, torch.Tensor) for a in call[0]):
        raise InvalidArgument("the inputs of an ONNX file are tensors")
    progress.begin("reading the file")
    try:
        captured = read_file(path, shapes, [tuple(a.shape) for a in call[0]])
        check_types(captured.graph.inputs, captured.dtypes, call[0])
        model, call = GraphModel(captured, captured.constants), call if call[0] else captured.filled()
        fast = _compiled(model, call, None, plan, asked, progress)
    except InvalidArgument as why:  # arguments were looked at: this is the file's
        raise InvalidFile(f"'{path}': {why}") from why
    except AerogelError:
        raise
    except (RuntimeError, ValueError, IndexError) as why:
        # torch's words on a graph that fits its shapes, but not its numbers
        raise InvalidFile(f"'{path}' does not run: {first_line(why)}") from why
    return fast if asked.effort is None or plan else _beside_peers(path, fast, call, asked, progress)


def _beside_peers(path: str | Path, fast: Compiled, call: Call, asked: Asked, progress: Progress) -> Compiled:
    """The compiled file with the times of other runtimes that are installed and run it."""
    sessions = peers.open_installed(path, fast.input_names, call[0])
    if not sessions:
        return fast
    progress.begin(f"timing {' and '.join(map(peers.TITLES.__getitem__, sessions))}", 0.05)
    calls = [*sessions.values(), runner(fast, call)]
    result = compare(calls, ROUNDS, asked.backend.meter_on_host, progress)
    *theirs, ours = (sorted(t)[len(t) // 2] for t in result.times)
    timed = {name: Beside(us, ours, result.busy) for name, us in zip(sessions, theirs, strict=True)}
    fast.plan = replace(fast.plan, onnxruntime=timed.get("onnxruntime"), openvino=timed.get("openvino"))
    return fast


def checked(plan: Plan, network: Network, asked: Asked) -> Plan:
    """The user's plan, if every configuration in it is one its method offers for that layer."""
    if plan.image_by_image and not separate(network.captured):
        raise PlanMismatch(
            "the plan runs a batch image by image, and this model's images are not known to be "
            "apart. Compile again."
        )
    convs = {n.name: n for n in network.convs()}
    for choice in plan.choices:
        node = convs.get(choice.node)
        if node is None or node.conv is None or node.conv != choice.conv.layer():
            raise PlanMismatch(
                f"the plan has a layer '{choice.layer}' ({choice.conv}) that this model has not. "
                "Compile again."
            )
    stats = [network.stats(convs[choice.node]) for choice in plan.choices]
    if (wrong := not_offered(plan.choices, stats, asked.backend, plan.target)) is not None:
        raise PlanMismatch(
            f"'{wrong.config}' is no configuration for '{wrong.layer}' on {plan.target}. Compile again."
        )
    return plan


def _replayed(model: Any, network: Network, known: Known, call: Call, asked: Asked) -> Compiled:
    """A model measured before: its choices again, its answer looked at, nothing timed."""
    notes = (*known.notes, f"choices and timings are from the store, measured on {known.measured}")
    if known.how == GRAPH:
        return looked(model, _made(model, network, known.plan, notes, asked), call, asked)
    torchs = body(model, known.how)
    return Compiled(model, None, known.plan, known.how, notes, torchs, network.captured)


def _parts(model: Any, call: Call, why: str, asked: Asked, progress: Progress) -> Compiled:
    """Where the whole does not export: the largest submodules that do, each compiled for what the example
    feeds it."""
    if asked.dtype == torch.int8:
        raise UnsupportedModel(f"int8 takes models that torch.export reads whole: {why}")
    held = copy.deepcopy(model)
    with restored(model):
        fed = record(model, call)
    fed_asked = replace(asked, samples=[])  # samples are calls of the whole
    choices: list[Choice] = []
    notes = [why]

    def visit(parent: Any, path: str) -> None:
        for name, child in with_convolutions(parent):
            full = f"{path}{name}"
            try:
                if full not in fed:
                    raise UnsupportedModel("the example never calls it")
                here, (there,) = asked.backend.host(child, [fed[full]])
                network, left = network_of(here, there, None, progress)
                network, own, said = tuned(network, there, fed_asked, progress)
                part = _made(child, network, own, (*left, *said), asked)
            except UnsupportedModel as reason:
                notes.append(f"{full}: {reason}")
                visit(child, f"{full}.")
                continue
            setattr(parent, name, part)
            notes.append(f"{full}: compiled as a part of its own")
            choices.extend(
                replace(c, layer=f"{full}.{c.layer}", node=f"{full}:{c.node}") for c in part.plan.choices
            )

    if not writes_weights(model):  # whose parts would not see it
        visit(held, "")
    if not choices:
        notes.append("no part of the model could be compiled; torch runs it")
    ours = Compiled(model, None, Plan(asked.backend.target, tuple(choices)), PARTS, tuple(notes), held)
    try:
        with restored(model), restored(held, writes_weights(model)):
            same = agree(model, ours, call, asked.within)
    except AerogelError as error:
        # Python between the parts that wants of a layer what a compiled one has not
        ours.notes, same = (*ours.notes, str(error)), False
    if not same:
        return differs(model, ours, "on the example")
    return ours if asked.effort is None else judged(model, ours, call, asked, progress)
