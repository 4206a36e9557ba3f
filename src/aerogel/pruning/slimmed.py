"""What slim() found, as a value: the module, the compiled one, the recipe, and every step on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from aerogel.errors import printable
from aerogel.pruning.advice import Point
from aerogel.runtime.module import Compiled


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

    @staticmethod
    def of(said: Mapping[str, Any]) -> Try:
        recipe = {name: (str(p), float(s)) for name, (p, s) in said["recipe"].items()}
        return Try(**{**said, "recipe": recipe})


@dataclass(frozen=True)
class Slimmed:
    """What `slim` gives back. `model` is the pruned module (zeros in its weights), `fast` the same compiled.

    Example:
        >>> slimmed = aerogel.slim(model, [x], speedup=1.5, max_drop=0.9, budget_minutes=0.5)
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
            f"{'dense':10} {'':>6} {self.dense_score:8.4f} {'':>8} {self.dense_us / 1e3:9.3f} {1:7.2f}x",
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
            "dense": {"score": self.dense_score, "us": self.dense_us},
            "tries": [asdict(one) for one in self.tries],
        }

    def plot(self, ax: Any = None) -> Any:
        """Score against measured latency: the dense model, each step, the chosen one. Needs matplotlib: pip
        install aerogel[plot]."""
        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=(6, 4), layout="constrained")
        ax.axhline(self.dense_score - self.max_drop, color="gray", linewidth=1, linestyle=":")
        ax.annotate(
            "least score allowed",
            (1, self.dense_score - self.max_drop),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="gray",
        )
        points = [(self.dense_us, self.dense_score, "dense", "black")] + [
            (
                one.us,
                one.score,
                f"{one.zeros:.0%} zeros, {one.speedup:.1f}x",
                "tab:green" if i == self.chosen else "tab:blue",
            )
            for i, one in enumerate(self.tries)
        ]
        for us, score, label, color in points:
            ax.scatter([us / 1e3], [score], color=color, zorder=3)
            ax.annotate(label, (us / 1e3, score), xytext=(6, -10), textcoords="offset points", fontsize=8)
        if self.chosen is not None:
            one = self.tries[self.chosen]
            ax.scatter([one.us / 1e3], [one.score], s=160, facecolors="none", edgecolors="tab:green")
        ax.margins(x=0.25, y=0.15)
        ax.set_xlim(left=0)
        ax.set(xlabel="measured latency, ms", ylabel="score", title="green: the chosen one")
        ax.title.set_fontsize(9)
        return ax
