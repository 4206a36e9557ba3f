"""Random ONNX operators and small chains beside onnxruntime: python -m tests.fuzz.onnx_nodes --seed S --count
N

Each case is compiled at one set of sizes and called at four: those and three others of its open dimensions.
It passes where the answers are onnxruntime's; a typed refusal of what onnxruntime runs is counted and listed
by its reason.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

import aerogel
from aerogel.errors import AerogelError
from tests.fuzz.onnx_cases import Case, case

REASONS = ("ok", "raises", "refused", "wrong", "untyped")
"""What can come of a case; "raises": onnxruntime does so itself, and we raise a typed error or answer."""


@dataclass(frozen=True)
class Outcome:
    """What came of one case, and why."""

    kind: str
    reason: str = ""


def session(case: Case) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(
        case.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def answers(case: Case) -> list[Any] | None:
    """onnxruntime's outputs at every set of sizes, None in the place of those where it raises; None where it
    takes none."""
    try:
        theirs = session(case)
    except Exception:  # onnxruntime's own types
        return None
    found = list[Any]()
    for feed in case.feeds:
        try:
            found.append(theirs.run(None, feed))
        except Exception:
            found.append(None)
    return found if found[0] is not None else None


def outcome(case: Case, folder: Path) -> Outcome:
    """Compiled at the first sizes, called at all of them."""
    wanted = answers(case)
    path = folder / "case.onnx"
    path.write_bytes(case.model.SerializeToString())
    try:
        args = tuple(torch.from_numpy(np.asarray(v)) for v in case.feeds[0].values()) if case.given else ()
        shapes = None if case.given else {n: v.shape for n, v in case.feeds[0].items()}
        fast = aerogel.compile(path, args, shapes=shapes, tune="off", progress=False)
    except AerogelError as why:
        return Outcome("raises" if wanted is None else "refused", f"compile: {why}")
    except Exception as why:
        return Outcome("untyped", f"compile: {type(why).__name__} {why}")
    refused = ""
    for i, (feed, there) in enumerate(zip(case.feeds, wanted or [None] * len(case.feeds), strict=True)):
        try:
            here = fast.run(None, feed)
        except AerogelError as why:
            refused = refused if there is None else f"call: {why}"
            continue
        except Exception as why:
            return Outcome("untyped", f"call {i}: {type(why).__name__} {why}")
        if there is not None and (said := differs(here, there, case.step)):
            return Outcome("wrong", f"call {i}: {said}")
    if refused:
        return Outcome("refused", refused)
    return Outcome(
        "ok" if wanted is not None else "raises",
        "onnxruntime raises, aerogel answers" if wanted is None else "",
    )


def differs(ours: list[Any], theirs: list[Any], step: float = 0.0) -> str:
    """How two answers differ; floats may by 1e-4 of the largest, and by `step` (what rounding to integers
    gives)."""
    for here, there in zip(ours, theirs, strict=True):
        if here.shape != there.shape:
            return f"shape {here.shape}, not {there.shape}"
        if here.dtype != there.dtype:
            return f"dtype {here.dtype}, not {there.dtype}"
        if here.dtype.kind not in "f":
            if not np.array_equal(here, there):
                return f"{np.sum(here != there)} of {here.size} whole numbers differ"
            continue
        a, b = here.astype(np.float64), there.astype(np.float64)
        odd = ~np.isfinite(b)
        if not np.array_equal(a[odd], b[odd], equal_nan=True) or not np.isfinite(a[~odd]).all():
            return "infinities or NaNs differ"
        scale = np.abs(b[~odd]).max(initial=0.0)
        loose = 4e-3 if here.dtype == np.float16 else 1e-4
        off = np.abs(a[~odd] - b[~odd]).max(initial=0.0)
        if off > loose * scale + 1e-6 + step:
            return f"{off:.3g} off of {scale:.3g}"
    return ""


def said(reason: str) -> str:
    """A reason without its numbers and names, to count by."""
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", re.sub(r"'[^']*'", "'...'", reason))[:150]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", default="", help="families whose names begin so")
    parser.add_argument("--show", type=int, default=3, help="cases shown for each reason")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kinds, reasons = Counter[str](), dict[tuple[str, str, str], list[str]]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(asked.seed, asked.seed + asked.count):
            one = case(seed, asked.only)
            got = outcome(one, Path(folder))
            kinds[got.kind] += 1
            if got.kind not in ("ok", "raises"):
                reasons.setdefault((got.kind, one.family, said(got.reason)), []).append(
                    f"{seed}: {one} {got.reason[:150]}"
                )
    for (kind, family, reason), shown in sorted(reasons.items(), key=lambda item: (item[0][0], item[0][1])):
        print(f"{kind} {family} x{len(shown)}: {reason}")
        for line in shown[: asked.show]:
            print(f"    {line}")
    print(", ".join(f"{kind} {kinds[kind]}" for kind in REASONS))


if __name__ == "__main__":
    main()
