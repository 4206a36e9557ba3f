"""The chart of README.md: ResNet-50 at real masks of 80, 90 and 95 %, aerogel beside the fastest dense
runtime.

Made by `python -m benchmarks.harness.tables` from results/models.jsonl, once for light pages and once for
dark ones. The numbers that it shows are in the SVG as a comment, which a test compares with the result file.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from aerogel.report.charts import DENSE, SPARSE

FOLDER = Path(__file__).parents[2] / "docs" / "_static"
INKS = {"light": ("#1c2430", "#5b6673"), "dark": ("#e8ecf1", "#a8b3bf")}
LEGEND = "grey: the fastest of torch, inductor, onnxruntime and OpenVINO, dense; blue: aerogel, pruned"
PATTERNS = ("resnet50-80", "resnet50-90", "resnet50-95")
MACHINES = {
    "cpu-avx512+amx_bf16+amx_int8+avx512bf16+avx512fp16+f16c-l1:49152-l2:2097152-l3:314572800": (
        "Xeon, Emerald Rapids"
    ),
    "cpu-avx512+f16c-l1:32768-l2:1048576-l3:37486592": "Xeon 2.5 GHz, Cascade Lake",
}


def numbers(results: list[dict[str, Any]]) -> dict[str, dict[str, tuple[float, float]]]:
    """By machine and mask: milliseconds of the fastest dense runtime and of aerogel, of the run in the
    middle."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for target, name in MACHINES.items():
        for pattern in PATTERNS:
            runs = [
                r
                for r in results
                if r["target"].rpartition("-t")[0] == target
                and (r["pruning"], r["batch"], r["threads"]) == (pattern, 1, 1)
            ]
            if runs:
                run = sorted(runs, key=lambda r: float(r["ratio"]["fastest"]))[(len(runs) - 1) // 2]
                ours = run["ms"]["aerogel"]["p50"]
                found.setdefault(name, {})[pattern] = (ours * run["ratio"]["fastest"], ours)
    return found


def shown(results: list[dict[str, Any]]) -> str:
    """The numbers as the SVG's comment has them."""
    return json.dumps(
        {
            machine: {pattern: [round(ms, 1) for ms in pair] for pattern, pair in own.items()}
            for machine, own in numbers(results).items()
        }
    )


def draw(results: list[dict[str, Any]]) -> None:
    """Both files."""
    import matplotlib
    from matplotlib.figure import Figure

    machines = numbers(results)
    for theme, (ink, soft) in INKS.items():
        style: dict[Any, Any] = {
            "svg.fonttype": "none",
            "svg.hashsalt": "aerogel",
            "font.family": "sans-serif",
        }
        style |= {"text.color": ink, "axes.labelcolor": soft, "xtick.color": soft, "ytick.color": ink}
        with matplotlib.rc_context(style):
            figure = Figure(figsize=(8, 2.9), layout="constrained")
            figure.patch.set_alpha(0)
            panels = figure.subplots(1, len(machines), sharey=True, squeeze=False)[0]
            for axes, (machine, own) in zip(panels, machines.items(), strict=True):
                _panel(axes, machine, own, ink, soft)
            panels[0].invert_yaxis()
            panels[0].set_xlabel(LEGEND, fontsize=7.5, loc="left")
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        text = out.getvalue().replace("<svg ", f"<!-- {shown(results)} -->\n<svg ", 1)
        (FOLDER / f"speed-{theme}.svg").write_text(text)


def _panel(axes: Any, machine: str, own: dict[str, tuple[float, float]], ink: str, soft: str) -> None:
    axes.patch.set_alpha(0)
    axes.spines[:].set_visible(False)
    for place, (dense, ours) in enumerate(own.values()):
        axes.barh(place - 0.19, 1.0, 0.34, color=DENSE)
        axes.barh(place + 0.19, ours / dense, 0.34, color=SPARSE)
        axes.text(1.01, place - 0.19, f"{dense:.0f} ms", va="center", fontsize=8, color=soft)
        label = f"{ours:.0f} ms, {dense / ours:.1f}x"
        axes.text(ours / dense + 0.01, place + 0.19, label, va="center", fontsize=9, color=ink, weight="bold")
    axes.set_yticks(range(len(own)), [f"{pattern[-2:]} % zeros" for pattern in own])
    axes.set_xlim(0, 1.2)
    axes.set_xticks([])
    axes.set_title(f"ResNet-50, fp32, one thread\n{machine}", fontsize=9, loc="left")
