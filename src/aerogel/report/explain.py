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
from aerogel.runtime.headline import (
    describe_kernels,
    describe_peers,
    describe_ratio,
    describe_speedup,
    skips_zeros,
)
from aerogel.runtime.module import Compiled
from aerogel.runtime.peers import TITLES, is_installed
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
        *_compared(points[0]),
        f"tuned for {target}; other image sizes use the same methods with their own first configuration",
        *(["batches run image by image"] if fast.plan.image_by_image else []),
        f"workspaces held now: {fast.workspace_bytes() / 2**20:.1f} MB",
    ]
    timing = fast.plan.model if len(points) == 1 else None
    return Report(
        headline=" ".join(heads),
        layers=rows,
        notes=tuple(notes),
        times=_milliseconds(fast) if len(points) == 1 else {},
        speedup="" if timing is None else describe_ratio(timing),
        doubt="" if timing is None else timing.doubt,
        memory=_bytes(points),
        machine=_machine(fast),
        by=fast.how.by,
        verbose=verbose or layer is not None,
    )


def _milliseconds(fast: Compiled) -> dict[str, float]:
    """The whole model's, by aerogel, by the faster torch layout and by other runtimes."""
    timed = fast.plan.model
    if timed is None:
        return {}
    ours = timed.p50_us / 1e3
    peers = {name: beside.theirs_us / 1e3 for name, beside in fast.plan.peers().items()}
    return {"aerogel": ours, "torch": ours * timed.ratio_p50, **peers}


def _bytes(points: Sequence[Compiled]) -> dict[str, float]:
    """Of weights, dense and with what chosen methods pack of them, counted; and of workspaces."""
    dense = packed = 0.0
    for choice in points[0].plan.choices:
        weights = float(np.prod(choice.conv.weight_shape)) * ITEM_BYTES[choice.conv.dtypes.weight]
        dense += weights
        position = 4.0 / ITEM_BYTES[choice.conv.dtypes.weight]
        kept = (1 - choice.sparsity) * (1 + position)
        packed += weights * kept if skips_zeros(choice) else weights
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
    """The headline, after the times of other runtimes where those were taken."""
    peers = describe_peers(fast.plan)
    return f"{peers}. {_headline(fast)}" if peers else _headline(fast)


def _compared(fast: Compiled) -> list[str]:
    """Which runtimes the model was timed beside and which not, as a note; none where nothing was timed."""
    timed = list(fast.plan.peers())
    if fast.plan.model is None and not timed:
        return []
    others = {title: is_installed(name) for name, title in TITLES.items() if title not in timed}
    present = [title for title, installed in others.items() if installed]
    absent = [title for title, installed in others.items() if not installed]
    note = f"timed beside {', '.join(['torch', *timed])}"
    if present:
        names = ",".join(title.lower() for title in present)
        note += (
            f"; {' and '.join(present)} {'is' if len(present) == 1 else 'are'} installed and may be faster: "
            f"aerogel bench MODEL --against torch,{names}"
        )
    if absent:
        note += f"; {' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed"
    return [note]


def _nearest(name: str, layers: list[str]) -> str:
    """Layers to name instead of one that there is not."""
    near = get_close_matches(str(name), layers, 1)
    few = ", ".join(layers[:FEW]) + (f" and {len(layers) - FEW} more" if len(layers) > FEW else "")
    return f"did you mean '{near[0]}'?" if near else f"layers are {few or 'none'}"


def _headline(fast: Compiled) -> str:
    choices = fast.plan.choices
    why = "" if any(map(skips_zeros, choices)) else f" {why_dense(fast)}"
    ours = any(choice.config.method != BASELINE for choice in choices)
    kernels = f"; {describe_kernels(choices)}" if ours else ""
    if fast.how.by == "torch":
        if fast.plan.differed:
            return f"torch ({fast.how}) runs the model: {fast.plan.differed}."
        doubt = fast.plan.model.doubt if fast.plan.model is not None else ""
        busy = f" ({doubt}: compile again when it is idle)" if doubt else ""
        return f"torch ({fast.how}) runs the model: no plan was faster on this machine{busy}.{why}"
    if fast.plan.model is None:
        return f"Nothing was timed (tune='off'){kernels and kernels + ', by rule'}.{why}"
    return f"{describe_speedup(fast.plan.model, 'the faster torch layout')}{kernels}.{why}"


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
        "skips_zeros": skips_zeros(choice),
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
        "the speed of the two kernels one after the other"
    )


def _limit(choice: Choice) -> str:
    """From where on a layer that skips zeros of its input is left to the next best."""
    if choice.limit is None or choice.limit >= 1:
        return ""
    return f"; falls back where more than {choice.limit:.0%} of the windows are not zero"
