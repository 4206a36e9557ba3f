"""The chart of README.md: ResNet-50 pruned to 80, 90 and 95 %, in f32 and in int8, aerogel beside the fastest
dense runtime of the same precision.

Made by `python -m benchmarks.harness.tables` from results/models.jsonl and int8_models.jsonl, once for light
pages and once for dark ones. The numbers that it shows are in the SVG as a comment, which a test compares
with the result files.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from aerogel.report.charts import DENSE, SPARSE

FOLDER = Path(__file__).parents[2] / "docs" / "_static"
INKS = {"light": ("#1c2430", "#5b6673"), "dark": ("#e8ecf1", "#a8b3bf")}
LEGEND = "grey: the fastest dense runtime of torch, inductor, onnxruntime and OpenVINO; blue: aerogel, pruned"
FLOATS = {"resnet50-80": "80 % zeros", "resnet50-90": "90 % zeros", "resnet50-95": "95 % zeros"}
BYTES = {"80% 1x4": "80 %, in blocks", "90% 1x4": "90 %, in blocks", "resnet50-95": "95 % zeros"}
"""What was pruned, and how it is called: real masks, and blocks of four input channels."""
MACHINES = {
    (
        "cpu-avx512+amx_bf16+amx_int8+avx512bf16+avx512fp16+f16c-l1:49152-l2:2097152-l3:314572800",
    ): "Xeon, Emerald Rapids",
    (
        "cpu-avx512+f16c-l1:32768-l2:1048576-l3:37486592",
        "cpu-avx512+avx512vnni+f16c-l1:32768-l2:1048576-l3:37486592",
    ): "Xeon 2.5 GHz, Cascade Lake",
}


def numbers(
    results: list[dict[str, Any]], quantized: list[dict[str, Any]]
) -> dict[str, dict[str, tuple[float, float]]]:
    """By panel and zeros: milliseconds of the fastest dense runtime and of aerogel, of the run in the
    middle."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for rows, kind, shown in ((results, "fp32", FLOATS), (quantized, "int8", BYTES)):
        for target, machine in MACHINES.items():
            for pruning, label in shown.items():
                runs = [
                    r
                    for r in rows
                    if r["target"].rpartition("-t")[0] in target
                    and (r["model"], r["pruning"], r["batch"], r["threads"]) == ("resnet50", pruning, 1, 1)
                ]
                if runs:
                    run = sorted(runs, key=lambda r: float(r["ratio"]["fastest"]))[(len(runs) - 1) // 2]
                    ours = run["ms"]["aerogel"]["p50"]
                    panel = found.setdefault(f"ResNet-50, {kind}, one thread\n{machine}", {})
                    panel[label] = (ours * run["ratio"]["fastest"], ours)
    return found


def shown(results: list[dict[str, Any]], quantized: list[dict[str, Any]]) -> str:
    """The numbers as the SVG's comment has them."""
    return json.dumps(
        {
            panel: {label: [round(ms, 1) for ms in pair] for label, pair in own.items()}
            for panel, own in numbers(results, quantized).items()
        }
    )


def draw(results: list[dict[str, Any]], quantized: list[dict[str, Any]]) -> None:
    """Both files."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = numbers(results, quantized)
    for theme, (ink, soft) in INKS.items():
        style: dict[Any, Any] = {
            "svg.fonttype": "none",
            "svg.hashsalt": "aerogel",
            "font.family": "sans-serif",
        }
        style |= {"text.color": ink, "axes.labelcolor": soft, "xtick.color": soft, "ytick.color": ink}
        with matplotlib.rc_context(style):
            figure = Figure(figsize=(4 * len(panels), 2.9), layout="constrained")
            figure.patch.set_alpha(0)
            places = figure.subplots(1, len(panels), squeeze=False)[0]
            for axes, (title, own) in zip(places, panels.items(), strict=True):
                _panel(axes, title, own, ink, soft)
            places[0].set_xlabel(LEGEND, fontsize=7.5, loc="left")
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        text = out.getvalue().replace("<svg ", f"<!-- {shown(results, quantized)} -->\n<svg ", 1)
        (FOLDER / f"speed-{theme}.svg").write_text(text)


def _panel(axes: Any, title: str, own: dict[str, tuple[float, float]], ink: str, soft: str) -> None:
    axes.patch.set_alpha(0)
    axes.spines[:].set_visible(False)
    for place, (dense, ours) in enumerate(own.values()):
        axes.barh(place - 0.19, 1.0, 0.34, color=DENSE)
        axes.barh(place + 0.19, ours / dense, 0.34, color=SPARSE)
        axes.text(1.01, place - 0.19, f"{dense:.0f} ms", va="center", fontsize=8, color=soft)
        label = f"{ours:.0f} ms, {dense / ours:.1f}x"
        axes.text(ours / dense + 0.01, place + 0.19, label, va="center", fontsize=9, color=ink, weight="bold")
    axes.set_yticks(range(len(own)), list(own))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2)
    axes.set_xticks([])
    axes.set_title(title, fontsize=9, loc="left")
