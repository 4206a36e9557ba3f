"""A network that was written, ready to be built and called as often as the judge likes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune

from tests.fuzz.sketch import Size, Sketch

Call = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass
class Spec:
    """`source` is the class; calls make their arguments anew. `onnx` is "", "dynamo", "legacy" or "by
    hand"."""

    seed: int
    title: str
    sketch: Sketch
    sizes: list[tuple[Size, str]]
    sparsity: float
    tune: str | float
    onnx: str = ""
    file: bytes = b""

    @property
    def source(self) -> str:
        sizes = ", ".join(
            f"{z.n}x{z.h}x{z.w} {layout}{' other' if z.other else ''}" for z, layout in self.sizes
        )
        head = (
            f"# {self.title}; {self.sketch.dtype}; sparsity {self.sparsity}; tune {self.tune}; "
            f"{sorted(self.flags)}\n# {sizes}\n"
        )
        return head + self.sketch.source() + "".join(f"# {line}\n" for line in self.sketch.after)

    @property
    def flags(self) -> set[str]:
        return self.sketch.flags

    @property
    def precision(self) -> torch.dtype:
        return getattr(torch, self.sketch.dtype)  # type: ignore[no-any-return]

    @property
    def example(self) -> Call:
        return self.call(0)

    @property
    def calls(self) -> list[Call]:
        return [self.call(i) for i in range(1, len(self.sizes))]

    def call(self, i: int) -> Call:
        size, layout = self.sizes[i]

        def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
            torch.manual_seed(self.seed * 16 + i)
            return self.sketch.call(size, layout, self.precision)

        return make

    def build(self, double: bool = False) -> nn.Module:
        """The same weights each time. In double what says float32 says float64."""
        torch.manual_seed(self.seed)
        model: nn.Module = made(self.sketch.source())()
        model.eval()
        if "Lazy" in self.sketch.source():
            args, kwargs = self.example()
            torch.manual_seed(self.seed)
            with torch.no_grad():
                model(*args, **kwargs)
        prepared(model, self.seed, self.sparsity)
        model = model.to(self.precision)
        for line in self.sketch.after:
            exec(line, {"model": model, "torch": torch})
        if double:
            text = (
                self.sketch.source()
                .replace(".float()", ".double()")
                .replace("torch.float32", "torch.float64")
            )
            model = model.double()
            model.__class__ = made(text)
        return model


def made(source: str) -> Any:
    """The class of a text."""
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "math": math, "prune": prune}
    exec(source, names)
    return names["Net"]


def prepared(model: nn.Module, seed: int, sparsity: float) -> None:
    """Statistics that matter, weights with zeros. What a reparametrisation makes is left alone."""
    generator, rng = torch.Generator().manual_seed(seed), Random(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                for value, low, high in (
                    (module.weight, 0.5, 1.5),
                    (module.bias, -1, 1),
                    (module.running_mean, -1, 1),
                    (module.running_var, 0.5, 2),
                ):
                    if value is not None:
                        value.uniform_(low, high, generator=generator)
            weight = module._parameters.get("weight")
            if (
                not isinstance(module, nn.modules.conv._ConvNd)
                or weight is None
                or parametrize.is_parametrized(module)
            ):
                continue
            if "Conv" in type(module).__name__ and sparsity:
                weight.mul_(
                    (torch.rand(weight.shape, generator=generator) >= sparsity) * (1 - sparsity) ** -0.5
                )
                if rng.random() < 0.2 and len(weight) > 1:
                    weight[rng.randrange(len(weight))] = 0
