"""Tables of pruning without labels, and with them: benchmarks/experiments/slim.py, slim_ocr.py,
slim_upscale.py; the same in int8: int8.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness.machines import name_machines

WAYS = {"magnitude": "magnitude", "obs": "repaired", "heal": "and healed", "labels": "trained with labels"}
AFTER = {
    "magnitude": "magnitude",
    "heal": "repaired and healed",
    "longer": "repaired and healed for longer (750 steps)",
    "labels": "repaired, trained with labels",
}
WITHIN = (
    "The two times of a row were measured in turns; rows were measured at different hours on a shared "
    "machine, so compare within a row."
)


def accuracy(result: dict[str, Any]) -> str:
    """Points of dense, the mean over seeds, and in brackets the wall time of one."""
    every, dense = result["accuracy"], result["accuracy"]["dense"]
    points = list(dict.fromkeys(name.partition("-")[2] for name in every if name != "dense"))
    points.sort(key=lambda p: (p.rpartition("-")[0], int(p.rpartition("-")[2])))
    ways = {way: head for way, head in WAYS.items() if any(n.startswith(f"{way}-") for n in every)}
    lines = [f"| zeros | {' | '.join(ways.values())} |", "|---|" + "---|" * len(ways)]
    for point in points:
        pattern, _, share = point.rpartition("-")
        cells = []
        for way in ways:
            name = f"{way}-{point}"
            spent = float(np.median(list(result["seconds"].get(name, {"": 0}).values())))
            cells.append(f"{every[name] - dense:+.2f} ({_time(spent)})" if name in every else "")
        lines.append(f"| {f'{share} % {pattern}'.strip()} | {' | '.join(cells)} |")
    seeds = f"mean of {result['seeds']} seeds" if result["seeds"] > 1 else "one seed"
    saw = f"Calibration saw {result['images']} images, without labels. "
    about = (
        f"Fashion-MNIST, 1,011,130 weights: points of accuracy beside the dense model's {dense:.2f} %, "
        f"{seeds}; in brackets the time of one on one thread. {saw}"
        f"({result['date']}, {name_machines(result['target'])})."
    )
    return "\n".join([*lines, "", about])


def in_bytes(result: dict[str, Any]) -> str:
    """benchmarks/experiments/int8.py: points of dense f32, in f32 and in int8, channels in both orders."""
    each = result["each"]
    seeds = len(each["dense"])

    def points(name: str) -> str:
        beside = [right - each["dense"][seed] for seed, right in each.get(name, {}).items()]
        few = f" ({len(beside)} of {seeds})" if len(beside) < seeds else ""
        return f"{np.mean(beside):+.2f}{few}" if beside else ""

    lines = ["| | f32 | int8 | permuted, f32 | permuted, int8 |", "|---|---|---|---|---|"]
    ranges = ("mean-square", "percentile", "min-max")
    lines += [f"| dense, ranges by {how} | | {points(f'dense-int8-{how}')} | | |" for how in ranges]
    for way in ("magnitude", "heal", "longer", "labels"):
        for share in (80, 90):
            names = [
                f"{way}-1x4-{share}{order}{form}" for order in ("", "-permuted") for form in ("", "-int8")
            ]
            if each.keys() & set(names):
                lines.append(f"| {share} % 1x4, {AFTER[way]} | {' | '.join(map(points, names))} |")
    dense = float(np.mean(list(each["dense"].values())))
    about = (
        f"Fashion-MNIST, 1,011,130 weights: points of accuracy beside the dense model's {dense:.2f} % in "
        f"f32, seeds {', '.join(each['dense'])}; 10,000 test images, so 0.1 point is ten of them. "
        "Permuted: in the order for 90 %, at 80 % too; (2 of 3): the mean of two seeds. Labels were used by "
        f"{'the rows that say so' if any('labels' in name for name in each) else 'no row'} "
        f"({result['date']}, {name_machines(result['target'])})."
    )
    return "\n".join([*lines, "", about])


def text(results: list[dict[str, Any]]) -> str:
    """rapidocr's two files: lines read as before."""
    timed, names = any(r["ours_ms"] for r in results), {"dense": "as it came"} | WAYS
    times = "aerogel, ms | onnxruntime, ms | " if timed else ""
    lines = [
        f"| file | zeros | way | same text | {times}seconds |",
        "|---|---|---|---|---|" + "---|---|" * timed,
    ]
    for r in sorted(results, key=lambda r: (r["part"], r["share"], list(names).index(r["way"]))):
        cells = [r["part"], f"{r['share']:.0%}", names[r["way"]], f"{r['same']:.1%}"]
        cells += [_rounded(r[name], 1) for name in ("ours_ms", "onnxruntime_ms") if timed]
        cells.append(_rounded(r["seconds"], 0))
        lines.append(f"| {' | '.join(cells)} |")
    files = " and ".join(sorted({r["file"] for r in results}))
    about = (
        f"rapidocr's {files}, {results[0]['lines']} rendered lines "
        f"({results[-1]['date']}, {name_machines(results[-1]['target'])}, one thread). "
        f"{WITHIN if timed else ''}"
    )
    return "\n".join([*lines, "", about.rstrip()])


def upscaled(results: list[dict[str, Any]]) -> str:
    """A super-resolution CNN: dB of the dense one."""
    dense = next(r for r in results if r["way"] == "dense")
    names = WAYS | {"dense": "dense", "global": "magnitude, all layers together", "magnitude": "magnitude"}
    lines = [
        "| zeros | way | PSNR | beside dense | aerogel, ms | onnxruntime, ms | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['share']:.0%} | {names[r['way']]} | {r['psnr']:.2f} dB | {r['psnr'] - dense['psnr']:+.2f} | "
        f"{r['ours_ms']:.1f} | {r['onnxruntime_ms']:.1f} | {_rounded(r['seconds'], 0)} |"
        for r in sorted(results, key=lambda r: (r["share"], list(names).index(r["way"])))
    ]
    last = results[-1]
    about = (
        "waifu2x's photo model (seven layers), scikit-image's photos at twice their size; times are for "
        f"128 x 128 pixels ({last['date']}, {name_machines(last['target'])}, one thread). {WITHIN}"
    )
    return "\n".join([*lines, "", about])


def _rounded(given: float | None, digits: int) -> str:
    """Nothing where it was not measured, or by a clock that stood still."""
    return "" if given is None else f"{given:.{digits}f}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
