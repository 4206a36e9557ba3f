"""explain(): layer by layer what was chosen, how fast it is, and why not the others."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from aerogel.errors import AerogelError
from aerogel.methods import METHODS, gpu, method
from aerogel.plan import Choice
from aerogel.runtime.module import Compiled
from aerogel.runtime.points import Several
from aerogel.target import Gpu

KEEP_DENSE = "Nothing here is sparse enough for our kernels: where a dense runtime (onnxruntime, OpenVINO) serves it, keep that."


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
        return "\n".join([*lines, "", *self.notes])

    def to_dict(self) -> dict[str, Any]:
        return {"headline": self.headline, "layers": [dict(row) for row in self.layers], "notes": list(self.notes)}

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{html.escape(row['layer'])}<td>{html.escape(row['conv'])}"
            f"<td>{row['sparsity']:.0%}{'; ' if row['idle'] else ''}{html.escape(row['idle'])}"
            f"<td>{html.escape(row['chosen'])}{html.escape(_times(row))}"
            f"<td>{html.escape('; '.join(f'{n}: {w}' for n, w in row['others'].items()))}"
            for row in self.layers
        )
        head = "<tr><th>layer<th>problem<th>zeros<th>chosen<th>why not the others"
        notes = "".join(f"<li>{html.escape(n)}" for n in self.notes)
        return f"<p><b>{html.escape(self.headline)}</b><table>{head}{cells}</table><ul>{notes}</ul>"


def explain(fast: Compiled, *, layer: str | None = None) -> Report:
    """Say what compile() decided and measured. `layer` keeps one layer."""
    if not isinstance(fast, Compiled):
        raise AerogelError(f"explain() takes what compile() gave, not a {type(fast).__name__}")
    points = fast.points if isinstance(fast, Several) else (fast,)
    rows = tuple(_row(c, p.plan.device) for p in points for c in p.plan.choices if layer in (None, c.layer))
    if layer is not None and not rows:
        raise AerogelError(f"no layer is called '{layer}'; layers are {', '.join(c.layer for c in fast.plan.choices)}")
    target, heads, notes = fast.plan.device or fast.plan.target, [_beside(p) for p in points], list(fast.notes)
    if isinstance(fast, Several):
        named = [", ".join("x".join(map(str, shape)) for shape in own) for own in fast.sizes]
        heads = [f"At {size}: {head}" for size, head in zip(named, heads, strict=True)]
        notes = [f"at {size}: {note}" for size, p in zip(named, points, strict=True) for note in p.notes]
    others = "other image sizes" if fast.plan.apart else "other image sizes and batches"
    notes = [
        *(n for n in notes if not n.startswith("onnxruntime ") and ": onnxruntime " not in n),
        f"tuned for {target}; {others} use the same methods with their own first configuration",
        *(["batches run image by image"] if fast.plan.apart else []),
        f"workspaces held now: {fast.workspace_bytes() / 2**20:.1f} MB",
    ]
    return Report(" ".join(heads), rows, tuple(notes))


def _beside(fast: Compiled) -> str:
    """The headline, after onnxruntime's time where that was taken."""
    return " ".join([*(f"{n}." for n in fast.notes if n.startswith("onnxruntime ")), _headline(fast)])


def _headline(fast: Compiled) -> str:
    sparse, layers = sum(c.config.method != "dense" for c in fast.plan.choices), len(fast.plan.choices)
    keep = "" if sparse else f" {KEEP_DENSE}"
    if fast.how not in ("graph", "parts", "gpu"):
        return f"torch ({fast.how}) runs the model: no plan was faster on this machine.{keep}"
    if fast.plan.model is None:
        return f"{sparse} of {layers} layers on sparse kernels, by rule; nothing was timed (tune='off').{keep}"
    return f"{fast.speedup:.2f}x over the faster torch layout; {sparse} of {layers} layers on sparse kernels.{keep}"


def _row(choice: Choice, device: Gpu | None) -> dict[str, Any]:
    names = METHODS if device is None else gpu.METHODS
    paper = (method if device is None else gpu.method)(choice.config.method).PAPER
    best = {config.method: (str(config), t) for config, t in reversed(choice.tried)}
    others = dict(choice.refused)
    for name in names:
        if name != choice.config.method and name in best and choice.config.method in best:
            config, timing = best[name]
            mine = best[choice.config.method][1]
            others[name] = f"{timing.p50_us:.0f} us ({config}), {choice.config.method} {mine.p50_us:.0f} us"
    mine_us = next((t.p50_us for c, t in choice.tried if c == choice.config), None)
    dense_us = best["dense"][1].p50_us if "dense" in best else None
    named = f"{choice.config} ({paper})"
    return {
        "layer": choice.layer, "conv": str(choice.conv), "sparsity": choice.sparsity,
        "chosen": named + (f"; {choice.reason}" if choice.reason else "") + _pooled(choice) + _limit(choice),
        "idle": str(choice.idle) if choice.idle else "",
        "us": mine_us, "dense_us": dense_us, "in_network_us": choice.in_network and choice.in_network.p50_us, "others": others,
    }  # fmt: skip


def _pooled(choice: Choice) -> str:
    if not choice.pooled or choice.in_network is None:
        return ""
    return f"; the pooling after it is done by the same kernel (PECR), {choice.in_network.ratio_p50:.2f}x of both apart"


def _limit(choice: Choice) -> str:
    """From where on a layer that skips zeros of its input is left to the next best."""
    if choice.most is None or choice.most >= 1:
        return ""
    return f"; falls back where more than {choice.most:.0%} of the windows are not zero"


def _times(row: dict[str, Any]) -> str:
    if row["us"] is None or row["dense_us"] is None:
        return ""
    inside = "" if row["in_network_us"] is None else f"; {row['in_network_us']:.0f} us in the network"
    return f"  {row['us']:.0f} us, dense {row['dense_us']:.0f} us ({row['dense_us'] / row['us']:.2f}x){inside}"
