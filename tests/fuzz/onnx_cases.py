"""Random ONNX cases: a model of a few nodes, and what to feed it at four sets of sizes. Families enter
themselves by name."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

FAMILIES: dict[str, Callable[[Build], None]] = {}
"""What fills a Build with nodes, by name."""
F32, F64, F16, I32, I64, U8, I8, BOOL = (
    np.float32,
    np.float64,
    np.float16,
    np.int32,
    np.int64,
    np.uint8,
    np.int8,
    np.bool_,
)
SETS = 4
"""Sets of sizes: one to compile at, three others."""


@dataclass(frozen=True)
class Case:
    """One model with its inputs; str() says what it is."""

    family: str
    model: Any
    feeds: tuple[dict[str, Any], ...]
    step: float

    @property
    def given(self) -> bool:
        """Whether it is compiled with an example rather than its sizes: zeros are not always right."""
        return any(v.dtype.kind in "iu" for v in self.feeds[0].values())

    def __str__(self) -> str:
        sizes = " ".join("x".join(map(str, v.shape)) for feed in self.feeds for v in feed.values())
        held = {t.name: numpy_helper.to_array(t) for t in self.model.graph.initializer}
        nodes = "; ".join(_shown(n, held) for n in self.model.graph.node)
        return f"[{self.model.opset_import[0].version}] {nodes} at {sizes}"


def _shown(node: Any, held: dict[str, Any]) -> str:
    attributes = " ".join(
        f"{a.name}={helper.get_attribute_value(a)}" for a in node.attribute if a.type != a.GRAPH
    )
    inputs = ", ".join(str(held[n].tolist()) if n in held and held[n].size < 10 else n for n in node.input)
    return f"{node.op_type}({inputs}) {attributes}"


class Build:
    """A case that grows: inputs, constants, nodes, all drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.opset = self.random.choice((11, 12, 13, 14, 15, 17, 18, 19, 20, 21))
        self.nodes: list[Any] = []
        self.held: list[Any] = []
        self.inputs: list[tuple[str, list[Any], Any, Callable[[tuple[int, ...]], Any]]] = []
        self.outputs: list[str] = []
        self.step = 0.0
        low, high = self.random.choice(((1, 20), (3, 20), (6, 20), (8, 12)))
        same = self.random.random() < 0.2
        self.sets = [self._sizes(low, high) for _ in range(SETS)]
        if same:  # only the image's sizes change
            self.sets = [{**sizes, "n": self.sets[0]["n"]} for sizes in self.sets]
        self.open = self.random.random() < 0.85

    def _sizes(self, low: int, high: int) -> dict[str, int]:
        draw = self.random.randint
        return {
            "n": draw(1, 3),
            "d": draw(low, min(high, 8)),
            "h": draw(low, high),
            "w": draw(low, high),
            "l": draw(1, 12),
        }

    # draws

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def whole(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def real(self, low: float = -2.0, high: float = 2.0) -> float:
        return round(self.random.uniform(low, high), 2)

    # parts of the model

    def x(self, *dims: Any, dtype: Any = F32, draw: Any = None) -> str:
        """An input: numbers, or letters of sizes that are open."""
        name = f"x{len(self.inputs)}"
        self.inputs.append((name, list(dims), dtype, draw or (lambda shape: self.array(shape, dtype))))
        return name

    def image(self, rank: int = 4, channels: int | None = None, dtype: Any = F32) -> str:
        c = self.whole(1, 16) if channels is None else channels
        return self.x("n", c, *"dhw"[5 - rank :], dtype=dtype)

    def array(self, shape: Any, dtype: Any = F32) -> Any:
        if dtype == BOOL:
            return self.numbers.random(shape) < 0.5
        if np.dtype(dtype).kind == "f":
            return (2 * self.numbers.standard_normal(shape)).astype(dtype)
        return self.numbers.integers(0 if np.dtype(dtype).kind == "u" else -9, 10, shape).astype(dtype)

    def const(self, values: Any, dtype: Any = None) -> str:
        name = f"c{len(self.held)}"
        self.held.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def ints(self, *values: Any) -> str:
        return self.const(values, I64)

    def weight(self, *shape: int, dtype: Any = F32) -> str:
        return self.const(self.array(shape, dtype), dtype)

    def node(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """The name of the output, or a list of names; attributes that are None are left out."""
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        given = list(inputs)
        while given and not given[-1]:
            given.pop()
        kept = {k: v for k, v in attributes.items() if v is not None}
        self.nodes.append(
            helper.make_node(op, given, names, domain=domain, name=f"{op}{len(self.nodes)}", **kept)
        )
        return names[0] if outputs == 1 else names

    def give(self, *names: str) -> None:
        self.outputs += names

    def case(self, family: str) -> Case:
        number = helper.np_dtype_to_tensor_dtype
        infos = [
            helper.make_tensor_value_info(
                name,
                number(np.dtype(kind)),
                [d if isinstance(d, int) or self.open else self.sets[0][d] for d in dims],
            )
            for name, dims, kind, _ in self.inputs
        ]
        outputs = [helper.make_empty_tensor_value_info(name) for name in self.outputs]
        graph = helper.make_graph(self.nodes, family, infos, outputs, self.held)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8 if self.opset < 19 else 9
        )
        sets = self.sets if self.open else self.sets[:1]
        feeds = tuple(
            {
                n: draw(tuple(d if isinstance(d, int) else sizes[d] for d in dims))
                for n, dims, _, draw in self.inputs
            }
            for sizes in sets
        )
        return Case(family, model, feeds, self.step)


def family(function: Callable[[Build], None]) -> Callable[[Build], None]:
    """Enter a family under its own name."""
    FAMILIES[function.__name__] = function
    return function


def case(seed: int, only: str = "") -> Case:
    """The case of a seed; families take turns."""
    for room in ("onnx_layers", "onnx_shapes", "onnx_elements", "onnx_chains"):
        importlib.import_module(f"tests.fuzz.{room}")
    names = [name for name in FAMILIES if name.startswith(only)]
    chosen = names[seed % len(names)]
    build = Build(seed)
    FAMILIES[chosen](build)
    return build.case(chosen)
