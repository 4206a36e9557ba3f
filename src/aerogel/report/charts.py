"""The charts of a report: matplotlib's own SVG, put into the page as it is.

matplotlib because it needs no script, no network and no second copy of the data in the page, and is what the
library's other plots use. Text stays text (it can be read aloud, searched and zoomed); its colour is the
page's, so that one drawing serves light, dark and print.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from aerogel.errors import printable
from aerogel.methods import METHODS
from aerogel.report.limits import Limit, Rates
from aerogel.report.report import shortened, spent_us

Row = Mapping[str, Any]
INK = "#010203"
"""Stands for the page's own text colour."""
DENSE, SPARSE = "#9aa4ae", "#2f7ed8"
"""Of bars: a dense library's, and aerogel's."""
COLOURS = (DENSE, SPARSE, "#e08214", "#2ca25f", "#a05fbf", "#d1495b", "#6b8e23")
NAMED = 60
"""Layers up to which bars have names."""
ROOF = {"fma": "multiply-adds", "l2": "second cache", "l3": "third cache"}


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def colour(method: str) -> str:
    return COLOURS[METHODS.index(method) % len(COLOURS)] if method in METHODS else DENSE


def _svg(draw: Callable[[Any], None], height: float, label: str) -> str:
    """One figure as inline SVG that a screen reader names."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "aerogel",
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9,
        "font.family": "sans-serif",
        "text.parse_math": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        draw(axes)
        out = io.StringIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a letter that its font has not: the reader's has it
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    drawn = out.getvalue()
    drawn = drawn[drawn.index("<svg") :].replace(INK, "currentColor")
    drawn = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", drawn, count=1)
    drawn = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", drawn, count=1)
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def by_layer(rows: Sequence[Row]) -> str:
    """Each layer's time beside dense."""
    spent = [(spent_us(row) or 0.0) / 1e3 for row in rows]
    dense = [(row["dense_us"] or 0.0) / 1e3 for row in rows]
    places = list(range(len(rows)))

    def draw(axes: Any) -> None:
        _bars(axes, places, dense, -0.2, DENSE, "dense, alone")
        for name in dict.fromkeys(row["method"] for row in rows):
            own = [spent[i] if rows[i]["method"] == name else 0.0 for i in places]
            _bars(axes, places, own, 0.2, colour(name), name)
        _named(axes, rows)
        axes.set_ylabel("milliseconds")
        axes.legend(frameon=False, ncols=6, loc="lower left", bbox_to_anchor=(0, 1))

    return _svg(draw, 3.6, "Time of each layer beside dense")


def _bars(
    axes: Any, places: Sequence[int], heights: Sequence[float], shift: float, colour: str, label: str
) -> None:
    """Bars beside each other; of many layers one outline, which a browser draws at once."""
    if len(places) > NAMED:
        edges = [place - 0.5 for place in range(len(places) + 1)]
        axes.stairs(heights, edges, fill=True, color=colour, label=label, alpha=0.75)
        return
    here = [(place, height) for place, height in zip(places, heights, strict=True) if height]
    width = 0.4 if shift else 0.8
    axes.bar([p + shift for p, _ in here], [h for _, h in here], width, color=colour, label=label)


def by_method(rows: Sequence[Row], whole_ms: float) -> str:
    """Where the whole model's time goes: one bar, a part for each method."""
    parts = dict[str, float]()
    for row in rows:
        parts[row["method"]] = parts.get(row["method"], 0.0) + (spent_us(row) or 0.0) / 1e3
    rest = whole_ms - sum(parts.values())
    if rest > 0:
        parts["everything else"] = rest

    def draw(axes: Any) -> None:
        left, total = 0.0, sum(parts.values())
        for name, ms in parts.items():
            label = f"{name}: {ms:.1f} ms, {ms / total:.0%}"
            axes.barh([0], [ms], left=left, color=colour(name), label=label, height=0.5, alpha=_alpha(name))
            left += ms
        axes.set_yticks([])
        axes.set_xlabel("milliseconds")
        axes.set_ylim(-0.4, 0.9)
        axes.legend(frameon=False, ncols=3, loc="upper left")

    return _svg(draw, 1.7, "Where the time goes, by method")


def _alpha(name: str) -> float:
    return 0.45 if name == "everything else" else 1.0


def roofline(rows: Sequence[Row], limits: Sequence[Limit], measured: Rates, threads: int) -> str:
    """What layers reach of what the machine can do, over the work they have for each byte."""

    def draw(axes: Any) -> None:
        top = measured["fma"] * threads / 1e9
        for level, style in (("l2", "-"), ("l3", "--")):
            knee = measured["fma"] / measured[level]
            work = [knee / 64, knee, knee * 64]
            reach = [top / 64, top, top]
            axes.plot(work, reach, style, color=INK, linewidth=1, label=f"limit by {ROOF[level]}")
        for name in dict.fromkeys(row["method"] for row in rows):
            own = [
                (found.flops / found.bytes, found.flops / us / 1e3)
                for row, found in zip(rows, limits, strict=True)
                if row["method"] == name and (us := spent_us(row)) and found.flops
            ]
            if own:
                axes.scatter(*zip(*own, strict=True), s=18, color=colour(name), label=name, alpha=0.8)
        axes.set(
            xscale="log", yscale="log", xlabel="operations for each byte moved", ylabel="GFLOP/s, nonzeros"
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))

    return _svg(draw, 3.8, "Layers under the limits of this machine")


def sparsity(rows: Sequence[Row]) -> str:
    """Zeros of each layer."""

    def draw(axes: Any) -> None:
        for name in dict.fromkeys(row["method"] for row in rows):
            shares = [100 * row["sparsity"] * (row["method"] == name) for row in rows]
            _bars(axes, range(len(rows)), shares, 0.0, colour(name), name)
        _named(axes, rows)
        axes.set(ylabel="zeros, %", ylim=(0, 100))

    return _svg(draw, 2.8, "Zeros of each layer's weights")


def _named(axes: Any, rows: Sequence[Row]) -> None:
    """Layers under the axis, by name where there is room; else their numbers in the table."""
    axes.margins(x=0.01)
    if len(rows) > NAMED:
        axes.set_xlabel("layer, in the order of the table")
        return
    names = [shortened(printable(row["layer"]), 22) for row in rows]
    axes.set_xticks(range(len(rows)), names, rotation=90, fontsize=7)
