"""Write the tables and charts of README.md and docs/ from result files:

    python -m benchmarks.harness.tables [--check]

Each table stands between `<!-- table:NAME -->` and `<!-- /table -->` and comes from
benchmarks/results/NAME.json, NAME.jsonl or NAME.txt, nothing else.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.experiments.activity import summary
from benchmarks.harness import chart, gpus, quantized, scaled, slimmed, torch_versions
from benchmarks.harness.machines import machine_name, middle, newest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def layers(result: dict[str, Any]) -> str:
    """The table of benchmarks/experiments/layers.py."""
    lines = ["| layer | times | dense, us | direct, us | dense / direct |", "|---|---|---|---|---|"]
    lines += [
        f"| `{row['conv']}` | {row['count']} | {row['dense_us']:.0f} | {row['direct_us']:.0f} | "
        f"{row['ratio']:.2f}x |"
        for row in result["layers"]
    ]
    total = f"**{result['ratio']:.2f}x** over the stride-1 layers, each as often as the network has it"
    return "\n".join(
        [
            *lines,
            "",
            f"{total} ({result['date']}, torch {result['torch']}, {machine_name(result['target'])}).",
        ]
    )


def models(results: list[dict[str, Any]]) -> str:
    """The tables of benchmarks/run.py, one for each machine: of the runs of the newest day, the one whose
    ratio to the fastest is in the middle; an opponent that was not in it, from another run."""
    return "\n\n".join(
        _models([r for r in results if r["target"].startswith(machine)]) for machine in _machines(results)
    )


def _models(results: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(n for r in results for n in r["ratio"] if n != "fastest"))
    lines = [f"| | runs | aerogel, ms | {' | '.join(names)} |", "|---|---|---|" + "---|" * len(names)]
    for what, several in _runs(results).items():
        latest = newest(several)
        r = middle(latest)
        cells = " | ".join(_ratio(n, [r, *reversed(several)]) for n in names)
        lines.append(f"| {what} | {len(latest)} | {r['ms']['aerogel']['p50']:.1f} | {cells} |")
    return "\n".join([*lines, "", _where(*results)])


def _ratio(name: str, runs: list[dict[str, Any]]) -> str:
    """Of the first run that had this opponent."""
    return next((f"{r['ratio'][name]:.2f}x" for r in runs if name in r["ratio"]), "")


def half(results: list[dict[str, Any]]) -> str:
    """benchmarks/run.py --dtype: milliseconds and, in brackets, the error, of ourselves and of opponents in
    every precision; a table for each machine."""
    return "\n\n".join(
        _half([r for r in results if r["target"].startswith(machine)]) for machine in _machines(results)
    )


def _half(results: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(n for r in results for n in r["ms"]))
    lines = [f"| | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for r in results:
        cells = " | ".join(
            f"{r['ms'][n]['p50']:.1f} ({r['error'][n]:.0e})" if n in r["ms"] else "" for n in names
        )
        unit = "with AMX" if r["amx"] else "without AMX"
        lines.append(f"| {r['model']} {r['pruning']}, aerogel in {r['dtype']}, {unit} | {cells} |")
    return "\n".join([*lines, "", _where(*results)])


def _machines(results: list[dict[str, Any]]) -> list[str]:
    """Targets without their threads, in order of appearance."""
    return list(dict.fromkeys(r["target"].rpartition("t")[0] for r in results))


def _where(*results: dict[str, Any]) -> str:
    """When, and on which machine, these were measured."""
    result, dates = results[-1], sorted(r["date"] for r in results)
    held = f", {result['held']}" if result.get("held") else ""
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"{machine_name(result['target'])}{held} ({when}, torch {result['torch']})."


def _runs(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs of the same thing together, under its name."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        batch = "" if r["batch"] == 1 else f", batch {r['batch']}"
        threads = "" if r["threads"] == 1 else f", {r['threads']} threads"
        runs.setdefault(f"{r['model']} {r['pruning']}, {r['size']} x {r['size']}{batch}{threads}", []).append(
            r
        )
    return runs


SHOWN = 4
"""Layers of the table that the README shows."""
DETAILS = 4
"""Lines of the first layer's details that the README shows: the problem, the choice and two refusals."""


def said(report: str) -> str:
    """A few lines of a real explain(), word for word: the table's first layers and its end, then the first
    layer in detail."""
    table, details = report.split("\n---\n")
    headline, _, *rows = table.splitlines()
    end = next(i for i, row in enumerate(rows) if row.startswith("all else"))
    few = [*rows[: SHOWN + 1], f"... {end - SHOWN - 1} more layers", rows[end]]
    one = details.split("\n\n")[1].splitlines()[:DETAILS]
    return "\n".join(["```", headline, "", *few, "", *one, "```"])


def agreement(result: dict[str, Any]) -> str:
    """benchmarks/experiments/fashion.py: how many answers are as in f32."""
    lines = ["| | answers as torch's in f32 |", "|---|---|"]
    lines += [f"| {name} | {share:.2%} |" for name, share in result["agreement"].items()]
    accuracy = (
        f"Accuracy {result['dense_accuracy']:.1%} dense, {result['pruned_accuracy']:.1%} at "
        f"{result['sparsity']:.0%} zeros"
    )
    return "\n".join([*lines, "", f"{accuracy} ({result['date']}, torch {result['torch']})."])


def size(result: dict[str, Any]) -> str:
    """benchmarks/experiments/int8_size.py: bytes of a file and of a call."""
    lines = ["| | file, f32 | file, int8 | one call, f32 | one call, int8 |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        cells = (
            f"{row[kind][what]:.1f} MB" for what in ("file_mb", "call_mb") for kind in ("float32", "int8")
        )
        lines.append(f"| {row['network']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{result['date']}, {machine_name(result['target'])}."])


def pruned(result: dict[str, Any]) -> str:
    """examples/fashion_mnist.py: accuracy and speedup of each way to prune."""
    lines = ["| | zeros | accuracy | beside dense | speedup |", "|---|---|---|---|---|"]
    for name, right in result["accuracy"].items():
        change = f"{100 * (right - result['accuracy']['dense']):+.2f} points" if name != "dense" else ""
        lines.append(
            f"| {name} | {result['zeros'][name]:.0%} | {right:.2%} | {change} | "
            f"{result['speedup'][name]:.2f}x |"
        )
    seeds = "one seed" if result["seeds"] == 1 else f"mean of {result['seeds']} seeds"
    return "\n".join(
        [
            *lines,
            "",
            f"{result['parameters']} weights, {seeds} ({result['date']}, {machine_name(result['target'])}).",
        ]
    )


def tilewise(result: dict[str, Any]) -> str:
    """benchmarks/experiments/tilewise.py, a line for each network."""
    lines = [
        "| | layers | chosen layers, dense / tilewise | their share of dense time | all layers |",
        "|---|---|---|---|---|",
    ]
    for name, own in result["networks"].items():
        count = sum(row["count"] for row in own["layers"])
        lines.append(
            f"| {name} at {result['sparsity']:.0%} | {count} | {own['ratio']:.2f}x | "
            f"{own['share']:.0%} | {own['all']:.2f}x |"
        )
    both = (
        f"Together **{result['ratio']['fp32']:.2f}x** over the chosen layers, "
        f"{result['all']['fp32']:.2f}x over all, fp32"
    )
    return "\n".join([*lines, "", f"{both} ({result['date']}, {machine_name(result['target'])})."])


def blockgemm(result: dict[str, Any]) -> str:
    """benchmarks/experiments/blockgemm.py: the planted matrix, and the real layers added up."""
    lines = [
        "| | nonzeros in blocks | after re-pruning | at random | direct / blockgemm | direct / "
        "blockgemm re-pruned |",
        "|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(r["kind"] for r in result["layers"]):
        rows = [r for r in result["layers"] if r["kind"] == kind]

        def over(after: str, rows: list[dict[str, Any]] = rows) -> str:
            first, second = (
                sum(r["count"] * r["us"][name] for r in rows)
                for name in ("direct_before", f"blockgemm_{after}")
            )
            return f"{first / second:.2f}x"

        shares = [
            sum(r["count"] * share(r) for r in rows) / sum(r["count"] for r in rows) for share in _SHARES
        ]
        what = "planted blocks" if kind == "planted" else f"{result['pattern']}, weights {kind}"
        lines.append(
            f"| {what} | {' | '.join(f'{s:.0%}' for s in shares)} | {over('before')} | {over('after')} |"
        )
    return "\n".join(
        [
            *lines,
            "",
            f"Re-pruned by {result['loss']:.0%} of each layer's L1 norm ({result['date']}, "
            f"{machine_name(result['target'])}).",
        ]
    )


def actsparse(result: dict[str, Any]) -> str:
    """benchmarks/experiments/actsparse.py, a line for each layer and kind of zeros."""
    rows = result["rows"]
    shares = ("0 %", "40 %", "60 %", "80 %", "90 %")
    lines = [
        f"| zeros | layer | {' | '.join(shares)} | break-even |",
        "|---|---" + "|---" * (len(shares) + 1) + "|",
    ]
    for r in rows:
        even = "never" if r["break_even"] is None else f"{r['break_even']:.0%}"
        lines.append(
            f"| {r['kind']} | {r['conv']} | {' | '.join(f'{d / o:.2f}x' for d, o in r['us'])} | {even} |"
        )
    said = ", ".join(f"{kind} **{ratio:.2f}x**" for kind, ratio in result["ratio"].items())
    return "\n".join(
        [
            *lines,
            "",
            f"At 80 % zero vectors, all layers: {said} ({result['date']}, {machine_name(result['target'])}).",
        ]
    )


def pooling(result: dict[str, Any]) -> str:
    """benchmarks/experiments/pooling.py, a line for each pair."""
    lines = [
        "| VGG-19 | zeros | direct, apart / together | stridepack, apart / together |",
        "|---|---|---|---|",
    ]
    for r in result["pairs"]:
        ratios = " | ".join(f"{a / 1e3:.1f} ms, {a / b:.2f}x" for a, b in r["us"].values())
        lines.append(f"| {r['conv']} | {r['sparsity']:.0%} | {ratios} |")
    held = " to ".join(f"{result['arena'][n] / 1e6:.1f}" for n in ("apart", "together"))
    both = f"All five **{result['ratio']:.2f}x**; memory for activations of the whole network from {held} MB"
    return "\n".join([*lines, "", f"{both} ({result['date']}, {machine_name(result['target'])})."])


def activity(result: dict[str, Any]) -> str:
    """benchmarks/experiments/activity.py, a line for each network and data."""
    lines = [
        "| network | on | accuracy | zero elements | zero vectors | layers that skip | speedup | "
        "by skipping | paper, GPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in result["networks"]:
        ends = f"{r['speedup']:.2f}x | {r['gain']:.2f}x | {r['claim']:.2f}x"
        lines.append(f"| {r['network']} | {r['on']} | {' | '.join(summary(r))} | {ends} |")
    machine = machine_name(result["networks"][0]["target"])
    where = f"Zeros are those of the layer in the middle ({result['date']}, {machine})."
    return "\n".join([*lines, "", where])


_SHARES: tuple[Callable[[dict[str, Any]], float], ...] = (
    lambda r: float(r["in_blocks"]["before"]),
    lambda r: float(r["in_blocks"]["after"]),
    lambda r: float(r["random_groups"]),
)

TABLES: dict[str, Callable[[Any], str]] = {
    "explain": said, "layers": layers, "models": models, "half": half, "scale": scaled.processes,
    "engines": scaled.engines, "fashion": agreement,
    "fashion_mnist": pruned, "tilewise": tilewise, "blockgemm": blockgemm, "actsparse": actsparse,
    "pooling": pooling, "activity": activity, "gpu_facts": gpus.facts, "gpu_model": gpus.model,
    "gpu_simulated": gpus.simulated, "gpu_sass": gpus.sass, "gpu_pairs": gpus.pairs,
    "int8_models": models, "int8_size": size, "quantized_files": quantized.files,
    "slim": slimmed.accuracy, "slim_labels": slimmed.accuracy, "slim_upscale": slimmed.upscaled,
    "int8": slimmed.in_bytes, "slim_ocr": slimmed.text, "torch_versions": torch_versions.table,
}  # fmt: skip


def _load(name: str) -> Any:
    """A result file: one JSON value, a list of them line by line, or plain text."""
    lines = RESULTS / f"{name}.jsonl"
    if lines.exists():
        return [json.loads(line) for line in lines.read_text().splitlines()]
    text = RESULTS / f"{name}.txt"
    return text.read_text() if text.exists() else json.loads((RESULTS / f"{name}.json").read_text())


def written(readme: str) -> str:
    """A text with every table in it made anew."""
    for name, table in TABLES.items():
        body = table(_load(name))
        pattern = re.compile(f"(<!-- table:{name} -->\n).*?(<!-- /table -->)", re.DOTALL)
        readme = pattern.sub(lambda m, body=body: f"{m[1]}{body}\n{m[2]}", readme)  # type: ignore[misc]
    return readme


PAGES = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("benchmarks", "gpu", "scale", "guides/slim", "guides/int8", "about/platforms")
    ),
)

if __name__ == "__main__":
    for path in PAGES:
        new = written(path.read_text())
        if "--check" in sys.argv and new != path.read_text():
            sys.exit(f"{path.name} does not show its result files; run python -m benchmarks.harness.tables")
        path.write_text(new)
    if "--check" not in sys.argv:
        chart.draw({name: _load(name) for name, _ in chart.SOURCES.values()})
