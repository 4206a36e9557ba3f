"""Model files that are good: what tests/fuzz/files.py changes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import aerogel
from aerogel.ir import EAGER
from tests.small_models import sparse


class Chain(nn.Module):
    """A residual, pooling, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(i, 16, 3, padding=1) for i in (3, 16, 16))
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.a(x)))
        x = nn.functional.max_pool2d(torch.relu(x + self.c(self.b(x))), 2)
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]


class Paths(nn.Module):
    """Upsampling, concatenation, a cut, and sizes that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(11, 6, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = nn.functional.silu(self.b(torch.relu(self.a(x))))
        y = nn.functional.interpolate(y, size=x.shape[2:], mode="nearest")
        left, right = torch.chunk(self.c(torch.cat([x, y], 1)), 2, 1)
        return {"left": left * torch.sigmoid(right), "flat": right.reshape(x.shape[0], -1)}


def samples() -> list[bytes]:
    """Files that are good."""
    x = torch.randn(1, 3, 12, 12)
    chain, paths = sparse(Chain(), 0.8), sparse(Paths(), 0.8)
    fast = aerogel.compile(chain, x, tune="off")
    eager = aerogel.Compiled(chain, None, fast.plan, EAGER, (), None, fast.captured)
    half = aerogel.compile(chain, x, tune="off", dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        made = [fast, aerogel.compile(paths, x, tune="off"), eager, half, _with_a_piece(Path(folder))]
        found = []
        for one in made:
            aerogel.save(one, Path(folder) / "m.aero")
            found.append((Path(folder) / "m.aero").read_bytes())
    return found


def _with_a_piece(folder: Path) -> aerogel.Compiled:
    """A convolution, an operator that only onnxruntime has, a convolution."""
    from tests.hostile import model, node, weight

    nodes = [
        node("Conv", "x", "w", outputs=["a"]), node("MeanVarianceNormalization", "a", outputs=["b"]),
        node("Unique", "u", outputs=["d"], sorted=1), node("ReduceMax", "d", outputs=["e"], keepdims=0),
        node("Flatten", "b", outputs=["f"]), node("Flatten", "f", outputs=["u"], axis=0), node("Mul", "b",
        "e"),
    ]  # fmt: skip
    nodes = [nodes[i] for i in (0, 1, 4, 5, 2, 3, 6)]
    made = model(nodes, (1, 3, 12, 12), [weight(4, 3, 3, 3)])
    (folder / "p.onnx").write_bytes(made.SerializeToString())
    fast = aerogel.compile(folder / "p.onnx", tune="off", progress=False)
    assert fast.captured is not None
    assert any(n.op == "onnx" for n in fast.captured.graph.nodes)
    return fast
