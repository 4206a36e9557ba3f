"""The CPU of this machine, as the tuner knows it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from aerogel.backends import Backend, Crossings, Trial
from aerogel.backends.cpu import copies, threads, trial
from aerogel.backends.cpu.lower import features
from aerogel.backends.cpu.lower.planes import likely, places
from aerogel.backends.cpu.lower.residency import staying
from aerogel.backends.cpu.runner import CpuRunner, program, workspace
from aerogel.backends.meter import Sample, meter_host
from aerogel.capture.network import Network
from aerogel.capture.nodes import Shapes, problem
from aerogel.ir import ALONE, Array, Choice, Config, Conv, Dtypes, Graph, Place, Plan, Target, Weight, host
from aerogel.methods import BASELINE, CpuForm, cpu_form


class Cpu(Backend):
    """With the threads torch uses now, or as `target` says: held to less than the machine can."""

    image_by_image = True

    def __init__(self, target: Target | None = None) -> None:
        self.target: Target = target or replace(host(), threads=threads.threads())

    def form(self, name: str) -> CpuForm:
        return cpu_form(name)

    def candidate(
        self, conv: Conv, config: Config, weight: Weight, x: Array, bias: Array, place: Place = ALONE
    ) -> Trial:
        return trial.candidate(conv, config, weight, x, bias, self.target, place)

    def meter(self, run: Trial, repeats: int) -> Sample:
        return meter_host(run, repeats, self.target.threads)

    def meter_on_host(self, run: Trial, repeats: int) -> Sample:
        return self.meter(run, repeats)

    def places(
        self, network: Network, shapes: Shapes, configs: Mapping[str, Config] | None = None
    ) -> Mapping[str, Place]:
        convs = {node.name: problem(node, shapes) for node in network.convs()}
        stats = {node.name: network.stats(node) for node in network.convs()}
        return places(convs, likely(convs, stats, self.target) if configs is None else configs, self.target)

    def output(
        self,
        conv: Conv,
        config: Config,
        weight: Weight,
        x: Array,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> Array:
        return trial.output(self.target, conv, config, weight, x, bias, residual)

    def runner(self, network: Network, plan: Plan) -> CpuRunner:
        """Where the module has moved to a machine that can do less, with what that one can."""
        return CpuRunner(network, plan, self.target if self.target.runs_here() else host())

    def suits(self, target: object) -> bool:
        """Another number of threads, or other caches, may cost time; another ISA is other code."""
        return isinstance(target, Target) and target.isa == self.target.isa

    def half(self, dtype: str) -> Dtypes:
        """Sums in fp16 where the machine has its arithmetic."""
        able = dtype == "f16" and {"avx512fp16", "fp16"} & set(self.target.extras)
        return Dtypes(dtype, dtype, "f16" if able else "f32", dtype)

    def active(self, conv: Conv, config: Config, weight: Weight, x: Array) -> float:
        return trial.active(conv, config, weight, x, self.target)

    def crossings(self, graph: Graph, shapes: Shapes, able: Collection[str]) -> Crossings:
        return copies.crossings(graph, shapes, able, self.target)

    def entry(self, conv: Conv, config: Config) -> Trial | None:
        return copies.entry(conv, config, self.target)

    def in_network(
        self, network: Network, shapes: Shapes, plans: Sequence[Mapping[str, Choice]]
    ) -> list[Callable[[list[Any]], dict[str, float]]]:
        runs: list[Callable[[list[Any]], dict[str, float]]] = []
        for plan in plans:
            pooled = {node for node, choice in plan.items() if choice.pooled}
            configs = {node: choice.config for node, choice in plan.items()}
            made = program(network, shapes, configs, self.target, pooled)
            runs.append(partial(_timed, workspace(network, made, self.target)))
        return runs

    def remarks(self, network: Network, shapes: Shapes, choices: Sequence[Choice]) -> dict[str, str]:
        """Say of a dense head that a kernel of ours runs it where its features are ours."""
        ours = {c.node for c in choices if c.config.method != BASELINE}
        inside = staying(network.graph, shapes, network.stored, ours, {c.node for c in choices})
        said = (
            f"as dense as torch's, but for up to {features.FEW} images by a kernel of ours (dot): the call "
            "stays one segment"
        )
        return {c.node: said for c in choices if c.node in inside}


def _timed(space: Any, inputs: list[Any]) -> dict[str, float]:
    with torch.no_grad():
        found: dict[str, float] = space.timed(inputs)
    return found
