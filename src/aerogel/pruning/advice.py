"""What advise() found, as a value: to print, to plot, to hand to prune()."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from aerogel.errors import printable
from aerogel.optional import import_optional

Point = tuple[str, float]
"""A pattern and a sparsity."""
NOISY = 0.2
"""Noise from which a recipe would follow the noise."""


@dataclass(frozen=True)
class LayerAdvice:
    """One layer: microseconds dense and at each point, what each point takes of its weight (L1), and where it
    breaks even."""

    layer: str
    conv: str
    dense_us: float
    us: dict[Point, float]
    lost: dict[Point, float]
    break_even: dict[str, float | None]


def spent(layers: Sequence[LayerAdvice], at: Sequence[Point | None]) -> float:
    """Microseconds of all layers, each at its point; None is dense."""
    return sum(min(one.dense_us, one.us[p]) if p else one.dense_us for one, p in zip(layers, at, strict=True))


def line_through(
    layers: Sequence[LayerAdvice], torch_us: float, model_us: Mapping[Point, float]
) -> tuple[float, float]:
    """What the layers' times make: the model takes `slope` x their sum + `rest`, a line through the points
    that were measured and torch's own time."""
    sums = [spent(layers, [p] * len(layers)) for p in (*model_us, None)]
    times = np.array([*model_us.values(), torch_us])
    slope, rest = np.polyfit(sums, times, 1, w=1 / times) if len(set(sums)) > 1 else (1.0, 0.0)
    if slope <= 0 or rest < 0:
        return float(np.median(times / sums)), 0.0
    return float(slope), float(rest)


@dataclass(frozen=True)
class Advice:
    """What `advise` found. Print it, plot it, or hand it to `prune`.

    Example:
        >>> advice = aerogel.advise(model, (x,), sparsities=(0.9,), patterns=("unstructured",))
        >>> recipe = advice.recipe    # {layer: (pattern, share)}; empty where no speedup was asked for
    """

    target: str
    torch_us: float
    model_us: dict[Point, float]
    layers: tuple[LayerAdvice, ...]
    wanted: float | None
    recipe: dict[str, Point]
    predicted: float | None
    """Speedup of the model pruned by the recipe."""
    spread: dict[Point, tuple[float, float]] = field(default_factory=dict)
    """Quartiles of the model's speedup at each point, as it was measured."""
    int8_us: float | None = None
    """In int8: the model with none of its weights pruned."""

    @property
    def dense_us(self) -> float:
        """What the model takes with its layers as `LayerAdvice.dense_us` has them."""
        return self.torch_us if self.int8_us is None else self.int8_us

    @property
    def noise(self) -> float:
        """How far the middle half of the rounds lie apart, as a share of the speedup; the median of all
        points."""
        return float(np.median([high / low - 1 for low, high in self.spread.values()] or [0.0]))

    @property
    def table(self) -> str:
        """The model at each point, then for each layer where it breaks even."""
        patterns, lowest = list(dict.fromkeys(p for p, _ in self.model_us)), min(s for _, s in self.model_us)
        lines = [f"speedup over torch ({self.torch_us / 1e3:.1f} ms) on {self.target}", ""]
        if self.int8_us is not None:
            lines += ["in int8", f"     no zeros {self.torch_us / self.int8_us:5.2f}x"]
        for pattern in patterns:
            lines.append(f"{pattern}")
            lines += [
                f"    {s:4.0%} zeros {self.torch_us / us:5.2f}x{self._between((p, s))}"
                for (p, s), us in self.model_us.items()
                if p == pattern
            ]
        lines += [
            "",
            f"{'layer':30} {'dense us':>9}  sparsity from which it is faster: " + ", ".join(patterns),
        ]
        for layer in self.layers:
            even = ", ".join(_percent(layer.break_even[p], lowest) for p in patterns)
            lines.append(f"{printable(layer.layer):30} {layer.dense_us:9.0f}  {even}")
        if self.wanted is not None:
            lines += ["", f"for {self.wanted:.2f}x, predicted {self.predicted:.2f}x:"]
            lines += [
                f"    {printable(name)}: {pattern} {share:.0%}"
                for name, (pattern, share) in self.recipe.items()
            ]
        if self.noise > NOISY:
            lines += [
                "",
                f"This machine was busy: half of the rounds lie {self.noise:.0%} apart. That is too noisy "
                "for a recipe; run it again when nothing else runs.",
            ]
        return "\n".join(lines)

    def _between(self, point: Point) -> str:
        """Half of the rounds, where they were kept."""
        if point not in self.spread:
            return ""
        low, high = self.spread[point]
        return f"  (half of the rounds {low:.2f} to {high:.2f})"

    def __str__(self) -> str:
        return self.table

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values; points are named `pattern@sparsity`."""

        def named(points: Mapping[Point, float]) -> dict[str, float]:
            return {f"{p}@{s}": v for (p, s), v in points.items()}

        layers = [asdict(layer) | {"us": named(layer.us), "lost": named(layer.lost)} for layer in self.layers]
        spread = {f"{p}@{s}": list(own) for (p, s), own in self.spread.items()}
        own = {"model_us": named(self.model_us), "layers": layers, "spread": spread, "noise": self.noise}
        return asdict(self) | own

    @staticmethod
    def from_dict(said: Mapping[str, Any]) -> Advice:
        """The way back."""

        def points(named: Mapping[str, Any]) -> dict[Point, Any]:
            return {(p, float(s)): v for (p, _, s), v in ((n.rpartition("@"), v) for n, v in named.items())}

        layers = tuple(
            LayerAdvice(**{**one, "us": points(one["us"]), "lost": points(one["lost"])})
            for one in said["layers"]
        )
        own = {
            "model_us": points(said["model_us"]),
            "layers": layers,
            "recipe": {name: (p, float(s)) for name, (p, s) in said["recipe"].items()},
            "spread": {p: (float(low), float(high)) for p, (low, high) in points(said["spread"]).items()},
        }
        return Advice(**{k: v for k, v in said.items() if k != "noise"} | own)

    def plot(self, ax: Any = None) -> Any:
        """Speedup of the model over sparsity, a line for each pattern. Needs matplotlib:
        `pip install "aerogel[plot]"`."""
        if ax is None:
            pyplot = import_optional("matplotlib.pyplot", "plot", "Advice.plot()")
            _, ax = pyplot.subplots(figsize=(6, 4), layout="constrained")
        for pattern in dict.fromkeys(p for p, _ in self.model_us):
            own = sorted((s, self.torch_us / us) for (p, s), us in self.model_us.items() if p == pattern)
            (line,) = ax.plot([100 * s for s, _ in own], [r for _, r in own], marker="o", label=pattern)
            known = [(100 * s, *self.spread[pattern, s]) for s, _ in own if (pattern, s) in self.spread]
            if known:
                ax.fill_between(*zip(*known, strict=True), color=line.get_color(), alpha=0.15, linewidth=0)
        ax.axhline(1, color="gray", linewidth=1, linestyle=":")
        ax.set(
            xlabel="zeros in every layer, %", ylabel="speedup over torch", title=f"measured: {self.target}"
        )
        ax.title.set_fontsize(8)
        ax.legend()
        return ax


def _percent(share: float | None, lowest: float) -> str:
    return "never" if share is None else f"{share:.0%}" if share > lowest else f"{lowest:.0%} or less"
