"""explain(): layer by layer what was chosen, how fast it is, and why not the others."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import date
from difflib import get_close_matches
from importlib.metadata import version
from typing import Any

import numpy as np

from aerogel import __version__
from aerogel.errors import InvalidArgument
from aerogel.ir import ITEM_BYTES, Choice
from aerogel.methods import BASELINE, METHODS, method
from aerogel.report.reasons import why_dense
from aerogel.report.report import Report
from aerogel.runtime.module import Compiled
from aerogel.runtime.points import Several

FEW = 12
"""Layers that a sentence lists."""


def explain(fast: Compiled, *, layer: str | None = None, verbose: bool = False) -> Report:
    """Say what `compile` decided and measured: a table of layers; on demand, why not the others.

    Example:
        >>> report = aerogel.explain(fast)
        >>> text = str(aerogel.explain(fast, layer="0"))    # what was tried there, and why not the others

    Args:
        fast: What `compile` or `load` gave.
        layer: Only this layer, with every detail.
        verbose: Every detail of every layer: what was tried, and why each other method was not chosen.

    Returns:
        A `Report`: print it, show it in a notebook, `save("report.html")` it, or take its `to_dict()`.
    """
    if not isinstance(fast, Compiled):
        raise InvalidArgument(f"explain() takes what compile() gave, not a {type(fast).__name__}")
    points = fast.points if isinstance(fast, Several) else (fast,)
    rows = tuple(_row(c) for p in points for c in p.plan.choices if layer in (None, c.layer))
    if layer is not None and not rows:
        raise InvalidArgument(
            f"no layer is called '{layer}'; {_nearest(layer, [c.layer for c in fast.plan.choices])}"
        )
    target, notes = fast.plan.target, list(fast.notes)
    heads = [_beside(p) for p in points]
    if isinstance(fast, Several):
        named = [", ".join("x".join(map(str, shape)) for shape in own) for own in fast.sizes]
        heads = [f"At {size}: {head}" for size, head in zip(named, heads, strict=True)]
        notes = [f"at {size}: {note}" for size, p in zip(named, points, strict=True) for note in p.notes]
    notes = [
        *notes,
        f"tuned for {target}; other image sizes use the same methods with their own first configuration",
        *(["batches run image by image"] if fast.plan.image_by_image else []),
        f"workspaces held now: {fast.workspace_bytes() / 2**20:.1f} MB",
    ]
    return Report(
        headline=" ".join(heads),
        layers=rows,
        notes=tuple(notes),
        times=_milliseconds(fast) if len(points) == 1 else {},
        memory=_bytes(points),
        machine=_machine(fast),
        by=fast.how.by,
        verbose=verbose or layer is not None,
    )


def _milliseconds(fast: Compiled) -> dict[str, float]:
    """The whole model's, by aerogel and by the faster torch layout."""
    timed = fast.plan.model
    if timed is None:
        return {}
    ours = timed.p50_us / 1e3
    return {"aerogel": ours, "torch": ours * timed.ratio_p50}


def _bytes(points: Sequence[Compiled]) -> dict[str, float]:
    """Of weights, dense and with what chosen methods pack of them, counted; and of workspaces."""
    dense = packed = 0.0
    for choice in points[0].plan.choices:
        weights = float(np.prod(choice.conv.weight_shape)) * ITEM_BYTES[choice.conv.dtypes.weight]
        dense += weights
        position = 4.0 / ITEM_BYTES[choice.conv.dtypes.weight]
        kept = (1 - choice.sparsity) * (1 + position)
        packed += weights if choice.config.method == BASELINE else weights * kept
    held = sum(point.workspace_bytes() for point in points)
    return {"dense weights": dense, "nonzeros and their positions": packed, "workspaces": float(held)}


def _machine(fast: Compiled) -> dict[str, str]:
    """Where it was tuned, and the versions at hand."""
    return {
        "target": str(fast.plan.target),
        "aerogel": __version__,
        "torch": version("torch"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "report made": date.today().isoformat(),
    }


def _beside(fast: Compiled) -> str:
    """The headline, after onnxruntime's time where that was taken."""
    beside = fast.plan.onnxruntime
    if beside is None:
        return _headline(fast)
    advice = "aerogel is faster" if beside.ours_us < beside.theirs_us else "keep onnxruntime"
    times = f"onnxruntime {beside.theirs_us / 1e3:.1f} ms, aerogel {beside.ours_us / 1e3:.1f} ms"
    return f"{times}: {advice}. {_headline(fast)}"


def _nearest(name: str, layers: list[str]) -> str:
    """Layers to name instead of one that there is not."""
    near = get_close_matches(str(name), layers, 1)
    few = ", ".join(layers[:FEW]) + (f" and {len(layers) - FEW} more" if len(layers) > FEW else "")
    return f"did you mean '{near[0]}'?" if near else f"layers are {few or 'none'}"


def _headline(fast: Compiled) -> str:
    sparse, layers = sum(c.config.method != BASELINE for c in fast.plan.choices), len(fast.plan.choices)
    why = "" if sparse else f" {why_dense(fast)}"
    own = f"; {sparse} of {layers} layers on sparse kernels" if sparse else ""
    if fast.how.by == "torch":
        if fast.plan.differed:
            return f"torch ({fast.how}) runs the model: {fast.plan.differed}."
        return f"torch ({fast.how}) runs the model: no plan was faster on this machine.{why}"
    if fast.plan.model is None:
        return f"Nothing was timed (tune='off'){own and own + ', by rule'}.{why}"
    return f"{fast.plan.model.ratio_p50:.2f}x over the faster torch layout{own}.{why}"


def _row(choice: Choice) -> dict[str, Any]:
    paper = method(choice.config.method).PAPER
    best, own = choice.fastest(), choice.config.method
    others = dict(choice.refused)
    for name in METHODS:
        if name != own and name in best and own in best:
            config, timing = best[name]
            others[name] = f"{timing.p50_us:.0f} us ({config}), {own} {best[own].timing.p50_us:.0f} us"
    dense_us = best[BASELINE].timing.p50_us if BASELINE in best else None
    named = f"{choice.config} ({paper})"
    reason = f"; {choice.reason}" if choice.reason else ""
    return {
        "layer": choice.layer,
        "conv": str(choice.conv),
        "sparsity": choice.sparsity,
        "method": own,
        "chosen": named + reason + _pooled(choice) + _limit(choice) + _lost(choice),
        "idle": str(choice.idle) if choice.idle else "",
        "lost": choice.lost,
        "us": choice.chosen_us(),
        "dense_us": dense_us,
        "in_network_us": choice.in_network and choice.in_network.p50_us,
        "others": others,
    }


def _lost(choice: Choice) -> str:
    return "" if choice.lost is None else f"; int8 costs it {choice.lost:.2%} of its output"


def _pooled(choice: Choice) -> str:
    if not choice.pooled or choice.in_network is None:
        return ""
    return (
        f"; the pooling after it is done by the same kernel (PECR), {choice.in_network.ratio_p50:.2f}x "
        "of both apart"
    )


def _limit(choice: Choice) -> str:
    """From where on a layer that skips zeros of its input is left to the next best."""
    if choice.limit is None or choice.limit >= 1:
        return ""
    return f"; falls back where more than {choice.limit:.0%} of the windows are not zero"
