"""How often two filters share a position, so that one word of shared memory could feed two FMAs of a lane.

    python -m benchmarks.experiments.gpu_pairs --json benchmarks/results/gpu_pairs.json
        a minute; needs the patterns

Filters of each layer are paired greedily: the two that share most positions first. `saved` is the share of
loads that go away, one for each shared position, before padding: a lane with two filters waits for more
places of theirs that differ. Counted; no kernel does it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from aerogel.ir import Array
from benchmarks.experiments.gpu_facts import PATTERNS
from benchmarks.zoo import patterns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    found = {path.stem: pattern(path) for path in sorted(PATTERNS.glob("*.npz"))}
    given.json.write_text(json.dumps(found, indent=1))


def pattern(path: Path) -> dict[str, Any]:
    """Of all layers together, and of the layer with most to gain."""
    layers = [one for one in patterns.load(path) if one.conv.groups == 1 and one.nonzeros]
    shared = {one.name: paired(one.mask.reshape(one.conv.k, -1)) for one in layers}
    most = max(layers, key=lambda one: shared[one.name] / one.nonzeros)
    return {
        "saved": sum(shared.values()) / sum(one.nonzeros for one in layers),
        "most": shared[most.name] / most.nonzeros,
        "layer": most.name,
    }


def paired(mask: Array) -> int:
    """Positions that two filters of a pair both keep."""
    held = mask.astype(np.float32)
    both = held @ held.T
    np.fill_diagonal(both, -1)
    total = 0
    for _ in range(len(mask) // 2):
        one, other = np.unravel_index(int(both.argmax()), both.shape)
        total += int(both[one, other])
        both[[one, other]] = -1
        both[:, [one, other]] = -1
    return total


if __name__ == "__main__":
    main()
