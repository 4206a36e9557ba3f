"""What half precision costs a layer, measured on real inputs: its kernel's answer beside the model's own.

A configuration is accurate where it loses no more than dense bf16 would lose on the same layer and inputs: that is what people
accept who run half precision today, and needs no number of ours. (What is asked for in bf16 need only stay finite.) A layer none of
whose dense forms is accurate stays f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aerogel.candidate import Config
from aerogel.graph import Node
from aerogel.layout import Array
from aerogel.plan import Choice
from aerogel.runtime.once import Run, Values, losses
from aerogel.tune.search import keep


def accurate(choice: Choice, node: Node, weight: Array, samples: Sequence[Values], run: Run) -> Choice | None:
    """The choice among the configurations that are accurate on all samples, or None where even dense is not.

    `node` is the layer in the model's own precision, `weight` what it becomes, `samples` all values of the model for some
    inputs, `run` where configurations run.
    """
    known: dict[tuple[object, ...], str] = {}

    def why_not(config: Config) -> str:
        key = (config.method, dict(config.options).get("channels"))  # what else a configuration says changes no rounding
        if key not in known:
            known[key] = _worst(choice, config, node, weight, samples, run)
        return known[key]

    tried = tuple(t for t in choice.tried if not why_not(t[0]))
    if not tried and why_not(choice.config):
        return None
    lost = dict.fromkeys(f"{c}: {why_not(c)}" for c, _ in choice.tried if why_not(c))
    refused = (*choice.refused, *((text.partition("/")[0], text) for text in lost))
    chosen = next((c for c, t in tried if c.method == "dense" or keep(t)), choice.config)
    if tried and all(c.method != "dense" for c, _ in tried):
        return None
    return replace(choice, config=chosen, tried=tried, refused=refused)


def _worst(choice: Choice, config: Config, node: Node, weight: Array, samples: Sequence[Values], run: Run) -> str:
    """Empty, or by how much the configuration loses more than dense bf16 on one of the samples."""
    for values in samples:
        lost, allowed = losses(choice.conv, config, node, weight, values, run)
        if not lost <= allowed:
            return f"loses {lost:.1e} of its output, dense bf16 {allowed:.1e}"
    return ""
