"""What int8 saves of memory: bytes of a model's file and of what one call needs, beside f32.

    python -m benchmarks.experiments.int8_size --json int8_size.json

Networks are compiled by rule (nothing is timed), one image, one thread. `file_mb` is what aerogel.save
writes: the weights as kernels read them and as the model had them; `call_mb` is what one call holds for its
maps (the arena and scratch). Counted, not timed: it says the same on every machine of a kind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

import aerogel
from aerogel.ir import host
from aerogel.zoo.models import example, make
from benchmarks.harness.opponents import calibration
from benchmarks.zoo.patterns import prune_pattern

PATTERNS = Path(__file__).parents[3] / "shared" / "patterns"


def blocks(share: float) -> torch.nn.Module:
    return aerogel.finalize(aerogel.prune(make("resnet50"), share, pattern="1x4"))


NETWORKS: dict[str, tuple[str, Callable[[], torch.nn.Module]]] = {
    "resnet50 90% 1x4": ("resnet50", partial(blocks, 0.9)),
    "resnet50-90": ("resnet50", lambda: prune_pattern(make("resnet50"), PATTERNS / "resnet50-90.npz")),
    "mobilenet-86": (
        "mobilenetv1",
        lambda: prune_pattern(make("mobilenetv1"), PATTERNS / "mobilenet-86.npz"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [sizes(name, model, made()) for name, (model, made) in NETWORKS.items()]
    found = {"rows": rows, "target": str(host()), "date": date.today().isoformat()}
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


def sizes(name: str, architecture: str, model: torch.nn.Module) -> dict[str, Any]:
    call = example(architecture, 1, 224)
    found: dict[str, Any] = {"network": name}
    for kind in ("float32", "int8"):
        quantized: dict[str, Any] = {"dtype": "int8", "calibration": calibration(call)[:2]}
        fast = aerogel.compile(model, *call, tune="off", **(quantized if kind == "int8" else {}))
        fast(*call[0], **call[1])
        path = Path(mkdtemp()) / "model.aero"
        aerogel.save(fast, path)
        held = fast.workspace_bytes()
        found[kind] = {"file_mb": path.stat().st_size / 1e6, "call_mb": held / 1e6}
    return found


if __name__ == "__main__":
    main()
