"""explain(): layer by layer what was chosen, how fast it is, and why not the others."""

from __future__ import annotations

import html
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from aerogel.errors import InvalidArgument, printable
from aerogel.ir import Choice
from aerogel.methods import BASELINE, METHODS, method
from aerogel.report.reasons import why_dense
from aerogel.runtime.module import Compiled
from aerogel.runtime.points import Several

FEW = 12
"""Layers that a sentence lists."""


@dataclass(frozen=True)
class Report:
    """A value: print it, show it in a notebook, or take its dict."""

    headline: str
    layers: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [self.headline, ""]
        for row in self.layers:
            lines.append(f"{row['layer']}  {row['conv']}  {row['sparsity']:.0%} zeros")
            lines += [f"    zero are {row['idle']}"] if row["idle"] else []
            lines.append(f"    {row['chosen']}{_times(row)}")
            lines += [f"    not {name}: {why}" for name, why in row["others"].items()]
        return "\n".join(map(_line, [*lines, "", *self.notes]))

    def to_dict(self) -> dict[str, Any]:
        return {
            "headline": self.headline,
            "layers": [dict(row) for row in self.layers],
            "notes": list(self.notes),
        }

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{_shown(row['layer'])}<td>{_shown(row['conv'])}"
            f"<td>{row['sparsity']:.0%}{'; ' if row['idle'] else ''}{_shown(row['idle'])}"
            f"<td>{_shown(row['chosen'])}{_shown(_times(row))}"
            f"<td>{_shown('; '.join(f'{n}: {w}' for n, w in row['others'].items()))}"
            for row in self.layers
        )
        head = "<tr><th>layer<th>problem<th>zeros<th>chosen<th>why not the others"
        notes = "".join(f"<li>{_shown(n)}" for n in self.notes)
        return f"<p><b>{_shown(self.headline)}</b><table>{head}{cells}</table><ul>{notes}</ul>"


def _line(text: str) -> str:
    """A line for a terminal; what it is indented by stays."""
    said = text.lstrip(" ")
    return " " * (len(text) - len(said)) + printable(said)


def _shown(text: str) -> str:
    """Text of a file in HTML: neither tags nor characters that turn what follows around."""
    return html.escape(printable(text))


def explain(fast: Compiled, *, layer: str | None = None) -> Report:
    """Say what compile() decided and measured. `layer` keeps one layer."""
    if not isinstance(fast, Compiled):
        raise InvalidArgument(f"explain() takes what compile() gave, not a {type(fast).__name__}")
    points = fast.points if isinstance(fast, Several) else (fast,)
    rows = tuple(_row(c) for p in points for c in p.plan.choices if layer in (None, c.layer))
    if layer is not None and not rows:
        raise InvalidArgument(
            f"no layer is called '{layer}'; {_nearest(layer, [c.layer for c in fast.plan.choices])}"
        )
    target, heads, notes = (
        fast.plan.target,
        [_beside(p) for p in points],
        list(fast.notes),
    )
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
    return Report(" ".join(heads), rows, tuple(notes))


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
        "chosen": named + reason + _pooled(choice) + _limit(choice),
        "idle": str(choice.idle) if choice.idle else "",
        "us": choice.chosen_us(),
        "dense_us": dense_us,
        "in_network_us": choice.in_network and choice.in_network.p50_us,
        "others": others,
    }


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


def _times(row: dict[str, Any]) -> str:
    us, dense_us, inside = row["us"], row["dense_us"], row["in_network_us"]
    if dense_us is None or (us is None and inside is None):
        return ""
    there = "" if inside is None else f"{inside:.0f} us in the network"
    if us is None:  # the cost model's, which was timed there only
        return f"  {there}, dense {dense_us:.0f} us alone"
    return f"  {us:.0f} us, dense {dense_us:.0f} us ({dense_us / us:.2f}x){there and f'; {there}'}"
