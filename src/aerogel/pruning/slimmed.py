"""What slim() found, as a value: the module, the compiled one, the recipe, and every step on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from torch import nn

from aerogel.errors import printable
from aerogel.optional import import_optional
from aerogel.pruning.advice import Point
from aerogel.runtime.module import Compiled

LINE = 11
"""Points from one label of a plot to the next."""


@dataclass(frozen=True)
class Try:
    """One step: what was asked for and predicted, what came out. `score` is evaluate's, or how often the
    answers are the dense model's."""

    goal: float
    predicted: float | None
    """Speedup, from the layers' own times; None where zeros were asked for."""
    zeros: float
    score: float
    speedup: float
    us: float
    seconds: float
    recipe: dict[str, Point]


@dataclass(frozen=True)
class Slimmed:
    """What `slim` gives back. `model` is the pruned module (zeros in its weights), `fast` the same compiled.

    Example:
        >>> slimmed = aerogel.slim(model, [x], sparsity=0.8, max_drop=0.9, budget_minutes=0.5)
        >>> text = slimmed.table
    """

    model: nn.Module
    fast: Compiled
    tries: tuple[Try, ...]
    chosen: int | None
    """Which of the tries this is; None where none kept its answers: the model is dense."""
    dense_score: float
    dense_us: float
    max_drop: float
    why: str
    """Why it ended where it did, in words."""

    @property
    def recipe(self) -> dict[str, Point]:
        """For each layer that is pruned its pattern and share of zeros: `prune(model, recipe)` replays it."""
        return {} if self.chosen is None else dict(self.tries[self.chosen].recipe)

    @property
    def table(self) -> str:
        """Every step, and which was taken."""
        lines = [
            f"{'':10} {'zeros':>6} {'score':>8} {'drop':>8} {'ms':>9} {'speedup':>8} predicted {'s':>5}",
            f"{'unpruned':10} {'':>6} {self.dense_score:8.4f} {'':>8} {self.dense_us / 1e3:9.3f} {1:7.2f}x",
        ]
        for number, one in enumerate(self.tries):
            said = "" if one.predicted is None else f"{one.predicted:.2f}x"
            mark = "  <- this one" if number == self.chosen else ""
            drop = f"{self.dense_score - one.score:+8.4f}"
            lines.append(
                f"{f'step {number + 1}':10} {one.zeros:6.1%} {one.score:8.4f} {drop} {one.us / 1e3:9.3f} "
                f"{one.speedup:7.2f}x {said:>9} {one.seconds:5.0f}{mark}"
            )
        lines += ["", self.why]
        if self.recipe:
            lines += ["", *(f"    {printable(n)}: {p} {s:.0%}" for n, (p, s) in self.recipe.items())]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "recipe": {name: list(point) for name, point in self.recipe.items()},
            "chosen": self.chosen,
            "why": self.why,
            "max_drop": self.max_drop,
            "unpruned": {"score": self.dense_score, "us": self.dense_us},
            "tries": [asdict(one) for one in self.tries],
        }

    def plot(self, ax: Any = None) -> Any:
        """Score against measured latency: the dense model, each step, the chosen one. Needs matplotlib:
        `pip install "aerogel[plot]"`."""
        if ax is None:
            pyplot = import_optional("matplotlib.pyplot", "plot", "Slimmed.plot()")
            _, ax = pyplot.subplots(figsize=(6, 4), layout="constrained")
        least = self.dense_score - self.max_drop
        small: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8}
        places = [(one.us / 1e3, one.score) for one in self.tries]
        dense = (self.dense_us / 1e3, self.dense_score)
        ax.scatter(*dense, color="black", zorder=3)
        ax.annotate("unpruned", dense, xytext=(0, 7), ha="center", **small)
        for number, place in enumerate(places):
            ax.scatter(*place, color="tab:green" if number == self.chosen else "tab:blue", zorder=3)
        if self.chosen is not None:
            ax.scatter(*places[self.chosen], s=160, facecolors="none", edgecolors="tab:green")
        ax.axhline(least, color="gray", linewidth=1, linestyle=":")
        ax.annotate("least score allowed", (0, least), xytext=(4, -3), va="top", color="gray", **small)
        ax.margins(x=0.25, y=0.15)
        ax.set_xlim(left=0)
        ax.set(xlabel="measured latency, ms", ylabel="score")
        ax.set_title("no step kept the score" if self.chosen is None else "green: the chosen one", fontsize=9)
        ax.figure.draw_without_rendering()  # now it is known where points stand
        heights = [float(ax.transData.transform(place)[1]) * 72 / ax.figure.dpi for place in places]
        for one, place, own, to in zip(self.tries, places, heights, spread(heights, LINE), strict=True):
            line = {"arrowstyle": "-", "linewidth": 0.5, "color": "gray"} if abs(to - own) > 3 else None
            label = f"{one.zeros:.0%} zeros, {one.speedup:.1f}x"
            ax.annotate(label, place, xytext=(18, to - own), va="center", arrowprops=line, **small)
        return ax


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Heights moved as little as makes them a gap apart, in the order they have."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    touching: list[list[float]] = []
    for rank, number in enumerate(order):
        touching.append([heights[number] - gap * rank])
        while len(touching) > 1 and fmean(touching[-2]) > fmean(touching[-1]):
            last = touching.pop()
            touching[-1] += last
    moved = [fmean(some) for some in touching for _ in some]
    return [moved[rank] + gap * rank for _, rank in sorted(zip(order, range(len(order)), strict=True))]
