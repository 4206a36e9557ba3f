"""Tables of docs/gpu.md: counted, modelled and simulated, none of them measured."""

from __future__ import annotations

from typing import Any

from benchmarks.experiments.gpu_model import cycles


def facts(result: dict[str, Any]) -> str:
    """benchmarks/experiments/gpu_facts.py: what packing costs on each pattern, and what kernels take."""
    lines = [
        "| pattern | slots, as it comes | x wavefronts | slots, reordered | x wavefronts, reorganized |",
        "|---|---|---|---|---|",
    ]
    for name, own in result["patterns"].items():
        lines.append(
            f"| {name} | "
            + " | ".join(f"{own['best'][k]:.2f}" for k in ("slots_before", "before", "slots", "after"))
            + " |"
        )
    rows = [r for r in result["kernels"] if r["occupancy"] is not None]
    spilled, count = max(r["spilled"] for r in rows), len({r["kernel"] for r in rows})
    allowed = []
    for arch in dict.fromkeys(r["target"] for r in rows):
        ours = [r["occupancy"] for r in rows if r["target"] == arch and not r["kernel"].startswith("dense")]
        allowed.append(f"{arch} {min(ours):.0%} to {max(ours):.0%}")
    triton, shared = list(result["triton"]), "registers and shared memory"
    kinds = sorted({m for r in triton for m in r["matrix"]})
    low = min(r["occupancy"] for r in triton if r["target"] == "sm_80")
    said = (
        f"{count} kernels compiled, {spilled} bytes spilled. Occupancy that {shared} allow: "
        f"{', '.join(allowed)}"
    )
    said += (
        f". {len({r['kernel'] for r in triton})} programs in Triton: "
        f"{max(r['spilled'] for r in triton)} bytes spilled, "
    )
    said += f"{', '.join(kinds)}, at least {low:.0%} on sm_80"
    return "\n".join([*lines, "", f"{said} ({result['date']})."])


def model(result: dict[str, Any]) -> str:
    """experiments/gpu_model.py: modelled microseconds, and how many times dense f32 and dense f16 that is."""
    heads = [
        "network",
        "batch",
        "on",
        "dense f32 / tf32 / f16, us",
        "direct",
        "stridepack",
        "best of each layer",
        "x dense f32",
    ]
    heads += ["stridepack f16", "x dense f16", "1x1: x dense f32"]
    lines, others = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"], list[str]()
    for r in result["rows"]:
        us, first, chosen = r["us"], f"| {r['network']} | {r['batch']} | {r['on']} |", r["chosen"]
        if "stridepack" in us:
            dense = " / ".join(f"{us[f'dense {k}']:.0f}" for k in ("f32", "tf32", "f16"))
            taken = ", ".join(f"{n} {m}" for m, n in sorted(chosen.items(), key=lambda one: -one[1]))
            ours = f"{us['direct']:.0f} | {us['stridepack']:.0f} | {us['best f32']:.0f} ({taken})"
            gain, half = us["dense f32"] / us["best f32"], us["stridepack f16"]
            points = us.get("1x1 dense f32", 0) / us.get("1x1 stridepack", 1)
            alone = f"{points:.2f}" if points else ""
            lines.append(
                f"{first} {dense} | {ours} | {gain:.2f} | {half:.0f} | "
                f"{us['dense f16'] / half:.2f} | {alone} |"
            )
            continue
        for name, beside in (
            ("tilewise tf32", "dense tf32"),
            ("tilewise f16", "dense f16"),
            ("best f32", "dense f32"),
        ):
            if name in us:
                skips = (
                    f"actsparse where it is less ({chosen.get('actsparse')} of {sum(chosen.values())} layers)"
                )
                said = skips if name == "best f32" else name
                others.append(
                    f"{first} {beside} {us[beside]:.0f} | {said} {us[name]:.0f} | "
                    f"{us[beside] / us[name]:.2f} |"
                )
    head = ["", "| network | batch | on | dense, us | ours, us | x dense |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *head, *others])


def sass(rows: list[dict[str, Any]]) -> str:
    """experiments/gpu_sass.py: all layers of a kind together, then each layer's machine code, before and
    after."""
    known = {(r["tree"], r["network"], r["conv"], r["method"], r["arch"]): r for r in rows}
    heads = ["layer", "method", "instructions an FMA, sm_80", "sm_90", "words an FMA", "staging", "epilogue"]
    lines = [f"| {' | '.join([*heads, 'resident warps'])} |", "|---" * (len(heads) + 1) + "|"]
    for network, conv, method in dict.fromkeys((r["network"], r["conv"], r["method"]) for r in rows):
        own = {
            (tree, arch): known.get((tree, network, conv, method, arch))
            for tree in ("before", "after")
            for arch in ("sm_80", "sm_90")
        }

        def both(key: str, form: str, arch: str = "sm_80", own: dict[Any, Any] = own) -> str:
            two = (own["before", arch], own["after", arch])
            return " -> ".join("none" if r is None else format(r[key], form) for r in two)

        cells = [both("instructions", ".2f"), both("instructions", ".2f", "sm_90"), both("words", ".2f")]
        cells += [both("staging", ".0%"), both("epilogue", ".0%"), both("warps", ".0f")]
        lines.append(f"| {network} {conv.partition('+')[0]} | {method} | {' | '.join(cells)} |")
    return "\n".join([*_together(rows), "", *lines])


AIMS = {("stridepack", "3x3"): 2.6, ("baked", "3x3"): 1.6}
"""Instructions for each FMA that issue 27 asked for."""


def _together(rows: list[dict[str, Any]]) -> list[str]:
    """Each method's layers of a kind: the mean, each layer as often as the network has it, and how many meet
    the aim."""
    lines = [
        "| method | layers | instructions an FMA, sm_80 | sm_90 | aim | layers that meet it, sm_80 |",
        "|---" * 6 + "|",
    ]
    for method in dict.fromkeys(r["method"] for r in rows):
        for kind in ("3x3", "1x1"):
            cells = list[str]()
            for arch in ("sm_80", "sm_90"):
                means = []
                for tree in ("before", "after"):
                    own = _of_kind(rows, method, kind, arch, tree)
                    many = sum(r["count"] for r in own)
                    means.append(
                        f"{sum(r['count'] * r['instructions'] for r in own) / many:.2f}" if many else "none"
                    )
                cells.append(" -> ".join(means))
            aim, own = AIMS.get((method, kind)), _of_kind(rows, method, kind, "sm_80", "after")
            met = "" if aim is None else f"{sum(r['instructions'] <= aim for r in own)} of {len(own)}"
            lines.append(f"| {method} | {kind} | {' | '.join(cells)} | {aim or ''} | {met} |")
    return lines


def _of_kind(rows: list[dict[str, Any]], *wanted: str) -> list[dict[str, Any]]:
    method, kind, arch, tree = wanted
    side = {"3x3": "r3s3", "1x1": "r1s1"}[kind]
    return [
        r for r in rows if (r["method"], r["arch"], r["tree"]) == (method, arch, tree) and side in r["conv"]
    ]


def simulated(result: dict[str, Any]) -> str:
    """results/gpu_simulated.json: simulated cycles, and what the cost model says of the same work."""
    runs = result["runs"]
    names, layers = (list(dict.fromkeys(r[key] for r in runs)) for key in ("kernel", "layer"))
    found = {(r["kernel"], r["layer"]): r for r in runs}
    lines = [f"| simulated / modelled cycles | {' | '.join(layers)} |", "|---" * (len(layers) + 1) + "|"]
    for name in sorted(names, key=lambda n: found.get((n, "A"), {"cycles": 0})["cycles"]):
        own = [found.get((name, layer)) for layer in layers]
        cells = [f"{r['cycles']:,} / {cycles(r):,.0f}" if r else "" for r in own]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pairs(result: dict[str, Any]) -> str:
    """experiments/gpu_pairs.py: loads that pairs of filters would save."""
    lines = ["| pattern | loads saved, all layers | in the layer with most |", "|---|---|---|"]
    lines += [f"| {name} | {own['saved']:.1%} | {own['most']:.1%} |" for name, own in result.items()]
    return "\n".join(lines)
