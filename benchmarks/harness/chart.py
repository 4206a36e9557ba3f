"""The chart of README.md: ResNet-50 pruned, in each precision, beside the fastest dense runtime of it.

Made by `python -m benchmarks.harness.tables` from results/models.jsonl, half.jsonl and int8_models.jsonl: a
panel for each kind of machine, named by what the results say of it, from the newest runs there. Two themes,
light and dark, each in a wide form for desks and a narrow one for phones. The numbers are in the SVG as a
comment, which a test compares with the result files.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aerogel.report.charts import DENSE, SPARSE
from benchmarks.harness.machines import Result, machine_name, middle, newest, same_machine

FOLDER = Path(__file__).parents[2] / "docs" / "_static"
INKS = {"light": ("#1c2430", "#5b6673"), "dark": ("#e8ecf1", "#a8b3bf")}
SHAPES = {"": 2, "-narrow": 1}
"""Panels side by side in each form of the chart, by the end of its name."""
MAX_PANELS = 2
"""Machines shown: those with the newest results."""
LEGEND = (
    "Grey: fastest dense runtime of this precision\n(torch, inductor, onnxruntime, OpenVINO). Blue: aerogel."
)
SOURCES = {  # precision: result file, and the label of each pruning it has
    "f32": (
        "models",
        {"resnet50-80": "80 % zeros", "resnet50-90": "90 % zeros", "resnet50-95": "95 % zeros"},
    ),
    "16 bits": ("half", {"resnet50-90": "90 % zeros", "resnet50-95": "95 % zeros"}),
    "int8": (
        "int8_models",
        {"80% 1x4": "80 %, blocks", "90% 1x4": "90 %, blocks", "resnet50-95": "95 % zeros"},
    ),
}
OPPONENTS = {"f32": ("torch", "torch-channels-last", "inductor", "onnxruntime", "openvino"),
             "16 bits": ("torch-bf16", "torch-bf16-channels-last", "inductor-bf16", "openvino-bf16"),
             "int8": ("openvino-int8",)}  # fmt: skip
"""Dense runtimes by the precision they compute in. Those of 16 bits count where the machine has AMX."""
NAMES = {"torch": "torch", "inductor": "inductor", "onnxruntime": "onnxruntime", "openvino": "OpenVINO"}
DENSE_LABELS = {"f32": "dense f32", "16 bits": "dense bf16", "int8": "dense int8"}

Bars = dict[str, tuple[float, float]]
"""Milliseconds of each bar and the dense runtime's time over it, by label; the dense bar first."""


def numbers(results: dict[str, list[Result]]) -> dict[str, dict[str, Bars]]:
    """Return the bars by machine and precision; the machine with the newest results first."""
    rows = [row for name, _ in SOURCES.values() for row in results[name] if _is_shown(row)]
    machines: dict[Any, list[Result]] = {}
    for row in sorted(rows, key=lambda row: str(row["date"]), reverse=True):
        machines.setdefault(same_machine(row["target"]), []).append(row)
    panels: dict[str, dict[str, Bars]] = {}
    for machine, mine in list(machines.items())[:MAX_PANELS]:
        title = machine_name(max((row["target"] for row in mine), key=len))
        for precision, (name, labels) in SOURCES.items():
            here = [row for row in results[name] if _is_shown(row) and same_machine(row["target"]) == machine]
            if bars := _group(here, precision, labels):
                panels.setdefault(title, {})[precision] = bars
    return panels


def _is_shown(row: Result) -> bool:
    alone = (row["model"], row["batch"], row["threads"]) == ("resnet50", 1, 1)
    half = row.get("dtype", "float32") in ("float16", "bfloat16")  # the oldest rows, in f32, name none
    return alone and not row.get("held") and (not half or row["amx"])


def _group(rows: list[Result], precision: str, labels: dict[str, str]) -> Bars:
    """Return the bars of one precision on one machine: the dense runtime that is fastest, then aerogel."""
    runs = {
        label: middle(newest(several))
        for pruning, label in labels.items()
        if (several := [row for row in rows if row["pruning"] == pruning])
    }
    if not runs:
        return {}
    times = [
        (run["ms"][n]["p50"], n) for run in runs.values() for n in OPPONENTS[precision] if n in run["ms"]
    ]
    name = min(times)[1]
    dense = sorted(ms for ms, other in times if other == name)
    label = f"{DENSE_LABELS[precision]}, {NAMES[name.removesuffix('-channels-last').partition('-')[0]]}"
    bars = {label: (dense[len(dense) // 2], 1.0)}
    for pruned, run in runs.items():
        beside = min(run["ratio"][n] for n in OPPONENTS[precision] if n in run["ratio"])
        bars[f"{precision}, {pruned}"] = (run["ms"]["aerogel"]["p50"], beside)
    return bars


def shown(results: dict[str, list[Result]]) -> str:
    """Return the numbers as the SVG's comment has them."""
    return json.dumps(
        {
            machine: {k: [round(v, 2) for v in pair] for bars in groups.values() for k, pair in bars.items()}
            for machine, groups in numbers(results).items()
        }
    )


def draw(results: dict[str, list[Result]]) -> None:
    """Write the four files."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = numbers(results)
    rows = [sum(map(len, groups.values())) + 0.7 * len(groups) for groups in panels.values()]
    for theme, (ink, soft) in INKS.items():
        style: dict[Any, Any] = {
            "svg.fonttype": "none",
            "svg.hashsalt": "aerogel",
            "font.family": "sans-serif",
        }
        style |= {"text.color": ink, "axes.labelcolor": soft, "xtick.color": soft, "ytick.color": ink}
        for form, beside in SHAPES.items():
            with matplotlib.rc_context(style):
                high = max(rows) if beside > 1 else sum(rows)
                grid = (-(-len(panels) // beside), min(beside, len(panels)))
                figure = Figure(
                    figsize=(4.4 * grid[1], 0.25 * high + 0.6 * grid[0] + 0.5), layout="constrained"
                )
                figure.patch.set_alpha(0)
                ratios = None if grid[1] > 1 else rows
                places = figure.subplots(*grid, squeeze=False, height_ratios=ratios).flat
                for axes, (title, groups) in zip(places, panels.items(), strict=True):
                    _draw_panel(axes, title, groups.values(), ink, soft)
                figure.supxlabel(LEGEND, fontsize=9, x=0.01, ha="left", color=soft)
                out = io.StringIO()
                figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
            text = out.getvalue().replace("<svg ", f"<!-- {shown(results)} -->\n<svg ", 1)
            (FOLDER / f"speed-{theme}{form}.svg").write_text(text)


def _draw_panel(axes: Any, title: str, groups: Iterable[Bars], ink: str, soft: str) -> None:
    axes.patch.set_alpha(0)
    axes.spines[:].set_visible(False)
    longest, places, labels, place = 0.0, [], [], 0.0
    for bars in groups:
        for i, (label, (ms, ratio)) in enumerate(bars.items()):
            axes.barh(place, ms, 0.78, color=SPARSE if i else DENSE)
            text = f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"
            text += f", {ratio:.1f}x" if i else ""
            look: dict[str, Any] = {"color": ink, "weight": "bold"} if i else {"color": soft}
            offset = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 10}
            axes.annotate(text, (ms, place), **offset, **look)
            places.append(place)
            labels.append(label)
            longest, place = max(longest, ms), place + 1
        place += 0.7
    axes.set_yticks(places, labels, fontsize=10)
    axes.tick_params(length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * longest)
    axes.set_xticks([])
    axes.set_title(f"ResNet-50, one thread, lower is better\n{title}", fontsize=10, loc="left", x=-0.45)
