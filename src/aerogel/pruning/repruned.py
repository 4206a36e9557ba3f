"""What reprune() did, as a value: layer by layer what went and came back, and the time before and after."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from aerogel.errors import printable


@dataclass(frozen=True)
class LayerReport:
    """One layer: what ran it before and after, microseconds alone, the share of nonzeros in dense blocks,
    what was removed."""

    layer: str
    conv: str
    before: str
    before_us: float
    after: str
    after_us: float
    blocks_before: float
    blocks_after: float
    nonzeros: int
    removed: int
    weight_lost: float
    ns_per_nonzero: float
    """With a pattern, for each of its blocks; `blocks_before` and `after` are how full they are."""
    completed: int = 0
    pattern: str = ""


@dataclass(frozen=True)
class Repruned:
    """What `reprune` did. `model` is the model itself, with masks that hold while it is trained on.

    Example:
        >>> repruned = aerogel.reprune(aerogel.prune(model, 0.8), (x,))
        >>> text = str(repruned)    # layer by layer: what went, and the time before and after
    """

    model: nn.Module
    layers: tuple[LayerReport, ...]
    score: tuple[float, float] | None

    @property
    def speedup(self) -> float:
        """Of the layers' times added up, measured alone; compile() measures the model."""
        return (
            sum(r.before_us for r in self.layers) / max(1e-9, sum(r.after_us for r in self.layers))
            if self.layers
            else 1.0
        )

    def __str__(self) -> str:
        lines = [
            f"{sum(r.removed for r in self.layers)} weights removed, layers {self.speedup:.2f}x as "
            "fast as before"
        ]
        for r in self.layers:
            kind = f"of each {r.pattern} block there" if r.pattern else "in blocks"
            blocks = f"{r.blocks_before:.0%} -> {r.blocks_after:.0%} {kind}"
            times = f"{r.before} {r.before_us:.0f} us -> {r.after} {r.after_us:.0f} us"
            gone = (
                f"{r.removed} of {r.nonzeros} nonzeros, {r.weight_lost:.1%} of its weight"
                if r.removed
                else "nothing removed"
            )
            lines.append(f"{printable(r.layer)}  {r.conv}")
            gone += f", {r.completed} came back" if r.completed else ""
            unit = "block" if r.pattern else "nonzero"
            lines.append(f"    {times}; {gone}; {blocks}; a {unit} costs {r.ns_per_nonzero:.2f} ns")
        if self.score is not None:
            lines.append(f"score {self.score[0]:.4f} -> {self.score[1]:.4f}")
        return "\n".join(lines)
