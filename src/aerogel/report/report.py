"""Report: what explain() found, as a value. Print it, show it in a notebook, save it as a page, or take its
dict."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from aerogel.errors import AerogelError, printable
from aerogel.outputs import check_output

WIDE = 120
"""Columns from which the table has room for problems."""
_NUMBERS = 56
"""Columns of all but name and problem."""
LEGEND = (
    "problem: n images, c channels in of h x w pixels, k filters of r x s, u stride, p padding, d dilation, "
    "g groups, then what is fused"
)
IN_BYTES = "int8: dense is torch on the same bytes, which it multiplies as floats"


@dataclass(frozen=True)
class Report:
    """What `explain` found.

    Example:
        >>> report = aerogel.explain(fast)
        >>> text = str(report)            # the summary table; every detail with explain(fast, verbose=True)
        >>> path = report.save("report.html")
    """

    headline: str
    layers: tuple[dict[str, Any], ...]
    """One dict a layer: what was chosen, its times in microseconds, and why not the others."""
    notes: tuple[str, ...]
    times: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of the whole model: `aerogel`, `torch`, and other runtimes that were timed; nothing where
    it was not timed."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Bytes, counted: weights dense, their nonzeros with positions, workspaces held now."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """Where it was measured, and the versions that did."""
    by: str = "graph"
    """Who runs the model: "graph" (these choices), "parts" (torch, with parts compiled) or "torch"."""
    verbose: bool = False
    speedup: str = ""
    """Times as fast as torch, in words: "2.70x", or on a busy machine "2.7x (1.9x to 3.4x)"."""
    doubt: str = ""
    """Why the speedup is an interval, such as "measured on a busy machine"."""

    def __repr__(self) -> str:
        return f"<aerogel.Report, {len(self.layers)} layers: {printable(self.headline)}>"

    def __str__(self) -> str:
        width = shutil.get_terminal_size((WIDE, 24)).columns
        body = self._details() if self.verbose else summary(self.layers, self.times.get("aerogel"), width)
        more = [] if self.verbose or not self.layers else [_more(self.layers[0]["layer"])]
        return "\n".join(map(_line, [self.headline, "", *body, *more, "", *self.notes]))

    def _details(self) -> list[str]:
        lines = []
        for row in self.layers:
            lines.append(f"{row['layer']}  {row['conv']}  {row['sparsity']:.0%} zeros")
            lines += [f"    zero are {row['idle']}"] if row["idle"] else []
            lines.append(f"    {row['chosen']}{times_of(row)}")
            lines += [f"    not {name}: {why}" for name, why in row["others"].items()]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "verbose"}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in own.items()}
        return plain | {"layers": [dict(row) for row in self.layers], "notes": list(self.notes)}

    def _repr_html_(self) -> str:
        from aerogel.report.page import fragment

        return fragment(self)

    def save(self, path: str | Path) -> Path:
        """Write one self-contained HTML page: charts, a table to sort and search, every choice and refusal.

        Charts need matplotlib (`pip install "aerogel[plot]"`); without it the page has its tables.
        """
        from aerogel.report.page import page

        out = check_output(path, (".html", ".htm"))
        try:
            out.write_text(page(self), encoding="utf-8")
        except OSError as why:
            raise AerogelError(f"'{out}' cannot be written: {why.strerror or why}") from why
        return out


def spent_us(row: Mapping[str, Any]) -> float | None:
    """A layer's time in the running network, or else alone."""
    inside: float | None = row["in_network_us"]
    alone: float | None = row["us"]
    return alone if inside is None else inside


def whole_us(rows: Sequence[Mapping[str, Any]], whole_ms: float | None) -> float:
    """Of which layers have their shares: the model's time, or that of its layers where it was not timed."""
    inside = sum(spent_us(row) or 0.0 for row in rows)
    return max(inside, 1e3 * (whole_ms or 0.0), 1e-9)


def summary(rows: Sequence[Mapping[str, Any]], whole_ms: float | None, width: int) -> list[str]:
    """The table: a line for each layer, with its problem where there is room."""
    if not rows:
        return []
    total = sum(spent_us(row) or 0.0 for row in rows)
    whole = whole_us(rows, whole_ms)
    wide = width >= WIDE
    longest = max(len(printable(row["layer"])) for row in rows)
    problem = max(len(row["conv"]) for row in rows) if wide else 0
    bytes_ = wide and any(row["lost"] is not None for row in rows)
    room = width - _NUMBERS - (2 + problem if wide else 0) - (12 if bytes_ else 0)
    name = max(12, min(longest, room))
    head = [f"{'layer':{name}}", f"{'problem':{problem}}"] if wide else [f"{'layer':{name}}"]
    head += ["zeros", f"{'method':10}", " time, us", "dense, us", "     x", "share"]
    lines = ["  ".join([*head, *(["int8 loses"] if bytes_ else [])])]
    for row in rows:
        spent, dense = spent_us(row), row["dense_us"]
        cells = [f"{shortened(printable(row['layer']), name):{name}}"]
        cells += [f"{row['conv']:{problem}}"] if wide else []
        cells += [f"{row['sparsity']:5.0%}", f"{row['method']:10}"]
        cells += [_number(spent), _number(dense)]
        cells.append(f"{dense / spent:5.2f}x" if spent and dense else f"{'':6}")
        cells.append(f"{spent / whole:5.0%}" if spent else f"{'':5}")
        cells += (
            [f"{'in floats' if row['lost'] is None else format(row['lost'], '.2%'):>10}"] if bytes_ else []
        )
        lines.append("  ".join(cells).rstrip())
    if total and whole_ms and 1e3 * whole_ms > total:
        rest = 1e3 * whole_ms - total
        blank = " " * (name + (2 + problem if wide else 0) - len("all else"))
        lines.append(f"all else{blank}  {'':5}  {'':10}  {rest:9.0f}  {'':9}  {'':6}  {rest / whole:5.0%}")
    quantized = any(":int8" in row["conv"] for row in rows)
    return [*lines, *(["", LEGEND, *([IN_BYTES] if quantized else [])] if wide else [])]


def _number(us: float | None) -> str:
    return f"{'':9}" if us is None else f"{us:9.0f}"


def shortened(name: str, most: int) -> str:
    """A name whose end, which tells layers apart, stays."""
    return name if len(name) <= most else "…" + name[-(most - 1) :]


def _more(layer: str) -> str:
    return f"Why not another method: explain(fast, layer={printable(layer)!r}), or all of it: verbose=True."


def _line(text: str) -> str:
    """A line for a terminal; what it is indented by stays."""
    said = text.lstrip(" ")
    return " " * (len(text) - len(said)) + printable(said)


def times_of(row: Mapping[str, Any]) -> str:
    """A layer's times as words; nothing where it was not timed."""
    us, dense_us, inside = row["us"], row["dense_us"], row["in_network_us"]
    if dense_us is None or (us is None and inside is None):
        return ""
    there = "" if inside is None else f"{inside:.0f} us in the network"
    if us is None:  # the cost model's, which was timed there only
        return f"  {there}, dense {dense_us:.0f} us alone"
    return f"  {us:.0f} us, dense {dense_us:.0f} us ({dense_us / us:.2f}x){there and f'; {there}'}"
